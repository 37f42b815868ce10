"""Strategies whose ranks need not meet in every step: local SGD, DiLoCo; without a framework."""
