"""Everything that hvdkit wants to know from the first GPU that it runs on, in one run of some minutes."""
