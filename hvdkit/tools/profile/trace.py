"""The steps of all ranks as spans of time, and as a Chrome trace: a process for each rank, with lines for its parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hvdkit.profiling.steps import Steps
from hvdkit.profiling.verdict import Analysis


@dataclass(frozen=True)
class Span:
    """An activity between two times, on the clock of its Steps.

    rank: its index among steps.ranks. line: "training" or "buckets". kind: of Shares, or "bucket". step: number of the
    round. bucket: its number. detail: its tensors.
    """

    rank: int
    line: str
    kind: str
    name: str
    step: int
    began: float
    ended: float
    bucket: int = 0
    detail: str = ""


_NAMES = {
    "compute": "compute",
    "loading": "waiting for data",
    "late": "waiting for a slower rank",
    "exposed": "communication",
}


def list_spans(steps: Steps, which: Iterable[int]) -> Iterator[Span]:
    """The spans of the steps with these indices in `steps`, rank by rank, in the order of time."""
    chosen = list(which)
    for rank in range(len(steps.ranks)):
        for at in chosen:
            yield from _training(steps, rank, at)
            number = int(steps.numbers[at])
            for bucket, names in enumerate(steps.plan.names):
                began, ended = float(steps.ready[rank, at, bucket]), float(steps.reduced[rank, at, bucket])
                if ended > began:
                    yield Span(rank, "buckets", "bucket", f"bucket {bucket}", number, began, ended, bucket, names)


def _training(steps: Steps, rank: int, at: int) -> Iterator[Span]:
    """The spans of training from begin to end of a step; what is no wait, copy or load is compute."""
    now = float(steps.began[rank, at])
    for kind, began, ended in sorted(_stops(steps, rank, at), key=lambda stop: stop[1]):
        began = max(began, now)
        if ended <= began:
            continue
        if began > now:
            yield _span(steps, rank, at, "compute", now, began)
        yield _span(steps, rank, at, kind, began, ended)
        now = ended
    if steps.ended[rank, at] > now:
        yield _span(steps, rank, at, "compute", now, float(steps.ended[rank, at]))


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


def _span(steps: Steps, rank: int, at: int, kind: str, began: float, ended: float) -> Span:
    return Span(rank, "training", kind, _NAMES[kind], int(steps.numbers[at]), began, ended)


_LINES = ("training", "buckets")
#: Of Chrome's own palette.
_COLOURS = {"compute": "good", "loading": "bad", "late": "terrible", "exposed": "yellow", "bucket": "generic_work"}


def build_trace(found: Analysis) -> dict[str, Any]:
    """The trace, in the JSON Object Format; time begins with the first step."""
    events: list[dict[str, Any]] = []
    for rank in found.steps.ranks:
        name = {"name": f"rank {rank.rank} ({rank.host})"}
        events.append({"name": "process_name", "ph": "M", "pid": rank.rank, "args": name})
        for at, line in enumerate(_LINES):
            events.append({"name": "thread_name", "ph": "M", "pid": rank.rank, "tid": at, "args": {"name": line}})
    start = float(found.steps.began.min())
    events += [
        {
            "name": span.name,
            "ph": "X",
            "pid": found.steps.ranks[span.rank].rank,
            "tid": _LINES.index(span.line),
            "ts": round(1e6 * (span.began - start), 1),
            "dur": round(1e6 * (span.ended - span.began), 1),
            "cname": _COLOURS[span.kind],
            "args": {"step": span.step, **({"tensors": span.detail} if span.detail else {})},
        }
        for span in list_spans(found.steps, range(len(found.steps.numbers)))
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
