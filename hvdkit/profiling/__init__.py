"""Profiling: from the recordings of ranks to a verdict on where the time of a training step goes."""
