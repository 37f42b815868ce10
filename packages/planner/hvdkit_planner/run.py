"""Carries out hvdkit plan: reads, computes, and prints plans as a table, as JSON, as a figure and in words."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hvdkit.tools.bench.report import read_report, show_time
from hvdkit.tools.charts import check_plot, draw_bars, new_figure, save_figure
from hvdkit_planner.errors import PlanError
from hvdkit_planner.evaluate import build_csv, describe, evaluate, read_table, summarise
from hvdkit_planner.layout import GIB, Calibration, Cluster, Gpu, Transformer, find_gpu
from hvdkit_planner.measured import measured_cpu, measured_layer, with_links
from hvdkit_planner.search import Candidate, Job, Plans, explain_refusal, search
from hvdkit_planner.sources import read_model
from hvdkit_planner.step import (
    GRADIENT_BYTES,
    OPTIMIZER_BYTES,
    WEIGHT_BYTES,
    data_bandwidth,
    layer_activations,
    stage_bandwidth,
    stage_parameters,
    tensor_bandwidth,
)

#: Part of a step -> its name in tables.
PARTS = {
    "compute": "compute",
    "tensor": "tp",
    "bubble": "pp bubble",
    "transfers": "pp transfers",
    "gradients": "exposed dp",
    "update": "optimizer",
}


def compare(candidate: Candidate, best: Candidate) -> str:
    """Explain why a layout is slower than the best: the parts that take longer, the largest first."""
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
    """Explain a layout: stages, memory and time, with the numbers behind them."""
    layout, model, cluster = candidate.layout, job.model, job.cluster
    micro_batches, stages = layout.micro_batches(job.batch), layout.stages(model)
    parameters = stage_parameters(model, layout, 0)
    size = WEIGHT_BYTES + GRADIENT_BYTES + OPTIMIZER_BYTES
    memory, time = candidate.memory, candidate.time
    in_flight = min(layout.pp, micro_batches)
    return [
        f"{layout}: {layout.dp} replicas of {layout.tp * layout.pp} GPUs",
        f"  model: {_count(model.parameters)} parameters; {stages[0]} of {model.layers} layers and "
        f"{_count(parameters)} parameters on a GPU of the first stage",
        f"  memory: {size} bytes for each of them (weight {WEIGHT_BYTES}, gradient {GRADIENT_BYTES}, Adam "
        f"{OPTIMIZER_BYTES}){_sharded(candidate)}: {memory.state / GIB:.1f} GiB",
        f"  activations: {layer_activations(model, layout) / 2**20:.0f} MiB a layer and micro-batch, of which the "
        f"first stage holds {in_flight}: {memory.activations / GIB:.1f} GiB; all together {memory.total / GIB:.1f} of "
        f"{cluster.gpu.memory / GIB:.0f} GiB",
        f"  compute: {micro_batches} micro-batches of {layout.micro_batch} on each replica: {show_time(time.compute)}",
        f"  tp: allreduces in each layer, and of embedding, output layer and loss, over "
        f"{_rate(tensor_bandwidth(cluster, layout, job.constants))}: {show_time(time.tensor)}"
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
    """Compute the tokens a second."""
    return job.batch * job.model.sequence / candidate.time.total


def utilisation(candidate: Candidate, job: Job) -> float:
    """Compute the fraction of the GPUs' peak that the model's own operations use (MFU)."""
    return job.model.step_flops(job.batch) / candidate.time.total / (job.cluster.gpus * job.cluster.gpu.flops)


def _sharded(candidate: Candidate) -> str:
    what = ("", "Adam", "Adam and gradients", "all of it")[candidate.layout.zero]
    return f", {what} divided over {candidate.layout.dp} replicas" if what else ""


def _rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.0f} GB/s"


#: Name of the option for the figure, for errors.
PLOT = "--plot"
_COLUMNS = ("dp", "tp", "pp", "schedule", "micro", "ZeRO", "recompute", "GiB", "state", "activ.")


def list_columns() -> list[str]:
    """List the columns of the table."""
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


def write_plot(shown: Sequence[Candidate], job: Job, path: Path) -> None:
    """Draw time and memory of the plans by part, side by side. Raises HvdkitError if the file cannot be written."""
    figure = new_figure(PLOT, 15, 1.5 + 0.45 * len(shown))
    times, memories = figure.subplots(1, 2)
    names = [f"{number}. {candidate.layout}" for number, candidate in enumerate(shown, 1)]
    steps = [{PARTS[part]: size for part, size in candidate.time.parts().items()} for candidate in shown]
    sizes = [{part: size / GIB for part, size in candidate.memory.parts().items()} for candidate in shown]
    draw_bars(times, dict(zip(names, steps, strict=True)), title="a step, seconds", show=show_time)
    numbers = [str(number) for number in range(1, len(shown) + 1)]
    draw_bars(memories, dict(zip(numbers, sizes, strict=True)), title="memory of a rank, GiB", show="{:.1f}".format)
    memories.axvline(job.cluster.gpu.memory / GIB, linestyle="--", color="black")
    save_figure(figure, path)


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


#: Options that are defaults for values missing in the table of --evaluate.
_TABLE_DEFAULTS = ("vocabulary", "sequence", "node", "recompute", "chunks", "sequence_parallel", "fused_attention")
_SIZES = ("hidden", "layers", "heads", "sequence", "vocabulary")


def run_plan(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code. Raises PlanError for invalid options or files."""
    if options.evaluate:
        return _evaluate(options)
    missing = [f"--{name}" for name in ("gpus", "batch") if getattr(options, name) is None]
    missing = [*(["MODEL"] if options.model is None else []), *missing]
    if missing:
        raise PlanError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. Example: hvdkit plan config.json "
            "--gpus 64 --batch 512. See hvdkit plan --help."
        )
    if options.plot:
        check_plot(PLOT, options.plot)
    model = read_model(options.model, {name: getattr(options, name) for name in _SIZES if getattr(options, name)})
    job = build_job(options, replace(model, fused_attention=options.fused_attention))
    plans = search(job)
    if not plans.fitting:
        if options.json:
            print(json.dumps({**encode(job, plans, []), "problem": explain_refusal(job, plans)}, indent=1))
        else:
            print(explain_refusal(job, plans))
        return 1
    shown = best_of_each(plans)[: options.top]
    if options.json:
        print(json.dumps(encode(job, plans, shown), indent=1))
    else:
        _print(job, plans, shown)
    if options.explain is not None:
        print(
            "\n" + "\n".join(explain(_chosen(options.explain, plans), job)), file=sys.stderr if options.json else None
        )
    if options.plot:
        write_plot(shown, job, options.plot)
    return 0


