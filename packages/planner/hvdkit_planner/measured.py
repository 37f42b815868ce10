"""Measurements in place of a data sheet: links by hvdkit bench, a processor and one layer on this machine."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hvdkit.launch.detect.hosts import count_cores
from hvdkit.optional_import import optional_import
from hvdkit.tools.bench.report import OURS, Report, bandwidths
from hvdkit_planner.errors import PlanError
from hvdkit_planner.layout import Calibration, Gpu, Layout, Transformer
from hvdkit_planner.step import layer_time


def with_links(gpu: Gpu, constants: Calibration, report: Report, *, width: int = 2) -> tuple[Gpu, Calibration]:
    """Replace the link inside a node by the measurements of `hvdkit bench allreduce`, of its largest and smallest size.

    width: bytes of a value in training; the formulas count 2. Raises PlanError for another report.
    """
    cases = sorted((case for case in report.cases if OURS in case.times), key=lambda case: case.nbytes)
    if report.kind != "allreduce" or report.ranks < 2 or not cases:
        raise PlanError(
            f"--bench holds {report.kind} of {report.ranks} ranks. Give the file of hvdkit bench allreduce --output "
            "FILE, with 2 ranks or more."
        )
    seconds = [report.summaries(case)[OURS].median_s for case in cases]
    link = bandwidths(report, cases[-1], seconds[-1])[1] * 2 / width
    latency = seconds[0] / report.ranks.bit_length()
    return replace(gpu, link=link), replace(constants, collective_s=latency, link_efficiency=1.0)


def measured_cpu(ranks: int) -> Gpu:
    """Measure a core of this machine while `ranks` processes compute, and return it as the "GPU" of a rank.

    Values are float32 there: twice the bytes that the formulas count, so rates are halved. With more ranks than cores,
    each rank has its share of a core.
    """
    rates = _on_ranks(min(ranks, count_cores()), _measure_rates, ())
    flops, bandwidth = (min(rate[index] for rate in rates) / _sharing(ranks) for index in (0, 1))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    return Gpu(f"CPU rank, {ranks} on this machine", memory, flops, bandwidth / 2, 1, bandwidth / 2, bandwidth / 2)


def measured_layer(model: Transformer, gpu: Gpu, ranks: int) -> Calibration:
    """Measure one layer of the model, forward and backward on one sample, on all cores of the ranks."""
    found = Calibration(1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 32.0, 1.0, 60.0)
    time_of = layer_time(model, Layout(1, 1, 1, 1), gpu, found)
    seconds = max(_on_ranks(min(ranks, count_cores()), _measure_layer, (model,))) * _sharing(ranks)
    return replace(found, layer_scale=seconds / (time_of.forward + time_of.backward))


def _sharing(ranks: int) -> float:
    """Return the number of ranks on a core."""
    return max(1.0, ranks / count_cores())


def _on_ranks(ranks: int, measure: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    with context.Pool(ranks, _meet, (context.Barrier(ranks),)) as pool:
        return pool.starmap(measure, [arguments] * ranks, chunksize=1)


def _meet(barrier: Any) -> None:
    """Wait in each process until all have loaded torch, so that they measure at the same time."""
    optional_import("torch", "torch").set_num_threads(1)
    barrier.wait()


def _measure_rates() -> tuple[float, float]:
    """Measure the operations and bytes a second of this process on one thread."""
    torch = optional_import("torch", "torch")
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    source, target = torch.randn(2**23), torch.empty(2**23)
    return 2 * 1024**3 / _cpu_s(lambda: left @ right), 8 * 2**23 / _cpu_s(lambda: target.copy_(source))


def _measure_layer(model: Transformer) -> float:
    """Measure the seconds of a layer of GPT with the model's sizes, forward and backward on one sample."""
    torch = optional_import("torch", "torch")
    layer = torch.nn.TransformerEncoderLayer(
        model.hidden, model.heads, model.width, 0.0, activation="gelu", batch_first=True, norm_first=True
    )
    sample = torch.randn(1, model.sequence, model.hidden, requires_grad=True)
    return _cpu_s(lambda: layer(sample).sum().backward())


def _cpu_s(work: Callable[[], object], seconds: float = 1.0) -> float:
    """Measure the median CPU seconds of repeated calls, after a warm-up; other processes' work does not count."""
    work()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 5:
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return sorted(times)[len(times) // 2]
