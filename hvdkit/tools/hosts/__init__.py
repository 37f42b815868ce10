"""hvdkit hosts: show a list of hosts, or write it in another dialect."""
