"""Profiling: computes from the ranks' recordings a verdict on the time of a training step."""
