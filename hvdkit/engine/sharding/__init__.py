"""State that is divided among the ranks (ZeRO): each rank keeps, and updates, one shard of every parameter's state."""
