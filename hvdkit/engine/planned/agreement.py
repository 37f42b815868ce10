"""Checks once that all ranks have the same plan: compares hashes, and exchanges descriptions only if they differ."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from hvdkit.engine.planned.plan import TensorSpec, describe_plan, plan_digest
from hvdkit.errors import PlanMismatchError
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import as_buffer
from hvdkit.transport.small_collectives import gather_bytes

_SHOWN = 6  # differing lines


def check_tensors(transport: Transport, tensors: Sequence[TensorSpec], words: str, limit_bytes: int = 0) -> None:
    """Check that the ranks' tensors, and the settings described in `words`, are equal; collective.

    transport: of the ranks that are compared.
    tensors: this rank's.
    words: the settings, in words.
    limit_bytes: maximum size of a bucket.
    Raises PlanMismatchError as check_agreement() does.
    """
    check_agreement(transport, describe_plan(tensors, limit_bytes, words))


def check_agreement(transport: Transport, description: str) -> None:
    """Compare the ranks' descriptions of their plans; collective.

    Raises PlanMismatchError on every rank, with both sides of each difference and the ranks that hold them.
    """
    digest = np.frombuffer(plan_digest(description), np.int64)
    # min(~digest) is ~max(digest), so 64 bytes give minimum and maximum of all digests, for any number of ranks.
    ends = as_buffer(np.concatenate([digest, ~digest]))
    transport.allreduce(ends, "min")
    if (ends.array[: digest.size] == ~ends.array[digest.size :]).all():
        return
    raise PlanMismatchError(explain_mismatch([text.decode() for text in gather_bytes(transport, description.encode())]))


def explain_mismatch(descriptions: list[str]) -> str:
    """Describe which ranks differ from rank 0, and in which tensors. descriptions: one a rank."""
    reference = descriptions[0].splitlines()
    message = ["The ranks do not hold the same parameters, so their gradients cannot be reduced."]
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(descriptions):
        if text != descriptions[0]:
            groups.setdefault(text, []).append(rank)
    same = [rank for rank, text in enumerate(descriptions) if text == descriptions[0]]
    for text, ranks in groups.items():
        lines = text.splitlines()
        message.append(f"{_name(same)}: {len(reference) - 1} tensors; {_name(ranks)}: {len(lines) - 1} tensors.")
        differences = [
            f"  {f'tensor {at - 1}' if at else 'settings'}: {_name(same)} has {here}; {_name(ranks)} has {there}"
            for at, (here, there) in enumerate(itertools.zip_longest(reference, lines, fillvalue="nothing"))
            if here != there
        ]
        message += differences[:_SHOWN] + ["  ..."] * (len(differences) > _SHOWN)
    message.append("Build the model, and wrap the optimizer, from the same configuration on every rank.")
    return "\n".join(message)


def _name(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
