"""Allreduce between hosts: the algorithms, their costs, and the choice among them."""
