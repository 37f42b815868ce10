"""Horovod's names for state that can be taken back."""

from hvdkit.elastic.state import ObjectState, State

__all__ = ["ObjectState", "State"]
