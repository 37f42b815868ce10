"""Elastic jobs: hosts and ranks for another start, and the ranks that continue without lost ones."""
