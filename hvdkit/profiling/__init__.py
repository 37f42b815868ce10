"""Where the time of a training step goes: from what its ranks recorded to a verdict in plain words."""
