"""What a round of the soak test does, as data that is drawn from a random.Random: the same one gives the same round."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Any

from numbers_of_ranks import FLOATS, REDUCED

Shape = tuple[int, ...]
Ranks = tuple[int, ...]

KINDS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
LAYOUTS = ("contiguous", "contiguous", "transposed", "strided")
REAL = tuple(dtype for dtype in REDUCED if not dtype.startswith("complex"))
FACTORS = (1.0, 1.0, 0.25, 0.5, 2.0)  # exact in every dtype
LARGE = 700_000  # elements: more than fits into the shared memory that an allreduce passes through at a time


@dataclass(frozen=True)
class Task:
    """One collective.

    key: tells it from the others of its round. name: "" for none. members: the ranks that take part.
    dtypes, shapes: of each tensor; where members have different first dimensions those are in rows, by tensor and
    member. splits: of an alltoall, by member; () for equal parts. op, factors: of a reduction. root: a rank in the
    world. grouped, in_place: which of the calls. layout: of the tensors in memory.
    """

    key: int
    kind: str
    name: str
    members: Ranks
    dtypes: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    rows: tuple[tuple[int, ...], ...] = ()
    splits: tuple[tuple[int, ...], ...] = ()
    op: str = "Sum"
    factors: tuple[float, float] = (1.0, 1.0)
    root: int = 0
    grouped: bool = False
    in_place: bool = False
    layout: str = "contiguous"

    def shape(self, tensor: int, member: int) -> Shape:
        """Of a tensor on a member, the n-th of them."""
        shape = self.shapes[tensor]
        return (self.rows[tensor][member], *shape[1:]) if self.rows else shape


@dataclass(frozen=True)
class Step:
    """Tasks that are begun together, in an order of each rank's own, and waited for in another.

    blocking: the only task is a call that waits.
    """

    tasks: tuple[Task, ...]
    blocking: bool


@dataclass(frozen=True)
class Round:
    """What several threads of each rank do at the same time. sets: the process sets there are, beside all ranks."""

    sets: tuple[Ranks, ...]
    threads: tuple[tuple[Step, ...], ...]

    @property
    def tasks(self) -> list[Task]:
        """All of them."""
        return [task for steps in self.threads for step in steps for task in step.tasks]


def plan_round(dice: Random, size: int) -> Round:
    """Draw a round for `size` ranks."""
    return _Planner(dice, size).round()


class _Planner:
    """Draws; everything that is drawn from `dice` is drawn here, in one order."""

    def __init__(self, dice: Random, size: int) -> None:
        self.dice, self.everyone = dice, tuple(range(size))
        possible = [ranks for count in range(1, size) for ranks in combinations(range(size), count)]
        self.sets = tuple(dice.sample(possible, dice.randint(0, min(3, len(possible)))))
        self.keys = 0

    def round(self) -> Round:
        threads = self.dice.choice((1, 1, 2, 3))
        steps = [tuple(self.step(thread) for _ in range(self.dice.randint(1, 4))) for thread in range(threads)]
        return Round(self.sets, tuple(steps))

    def step(self, thread: int) -> Step:
        if self.dice.random() < 0.7:
            return Step(tuple(self.task(KINDS) for _ in range(self.dice.randint(1, 12))), blocking=False)
        # What has no name is matched by its order, so a single thread does it, and waits.
        if thread:
            return Step((self.task(KINDS),), blocking=True)
        return Step((self.task((*KINDS, "barrier"), named=self.dice.random() < 0.7),), blocking=True)

    def task(self, kinds: tuple[str, ...], named: bool = True) -> Task:
        dice, kind = self.dice, self.dice.choice(kinds)
        self.keys += 1
        members = dice.choice((self.everyone, self.everyone, *self.sets))
        name = f"{dice.choice('abcdefgh')}{self.keys}" if named else ""
        if kind == "barrier":
            return Task(self.keys, kind, "", members)
        grouped = kind in ("allreduce", "allgather", "reducescatter") and dice.random() < 0.25
        count = dice.randint(1, 5) if grouped else 1
        op = self.op(kind)
        common: dict[str, Any] = {"grouped": grouped, "layout": dice.choice(LAYOUTS), "op": op}
        common["in_place"] = kind in ("allreduce", "broadcast") and dice.random() < 0.5
        common["dtypes"] = tuple(dice.choice(self.dtypes_for(kind, op)) for _ in range(count))
        scaled = kind in ("allreduce", "reducescatter") and op not in ("Adasum", "Product")
        if scaled and "bool" not in common["dtypes"]:
            common["factors"] = (dice.choice(FACTORS), dice.choice(FACTORS))
        shapes = [self.shape(scalar=kind != "reducescatter") for _ in range(count)]
        if kind == "allgather":
            shapes = [shape or (1,) for shape in shapes]
            common["rows"] = tuple(self.uneven(shape[0], len(members)) for shape in shapes)
        elif kind == "alltoall":
            shapes = [shape or (1,) for shape in shapes]
            self.split(common, shapes, len(members))
        elif kind == "broadcast":
            common["root"] = dice.choice(members)
        return Task(self.keys, kind, name, members, shapes=tuple(shapes), **common)

    def op(self, kind: str) -> str:
        if kind == "allreduce":
            return self.dice.choice(("Average", "Average", "Sum", "Sum", "Min", "Max", "Product", "Adasum"))
        return self.dice.choice(("Average", "Sum"))

    def dtypes_for(self, kind: str, op: str) -> tuple[str, ...]:
        if kind in ("allreduce", "reducescatter"):
            if op == "Adasum":
                return FLOATS
            if op == "Average":
                return tuple(dtype for dtype in REAL if dtype != "bool")
        return REAL

    def shape(self, *, scalar: bool) -> Shape:
        dice, how = self.dice, self.dice.random()
        if how < 0.08:
            return () if scalar else (1,)
        if how < 0.15:
            return (0, dice.randint(1, 4)) if dice.random() < 0.5 else (dice.randint(1, 9), 0)
        if how < 0.80:
            return tuple(dice.randint(1, 12) for _ in range(dice.randint(1, 3)))
        if how < 0.96:
            return (dice.randint(100, 3000), dice.randint(1, 8))
        return (dice.randint(LARGE // 10, LARGE),)

    def uneven(self, rows: int, size: int) -> tuple[int, ...]:
        return tuple(self.dice.choice((rows, rows, self.dice.randint(0, rows), 0)) for _ in range(size))

    def split(self, common: dict[str, Any], shapes: list[Shape], size: int) -> None:
        """Decide which rows of an alltoall go where; some go nowhere."""
        if self.dice.random() < 0.25:
            shapes[:] = [(shape[0] // size * size, *shape[1:]) for shape in shapes]
            return
        rows = self.uneven(shapes[0][0], size)
        splits = []
        for count in rows:
            cuts = sorted(self.dice.randint(0, count) for _ in range(size))
            splits.append(tuple(end - start for start, end in zip([0, *cuts], cuts, strict=False)))
        common["rows"], common["splits"] = (rows,), tuple(splits)
