"""Carry out hvdkit plan: read, compute, print."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hvdkit.errors import PlanError
from hvdkit.tools.bench.report import read_report
from hvdkit.tools.charts import check_plot
from hvdkit.tools.plan.evaluate import build_csv, describe, evaluate, read_table, summarise
from hvdkit.tools.plan.layout import Calibration, Cluster, Gpu, Transformer, find_gpu
from hvdkit.tools.plan.measured import measured_cpu, measured_layer, with_links
from hvdkit.tools.plan.search import Candidate, Job, Plans, explain_refusal, search
from hvdkit.tools.plan.show import PLOT, encode, explain, list_columns, list_rows, write_plot
from hvdkit.tools.plan.sources import read_model

#: What --evaluate takes from options where a table does not say it.
_TABLE_DEFAULTS = ("vocabulary", "sequence", "node", "recompute", "chunks", "sequence_parallel", "fused_attention")
_SIZES = ("hidden", "layers", "heads", "sequence", "vocabulary")


def run_plan(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code. Raises PlanError for what cannot be used."""
    if options.evaluate:
        return _evaluate(options)
    missing = [f"--{name}" for name in ("gpus", "batch") if getattr(options, name) is None]
    missing = [*(["MODEL"] if options.model is None else []), *missing]
    if missing:
        raise PlanError(f"{', '.join(missing)} is missing. See hvdkit plan --help.")
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
    """Build the job: the GPU's data sheet, or what was measured. Raises PlanError for options that contradict."""
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
    """The fastest micro-batch and schedule of each dp x tp x pp."""
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


def _print(job: Job, plans: Plans, shown: list[Candidate]) -> None:
    cluster = job.cluster
    print(
        f"{job.model.parameters / 1e9:.2f} billion parameters on {cluster.gpus} x {cluster.gpu.name}, {cluster.node} a "
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
    defaults = {name: str(value) for name in _TABLE_DEFAULTS if (value := getattr(options, name))}
    defaults = {name: "yes" if value == "True" else value for name, value in defaults.items()}
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
