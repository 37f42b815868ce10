"""Predictions beside measurements: reads a table of rows, and writes it with times, memory and errors.

A row is a model, a cluster, a layout and a time. Columns are known by name.
"""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdkit_planner.errors import PlanError
from hvdkit_planner.layout import GIB, GPT_VOCABULARY, Calibration, Cluster, Gpu, Layout, Transformer
from hvdkit_planner.search import Candidate, Job, assess

# A quantity -> names of its column, without case, spaces and signs.
_COLUMNS = {
    "gpus": "gpus ngpus numgpus numberofgpus numberofgpu numberofaccelerators worldsize totalgpus",
    "batch": "globalbatch globalbatchsize batchsize batch gbs",
    "micro_batch": "microbatch microbatchsize mbs b",
    "hidden": "hiddensize hidden hiddendim hiddendimension dmodel h",
    "heads": "attentionheads heads numheads numattentionheads numberofattentionheads numberofheads a",
    "layers": "layers numlayers numberoflayers nlayers l",
    "sequence": "sequencelength seqlength seqlen sequence s",
    "vocabulary": "vocabulary vocabularysize vocabsize vocab v",
    "feedforward": "feedforward ffnhiddensize ffnsize feedforwardsize",
    "tp": "tensorparallelism tensorparallel tensorparallelsize tensormodelparallelsize tensorsize tp tpsize t",
    "dp": "dataparallelism dataparallel dataparallelsize datasize dp dpsize d",
    "pp": "pipelineparallelism pipelineparallel pipelineparallelsize pipelinemodelparallelsize pipelinesize pp "
    "ppsize p",
    "chunks": "chunks modelchunks virtualstages virtualpipelinestages virtualpipeline interleaving interleave "
    "interleavedstages vpp virtualpipelineparallelism",
    "node": "gpuspernode gpuspernodes pernode node",
    "zero": "zero zerostage distributedoptimizer",
    "recompute": "recompute recomputation activationrecomputation activationrecompute activationcheckpointing "
    "checkpointing recomputekind recomputationkind",
    "sequence_parallel": "sequenceparallelism sequenceparallel sp",
    "fused_attention": "flashattention fusedattention",
}
_QUANTITIES = {name: quantity for quantity, names in _COLUMNS.items() for name in names.split()}
_TIME = re.compile(
    r"^(?:measured)?(?:iteration|step|batch)?(?:time|latency)(?:periteration|perbatch)?(ms|s|sec|seconds)?$"
)
_YES, _NO = ("1", "yes", "true", "on", "y"), ("0", "no", "false", "off", "n", "none", "-")


@dataclass(frozen=True)
class Columns:
    """The columns of a table.

    names: quantity to column. time: the column of the measured time. unit: its unit in seconds.
    """

    names: Mapping[str, str]
    time: str | None = None
    unit: float = 1e-3


@dataclass(frozen=True)
class Row:
    """A row of the table.

    model: its transformer.
    cluster: its GPUs.
    batch: samples of a step.
    layouts: one layout, or all that the missing values allow.
    measured: time in seconds, None if unknown.
    assumed: the values that the table lacks, in words.
    """

    model: Transformer
    cluster: Cluster
    batch: int
    layouts: list[Layout]
    measured: float | None
    assumed: list[str]


def find_columns(header: Iterable[str]) -> Columns:
    """Find the columns by their names. Raises PlanError if a required column is missing, or two mean the same."""
    header = list(header)
    names: dict[str, str] = {}
    time, unit = None, 1e-3
    for column in header:
        word = re.sub(r"[^a-z0-9]", "", column.lower())
        match = _TIME.match(word)
        if match and time is None:
            time, unit = column, 1e-3 if match[1] in (None, "ms") else 1.0
        quantity = _QUANTITIES.get(word)
        if quantity is None:
            continue
        if quantity in names:
            raise PlanError(f"columns {names[quantity]!r} and {column!r} are both {quantity}. Remove one of them.")
        names[quantity] = column
    missing = [name for name in ("hidden", "layers", "batch", "tp", "pp") if name not in names]
    missing += [] if {"gpus", "dp"} & set(names) else ["gpus or dp"]
    if missing:
        raise PlanError(
            f"no column says {', '.join(missing)}; there are {', '.join(header)}. Name them as in: # GPUs, "
            "global batch, micro batch, hidden size, attention heads, # layers, sequence length, tensor parallelism, "
            "data parallelism, pipeline parallelism, iteration time (ms)."
        )
    return Columns(names, time, unit)


