"""Optimizers of Keras whose state is divided among the ranks."""
