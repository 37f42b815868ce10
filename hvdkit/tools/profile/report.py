"""The report: the verdict and drawings of its data in one HTML file; and the steps as a Chrome trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from hvdkit.profiling.mesh_steps import PARTS, MeshSteps, describe_mesh_steps
from hvdkit.profiling.scaling_report import ScalingReport
from hvdkit.profiling.steps import Steps
from hvdkit.profiling.text import describe, show_s
from hvdkit.profiling.verdict import Analysis
from hvdkit.tools.charts import build_page, draw_bars, draw_lines, embed, label_log_axis, new_figure


@dataclass(frozen=True)
class Span:
    """An activity between two times, on the clock of its Steps.

    rank: its index among steps.ranks.
    kind: one of the kinds of TimeShares, or "bucket".
    step: number of the round.
    began, ended: times.
    bucket: its number, None for an activity of the training.
    detail: its tensors.
    """

    rank: int
    kind: str
    step: int
    began: float
    ended: float
    bucket: int | None = None
    detail: str = ""


def list_spans(steps: Steps, which: Iterable[int]) -> Iterator[Span]:
    """Yield the spans of the steps with these indices in `steps`, rank by rank and step by step."""
    chosen = list(which)
    for rank in range(len(steps.ranks)):
        for at in chosen:
            number = int(steps.numbers[at])
            for kind, began, ended in _training(steps, rank, at):
                yield Span(rank, kind, number, began, ended)
            for bucket, names in enumerate(steps.plan.names):
                began, ended = float(steps.ready[rank, at, bucket]), float(steps.reduced[rank, at, bucket])
                if ended > began:
                    yield Span(rank, "bucket", number, began, ended, bucket, names)


def _training(steps: Steps, rank: int, at: int) -> Iterator[tuple[str, float, float]]:
    """Yield kind, begin and end of the training's activities in a step; time without wait, copy or load is compute."""
    now = float(steps.began[rank, at])
    for kind, began, ended in sorted(_stops(steps, rank, at), key=lambda stop: stop[1]):
        began = max(began, now)
        if ended <= began:
            continue
        if began > now:
            yield "compute", now, began
        yield kind, began, ended
        now = ended
    if steps.ended[rank, at] > now:
        yield "compute", now, float(steps.ended[rank, at])


def _stops(steps: Steps, rank: int, at: int) -> Iterator[tuple[str, float, float]]:
    loaded, loading = float(steps.loaded[rank, at]), float(steps.loading[rank, at])
    if loading:
        yield "loading", loaded - loading, loaded
    for bucket in range(len(steps.plan.nbytes)):
        here = rank, at, bucket
        yield "exposed", float(steps.filling[here]), float(steps.handed[here])
        waiting, reduced = float(steps.waiting[here]), float(steps.reduced[here])
        ready = min(max(float(steps.ready[:, at, -1].max()), waiting), reduced)
        yield "late", waiting, ready
        yield "exposed", ready, float(steps.taken[here])


_LINES = ("training", "buckets")
#: Names in a trace, and colours of Chrome's own palette.
_TRACED = {
    "compute": ("compute", "good"),
    "loading": ("waiting for data", "bad"),
    "late": ("waiting for a slower rank", "terrible"),
    "exposed": ("communication", "yellow"),
    "bucket": ("bucket {}", "generic_work"),
}


