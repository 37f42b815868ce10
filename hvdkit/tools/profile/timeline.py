"""Some steps of all ranks as a drawing: what training did, and below it which buckets were under way."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hvdkit.profiling.steps import Steps
from hvdkit.profiling.text import show_s
from hvdkit.tools.profile.spans import Span, list_spans

#: Of Shares, in the order of the colours.
KINDS = ("compute", "loading", "late", "exposed")

_WIDTH, _LEFT, _TOP = 1100, 110, 24
_TRAINING, _BUCKETS, _GAP = 18, 8, 8  # heights
_TICKS = 8


def draw_timeline(steps: Steps, ranks: Sequence[int], which: Sequence[int]) -> str:
    """Draw an <svg> of these steps of these ranks, by their places in `steps`; for a page of charts.build_page."""
    began = float(steps.began[:, which[0]].min())
    whole = float(steps.ended[:, which[-1]].max()) - began
    scale = (_WIDTH - _LEFT - 10) / whole
    rows = {rank: _TOP + at * (_TRAINING + _BUCKETS + _GAP) for at, rank in enumerate(ranks)}
    height = _TOP + len(ranks) * (_TRAINING + _BUCKETS + _GAP) + 4
    parts = []
    for tick in range(_TICKS + 1):
        x = _LEFT + tick / _TICKS * whole * scale
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP - 4}V{height}"/>')
        parts.append(
            f'<text class="quiet" x="{x:.1f}" y="12" text-anchor="middle">{show_s(tick / _TICKS * whole)}</text>'
        )
    for rank, top in rows.items():
        one = steps.ranks[rank]
        parts.append(
            f'<text x="{_LEFT - 8}" y="{top + 13}" text-anchor="end">{escape(f"{one.rank} {one.host}"[:16])}</text>'
        )
    for span in list_spans(steps, which):
        if span.rank in rows:
            x, width = _LEFT + (span.began - began) * scale, max(0.3, (span.ended - span.began) * scale)
            parts.append(_draw(span, x, rows[span.rank], width))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="timeline of all ranks">\n{chr(10).join(parts)}\n</svg>'
    )


def _draw(span: Span, x: float, top: int, width: float) -> str:
    training = span.line == "training"
    y, height = (top, _TRAINING) if training else (top + _TRAINING + 1, _BUCKETS - 1)
    colour = KINDS.index(span.kind) if training else 4 + span.bucket % 4
    tip = (
        f"step {span.step}: {span.name}{f' ({span.detail})' if span.detail else ''}, {show_s(span.ended - span.began)}"
    )
    return (
        f'<rect class="fill{colour}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}">'
        f"<title>{escape(tip)}</title></rect>"
    )
