"""State that is divided among the ranks (ZeRO): each rank keeps, and updates, one part of every parameter's."""
