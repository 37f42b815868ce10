"""Named operations: announced, agreed on and executed in one order on all ranks."""
