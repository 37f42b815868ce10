"""State that outlives a change of the world: saved, taken back and made equal on all ranks; no framework here."""
