"""Batches for ranks of unequal speed: each rank gets rows according to its measured time per row."""
