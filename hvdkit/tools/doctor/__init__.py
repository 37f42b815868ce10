"""hvdkit doctor: find problems of hosts, networks and an installation.

facts (of a host) and survey (of several) are data. collect/ collects facts, a file for each subject; code that may
crash or hang is in collect/probes/ and runs in a process of its own. checks/ has functions from facts to findings;
evaluate has the steps, and calls them. hosts/ runs an agent on each of several hosts: surveyor queries it, session is
the connection to it. report and settings print, command has the options.
"""
