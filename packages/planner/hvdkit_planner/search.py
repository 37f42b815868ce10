"""All layouts of a model on a cluster, with memory and time; those that fit, sorted by time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hvdkit_planner.errors import PlanError
from hvdkit_planner.layout import GIB, Calibration, Cluster, Layout, Transformer, check_layout
from hvdkit_planner.step import Memory, StepTime, compute_memory, compute_step

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_CHUNKS = (1, 2, 3, 4)

#: Choices of ZeRO and recomputation, which trade time for memory, from the least change of training to the greatest.
_SAVINGS = [
    {"zero": zero, "recompute": recompute} for recompute in ("none", "selective", "full") for zero in (0, 1, 2, 3)
]


@dataclass(frozen=True)
class Job:
    """The input of a plan: a model, a cluster, samples of a step, and constants of the GPUs."""

    model: Transformer
    cluster: Cluster
    batch: int
    constants: Calibration = field(default_factory=Calibration)


@dataclass(frozen=True)
class Candidate:
    """A layout with its memory and time."""

    layout: Layout
    memory: Memory
    time: StepTime

    def fits(self, job: Job) -> bool:
        """Does a rank's memory suffice?"""
        return self.memory.total <= job.cluster.gpu.memory


@dataclass(frozen=True)
class Plans:
    """The layouts that fit, by time, the least memory first among equals. refused: number of layouts that do not fit.

    smallest: the layout with the least memory of those that do not fit; None if all fit.
    """

    fitting: list[Candidate]
    refused: int
    smallest: Candidate | None


def assess(job: Job, layout: Layout) -> Candidate:
    """Compute memory and time of one layout. Raises PlanError for a layout that cannot be trained."""
    check_layout(layout, job.model, job.cluster, job.batch)
    memory = compute_memory(job.model, layout, job.batch)
    return Candidate(layout, memory, compute_step(job.model, layout, job.cluster, job.batch, job.constants))


def search(job: Job) -> Plans:
    """Assess all layouts: for each dp, tp, pp, micro-batch and schedule the fastest that fits, with and without ZeRO.

    Raises PlanError if the batch cannot be divided over the GPUs at all.
    """
    fitting: list[Candidate] = []
    refused, smallest, shapes = 0, None, 0
    for shape in _shapes(job):
        shapes += 1
        options = [assess(job, layout) for layout in _variants(shape)]
        suitable = [option for option in options if option.fits(job)]
        if suitable:
            fitting.append(min(suitable, key=_order))
            continue
        refused += 1
        least = min(options, key=lambda option: option.memory.total)
        smallest = least if smallest is None or least.memory.total < smallest.memory.total else smallest
    if not shapes:
        raise PlanError(
            f"a batch of {job.batch} cannot be divided over {job.cluster.gpus} GPUs: no dp, tp and pp that the model "
            "allows have it as a multiple of dp. Give a multiple of the number of GPUs."
        )
    return Plans(sorted(fitting, key=_order), refused, smallest)


def explain_refusal(job: Job, plans: Plans) -> str:
    """Explain that nothing fits, and what would help."""
    least = plans.smallest
    assert least is not None
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in least.memory.parts().items())
    return (
        f"does not fit: none of {plans.refused} layouts fits into {job.cluster.gpu.memory / GIB:.0f} GiB. The "
        f"smallest, {least.layout}, needs {least.memory.total / GIB:.1f} GiB ({parts}). Use more GPUs, GPUs with "
        "more memory, a smaller model or shorter sequences."
    )


def _order(candidate: Candidate) -> tuple[float, int, int, float]:
    """Make the sort key: time to three digits, then the least ZeRO stage and chunks, then memory."""
    layout = candidate.layout
    return (float(f"{candidate.time.total:.3g}"), layout.zero, layout.chunks, candidate.memory.total)


def _shapes(job: Job) -> Iterator[Layout]:
    """Yield every dp x tp x pp, micro-batch and schedule.

    Tensor parallelism, with the most traffic, stays inside a node.
    """
    gpus, model = job.cluster.gpus, job.model
    for tp in _divisors(gpus):
        if tp > job.cluster.node or model.heads % tp or model.hidden % tp or model.grouped_heads % tp:
            continue
        for pp in _divisors(gpus // tp):
            dp = gpus // tp // pp
            if pp > model.layers or job.batch % dp:
                continue
            for micro_batch in _MICRO_BATCHES:
                for chunks in _CHUNKS:
                    layout = Layout(dp, tp, pp, micro_batch, chunks)
                    try:
                        check_layout(layout, model, job.cluster, job.batch)
                    except PlanError:
                        continue
                    yield layout


def _variants(shape: Layout) -> Iterator[Layout]:
    for saving in _SAVINGS:
        layout = replace(shape, sequence_parallel=shape.tp > 1, **saving)  # type: ignore[arg-type]
        if (layout.zero and layout.dp == 1) or (layout.zero > 1 and layout.pp > 1):
            continue
        yield layout


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