def build_job(options: argparse.Namespace, model: Transformer) -> Job:
    """Build the job, from the GPU's data sheet or from measurements. Raises PlanError for options that contradict."""
    gpu, constants = find_gpu(options.gpu), Calibration()
    if options.measure:
        if options.gpus > 1 and not options.bench:
            raise PlanError(
                "--measure with more than one rank needs the links: add --bench FILE of hvdkit bench allreduce."
            )
        gpu = measured_cpu(options.gpus)
        constants = measured_layer(model, gpu, options.gpus)
    if options.bench:
        gpu, constants = with_links(gpu, constants, read_report(options.bench), width=4 if options.measure else 2)
    node = options.node or (options.gpus if options.measure else 8)
    return Job(model, Cluster(_change(gpu, options), options.gpus, node), options.batch, constants)


def best_of_each(plans: Plans) -> list[Candidate]:
    """Select the fastest micro-batch and schedule of each dp x tp x pp."""
    found: dict[tuple[int, int, int], Candidate] = {}
    for candidate in plans.fitting:
        layout = candidate.layout
        found.setdefault((layout.dp, layout.tp, layout.pp), candidate)
    return list(found.values())


def _change(gpu: Gpu, options: argparse.Namespace) -> Gpu:
    return replace(
        gpu,
        memory=float(options.memory or gpu.memory),
        link=float(options.link or gpu.link),
        network=float(options.network or gpu.network),
    )


def _chosen(text: str, plans: Plans) -> Candidate:
    if not text:
        return plans.fitting[0]
    for candidate in plans.fitting:
        layout = candidate.layout
        if text.replace(" ", "") == f"{layout.dp},{layout.tp},{layout.pp}":
            return candidate
    raise PlanError(
        f"--explain {text}: no layout of dp,tp,pp = {text} fits, or can be trained. Their product is the number of "
        "GPUs, tp divides the heads and stays inside a node, pp is at most the layers, and dp divides the batch."
    )


def _count(number: float) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.4g} million"


def _print(job: Job, plans: Plans, shown: list[Candidate]) -> None:
    cluster = job.cluster
    print(
        f"{_count(job.model.parameters)} parameters on {cluster.gpus} x {cluster.gpu.name}, {cluster.node} a "
        f"node; a step of {job.batch} x {job.model.sequence} tokens"
    )
    console = Console(width=None if sys.stdout.isatty() else 220)
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for number, column in enumerate(list_columns()):
        table.add_column(
            column, justify="right" if 6 < number < 19 and column != "why" else "left", no_wrap=column != "why"
        )
    for row in list_rows(shown, job):
        table.add_row(*map(escape, row))
    console.print(table)
    print(
        f"GiB: memory of the fullest rank; state: parameters, gradients, optimizer. Of each dp x tp x pp the fastest "
        f"is listed; {len(plans.fitting)} layouts fit, {plans.refused} do not."
    )


def _evaluate(options: argparse.Namespace) -> int:
    if options.model is not None:
        raise PlanError(f"--evaluate takes the models from its table. Leave out {options.model}.")
    given = {name: value for name in _TABLE_DEFAULTS if (value := getattr(options, name))}
    defaults = {name: "yes" if value is True else str(value) for name, value in given.items()}
    gpu, constants = find_gpu(options.gpu), Calibration()
    if options.bench:
        gpu, constants = with_links(gpu, constants, read_report(options.bench))
    gpu = _change(gpu, options)
    found = evaluate(read_table(options.evaluate), gpu, constants, defaults)
    text = build_csv(found)
    if options.output:
        try:
            options.output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise PlanError(f"{options.output} cannot be written: {error.strerror}. Name a file in a folder.") from None
    elif not options.json:
        print(text, end="")
    if options.json:
        sums = {name: value for name, value in summarise(found).items() if math.isfinite(value)}
        print(json.dumps({"format": "hvdkit plan --evaluate 1", "gpu": gpu.name, **sums}, indent=1))
    else:
        print("\n".join(describe(found)), file=None if options.output else sys.stderr)
    return 0
