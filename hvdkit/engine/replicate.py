"""Equal parameters on all ranks: broadcast at the beginning, compared by checksums at intervals.

Every rank computes each tensor's checksum from its own memory; a 16-byte digest of each rank then shows whether they
are equal. Only if they differ do the ranks exchange the checksums themselves, to find which tensors differ and where.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from hvdkit.engine.groups import global_process_set
from hvdkit.engine.named.api import Engine
from hvdkit.engine.named.submit import collective_step, root_options
from hvdkit.errors import HorovodInternalError, ReplicasDifferError
from hvdkit.transport.api import Transport
from hvdkit.transport.small_collectives import allgather_object, gather_bytes

#: (name, checksum) of each tensor, in the same order on all ranks.
Checksums = Sequence[tuple[str, int]]
Result = TypeVar("Result")

_MOST_NAMED = 8


def broadcast_state(
    call: str,
    kind: str,
    described: Sequence[str],
    broadcast: Callable[[Transport], Result],
    root_rank: int,
    *,
    owner: str = "",
    key: Callable[[str], str] = str,
    cure: str = "Build the model from the same configuration on every rank.",
) -> Result:
    """Compare the state of all ranks, then have `broadcast` send root's; collective. Returns what `broadcast` returns.

    call: the public function, for messages.
    kind: the kind of the ranks' objects, in the plural, for messages.
    described: a description of each object, in the order in which they are sent.
    broadcast: sends root's objects, over the transport that it is given.
    root_rank: the rank whose objects are sent.
    owner: the owner of the objects, for the error.
    key: returns the part of a description that must be equal on all ranks.
    cure: the remedy, for the error.
    Raises ValueError for a root that does not exist, NotInitializedError before init(), HorovodInternalError on every
    rank, before anything is sent, if the ranks' objects differ, and if a rank calls something else or has left.
    """
    group = global_process_set.group(f"{call}()")
    options = root_options(global_process_set, root_rank, f"{call}()")
    problem = ""

    def compare_and_broadcast(transport: Transport, _: Sequence[int]) -> Result | None:
        nonlocal problem
        held = allgather_object(transport, (owner, list(described)))
        problem = _explain_mismatch(held, root_rank, kind, key)
        return None if problem else broadcast(transport)

    result = collective_step(group.engine, call, compare_and_broadcast, options=options)
    if problem:
        raise HorovodInternalError(f"{call}(): {problem} {cure}")
    return result  # type: ignore[no-any-return]


def _explain_mismatch(
    held: Sequence[tuple[str, Sequence[str]]], root_rank: int, kind: str, key: Callable[[str], str]
) -> str:
    """Describe how a rank's state differs from root's; "" if none does. held: owner and descriptions of every rank."""
    owner, root = held[root_rank]
    for rank, (other_owner, other) in enumerate(held):
        if list(map(key, other)) != list(map(key, root)):
            owners = f" Rank {root_rank} has {owner}; rank {rank} has {other_owner}." if owner != other_owner else ""
            difference = _first_difference(root, other, (f"rank {root_rank}", f"rank {rank}"), key)
            return f"the ranks hold different {kind}: {difference}{owners}"
    return ""


def _first_difference(
    one: Sequence[str], other: Sequence[str], who: tuple[str, str], key: Callable[[str], str] = str
) -> str:
    """Describe how many objects two ranks hold, and the first that differ in their keys."""
    least = min(len(one), len(other))
    at = next((i for i in range(least) if key(one[i]) != key(other[i])), least)
    here, there = (held[at] if at < len(held) else "none" for held in (one, other))
    return (
        f"{len(one)} on {who[0]}, {len(other)} on {who[1]}. The first difference is number {at}: {here} on {who[0]}, "
        f"{there} on {who[1]}."
    )


class ReplicaCheck:
    """Compares the parameters of one optimizer between ranks after every `every` of its steps; never if `every` is 0.

    name: the optimizer's, the same on all ranks.
    """

    def __init__(self, engine: Engine, name: str, every: int) -> None:
        self._engine, self._name, self._every = engine, name, every
        self._steps = 0

    def stepped(self, compute: Callable[[], Checksums], steps: int = 1) -> None:
        """Count steps of the optimizer; collective where a check is due.

        compute: returns the checksums. steps: the number of steps taken since the last call.
        Raises ReplicasDifferError on every rank, or HorovodInternalError if a rank has left.
        """
        if not self._every:
            return
        before, self._steps = self._steps, self._steps + steps
        if before // self._every != self._steps // self._every:
            compare_replicas(self._engine, f"{self._name}, step {self._steps}", compute())


def compare_replicas(engine: Engine, what: str, checksums: Checksums) -> None:
    """Compare all ranks' checksums; collective. what: for messages, the same on all ranks.

    Raises ReplicasDifferError on every rank, naming the first tensor that differs, and on which ranks.
    """

    def compare(transport: Transport, _: Sequence[int]) -> str:
        digest = hashlib.blake2b(repr(list(checksums)).encode(), digest_size=16).digest()
        if len(set(gather_bytes(transport, digest))) == 1:
            return ""
        return explain_difference(allgather_object(transport, list(checksums)), engine.who)

    problem = collective_step(engine, "check_replicas", compare, name=what)
    if problem:
        raise ReplicasDifferError(f"{what}: {problem}")


def explain_difference(by_rank: Sequence[Checksums], who: Callable[[int], str]) -> str:
    """Describe which tensors differ, and which ranks differ from the majority. by_rank: every rank's; not all equal."""
    names = [[name for name, _ in checksums] for checksums in by_rank]
    for rank, theirs in enumerate(names):
        if theirs != names[0]:
            difference = _first_difference(names[0], theirs, (who(0), who(rank)))
            return (
                f"the ranks train different tensors: {difference} Build the model from the same configuration on every "
                "rank."
            )
    columns = [[checksums[at][1] for checksums in by_rank] for at in range(len(names[0]))]
    differing = [at for at, column in enumerate(columns) if len(set(column)) > 1]
    first = columns[differing[0]]
    common = max(Counter(first).items(), key=lambda item: item[1])
    odd = [rank for rank, value in enumerate(first) if value != common[0]]
    most = [rank for rank, value in enumerate(first) if value == common[0]]
    if len(most) == 1:  # of two ranks either may be right
        where = f"no two of the {len(first)} ranks agree"
    elif len(most) <= len(odd):
        where = f"{_list(odd, who)} and {_list(most, who)} differ and none has a majority"
    else:
        where = f"{_list(odd, who)} {'differ' if len(odd) > 1 else 'differs'} from the other {len(most)} ranks"
    return (
        f"the parameters differ between ranks: {len(differing)} of {len(columns)} tensors differ, and the first one "
        f"is {names[0][differing[0]]}, where {where}. Usual causes: parameters that were changed, loaded or frozen "
        "on some ranks only, learning rates or random numbers that differ between ranks, memory errors. Load a "
        "checkpoint from before the last check, or broadcast the parameters of a rank that has the right ones."
    )


def _list(ranks: Sequence[int], who: Callable[[int], str]) -> str:
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return ", ".join(map(who, ranks[:_MOST_NAMED])) + more
