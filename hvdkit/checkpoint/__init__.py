"""Checkpoints on disk, without a framework: a thread writes them during training, atomically, and keeps the newest."""
