"""Elastic training: states that are saved, restored and synchronized when the world changes; no framework here."""
