"""Batches for ranks of unequal speed: each rank gets rows by its measured time for a row."""
