"""Tracking: averages over the ranks of values that a script logs, hvdkit's own series, and progress of the job."""
