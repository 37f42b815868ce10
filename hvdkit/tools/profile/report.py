"""The report: the verdict, and drawings of what it rests on, in one HTML file."""

from __future__ import annotations

from html import escape

import numpy as np

from hvdkit.profiling.text import describe, show_s
from hvdkit.profiling.verdict import Analysis, Parts
from hvdkit.tools.charts import Axis, Line, build_page, draw_bars, draw_lines
from hvdkit.tools.profile.timeline import draw_timeline

_STYLE = "pre { white-space: pre-wrap; }\n"
_STEPS = 4  # in the timeline
_RANKS = 32  # in drawings
_POINTS = 400  # of a line over all steps


def build_report(analysis: Analysis) -> str:
    """The whole page."""
    ranks = _chosen(analysis)
    parts = [
        f"<pre>{escape(describe(analysis.verdict))}</pre>",
        "<h2>A step of each rank</h2>",
        draw_bars(_by_rank(analysis, ranks), title="average step", show=show_s),
        "<h2>Some steps of all ranks</h2>",
        '<p class="quiet">Colours as above; the thin line below each rank shows its buckets, from when it had its part '
        "ready to when it saw the sum. Point at anything for its name and time.</p>",
        draw_timeline(analysis.steps, ranks, _typical(analysis)),
        "<h2>Buckets</h2>",
        draw_bars(_by_bucket(analysis), title="from the first rank that has it ready", show=show_s),
        "<h2>All steps</h2>",
        _draw_steps(analysis),
        "<h2>On more hosts</h2>",
        _draw_scaling(analysis),
    ]
    return build_page("Where the time of a step goes", parts, style=_STYLE)


def _chosen(analysis: Analysis) -> list[int]:
    """Places of the ranks that are drawn: those that are waited for most, if there are many."""
    waited = [-rank.waited_for_s for rank in analysis.verdict.ranks]
    return sorted(np.argsort(waited, kind="stable")[:_RANKS].tolist())


def _typical(analysis: Analysis) -> list[int]:
    """Places of some steps in a row that are as long as most are, near the end."""
    usual = analysis.shares.usual
    count = len(usual)
    length = min(_STEPS, count)
    sums = np.convolve(analysis.shares.step.max(axis=0), np.ones(length), "valid")
    rows = np.convolve(usual, np.ones(length), "valid") == length
    late = np.arange(len(sums)) >= len(sums) // 2
    fit = rows & late if (rows & late).any() else np.ones_like(rows)
    distance = np.where(fit, abs(sums - np.median(sums[fit])), np.inf)
    first = int(distance.argmin())
    return list(range(first, first + length))


def _by_rank(analysis: Analysis, ranks: list[int]) -> dict[str, dict[str, float]]:
    return {f"rank {row.rank} {row.host}": _name(row.parts) for row in (analysis.verdict.ranks[at] for at in ranks)}


def _name(parts: Parts) -> dict[str, float]:
    return {
        "compute": parts.compute_s,
        "waiting for data": parts.loading_s,
        "waiting for slower ranks": parts.late_s,
        "communication": parts.exposed_s,
    }


def _by_bucket(analysis: Analysis) -> dict[str, dict[str, float]]:
    steps, usual = analysis.steps, analysis.shares.usual
    first, last = steps.ready.min(axis=0), steps.ready.max(axis=0)
    done = steps.reduced.min(axis=0)
    bars = {}
    for at, (nbytes, names) in enumerate(zip(steps.plan.nbytes, steps.plan.names, strict=True)):
        name = f"{at}: {nbytes / 2**20:.2f} MiB, {names}"[:60]
        bars[name] = {
            "until the last rank has it": float((last - first)[usual, at].mean()),
            "until it is reduced, and seen": float((done - last)[usual, at].clip(0).mean()),
        }
    return bars


def _draw_steps(analysis: Analysis) -> str:
    numbers, every = analysis.steps.numbers, max(1, len(analysis.steps.numbers) // _POINTS)
    lines = {"step": analysis.shares.step.max(axis=0)}
    slow = analysis.verdict.slow
    if slow is not None:
        members = [at for at, rank in enumerate(analysis.steps.ranks) if rank.rank in slow.ranks]
        who = f"rank {slow.ranks[0]}" if len(slow.ranks) == 1 else slow.host
        lines[f"waited for {who}"] = analysis.shares.waited_for[members].sum(axis=0)
    drawn = [
        Line(name, list(zip(numbers[::every].tolist(), (1e3 * series[::every]).tolist(), strict=True)))
        for name, series in lines.items()
    ]
    return draw_lines(drawn, x=Axis("step"), y=Axis("ms"), title="how long each step took")


def _draw_scaling(analysis: Analysis) -> str:
    predicted = analysis.verdict.predicted
    hosts = [float(step.hosts) for step in predicted]
    times = [float(step.times) for step in predicted]
    bare = predicted[0].step_s / analysis.scaling.work.compute_s
    lines = [
        Line("predicted", [(step.hosts, step.times * step.efficiency) for step in predicted]),
        Line("without communication", [(at, more * bare) for at, more in zip(hosts, times, strict=True)], dashed=True),
    ]
    return draw_lines(
        lines,
        x=Axis("hosts", log=True, ticks=hosts),
        y=Axis("times today's samples in a second"),
        title=f"on {analysis.verdict.network}",
    )
