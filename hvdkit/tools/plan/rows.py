"""A row of a table of measurements as a model, a cluster, a layout and a time. Columns are known by name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hvdkit.errors import PlanError
from hvdkit.tools.plan.cluster import Cluster, Gpu
from hvdkit.tools.plan.layout import Layout
from hvdkit.tools.plan.model import GPT_VOCABULARY, Transformer

# A quantity -> what columns call it: without case, spaces and signs.
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
    """Which column is which. names: quantity to column. time: the column of the measured time, and its seconds."""

    names: Mapping[str, str]
    time: str | None = None
    unit: float = 1e-3


@dataclass(frozen=True)
class Row:
    """A row. layouts: one, or those that what is missing allows. measured: seconds, None if unknown.

    assumed: what the table does not say, in words.
    """

    model: Transformer
    cluster: Cluster
    batch: int
    layouts: list[Layout]
    measured: float | None
    assumed: list[str]


def find_columns(header: Iterable[str]) -> Columns:
    """Find the columns by their names. Raises PlanError if one that is needed is missing, or two mean the same."""
    header = list(header)
    names: dict[str, str] = {}
    time, unit = None, 1e-3
    for column in header:
        word = _normalise(column)
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
    """Read a row. defaults: quantity to text, for what no column or an empty cell says. Raises PlanError.

    Without them: Megatron-LM's vocabulary, sequences of 2048, heads of 128, 8 GPUs a node, 1F1B, no ZeRO, no sequence
    parallelism; of micro-batch and recomputation the layouts with all values, of which the caller chooses.
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
    layouts = [base]
    if "micro_batch" in texts:
        layouts = [replace(base, micro_batch=_integer("micro_batch", texts["micro_batch"]))]
    else:
        sizes = [size for size in (1, 2, 4, 8, 16) if batch % (base.dp * size) == 0] or [1]
        layouts = [replace(base, micro_batch=size) for size in sizes]
        assumed.append("the fastest micro-batch that fits")
    kinds = [_recompute(texts["recompute"])] if "recompute" in texts else ["none", "full"]
    assumed += [] if "recompute" in texts else ["no recomputation if that fits, else full"]
    layouts = [replace(layout, recompute=kind) for layout in layouts for kind in kinds]
    return Row(model, Cluster(gpu, gpus, take("node", 8)), batch, layouts, _measured(cells, columns), assumed)


def _measured(cells: Mapping[str, str], columns: Columns) -> float | None:
    text = (cells.get(columns.time) or "").strip() if columns.time else ""
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return None
    return number * columns.unit if math.isfinite(number) and number > 0 else None


def _normalise(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


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
