"""Why a layout takes the memory and the time it takes, and what makes another one worse: in words."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.tools.bench.report import show_time
from hvdkit.tools.plan.cluster import GIB
from hvdkit.tools.plan.links import data_bandwidth, stage_bandwidth, tensor_bandwidth
from hvdkit.tools.plan.memory import GRADIENT_BYTES, OPTIMIZER_BYTES, WEIGHT_BYTES, layer_activations, stage_parameters
from hvdkit.tools.plan.search import Candidate, Job

#: Part of a step -> what it is, for tables.
PARTS = {
    "compute": "compute",
    "tensor": "tp",
    "bubble": "pp bubble",
    "transfers": "pp transfers",
    "gradients": "exposed dp",
    "update": "optimizer",
}


def compare(candidate: Candidate, best: Candidate) -> str:
    """Say why a layout is slower than the best: the parts that take longer, the largest first."""
    if candidate is best:
        return "the fastest"
    mine, others = candidate.time.parts(), best.time.parts()
    more = {name: mine[name] - others[name] for name in PARTS}
    gap = candidate.time.total - best.time.total
    names = [name for name in sorted(more, key=more.__getitem__, reverse=True) if more[name] > 0.2 * abs(gap)][:2]
    if gap < 0.001 * best.time.total or not names:
        return "as fast, within 0.1 %"
    return ", ".join(f"{PARTS[name]} +{show_time(more[name])}" for name in names)


def explain(candidate: Candidate, job: Job) -> Sequence[str]:
    """Explain a layout: stages, memory and time, with the numbers that they come from."""
    layout, model, cluster = candidate.layout, job.model, job.cluster
    micro_batches, stages = layout.micro_batches(job.batch), layout.stages(model)
    parameters = stage_parameters(model, layout, 0)
    size = WEIGHT_BYTES + GRADIENT_BYTES + OPTIMIZER_BYTES
    memory, time = candidate.memory, candidate.time
    in_flight = min(layout.pp, micro_batches)
    return [
        f"{layout}: {layout.dp} replicas of {layout.tp * layout.pp} GPUs",
        f"  model: {model.parameters / 1e9:.2f} billion parameters; {stages[0]} of {model.layers} layers and "
        f"{parameters / 1e9:.3f} billion parameters on a GPU of the first stage",
        f"  memory: {size} bytes for each of them (weight {WEIGHT_BYTES}, gradient {GRADIENT_BYTES}, Adam "
        f"{OPTIMIZER_BYTES}){_sharded(candidate)}: {memory.state / GIB:.1f} GiB",
        f"  activations: {layer_activations(model, layout) / 2**20:.0f} MiB a layer and micro-batch, of which the "
        f"first stage holds {in_flight}: {memory.activations / GIB:.1f} GiB; all together {memory.total / GIB:.1f} of "
        f"{cluster.gpu.memory / GIB:.0f} GiB",
        f"  compute: {micro_batches} micro-batches of {layout.micro_batch} on each replica: {show_time(time.compute)}",
        f"  tp: allreduces in each layer over {_rate(tensor_bandwidth(cluster, layout, job.constants))}: "
        f"{show_time(time.tensor)}"
        if layout.tp > 1
        else "  tp: none",
        f"  pipeline: (p - 1) / (v m) = {layout.pp - 1} / ({layout.chunks} x {micro_batches}) of the work is waiting: "
        f"{show_time(time.bubble)}; sending over {_rate(stage_bandwidth(cluster, layout, job.constants))}: "
        f"{show_time(time.transfers)}"
        if layout.pp > 1
        else "  pipeline: none",
        f"  dp: {WEIGHT_BYTES * parameters / GIB:.2f} GiB of gradients over "
        f"{_rate(data_bandwidth(cluster, layout, job.constants))}, nothing of it hidden: {show_time(time.gradients)}"
        if layout.dp > 1
        else "  dp: none",
        f"  optimizer: {show_time(time.update)}; the whole step: {show_time(time.total)}, "
        f"{rate_tokens(candidate, job):,.0f} tokens/s, {utilisation(candidate, job):.0%} of the GPUs' peak",
    ]


def rate_tokens(candidate: Candidate, job: Job) -> float:
    """Tokens a second."""
    return job.batch * job.model.sequence / candidate.time.total


def utilisation(candidate: Candidate, job: Job) -> float:
    """Share of the GPUs' peak that the model's own operations take (MFU)."""
    return job.model.step_flops(job.batch) / candidate.time.total / (job.cluster.gpus * job.cluster.gpu.flops)


def _sharded(candidate: Candidate) -> str:
    what = ("", "Adam", "Adam and gradients", "all of it")[candidate.layout.zero]
    return f", {what} divided over {candidate.layout.dp} replicas" if what else ""


def _rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.0f} GB/s"
