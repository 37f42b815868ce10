"""Checkpoints on disk: written in a thread beside training, whole or absent, the newest kept; no framework here."""
