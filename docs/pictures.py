"""Draws the two pictures of the first page: python docs/pictures.py writes docs/_static/architecture.svg and speed.svg.

Plain SVG without scripts and fonts; its colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "_static"

#: Floors from top to bottom: each row's boxes, as (name, what it does).
FLOORS = (
    (("hvdrun, hvdkit", "command lines"),),
    (("launch", "hosts, schedulers, ranks, supervision"), ("tools", "doctor, profile, bench, submit")),
    (("keras", "Keras 3"), ("torch", "PyTorch"), ("tensorflow", "TensorFlow")),
    (
        ("elastic", "ranks that die"),
        ("checkpoint", "atomic files"),
        ("profiling", "where time goes"),
        ("parallel", "meshes, stages"),
        ("strategies", "local SGD, servers"),
    ),
    (("engine", "plan of buckets, named operations, strategies, sharding"),),
    (
        ("shared memory", "inside a host"),
        ("MPI", "between hosts, ULFM"),
        ("Gloo", "without MPI"),
        ("NCCL", "on GPUs"),
    ),
)

#: Step time relative to the step without communication of the same run: model -> tool -> ratio; and, between two hosts
#: at 1 Gbit/s, milliseconds. From docs/performance/results.md, which has the commands.
STEP_RATIOS = {
    "MLP, 8 x 1024x1024": {"hvdkit": 1.13, "Horovod": 1.36, "DDP (Gloo)": 1.72},
    "small conv net": {"hvdkit": 1.11, "Horovod": 1.28, "DDP (Gloo)": 1.58},
    "101 small layers": {"hvdkit": 1.40, "Horovod": 1.79, "DDP (Gloo)": 2.55},
}

_STYLE = """<style>
text { font: 14px system-ui, sans-serif; fill: #1f2937 } .small { font-size: 12px; fill: #4b5563 }
.box { fill: #eef2ff; stroke: #6366f1 } .hvdkit { fill: #4f46e5 } .other { fill: #9ca3af } .line { stroke: #9ca3af }
@media (prefers-color-scheme: dark) {
  text { fill: #e5e7eb } .small { fill: #b6bcc6 } .box { fill: #272a4a; stroke: #818cf8 } .hvdkit { fill: #818cf8 }
}
</style>"""


def draw(width: int, height: int, title: str, shapes: Sequence[str]) -> str:
    """Put shapes into an SVG with a title for screen readers."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", _STYLE, *shapes, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "") -> str:
    """Draw a line of text."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def architecture(width: int = 860, height: int = 64, gap: int = 10) -> str:
    """Draw the floors; each uses those below it."""
    shapes = list(_floors(width, height, gap))
    return draw(width, len(FLOORS) * (height + gap) + gap, "The floors of hvdkit; each uses those below it", shapes)


def _floors(width: int, height: int, gap: int) -> Iterator[str]:
    for row, boxes in enumerate(FLOORS):
        y = gap + row * (height + gap)
        box_width = (width - gap * (len(boxes) + 1)) / len(boxes)
        for column, (name, meaning) in enumerate(boxes):
            x = gap + column * (box_width + gap)
            yield f'<rect x="{x:g}" y="{y}" width="{box_width:g}" height="{height}" rx="8" class="box"/>'
            yield text(x + box_width / 2, y + 27, name, anchor="middle")
            yield text(x + box_width / 2, y + 48, meaning, anchor="middle", kind="small")


def speed(width: int = 860, bar: int = 20, left: int = 240) -> str:
    """Draw bars of step times, each beside 1: the step without communication."""
    shapes, y = [], 30
    scale = (width - left - 70) / 2.3
    shapes.append(text(10, 20, "Step time, as a multiple of the step without communication (2 ranks, one host)"))
    for model, ratios in STEP_RATIOS.items():
        y += 12
        for tool, ratio in ratios.items():
            name = f"{model}: {tool}" if tool == "hvdkit" else tool
            kind = "hvdkit" if tool == "hvdkit" else "other"
            shapes.append(text(left - 8, y + 15, name, anchor="end", kind="small"))
            shapes.append(f'<rect x="{left}" y="{y}" width="{ratio * scale:g}" height="{bar}" rx="3" class="{kind}"/>')
            shapes.append(text(left + ratio * scale + 6, y + 15, f"x{ratio:g}", kind="small"))
            y += bar + 4
    x = left + scale
    shapes.append(f'<line x1="{x:g}" y1="32" x2="{x:g}" y2="{y}" class="line" stroke-dasharray="4 3"/>')
    shapes.append(text(x, y + 16, "x1: no communication", anchor="middle", kind="small"))
    return draw(width, y + 26, "Step times of hvdkit, Horovod and DDP beside the step without communication", shapes)


def main() -> None:
    """Write both pictures."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "architecture.svg").write_text(architecture())
    (FOLDER / "speed.svg").write_text(speed())


if __name__ == "__main__":
    main()
