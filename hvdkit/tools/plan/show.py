"""Plans as a table, as JSON and as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdkit.errors import PlanError
from hvdkit.tools.bench.report import show_time
from hvdkit.tools.charts import draw_bars, new_figure
from hvdkit.tools.plan.cluster import GIB
from hvdkit.tools.plan.explain import PARTS, compare, rate_tokens, utilisation
from hvdkit.tools.plan.search import Candidate, Job, Plans

SUFFIXES = (".svg", ".png", ".pdf")
_OPTION = "hvdkit plan --plot"
_COLUMNS = ("dp", "tp", "pp", "schedule", "micro", "ZeRO", "recompute", "GiB", "state", "activ.")


def list_columns() -> list[str]:
    """Name the columns of the table."""
    return [*_COLUMNS, "step", *PARTS.values(), "tokens/s", "why"]


def list_rows(shown: Sequence[Candidate], job: Job) -> list[list[str]]:
    """Write the rows of the table; the first candidate is the best."""
    return [_row(candidate, shown[0], job) for candidate in shown]


def encode(job: Job, plans: Plans, shown: Sequence[Candidate]) -> dict[str, Any]:
    """Encode for JSON: bytes and seconds."""
    cluster = job.cluster
    return {
        "format": "hvdkit plan 1",
        "model": {**asdict(job.model), "parameters": job.model.parameters},
        "cluster": {**asdict(cluster.gpu), "gpus": cluster.gpus, "node": cluster.node},
        "batch": job.batch,
        "fits": bool(plans.fitting),
        "layouts_that_fit": len(plans.fitting),
        "layouts_that_do_not_fit": plans.refused,
        "plans": [_encode(candidate, shown[0], job) for candidate in shown],
    }


def check_plot(path: Path) -> None:
    """Raise PlanError or MissingDependencyError if no such figure can be drawn."""
    if path.suffix not in SUFFIXES:
        raise PlanError(f"--plot {path}: the suffix chooses the format. Use {', '.join(SUFFIXES)}.")
    new_figure(_OPTION, 1, 1)


def write_plot(shown: Sequence[Candidate], job: Job, path: Path) -> None:
    """Draw time and memory of the plans by part, side by side. Raises PlanError if the file cannot be written."""
    figure = new_figure(_OPTION, 15, 1.5 + 0.45 * len(shown))
    times, memories = figure.subplots(1, 2)
    names = [f"{number}. {candidate.layout}" for number, candidate in enumerate(shown, 1)]
    steps = [{PARTS[part]: size for part, size in candidate.time.parts().items()} for candidate in shown]
    sizes = [{part: size / GIB for part, size in candidate.memory.parts().items()} for candidate in shown]
    draw_bars(times, dict(zip(names, steps, strict=True)), title="a step, seconds", show=show_time)
    numbers = [str(number) for number in range(1, len(shown) + 1)]
    draw_bars(memories, dict(zip(numbers, sizes, strict=True)), title="memory of a rank, GiB", show="{:.1f}".format)
    memories.axvline(job.cluster.gpu.memory / GIB, linestyle="--", color="black")
    try:
        figure.savefig(path)
    except OSError as error:
        raise PlanError(f"{path} cannot be written: {error.strerror}. Name a file in an existing folder.") from None


def _row(candidate: Candidate, best: Candidate, job: Job) -> list[str]:
    layout, memory, time = candidate.layout, candidate.memory, candidate.time
    numbers = [memory.total, memory.state, memory.activations]
    return [
        *(str(number) for number in (layout.dp, layout.tp, layout.pp)),
        layout.schedule,
        str(layout.micro_batch),
        str(layout.zero),
        layout.recompute,
        *(f"{number / GIB:.1f}" for number in numbers),
        show_time(time.total),
        *(show_time(time.parts()[part]) for part in PARTS),
        f"{rate_tokens(candidate, job):,.0f}",
        compare(candidate, best),
    ]


def _encode(candidate: Candidate, best: Candidate, job: Job) -> dict[str, Any]:
    memory, time = candidate.memory, candidate.time
    return {
        **asdict(candidate.layout),
        "schedule": candidate.layout.schedule,
        "fits": candidate.fits(job),
        "memory_bytes": {**memory.parts(), "total": memory.total},
        "step_s": {**time.parts(), "total": time.total},
        "tokens_per_s": rate_tokens(candidate, job),
        "utilisation": utilisation(candidate, job),
        "why": compare(candidate, best),
    }
