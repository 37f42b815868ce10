"""hvdkit doctor: what is here, whether it works together, and how to mend what does not.

facts is what can be seen, as data; collect sees it, with one file a subject, and probes/ has what may crash or hang and
so runs in a process of its own. checks/ has functions from facts to findings, which look at nothing else. abilities
tells which engines and transports work; table and document show all of it; command is what a person types.
"""
