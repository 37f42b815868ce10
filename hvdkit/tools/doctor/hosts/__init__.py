"""Several hosts: an agent on each, and the connections between them.

surveyor asks the agents; session starts one of them, and is the connection to it. allreduce is a small job on all.
"""
