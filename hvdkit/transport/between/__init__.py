"""Allreduce between hosts: algorithms, their cost, and the choice among them."""
