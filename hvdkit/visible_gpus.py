"""Finds the GPUs that CUDA_VISIBLE_DEVICES shows to a process, by the rules of CUDA and of torch.cuda."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class VisibleGpu(NamedTuple):
    """A GPU that a process sees.

    word: its word in the variable. number: its number among the host's GPUs in CUDA's order; None for a MIG instance,
    or if the host's GPUs are unknown.
    """

    word: str
    number: int | None


class VisibleGpus(NamedTuple):
    """The GPUs that a process sees.

    gpus: in the order in which CUDA numbers them. invalid: the invalid word that ends the list; None if there is none.
    repeated: the word of a GPU that is named twice; None if there is none.
    """

    gpus: tuple[VisibleGpu, ...]
    invalid: str | None = None
    repeated: str | None = None


def read_visible(variable: str | None, uuids: Sequence[str] | None) -> VisibleGpus:
    """Parse CUDA_VISIBLE_DEVICES: an invalid word ends the list, and a GPU named twice makes the list empty.

    variable: the variable's value; None if it is not set. uuids: the UUIDs of the host's GPUs in CUDA's order, "" for
    an unknown UUID; None if the host's GPUs are unknown.
    """
    if variable is None:
        return VisibleGpus(tuple(VisibleGpu(str(number), number) for number in range(len(uuids or ()))))
    found: list[VisibleGpu] = []
    for word in (part.strip() for part in variable.split(",")):
        if not _is_valid(word, uuids):
            return VisibleGpus(tuple(found), invalid=word)
        gpu = VisibleGpu(word, _find_number(word, uuids))
        if any(gpu.word == other.word or gpu.number == other.number is not None for other in found):
            return VisibleGpus((), repeated=word)
        found.append(gpu)
    return VisibleGpus(tuple(found))


_LARGEST = 10**9  # larger numbers, which no host has, become this one


def _is_valid(word: str, uuids: Sequence[str] | None) -> bool:
    if word.startswith("MIG-"):
        return uuids is None or bool(uuids)
    number = _find_number(word, uuids)
    if word.startswith("GPU-"):
        return uuids is None or number is not None or "" in uuids
    return number is not None and (uuids is None or number < len(uuids))


def _find_number(word: str, uuids: Sequence[str] | None) -> int | None:
    """Find a GPU by its number or by the beginning of its UUID. CUDA reads a number as strtoul does: "1x" is 1."""
    if word.startswith("GPU-"):
        return next((at for at, uuid in enumerate(uuids or ()) if uuid.startswith(word)), None)
    number = re.match(r"\+?0*([0-9]+)", word)
    return min(_LARGEST, int(number[1][: len(str(_LARGEST)) + 1])) if number else None
