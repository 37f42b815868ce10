"""Faults at random moments of elastic jobs: planned by seed, played on real ones."""
