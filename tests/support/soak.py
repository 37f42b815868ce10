"""Random collectives for as long as you like, on ranks of this machine, each result compared with numpy's.

    python tests/support/soak.py --minutes 10

Every rank draws the same rounds from the seed: which operations, under which names, on which process sets, of which
dtypes and sizes, from how many threads; in which order it begins them and waits for them is its own affair. A mismatch,
an error or a hang ends the test with what it takes to repeat that round. Memory is what a rank has resident after the
warm-up, a fifth of the time, and at the end; it may grow by 5 %.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run by path, the tests' own folder is there already

from ranks import RanksFailedError, run_ranks
from soak_play import leave_world, play_rounds

GROWTH = 0.05
_WARM_UP = 0.2  # of the time
_CHUNK = 20  # rounds between two looks at the clock
_HANG_S = 120.0  # for a chunk
#: glibc gives large blocks back at once. By itself it keeps a changing 100 MB of them, in which no leak could be seen.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}


def soak(
    minutes: float, size: int, seed: int, say: Callable[[str], None], transport: str = "auto"
) -> tuple[int, list[float], list[float]]:
    """Play rounds for some minutes; returns the number of operations, and each rank's MB after warm-up and at the end.

    An operation on three ranks counts as three. Raises RanksFailedError.
    """
    began, first, operations = time.monotonic(), 0, 0
    warm: list[float] = []
    said = 0.0
    while True:
        last = first + _CHUNK
        played = run_ranks(size, play_rounds, seed, first, last, size, timeout=_HANG_S, transport_name=transport)
        first = last
        operations += sum(int(one["operations"]) for one in played)
        memory = [one["memory"] for one in played]
        gone = (time.monotonic() - began) / 60
        if not warm and gone >= _WARM_UP * minutes:
            warm = memory
        if gone >= minutes:
            run_ranks(size, leave_world)
            return operations, warm, memory
        if gone >= said + minutes / 20:
            said = gone
            megabytes = " ".join(f"{each:.0f}" for each in memory)
            say(f"{gone:.1f} min: {first} rounds, {operations} operations, {megabytes} MB")


def growth(warm: list[float], end: list[float]) -> float:
    """The largest share by which a rank's memory has grown."""
    return max(after / before - 1 for before, after in zip(warm, end, strict=True))


def main() -> int:
    """Run it; 0 if all was well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--ranks", type=int, default=3, help="how many ranks (default: 3)")
    parser.add_argument("--seed", type=int, help="what the rounds are drawn from (default: a new one)")
    parser.add_argument("--round", type=int, help="play this round only, and say what it consists of")
    parser.add_argument("--transport", default="auto", help="how bytes travel (default: auto)")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}, {options.ranks} ranks", flush=True)
    os.environ.update(_MALLOC)
    try:
        if options.round is not None:
            from soak_plan import plan_round

            for task in plan_round(random.Random(f"{seed} {options.round}"), options.ranks).tasks:
                print(task)
            once = (seed, options.round, options.round + 1, options.ranks)
            run_ranks(options.ranks, play_rounds, *once, timeout=_HANG_S, transport_name=options.transport)
            print("no mismatch")
            return 0
        operations, warm, end = soak(options.minutes, options.ranks, seed, _say, options.transport)
    except RanksFailedError as error:
        print(error)
        return 1
    grown = growth(warm, end)
    megabytes = ", ".join(f"{before:.0f} -> {after:.0f}" for before, after in zip(warm, end, strict=True))
    print(f"{operations} operations, no mismatch; MB a rank: {megabytes}; growth {100 * grown:.1f} %, at most 5 %")
    return int(grown > GROWTH)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
