"""Optimizers of torch whose state is divided among the ranks."""
