"""Observation: timeline, stalls, stragglers, profiles."""
