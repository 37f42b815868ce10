"""Strategies without a framework whose ranks need not meet in every step: local SGD, DiLoCo, asynchronous."""
