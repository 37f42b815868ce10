"""Collectives with names, order and overlap, on top of a transport."""
