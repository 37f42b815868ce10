"""hvdkit doctor: what is here, whether it works together, and how to mend what does not.

facts and machine say what can be seen, as data. look/ sees it, a file a subject; what may crash or hang is in probes/,
and runs in a process of its own. checks/ has functions from facts to findings, which look at nothing else. abilities
tells which engines and transports work. hosts/ does the same on several hosts, and between them. show/ prints, command
is what a person types.
"""
