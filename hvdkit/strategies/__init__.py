"""Strategies without a framework: local SGD, DiLoCo, asynchronous and backup steps. They import the door only."""
