"""Horovod's names for process sets."""

from hvdkit.engine.basics import add_process_set, get_process_set_ids_and_ranks, remove_process_set
from hvdkit.engine.groups import ProcessSet, global_process_set

__all__ = [
    "ProcessSet",
    "add_process_set",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "remove_process_set",
]
