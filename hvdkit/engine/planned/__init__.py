"""Planned reductions: the gradients of one optimizer, in buckets that all ranks agreed on once."""
