"""Examine this machine, the hosts, their programs and the ranks' command: the facts that a plan starts from."""
