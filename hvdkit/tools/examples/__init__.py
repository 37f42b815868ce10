"""hvdkit examples: the gallery of scripts."""
