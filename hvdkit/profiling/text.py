"""Describes the verdict as text."""

from __future__ import annotations

from collections.abc import Iterator

from hvdkit.profiling.scaling_report import describe_scaling
from hvdkit.profiling.verdict import Verdict

_LABELS = {
    "compute_s": "compute and everything else",
    "loading_s": "waiting for data",
    "late_s": "waiting for slower ranks",
    "exposed_s": "exposed communication",
}
_SHOWN = 16  # limit of ranks shown
_WORTH = 0.03  # of a step


def describe(verdict: Verdict) -> str:
    """Describe the whole verdict in lines."""
    parts = _list_shares, _list_ranks, _list_slow, _list_advice, _list_strategies
    return "\n\n".join("\n".join(part(verdict)) for part in parts)


def describe_slow(verdict: Verdict) -> str:
    """Describe the straggler in a sentence; "" if there is none."""
    slow = verdict.slow
    if slow is None:
        return ""
    who = f"Rank {slow.ranks[0]} on {slow.host}" if len(slow.ranks) == 1 else f"Every rank on {slow.host}"
    since = "in all steps" if slow.since is None else f"since step {slow.since}"
    return (
        f"{who} is slow {since}: the other ranks wait {show_s(slow.waited_s)} for it in each step of "
        f"{show_s(slow.step_s)}. Its own work takes {slow.times:.2f} times as long as theirs."
    )


def show_s(seconds: float) -> str:
    """Format a time with its unit: us, ms or s."""
    if abs(seconds) < 1e-3:
        return f"{1e6 * seconds:.3g} us"
    return f"{1e3 * seconds:.3g} ms" if abs(seconds) < 10 else f"{seconds:.3g} s"


def _list_shares(verdict: Verdict) -> Iterator[str]:
    hosts = len(verdict.hosts)
    parts = verdict.parts
    yield (
        f"{verdict.size} ranks on {hosts} host{'s' * (hosts > 1)} ({verdict.transport}): a step takes "
        f"{show_s(parts.step_s)} ({verdict.count} steps analysed, from step {verdict.first} to {verdict.last})."
    )
    for name, label in _LABELS.items():
        seconds = getattr(parts, name)
        yield f"  {label:34}{show_s(seconds):>9}  {100 * seconds / parts.step_s:3.0f} %"
    if verdict.loaders == -1 and not parts.loading_s:
        yield "  (No DataLoader or fit() was found, so any time spent on loading data is part of compute.)"
    if verdict.pauses:
        yield (
            f"  Not included: {verdict.pauses} step{'s' * (verdict.pauses > 1)} that took {show_s(verdict.pauses_s)} "
            f"longer than usual in total, for evaluation, checkpoints or the start of an epoch."
        )
    if verdict.missing:
        some = ", ".join(map(str, verdict.missing))
        yield f"  No recording came from rank {some}, so time spent waiting for them counts as communication."


def _list_ranks(verdict: Verdict) -> Iterator[str]:
    several = len(verdict.hosts) > 1
    yield f"  rank{'  host' + ' ' * 12 if several else ''}   compute      data  waiting  exposed  waited for"
    ranks = sorted(verdict.ranks, key=lambda row: -row.waited_for_s)[:_SHOWN]
    for row in sorted(ranks, key=lambda row: row.rank):
        cells = (row.parts.compute_s, row.parts.loading_s, row.parts.late_s, row.parts.exposed_s, row.waited_for_s)
        host = f"  {row.host:16}" if several else ""
        yield f"  {row.rank:4}{host}" + "".join(f"{show_s(cell):>10}" for cell in cells)
    if len(verdict.ranks) > _SHOWN:
        yield f"  ... and {len(verdict.ranks) - _SHOWN} more ranks, for which the others wait less"


def _list_slow(verdict: Verdict) -> Iterator[str]:
    if verdict.slow is not None:
        yield describe_slow(verdict)
    elif verdict.parts.late_s > _WORTH * verdict.parts.step_s:
        yield "No single rank is slow: different ranks are slow in different steps."
    else:
        yield "No rank is slow."


def _list_advice(verdict: Verdict) -> Iterator[str]:
    more = "; ".join(
        f"{step.times}x the hosts ({step.hosts}): {show_s(step.step_s)}, {100 * step.efficiency:.0f} %"
        for step in verdict.predicted
        if step.times > 1
    )
    yield f"Predicted step time, and efficiency relative to this job, on {verdict.network}: {more}."
    yield ""
    yield describe_scaling(verdict.scaling)
    yield ""
    if not verdict.advice:
        yield "Nothing to change: no advice would save a noticeable part of a step."
        return
    yield "What to change first:"
    for number, advice in enumerate(verdict.advice, 1):
        yield f"  {number}. [{advice.name}, saves up to {show_s(advice.saves_s)} per step] {advice.text}"


def _list_strategies(verdict: Verdict) -> Iterator[str]:
    found = verdict.strategies
    yield "Strategies, with the predicted time for the samples of one step of all ranks:"
    for one in found.choices:
        yield f"  {one.name:28}{show_s(one.step_s):>9}  x{one.speedup:4.2f}  {one.trade}"
    best, fastest = found.named(found.best), found.named(found.fastest)
    if fastest is found.choices[0]:
        yield "Stay synchronous: no other strategy is predicted to be 5 % faster."
        return
    if fastest is not best:
        yield (
            f"With another result: {fastest.name} ({fastest.use}) is predicted to be {fastest.speedup:.2f} times as "
            f"fast in samples, but {fastest.trade}. Compare its loss with that of synchronous training first."
        )
    if best is not found.choices[0]:
        yield f"Use {best.name} ({best.use}): predicted to be {best.speedup:.2f} times as fast, with the same result."
    else:
        yield "Stay synchronous: nothing with the same result is predicted to be 5 % faster."