def read_row(cells: Mapping[str, str], columns: Columns, gpu: Gpu, defaults: Mapping[str, str]) -> Row:
    """Read a row. Raises PlanError.

    cells: column to text.
    columns: the columns of the table.
    gpu: the GPU of the cluster.
    defaults: quantity to text, used if the column is missing or the cell empty.
    Without defaults: Megatron-LM's vocabulary, sequences of 2048, heads of 128, 8 GPUs a node, 1F1B, no ZeRO, no
    sequence parallelism; for a missing micro-batch or recomputation, the layouts with all values, from which the caller
    chooses.
    """
    texts = {
        **defaults,
        **{key: cells[name].strip() for key, name in columns.names.items() if (cells[name] or "").strip()},
    }
    assumed: list[str] = []

    def take(key: str, default: int) -> int:
        if key in texts:
            return _integer(key, texts[key])
        assumed.append(f"{key.replace('_', ' ')} {default}")
        return default

    hidden = _integer("hidden", texts.get("hidden", ""))
    model = Transformer(
        hidden,
        _integer("layers", texts.get("layers", "")),
        take("heads", next(heads for heads in range(max(1, hidden // 128), 0, -1) if hidden % heads == 0)),
        take("sequence", 2048),
        take("vocabulary", GPT_VOCABULARY),
        _integer("feedforward", texts.get("feedforward", "0")),
        fused_attention=_flag("fused_attention", texts.get("fused_attention", "no")),
    )
    tp, pp = _integer("tp", texts.get("tp", "")), _integer("pp", texts.get("pp", ""))
    gpus = _integer("gpus", texts["gpus"]) if "gpus" in texts else tp * pp * _integer("dp", texts["dp"])
    if tp < 1 or pp < 1 or gpus < 1:
        raise PlanError(f"tp {tp}, pp {pp} and {gpus} GPUs: numbers from 1 up are needed")
    dp = _integer("dp", texts["dp"]) if "dp" in texts else gpus // (tp * pp)
    batch = _integer("batch", texts.get("batch", ""))
    base = Layout(
        max(1, dp),
        tp,
        pp,
        1,
        _chunks(texts.get("chunks", "1")),
        _integer("zero", _as_digit(texts.get("zero", "0"))),
        sequence_parallel=_flag("sequence_parallel", texts.get("sequence_parallel", "no")),
    )
    if "micro_batch" in texts:
        sizes = [_integer("micro_batch", texts["micro_batch"])]
    else:
        sizes = [size for size in (1, 2, 4, 8, 16) if batch % (base.dp * size) == 0] or [1]
        assumed.append("the fastest micro-batch that fits")
    kinds = [_recompute(texts["recompute"])] if "recompute" in texts else ["none", "full"]
    assumed += [] if "recompute" in texts else ["no recomputation if that fits, else full"]
    layouts = [replace(base, micro_batch=size, recompute=kind) for size in sizes for kind in kinds]
    return Row(model, Cluster(gpu, gpus, take("node", 8)), batch, layouts, _measured(cells, columns), assumed)


def _measured(cells: Mapping[str, str], columns: Columns) -> float | None:
    text = (cells.get(columns.time) or "").strip() if columns.time else ""
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return None
    return number * columns.unit if math.isfinite(number) and number > 0 else None


def _integer(key: str, text: str) -> int:
    try:
        number = float(text.replace(",", ""))
        if number != int(number):
            raise ValueError
    except (ValueError, OverflowError):
        raise PlanError(f"{key.replace('_', ' ')} is {text!r}, not a whole number") from None
    return int(number)


def _flag(key: str, text: str) -> bool:
    if text.lower() not in _YES + _NO:
        raise PlanError(f"{key.replace('_', ' ')} is {text!r}; write yes or no")
    return text.lower() in _YES


def _as_digit(text: str) -> str:
    return "1" if text.lower() in _YES else "0" if text.lower() in _NO else text


def _chunks(text: str) -> int:
    return max(1, _integer("chunks", "1" if text.lower() in _NO else text))


def _recompute(text: str) -> str:
    word = text.lower()
    if word.startswith("full") or word in ("all", "uniform", "block", *_YES):
        return "full"
    if word.startswith(("sel", "attn", "attention", "seqsel")):
        return "selective"
    if word in ("", *_NO):
        return "none"
    raise PlanError(f"recomputation is {text!r}; write none, selective or full")


TIME, MEMORY, STATE = "predicted time (ms)", "predicted memory (GiB)", "predicted parameters and optimizer (GiB)"
ERROR, ASSUMED = "error of time (%)", "assumed"
_ADDED = (TIME, MEMORY, STATE, ERROR, ASSUMED)


@dataclass(frozen=True)
class Verdict:
    """The result for a row. candidate: None for bad rows. problem: why there is no prediction; "" if there is one."""

    row: Row | None
    candidate: Candidate | None
    problem: str = ""

    @property
    def error(self) -> float | None:
        """The error of the time, relative to the measured time; above 0 if the prediction is too long."""
        if self.row is None or self.row.measured is None or self.candidate is None or self.problem:
            return None
        return self.candidate.time.total / self.row.measured - 1


@dataclass(frozen=True)
class Evaluation:
    """A table with its predictions. header, cells: as in the file. verdicts: the results of the rows."""

    header: list[str]
    cells: list[dict[str, str]]
    verdicts: list[Verdict]

    def errors(self) -> list[float]:
        """List the absolute errors of all rows whose time is known and predicted."""
        return [abs(verdict.error) for verdict in self.verdicts if verdict.error is not None]

    def regrets(self) -> list[float]:
        """List the regret of each job with several layouts.

        The regret is how much slower the layout with the best prediction is than the layout with the best measurement.
        """
        groups: dict[object, list[tuple[float, float]]] = defaultdict(list)
        for verdict in self.verdicts:
            row = verdict.row
            if row and verdict.candidate and row.measured and not verdict.problem:
                key = (row.model, row.cluster.gpus, row.batch)
                groups[key].append((verdict.candidate.time.total, row.measured))
        return [min(rows)[1] / min(time for _, time in rows) - 1 for rows in groups.values() if len(rows) > 1]


def evaluate(text: str, gpu: Gpu, constants: Calibration, defaults: Mapping[str, str]) -> Evaluation:
    """Predict every row of a table of comma-separated values. Raises PlanError if the text is not such a table.

    text: the table.
    gpu: the GPU of the clusters.
    constants: constants of the predictions.
    defaults: see read_row().
    """
    reader = csv.DictReader(io.StringIO(text.lstrip("\ufeff")), restval="")
    header = list(reader.fieldnames or [])
    columns = find_columns(header)
    cells = [{name: row[name] or "" for name in header} for row in reader]

    def predict(number: int, row: Mapping[str, str]) -> Verdict:
        try:
            return judge(read_row(row, columns, gpu, defaults), constants)
        except PlanError as error:
            return Verdict(None, None, f"row {number}: {error}")

    return Evaluation(header, cells, [predict(number, row) for number, row in enumerate(cells, 1)])


def judge(row: Row, constants: Calibration) -> Verdict:
    """Predict a row: uses the fastest of its layouts that fit; a layout that recomputes only if no other fits."""
    job = Job(row.model, row.cluster, row.batch, constants)
    candidates = [assess(job, layout) for layout in row.layouts]
    fitting = [candidate for candidate in candidates if candidate.fits(job)]
    if fitting:
        plain = [candidate for candidate in fitting if candidate.layout.recompute == "none"]
        return Verdict(row, min(plain or fitting, key=lambda candidate: candidate.time.total))
    least = min(candidates, key=lambda candidate: candidate.memory.total)
    return Verdict(row, least, "does not fit")


def build_csv(evaluation: Evaluation) -> str:
    """Write the table with its predictions; columns of the same names are replaced, all others are kept."""
    kept = [name for name in evaluation.header if name not in _ADDED]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*kept, *_ADDED], lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for cells, verdict in zip(evaluation.cells, evaluation.verdicts, strict=True):
        writer.writerow({**cells, **_added(verdict)})
    return text.getvalue()


def summarise(evaluation: Evaluation) -> dict[str, float]:
    """Summarise: number of rows, predicted, not fitting and wrong rows; errors of time and regrets as fractions."""
    verdicts, errors, regrets = evaluation.verdicts, evaluation.errors(), evaluation.regrets()
    found: dict[str, float] = {
        "rows": len(verdicts),
        "predicted": sum(not verdict.problem for verdict in verdicts),
        "do_not_fit": sum(verdict.problem == "does not fit" for verdict in verdicts),
        "refused": sum(verdict.candidate is None for verdict in verdicts),
        "timed": len(errors),
    }
    if errors:
        found |= {"mean_error": statistics.fmean(errors), "worst_error": max(errors)}
        found |= {"within_25_percent": sum(error <= 0.25 for error in errors) / len(errors)}
    if regrets:
        found |= {"choices": len(regrets), "mean_regret": statistics.fmean(regrets), "worst_regret": max(regrets)}
    return found


def read_table(path: Path) -> str:
    """Read a file. Raises PlanError if that fails."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}. Give a file of comma-separated values.") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path} is no text in UTF-8. Give a file of comma-separated values.") from None


def describe(evaluation: Evaluation, limit: int = 5) -> Sequence[str]:
    """Write the summary and the first problems as lines."""
    found = summarise(evaluation)
    lines = [
        f"{found['rows']:.0f} rows, {found['predicted']:.0f} predicted, {found['do_not_fit']:.0f} do not fit, "
        f"{found['refused']:.0f} refused"
    ]
    if found["timed"]:
        lines.append(
            f"error of time on {found['timed']:.0f} rows: mean {100 * found['mean_error']:.1f} %, worst "
            f"{100 * found['worst_error']:.1f} %; within 25 %: {100 * found['within_25_percent']:.1f} % of them"
        )
    if "choices" in found:
        lines.append(
            f"layout called best, against the best measured, in {found['choices']:.0f} jobs: slower by "
            f"{100 * found['mean_regret']:.1f} % in the mean, {100 * found['worst_regret']:.1f} % at worst"
        )
    problems = [verdict.problem for verdict in evaluation.verdicts if verdict.candidate is None]
    lines += problems[:limit]
    if len(problems) > limit:
        lines.append(f"and {len(problems) - limit} more such lines")
    return lines


def _added(verdict: Verdict) -> dict[str, str]:
    added = {ASSUMED: "; ".join(verdict.row.assumed) if verdict.row else ""}
    if verdict.candidate is None:
        return {**added, TIME: verdict.problem}
    memory = verdict.candidate.memory
    added |= {MEMORY: f"{memory.total / GIB:.3f}", STATE: f"{memory.state / GIB:.3f}"}
    added[TIME] = verdict.problem or f"{1e3 * verdict.candidate.time.total:.3f}"
    added[ERROR] = f"{100 * verdict.error:.2f}" if verdict.error is not None else ""
    return added
