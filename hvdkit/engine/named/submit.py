"""How an adapter submits named operations: ranks, options and names. Contains no code for tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdkit.engine.groups import Group, ProcessSet
from hvdkit.engine.named.api import STEP, Engine
from hvdkit.engine.named.operation import Action, Operation, OperationRequest
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
    """Execute a named operation, or only begin it.

    group: the ranks that take part.
    kind: see OperationRequest.
    name: of the operation; None for a name made from its number among the unnamed operations of this kind.
    tensors: dtype and shape of each tensor.
    buffers: see Operation.
    options: see OperationRequest.
    splits: see OperationRequest.
    wait: return when the operation is done; this is faster than to begin it and wait for it afterwards.
    """
    engine = group.engine
    run = engine.do if wait else engine.submit
    named = f"{kind}.{name}" if name else engine.make_name(kind)
    return run(named, _announcement(kind, tuple(tensors), options, splits), buffers)


@functools.lru_cache(maxsize=4096)
def _announcement(
    kind: str, tensors: tuple[tuple[str, tuple[int, ...]], ...], options: Options, splits: tuple[int, ...]
) -> OperationRequest:
    # Reusing the same object makes comparisons faster, and leaves the garbage collector less to check.
    return OperationRequest(kind, tensors, options, splits)


def collective_step(
    engine: Engine, kind: str, action: Action | None, *, name: str = "", options: Sequence[tuple[str, str]] = ()
) -> Any:
    """Wait until every rank calls this step, then run `action`, if any, on all ranks. Returns the result of `action`.

    It is a named operation: the stall report covers it, it fails on every rank if a rank has left or calls something
    else, and it has the same position in the order of operations on all ranks, whatever else is under way.

    engine: of the ranks that take part.
    kind: the purpose of the step, in a word that users know.
    action: runs on all ranks; None to wait for the ranks only.
    name: of the step; unnamed steps are numbered, so that ranks at different steps get an error.
    options: (word, value) pairs that must be equal on all ranks.
    Raises HorovodInternalError if the ranks disagree or one has left, and the error of `action` if all ranks raise it.
    """
    named = f"{kind}.{name}" if name else f"{STEP}.{engine.count(STEP)}"
    return engine.do(named, OperationRequest(kind, (), tuple(options)), (), action=action).outcome


def all_true(group: Group, flag: bool, name: str) -> bool:
    """Return whether `flag` is true on all ranks of the group. Collective; raises what do() raises."""
    return not largest(group, int(not flag), name)


def largest(group: Group, number: int, name: str) -> int:
    """Return the largest `number` (int32) among the ranks of the group. Collective; raises what do() raises."""
    buffer = Buffer(np.array([number], np.int32), "int32")
    do(group, "allreduce", name, [("int32", (1,))], [buffer], _write_options("max", 1.0, 1.0))
    return int(buffer.array[0])


def reduce_options(dtypes: Sequence[str], op: ReduceOp, prescale: float, postscale: float, call: str) -> Options:
    """Make the options of a reduction, which must be equal on all ranks.

    dtypes: of the tensors.
    op: the reduction.
    prescale: factor before the reduction.
    postscale: factor after it.
    call: the public function, for messages.
    Raises TypeError for an operation that a dtype does not support.
    """
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
    """Make the options of a reducescatter; the arguments are those of reduce_options().

    Raises NotImplementedError, as Horovod does, unless `op` is Average or Sum, and what reduce_options() raises.
    """
    if op not in (Average, Sum):
        raise NotImplementedError(f"{call}: op is {op!r}; use hvd.Average or hvd.Sum.")
    return reduce_options(dtypes, op, prescale, postscale, call)


@functools.lru_cache(maxsize=64)
def _write_options(op: str, prescale: float, postscale: float) -> tuple[tuple[str, str], ...]:
    return (("op", op), ("prescale factor", repr(prescale)), ("postscale factor", repr(postscale)))


def root_options(process_set: ProcessSet, root_rank: int, call: str) -> Options:
    """Make the options of a broadcast, which must be equal on all ranks.

    root_rank: number in the world. call: the public function, for messages.
    Raises ValueError if `root_rank` is not in the set.
    """
    ranks = process_set.ranks or []
    if root_rank not in ranks:
        raise ValueError(f"{call}: root_rank is {root_rank}; it must be one of the ranks {ranks} of the process set.")
    return (("root rank", str(ranks.index(root_rank))),)


def check_splits(rows: int, splits: Sequence[int] | None, size: int, call: str) -> tuple[int, ...]:
    """Return the number of rows for each rank of an alltoall.

    rows: rows of the tensor.
    splits: rows for each rank; None for equal numbers.
    size: number of ranks.
    call: the public function, for messages.
    Raises ValueError for invalid splits, or rows that cannot be divided equally.
    """
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
