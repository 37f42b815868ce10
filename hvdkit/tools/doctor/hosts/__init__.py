"""Several hosts: an agent on each, and what they see of one another.

start and remote run agents there; survey asks them; seen is what they answered, as data, which the functions of checks/
judge.
"""