def build_trace(found: Analysis) -> dict[str, Any]:
    """Build the trace, in the JSON Object Format; time begins with the first step."""
    events: list[dict[str, Any]] = []
    for rank in found.steps.ranks:
        name = {"name": f"rank {rank.rank} ({rank.host})"}
        events.append({"name": "process_name", "ph": "M", "pid": rank.rank, "args": name})
        for at, line in enumerate(_LINES):
            events.append({"name": "thread_name", "ph": "M", "pid": rank.rank, "tid": at, "args": {"name": line}})
    start = float(found.steps.began.min())
    events += [
        {
            "name": _TRACED[span.kind][0].format(span.bucket),
            "ph": "X",
            "pid": found.steps.ranks[span.rank].rank,
            "tid": int(span.bucket is not None),
            "ts": round(1e6 * (span.began - start), 1),
            "dur": round(1e6 * (span.ended - span.began), 1),
            "cname": _TRACED[span.kind][1],
            "args": {"step": span.step, **({"tensors": span.detail} if span.detail else {})},
        }
        for span in list_spans(found.steps, range(len(found.steps.numbers)))
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


_OPTION = "--output"
_STEPS = 4  # number of steps in the timeline
_RANKS = 32  # most ranks in drawings
_POINTS = 400  # most points of a line over all steps
_COLOURS = {"compute": "C0", "loading": "C1", "late": "C2", "exposed": "C3"}  # as in the bars of ranks


def check_report() -> None:
    """Raise MissingDependencyError, before the job runs, if the report cannot be drawn."""
    new_figure(_OPTION, 1, 1)


def build_report(analysis: Analysis | None, mesh: MeshSteps | None = None) -> str:
    """Build the whole page."""
    parts = [] if analysis is None else _list_parts(analysis)
    if mesh is not None:
        bars = {
            f"rank {rank}": {PARTS[part]: seconds for part, seconds in each.items()}
            for rank, each in mesh.ranks.items()
        }
        stages = {
            f"stage {each.stage}": {"forward": each.forward_s, "backward": each.backward_s} for each in mesh.stages
        }
        parts += ["<h2>Steps on the mesh</h2>", f"<pre>{escape(describe_mesh_steps(mesh))}</pre>"]
        parts += [_draw_bars(bars, "time of each part")]
        parts += [_draw_bars(stages, "time of each stage")] if stages else []
    return build_page("Where the time of a step goes", parts)


def _list_parts(analysis: Analysis) -> list[str]:
    ranks = _chosen(analysis)
    return [
        f"<pre>{escape(describe(analysis.verdict))}</pre>",
        "<h2>Average step of each rank</h2>",
        _draw_bars(_by_rank(analysis, ranks), "time of each part"),
        "<h2>Timeline of typical steps</h2>",
        "<p>The thin line below each rank shows its buckets, from the time when the rank has its gradients ready until "
        "it receives their sum. hvdkit profile --trace FILE writes the same with names and times, for "
        "ui.perfetto.dev.</p>",
        _draw_timeline(analysis, ranks, _typical(analysis)),
        "<h2>Buckets</h2>",
        _draw_bars(_by_bucket(analysis), "time after the first rank has the bucket ready"),
        "<h2>All steps</h2>",
        _draw_steps(analysis),
        "<h2>On more hosts</h2>",
        _draw_scaling(analysis),
        "<h2>Against one rank</h2>",
        _draw_report(analysis.verdict.scaling),
    ]


def _draw_bars(bars: Mapping[str, Mapping[str, float]], title: str) -> str:
    figure = new_figure(_OPTION, 10, 1.5 + 0.3 * len(bars))
    draw_bars(figure.subplots(), bars, title=title, show=show_s)
    return embed(figure)


def _draw_timeline(analysis: Analysis, ranks: list[int], steps: list[int]) -> str:
    """Draw the training's activities on each rank, and below them the reductions of its buckets."""
    figure = new_figure(_OPTION, 14, 1 + 0.45 * len(ranks))
    axis, start = figure.subplots(), float(analysis.steps.began[:, steps[0]].min())
    rows = {rank: row for row, rank in enumerate(ranks)}
    for span in list_spans(analysis.steps, steps):
        if span.rank in rows:
            place = (rows[span.rank] - 0.4, 0.5) if span.bucket is None else (rows[span.rank] + 0.12, 0.2)
            colour = _COLOURS[span.kind] if span.bucket is None else f"C{4 + span.bucket % 4}"
            axis.broken_barh([(1e3 * (span.began - start), 1e3 * (span.ended - span.began))], place, facecolor=colour)
    members = [analysis.steps.ranks[rank] for rank in ranks]
    axis.set_yticks(range(len(ranks)), [f"{member.rank} {member.host}"[:16] for member in members])
    axis.invert_yaxis()
    axis.set_xlabel("ms")
    return embed(figure)


def _chosen(analysis: Analysis) -> list[int]:
    """Return the indices of the ranks to draw: if there are many, those for which others wait the most."""
    waited = [-rank.waited_for_s for rank in analysis.verdict.ranks]
    return sorted(np.argsort(waited, kind="stable")[:_RANKS].tolist())


def _typical(analysis: Analysis) -> list[int]:
    """Return the indices of consecutive steps of typical length, near the end."""
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
    return {
        f"rank {row.rank} {row.host}": {
            "compute": row.parts.compute_s,
            "waiting for data": row.parts.loading_s,
            "waiting for slower ranks": row.parts.late_s,
            "communication": row.parts.exposed_s,
        }
        for row in (analysis.verdict.ranks[at] for at in ranks)
    }


def _by_bucket(analysis: Analysis) -> dict[str, dict[str, float]]:
    steps, usual = analysis.steps, analysis.shares.usual
    first, last = steps.ready.min(axis=0), steps.ready.max(axis=0)
    done = steps.reduced.min(axis=0)
    bars = {}
    for at, (nbytes, names) in enumerate(zip(steps.plan.nbytes, steps.plan.names, strict=True)):
        name = f"{at}: {nbytes / 2**20:.2f} MiB, {names}"[:60]
        bars[name] = {
            "until the last rank has it ready": float((last - first)[usual, at].mean()),
            "until its sum is received": float((done - last)[usual, at].clip(0).mean()),
        }
    return bars


def _draw_steps(analysis: Analysis) -> str:
    numbers, every = analysis.steps.numbers, max(1, len(analysis.steps.numbers) // _POINTS)
    series = {"step": analysis.shares.step.max(axis=0)}
    slow = analysis.verdict.slow
    if slow is not None:
        members = [at for at, rank in enumerate(analysis.steps.ranks) if rank.rank in slow.ranks]
        who = f"rank {slow.ranks[0]}" if len(slow.ranks) == 1 else slow.host
        series[f"waited for {who}"] = analysis.shares.waited_for[members].sum(axis=0)
    figure = new_figure(_OPTION, 10, 4)
    axis = figure.subplots()
    draw_lines(
        axis,
        {
            name: list(zip(numbers[::every].tolist(), (1e3 * seconds[::every]).tolist(), strict=True))
            for name, seconds in series.items()
        },
    )
    axis.set(title="duration of each step", xlabel="step", ylabel="ms", ylim=(0, None))
    return embed(figure)


def _draw_scaling(analysis: Analysis) -> str:
    predicted = analysis.verdict.predicted
    hosts = [float(step.hosts) for step in predicted]
    bare = predicted[0].step_s / analysis.scaling.work.compute_s
    figure = new_figure(_OPTION, 10, 4)
    axis = figure.subplots()
    lines = {
        "predicted": [(float(step.hosts), step.times * step.efficiency) for step in predicted],
        "without communication": [(float(step.hosts), step.times * bare) for step in predicted],
    }
    draw_lines(axis, lines, dashed=["without communication"])
    label_log_axis(axis, hosts)
    axis.set(title=f"on {analysis.verdict.network}", xlabel="hosts", ylabel="throughput relative to this job")
    return embed(figure)


def _draw_report(report: ScalingReport) -> str:
    """Draw speedup and efficiency, weak and strong, over the number of ranks; each line begins at one rank."""
    figure = new_figure(_OPTION, 12, 4)
    speedups, efficiencies = figure.subplots(1, 2)
    ranks = [1.0, *(float(point.ranks) for point in report.points)]
    lines = {"weak": [point.weak for point in report.points], "strong": [point.strong for point in report.points]}
    faster = {
        name: list(zip(ranks, [1.0, *(one.speedup for one in line)], strict=True)) for name, line in lines.items()
    }
    draw_lines(speedups, {**faster, "ideal": [(each, each) for each in ranks]}, dashed=["ideal"])
    shares = {
        name: list(zip(ranks, [100.0, *(100 * one.efficiency for one in line)], strict=True))
        for name, line in lines.items()
    }
    draw_lines(efficiencies, shares)
    for axis in (speedups, efficiencies):
        label_log_axis(axis, ranks)
        axis.set_xlabel(f"ranks ({report.points[0].ranks}: measured)")
    speedups.set(title="speedup", ylim=(0, None))
    efficiencies.set(title="efficiency", ylabel="%", ylim=(0, None))
    return embed(figure)
