"""Collects facts, a file for each subject; host.py collects all."""
