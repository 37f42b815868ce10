"""Strategies for all frameworks: local SGD, DiLoCo, asynchronous and backup steps. They import the door only."""
