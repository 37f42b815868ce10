"""What agreement costs as ranks become more: hvdkit's own code among up to 4096 simulated ranks in this one process.

    python -m benchmarks.agreement

Nothing is started and no network is used: see simulated_ranks.py for what is counted, and with which link. Each row is
of the rank that has most to do; "flat" is the same negotiation with every rank announcing to rank 0 itself. The aim: no
more rounds, and messages of one rank, than 8 times log2 of the ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from math import log2
from pathlib import Path

from benchmarks.rows import Row, write_rows
from benchmarks.simulated_ranks import Cost, SimulatedMailbox, Wire, run_simulated
from hvdkit.config import Config
from hvdkit.engine.named.negotiator import Negotiator
from hvdkit.engine.named.operation import AllJoined, Answer, Failed, OperationRequest, Ready
from hvdkit.engine.named.tree import FANOUT, HOLD_S
from hvdkit.engine.observe.stall import Stalls
from hvdkit.engine.planned.agreement import check_agreement
from hvdkit.engine.planned.plan import TensorSpec, describe_plan
from hvdkit.launch.cli.numbers import positive_int
from hvdkit.tools.bench.report import show_time
from hvdkit.transport.small_collectives import allgather_object, gather_ints

MOST = 8  # rounds, and messages, for each doubling of the ranks: init() gathers four times, at two messages each
_NAMES = 50


class SimulatedRank:
    """A rank's negotiator, and what it has heard: "ready NAME", "failed NAME: WHY", "joined LAST", "closed: WHY"."""

    def __init__(self, wire: Wire, rank: int, fanout: int) -> None:
        self.heard: list[str] = []
        clock = lambda: wire.now[rank]  # noqa: E731
        self.negotiator = Negotiator(
            SimulatedMailbox(wire, rank),
            rank,
            wire.size,
            who=lambda peer: f"rank {peer}",
            stalls=Stalls(Config(stall_check_s=0), str, clock),
            fanout=fanout,
            clock=clock,
        )

    def _hear(self, answer: Answer) -> None:
        if isinstance(answer, int):
            answer = self.negotiator.numbers.ready[answer]
        if isinstance(answer, Ready):
            without = f" without {sorted(answer.joined)}" if answer.joined else ""
            self.heard.append(f"ready {answer.name}{without}")
        elif isinstance(answer, Failed):
            self.heard.append(f"failed {answer.name}: {answer.why}")
        elif isinstance(answer, AllJoined):
            self.heard.append(f"joined {answer.last}")
        else:
            self.heard.append(f"closed: {answer.why}")

    def drive(self) -> None:
        """Do what can be done now."""
        while self.negotiator.turn():
            while self.negotiator.heard:
                for answer in self.negotiator.heard.popleft():
                    self._hear(answer)


class SimulatedEngines:
    """Negotiators of so many ranks on one wire."""

    def __init__(self, size: int, fanout: int = FANOUT) -> None:
        self.wire = Wire(size)
        self._levels = size if fanout == 1 else 16  # a tree of more levels than that has nobody; a chain may
        self.ranks = [SimulatedRank(self.wire, rank, fanout) for rank in range(size)]
        self.wire.deliver = lambda rank: self.ranks[rank].drive()

    def announce(self, rank: int, names: Sequence[str], asked: OperationRequest) -> None:
        """Announce operations on one rank."""
        for name in names:
            self.ranks[rank].negotiator.add(name, asked)
        self.ranks[rank].drive()

    def settle(self) -> None:
        """Deliver everything; what is kept for a while as well."""
        self.wire.run()
        for _ in range(self._levels):
            self.wire.sleep(2 * HOLD_S)
            for rank in self.ranks:
                rank.drive()
            self.wire.run()


def negotiate(size: int, fanout: int = FANOUT) -> tuple[Cost, Cost]:
    """The cost of 50 allreduces that all ranks announce at once: the first time, and the fourth, by number."""
    engines = SimulatedEngines(size, fanout)
    names, asked = [f"layer.{at}" for at in range(_NAMES)], OperationRequest("allreduce", (("float32", (1024,)),))
    costs = []
    for turn in range(4):
        engines.wire.start_counting()
        for rank in range(size):
            engines.announce(rank, names, asked)
        engines.wire.run()
        costs.append(engines.wire.counted())
        wanted = [f"ready {name}" for name in names] * (turn + 1)
        assert all(sorted(rank.heard) == sorted(wanted) for rank in engines.ranks), "not all ranks have been told"
    return costs[0], costs[3]


def is_logarithmic(cost: Cost) -> bool:
    """Is the aim met?"""
    return max(cost.rounds, cost.messages) <= MOST * log2(cost.ranks)


def agree_on_plan(size: int) -> Cost:
    """The cost of check_agreement() on the plan of 200 tensors."""
    plan = describe_plan([TensorSpec(f"layer.{at}.weight", 4096, "float32") for at in range(200)], 2**23, "average")
    results, cost = run_simulated(size, lambda transport: check_agreement(transport, plan))
    assert results == [None] * size
    return cost


def start_up(size: int) -> Cost:
    """The cost of what init() gathers through its transport: the hosts' sizes, twice, and their names."""
    results, cost = run_simulated(
        size,
        lambda transport: (
            gather_ints(transport, 8),
            gather_ints(transport, 8),
            allgather_object(transport, f"node{transport.rank // 8:04d}.cluster"),
        ),
    )
    assert all(result == results[0] for result in results) and len(results[0][2]) == size
    return cost


WORKS: dict[str, Callable[[int], Cost]] = {
    "plan agreement": agree_on_plan,
    "init()'s gathering": start_up,
    "50 names, first time": lambda size: negotiate(size)[0],
    "50 names, known": lambda size: negotiate(size)[1],
    "50 names, known, flat": lambda size: negotiate(size, fanout=size)[1],
}


def main() -> None:
    """Print a table for each piece of work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=positive_int, nargs="+", default=[2, 8, 64, 512, 1024])
    parser.add_argument("--json", type=Path, help="write the numbers there as well")
    options = parser.parse_args()
    rows = []
    for name, work in WORKS.items():
        print(f"\n| {name}: ranks | time | rounds | messages | bytes |\n|{'---|' * 5}")
        for size in options.ranks:
            cost = work(size)
            met = None if "flat" in name else is_logarithmic(cost)
            miss = ", missed" if met is False else ""
            cells = [size, show_time(cost.seconds), cost.rounds, f"{cost.messages}{miss}", cost.nbytes]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
            aim = "" if met is None else f"at most {MOST} messages and rounds x log2(ranks)"
            rows.append(Row(f"{name}, {size} ranks", "hvdkit, simulated", cost.seconds, aim=aim, met=met))
    if options.json:
        write_rows(options.json, "simulated ranks", rows)


if __name__ == "__main__":
    main()
