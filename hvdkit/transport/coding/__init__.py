"""Gradient compression between hosts, with error feedback: TopK, Sign, Int8, PowerSGD."""
