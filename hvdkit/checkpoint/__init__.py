"""Checkpoints on disk: whole or not there, kept in turn, written beside the training; no framework here."""
