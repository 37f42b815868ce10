"""Division of a chain of parts into pipeline stages of about equal cost, and assignment of stages to ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hvdkit.errors import ParallelError


def balance(costs: Sequence[float], stages: int) -> list[range]:
    """Divide parts into `stages` consecutive ranges with the smallest possible largest sum of costs.

    costs: of each part, in any unit; at least as many parts as stages. Dynamic programming over prefixes, n^2 stages.
    """
    sums = [0.0, *itertools.accumulate(costs)]
    count = len(costs)
    # best[i]: smallest largest sum of the first i parts in the stages so far; cuts[s][i]: beginning of the last stage.
    best = [0.0] + [float("inf")] * count
    cuts: list[list[int]] = []
    for stage in range(1, stages + 1):
        cut = [0] * (count + 1)
        new = [float("inf")] * (count + 1)
        for end in range(stage, count + 1):
            new[end], cut[end] = min((max(best[at], sums[end] - sums[at]), at) for at in range(stage - 1, end))
        best = new
        cuts.append(cut)
    ranges: list[range] = []
    end = count
    for cut in reversed(cuts):
        ranges.append(range(cut[end], end))
        end = cut[end]
    return ranges[::-1]


def stages_of_rank(rank: int, ranks: int, stages: int, *, v_shaped: bool) -> list[int]:
    """Return the stages of one rank of a pipeline: every `ranks`-th, or forth and back for a v-shaped schedule."""
    if v_shaped:
        return [rank, stages - 1 - rank]
    return list(range(rank, stages, ranks))


def plan_stages(
    schedule: str, ranks: int, parts: int, stages: int | None, microbatches: int, *, several: bool, v_shaped: bool
) -> int:
    """Check stages and micro-batches against schedule, ranks and model; returns the number of stages.

    schedule: its name.
    ranks: of the pipeline.
    parts: number of the model's parts.
    stages: None for the smallest number that the schedule allows.
    microbatches: in a batch.
    several: whether the schedule allows several stages per rank.
    v_shaped: see stages_of_rank().

    Raises ParallelError for numbers that do not fit.
    """
    call = f"pipeline(schedule={schedule!r})"
    if stages is None:
        stages = 2 * ranks if several else ranks
    if stages < 1 or stages % ranks:
        raise ParallelError(
            f"{call}: {stages} stages cannot be given to {ranks} ranks evenly (pp={ranks}). Use "
            f"stages={max(ranks, stages // ranks * ranks)}, or another pp."
        )
    if not several and stages != ranks:
        raise ParallelError(
            f"{call} takes one stage a rank, so {ranks} with pp={ranks}, not {stages}. Use stages={ranks}, or a "
            "schedule for several stages a rank, such as 'Interleaved1F1B'."
        )
    if v_shaped and stages != 2 * ranks:
        raise ParallelError(f"{call} takes two stages a rank, so {2 * ranks} with pp={ranks}. Use stages={2 * ranks}.")
    if several and stages == ranks:
        raise ParallelError(
            f"{call} takes two or more stages a rank. Use stages={2 * ranks}, or schedule='1F1B' for one."
        )
    if stages > parts:
        raise ParallelError(
            f"{call}: the model has {parts} part{'s' * (parts != 1)}, too few for {stages} stages. Use pp or stages of "
            f"at most {parts}, or name smaller parts with parts=[...]."
        )
    if microbatches < 1 or (microbatches < ranks and ranks > 1):
        raise ParallelError(
            f"{call}: {microbatches} micro-batches leave ranks without work, as the pipeline has {ranks}. Use "
            f"microbatches={ranks} or more; 4 per rank ({4 * ranks}) keep the idle part below a fifth."
        )
    return stages
