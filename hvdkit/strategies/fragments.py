"""Fragments of the parameters: which tensors are averaged together, and after which steps."""

from __future__ import annotations

from collections.abc import Sequence


def split_fragments(counts: Sequence[int], fragments: int) -> list[list[int]]:
    """Divide tensors, given by their numbers of elements, into fragments of about equal size.

    Returns the indices of each fragment, ascending; every tensor is in exactly one fragment, and no fragment is empty.
    Raises ValueError for fewer tensors than fragments.
    """
    if len(counts) < fragments:
        raise ValueError(
            f"fragments is {fragments}, but the optimizer trains only {len(counts)} tensors, and a tensor is not "
            f"divided. Use at most fragments={len(counts)}."
        )
    parts: list[list[int]] = [[] for _ in range(fragments)]
    sizes = [0] * fragments
    for index in sorted(range(len(counts)), key=lambda index: -counts[index]):
        # Among fragments of equal size, the one with fewer tensors: tensors may be empty, fragments may not.
        lightest = min(range(fragments), key=lambda part: (sizes[part], len(parts[part])))
        parts[lightest].append(index)
        sizes[lightest] += counts[index]
    return [sorted(part) for part in parts]


def due_fragment(step: int, every: int, fragments: int) -> int | None:
    """Return the fragment that is averaged after this step, counted from 1; None for no fragment.

    Each fragment is due once in `every` steps, at equal distances as far as whole steps allow; the last one at the end.
    """
    within = (step - 1) % every + 1
    for part in range(fragments):
        if within == (part + 1) * every // fragments:
            return part
    return None
