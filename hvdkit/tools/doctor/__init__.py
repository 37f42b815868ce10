"""hvdkit doctor: find out what is wrong with hosts, networks and an installation.

facts (of a host) and survey (of several) are data. collect/ collects facts, a file for each subject; what may crash or
hang is in collect/probes/ and runs in a process of its own. checks/ has functions from facts to findings; evaluate
calls them. hosts/ runs an agent on each of several hosts. report and settings print. diagnose has the steps, command
the options.
"""
