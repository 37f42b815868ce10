"""The steps of all ranks as a Chrome trace: a process for each rank, with lines for training and for buckets."""

from __future__ import annotations

from typing import Any

from hvdkit.profiling.verdict import Analysis
from hvdkit.tools.profile.spans import list_spans

_LINES = ("training", "buckets")
#: Of Chrome's own palette.
_COLOURS = {
    "compute": "good",
    "loading": "bad",
    "late": "terrible",
    "exposed": "yellow",
    "bucket": "generic_work",
}


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
