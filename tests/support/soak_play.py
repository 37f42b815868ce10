"""One rank's part of a round of the soak test: begin, wait and compare, several threads at a time."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from soak_model import expected, find_difference, given
from soak_plan import Round, Step, Task, plan_round

import hvdkit.torch as hvd


class MismatchError(AssertionError):
    """A collective gave something else than numpy."""


class RoundFailedError(AssertionError):
    """A round went wrong; says which, so that it can be repeated."""


def play_rounds(seed: int, first: int, last: int, size: int, transport_name: str = "auto") -> dict[str, float]:
    """Play the rounds from `first` up to `last` of a seed; returns how many operations this rank did, and its memory.

    size: of the world, which is joined over `transport_name` if that has not been done. Raises RoundFailedError.
    """
    torch.set_num_threads(1)
    hvd.init(transport=transport_name)
    done = 0
    number = first
    try:
        for number in range(first, last):
            done += play(plan_round(Random(f"{seed} {number}"), size), salt=(1_000_003 * seed + number) % 2**32)
    except Exception as error:
        how = f"python tests/support/soak.py --ranks {size} --seed {seed} --round {number}"
        raise RoundFailedError(f"rank {hvd.rank()}: {error}\nTo repeat it: {how}") from error
    _change_sets(())  # how many there are at the moment does not count
    return {"operations": done, "memory": resident_mb()}


def leave_world() -> None:
    """Shut hvdkit down; collective."""
    hvd.shutdown()


def resident_mb() -> float:
    """This process's memory, in 10^6 bytes, without what has been freed and kept for later (with glibc)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024 / 1e6


def play(round_: Round, salt: int) -> int:
    """Play one round; collective over all ranks. Returns how many operations this rank took part in."""
    sets = _change_sets(round_.sets)
    failures: list[Exception] = []

    def work(number: int, steps: Sequence[Step]) -> None:
        dice = Random(f"{salt} {hvd.rank()} {number}")  # this rank's own order
        try:
            for step in steps:
                _Player(sets, salt, dice).play(step)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=each) for each in enumerate(round_.threads)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if failures:
        raise failures[0]
    return sum(hvd.rank() in task.members for task in round_.tasks)


def _change_sets(wanted: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Any]:
    """Add and remove process sets until there are just these; collective over all ranks."""
    known = {tuple(ranks): number for number, ranks in hvd.get_process_set_ids_and_ranks().items()}
    everyone = tuple(range(hvd.size()))
    for ranks in sorted(set(_sets) - set(known)):
        del _sets[ranks]
    for ranks in sorted(set(_sets) - set(wanted)):
        hvd.remove_process_set(_sets.pop(ranks))
    for ranks in wanted:
        if ranks not in _sets:
            _sets[ranks] = hvd.add_process_set(ranks)
    return {**_sets, everyone: hvd.global_process_set}


_sets: dict[tuple[int, ...], Any] = {}


class _Player:
    """A thread's hand. dice: of this thread alone."""

    def __init__(self, sets: dict[tuple[int, ...], Any], salt: int, dice: Random) -> None:
        self.sets, self.salt, self.dice = sets, salt, dice

    def play(self, step: Step) -> None:
        """Do what this rank has to do of a step."""
        mine = [task for task in step.tasks if hvd.rank() in task.members]
        if step.blocking:
            for task in mine:
                self.compare(task, self.begin(task, blocking=True))
            return
        self.dice.shuffle(mine)
        begun = [(task, self.begin(task, blocking=False)) for task in mine]
        self.dice.shuffle(begun)
        for task, handle in begun:
            if self.dice.random() < 0.2:
                hvd.poll(handle)
            self.compare(task, hvd.synchronize(handle))

    def begin(self, task: Task, *, blocking: bool) -> Any:
        """Make the call: its result if it is blocking, else its handle."""
        keywords: dict[str, Any] = {"process_set": self.sets[task.members]}
        if task.kind == "barrier":
            hvd.barrier(**keywords)
            return None
        member = task.members.index(hvd.rank())
        tensors = [
            _lay_out(torch.from_numpy(given(task, at, member, self.salt)).to(getattr(torch, dtype)), task.layout)
            for at, dtype in enumerate(task.dtypes)
        ]
        keywords["name"] = task.name or None
        if task.kind in ("allreduce", "reducescatter"):
            keywords["op"] = getattr(hvd, task.op)
            keywords["prescale_factor"], keywords["postscale_factor"] = task.factors
        elif task.kind == "broadcast":
            keywords["root_rank"] = task.root
        elif task.kind == "alltoall":
            keywords["splits"] = list(task.splits[member]) if task.splits else None
        name = f"{'grouped_' * task.grouped}{task.kind}{'_async' * (not blocking)}{'_' * task.in_place}"
        call: Callable[..., Any] = getattr(hvd, name)
        return call(tensors if task.grouped else tensors[0], **keywords)

    def compare(self, task: Task, result: Any) -> None:
        """Raise MismatchError if the result is not what numpy says."""
        if task.kind == "barrier":
            return
        if isinstance(result, tuple):  # an alltoall's, with how many rows came from each rank
            result, counts = result
            me = task.members.index(hvd.rank())
            if task.splits and counts.tolist() != [each[me] for each in task.splits]:
                raise MismatchError(f"{task}: {counts.tolist()} rows came, by rank")
        results = result if task.grouped else [result]
        for got, wanted, dtype in zip(results, expected(task, hvd.rank(), self.salt), task.dtypes, strict=True):
            if got.dtype is not getattr(torch, dtype):
                raise MismatchError(f"{task}: a result is of {got.dtype}")
            difference = find_difference(got.double().numpy(), wanted, dtype)
            if difference:
                raise MismatchError(f"{task}: of a {dtype} tensor {difference}")


def _lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers in memory of a wished order."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and tensor.dim():
        return torch.stack([tensor, tensor], dim=-1)[..., 0]
    return tensor
