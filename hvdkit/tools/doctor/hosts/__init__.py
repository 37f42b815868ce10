"""Several hosts: an agent on each, and the connections between them.

surveyor asks the agents; session is the connection to one of them; start has the command lines. responder is what the
agents connect to on one another.
"""
