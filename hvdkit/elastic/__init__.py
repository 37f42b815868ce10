"""Elastic training without a framework: states that are saved, restored and synchronized when the world changes."""
