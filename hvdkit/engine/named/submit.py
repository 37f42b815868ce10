"""Named operations as an adapter asks for them: which ranks, which options, which name. Knows no tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdkit.engine.groups import Group, ProcessSet
from hvdkit.engine.named.api import STEP, Engine
from hvdkit.engine.named.operation import Action, Announcement, Operation
from hvdkit.engine.reduce_op import Adasum, Average, ReduceOp, Sum
from hvdkit.transport.arithmetic import check_reduction
from hvdkit.transport.buffer import FLOATS, Buffer

Options = tuple[tuple[str, str], ...]


def do(
    group: Group,
    kind: str,
    name: str | None,
    tensors: Sequence[tuple[str, tuple[int, ...]]],
    buffers: Sequence[Buffer],
    options: Options = (),
    splits: tuple[int, ...] = (),
    *,
    wait: bool = True,
) -> Operation:
    """Do a named operation now, or only begin it. name: made up, in the order of operations of this kind, if None.

    tensors: dtype and shape of each. splits: of an alltoall. wait: faster than to begin it and to wait for it then.
    """
    engine = group.engine
    run = engine.do if wait else engine.submit
    named = f"{kind}.{name}" if name else engine.make_name(kind)
    return run(named, _announcement(kind, tuple(tensors), options, splits), buffers)


@functools.lru_cache(maxsize=4096)
def _announcement(
    kind: str, tensors: tuple[tuple[str, tuple[int, ...]], ...], options: Options, splits: tuple[int, ...]
) -> Announcement:
    # The same one again: it is compared sooner, and the collector has less to look at.
    return Announcement(kind, tensors, options, splits)


def collective_step(
    engine: Engine, kind: str, action: Action | None, *, name: str = "", options: Sequence[tuple[str, str]] = ()
) -> Any:
    """Wait until every rank has come to this step, do it, and return what `action` returns, if there is one.

    It is a named operation: the stall report sees it, it fails on every rank when one has left or calls something else,
    and it comes in one order on all ranks, whatever other operations are under way.

    kind: what the step is, in a word that users know. name: of the step; without one it is the n-th of all such steps,
    so that ranks which come to different ones are told. options: what all ranks must say alike, as (word, value).
    Raises HorovodInternalError if the ranks disagree or one has left, and what `action` raises on all ranks alike.
    """
    named = f"{kind}.{name}" if name else f"{STEP}.{engine.count(STEP)}"
    return engine.do(named, Announcement(kind, (), tuple(options)), (), action=action).outcome


def all_true(group: Group, flag: bool, name: str) -> bool:
    """Is it true on all ranks of the group? Collective; raises what do() raises."""
    return not largest(group, int(not flag), name)


def largest(group: Group, number: int, name: str) -> int:
    """The largest number (int32) of the ranks of the group. Collective; raises what do() raises."""
    buffer = Buffer(np.array([number], np.int32), "int32")
    do(group, "allreduce", name, [("int32", (1,))], [buffer], _write_options("max", 1.0, 1.0))
    return int(buffer.array[0])


def reduce_options(dtypes: Sequence[str], op: ReduceOp, prescale: float, postscale: float, call: str) -> Options:
    """What the ranks must agree on in a reduction; TypeError for what cannot be done with a dtype."""
    scaled = op is Average or prescale != 1 or postscale != 1
    for dtype in dtypes:
        check_reduction(dtype, op.kind, call)
        if dtype == "bool" and (scaled or op is Adasum):
            raise TypeError(
                f"{call}: bool tensors cannot be averaged or scaled. Use op=hvd.Max (true if any rank has true) or "
                "op=hvd.Min (true if all ranks have true)."
            )
        if op is Adasum and dtype not in FLOATS:
            raise TypeError(
                f"{call}: Adasum needs floating-point tensors, not {dtype}. Use op=hvd.Sum or op=hvd.Average."
            )
    return _write_options(op.kind, float(prescale), float(postscale))


def scatter_options(dtypes: Sequence[str], op: ReduceOp, prescale: float, postscale: float, call: str) -> Options:
    """As reduce_options, for a reducescatter; NotImplementedError, as in Horovod, unless `op` is Average or Sum."""
    if op not in (Average, Sum):
        raise NotImplementedError(f"{call}: op is {op!r}; use hvd.Average or hvd.Sum.")
    return reduce_options(dtypes, op, prescale, postscale, call)


@functools.lru_cache(maxsize=64)
def _write_options(op: str, prescale: float, postscale: float) -> tuple[tuple[str, str], ...]:
    return (("op", op), ("prescale factor", repr(prescale)), ("postscale factor", repr(postscale)))


def root_options(process_set: ProcessSet, root_rank: int, call: str) -> Options:
    """What the ranks must agree on in a broadcast; ValueError if `root_rank` is not in the set.

    root_rank: in the world. call: the public function, for messages.
    """
    ranks = process_set.ranks or []
    if root_rank not in ranks:
        raise ValueError(f"{call}: root_rank is {root_rank}; it must be one of the ranks {ranks} of the process set.")
    return (("root rank", str(ranks.index(root_rank))),)


def check_splits(rows: int, splits: Sequence[int] | None, size: int, call: str) -> tuple[int, ...]:
    """How many of `rows` each rank gets: equal parts without `splits`. ValueError if they do not add up."""
    if splits is None:
        if rows % size:
            raise ValueError(
                f"{call}: {rows} rows cannot be divided equally among {size} ranks. Pass splits, the number of rows "
                "for each rank."
            )
        return (rows // size,) * size
    counts = tuple(int(count) for count in splits)
    if len(counts) != size or min(counts) < 0 or sum(counts) > rows:
        raise ValueError(
            f"{call}: splits is {list(counts)}; it must be {size} numbers from 0 up, one for each rank, with a sum "
            f"of at most {rows}, the rows of the tensor."
        )
    return counts
