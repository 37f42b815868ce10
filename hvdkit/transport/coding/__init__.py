"""Gradients coded in fewer bytes between hosts, with error feedback: TopK, Sign, Int8, PowerSGD."""
