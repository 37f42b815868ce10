"""A job's metrics in Prometheus' text exposition format, version 0.0.4."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hvdkit.launch.job.ranks import Phase, Ranks, RankState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Name -> (type, help), in their order in the text.
METRICS = {
    "hvdkit_job_start_time_seconds": ("gauge", "When the job was started, in seconds since 1970."),
    "hvdkit_ranks": ("gauge", "Ranks that the job consists of."),
    "hvdkit_rank_running": ("gauge", "1 while the command of the rank runs and is not stopped, else 0."),
    "hvdkit_gradient_reductions_total": (
        "counter",
        "Reductions of gradients: steps, with one optimizer.",
    ),
    "hvdkit_gradient_wait_seconds_total": (
        "counter",
        "Seconds for which training waited for gradients. The others wait for the rank that waits least.",
    ),
    "hvdkit_reduced_bytes_total": ("counter", "Bytes of gradients that the rank has reduced."),
    "hvdkit_samples_total": ("counter", "Samples that the script has given to hvd.track()."),
    "hvdkit_logged": ("gauge", "The last average over all ranks of what the script has logged with hvd.track()."),
}

_RUNNING = (Phase.RUNNING, Phase.READY, Phase.CHANGING)


def format_metrics(ranks: Ranks, job: str, since: float) -> str:
    """Write the metrics of a job. job: its name. since: when it was started, in seconds since 1970."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {name: [] for name in METRICS}
    samples["hvdkit_job_start_time_seconds"].append(({}, since))
    samples["hvdkit_ranks"].append(({}, len(ranks.expected)))
    for rank, state in sorted(ranks.states.items()):
        labels = {"rank": str(rank), "host": state.host}
        for name, value in _of_rank(state).items():
            samples[name].append((labels, value))
    samples["hvdkit_logged"] += [({"key": key}, value) for key, value in sorted(ranks.logged.items())]
    lines = []
    for name, (kind, text) in METRICS.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{_labels({'job_name': job, **labels})} {_number(value)}" for labels, value in samples[name]]
    return "\n".join(lines) + "\n"


def _of_rank(state: RankState) -> dict[str, float]:
    metrics = {"hvdkit_rank_running": float(state.phase in _RUNNING and not state.paused_by)}
    totals = state.totals
    if totals is not None:
        metrics["hvdkit_gradient_reductions_total"] = totals.rounds
        if math.isfinite(totals.waited_s):  # else a GPU's stream waits
            metrics["hvdkit_gradient_wait_seconds_total"] = totals.waited_s
        metrics["hvdkit_reduced_bytes_total"] = totals.nbytes
        metrics["hvdkit_samples_total"] = totals.samples
    return metrics


def _labels(labels: Mapping[str, str]) -> str:
    pairs = [f'{name}="{_escape(value)}"' for name, value in labels.items()]
    return "{" + ",".join(pairs) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
