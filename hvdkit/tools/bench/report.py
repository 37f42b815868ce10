"""What a run of hvdkit bench has found, and the file that keeps it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvdkit.errors import BenchError
from hvdkit.tools.bench.figures import Figures, bus_factor, summarise

_FORMAT = "hvdkit bench 1"


@dataclass(frozen=True)
class Case:
    """One work: a size of a collective, or a model's step.

    nbytes: of the whole, see Work; 0 for a step. times: seconds of every peer in each round.
    """

    work: str
    nbytes: int
    times: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Report:
    """A run. kind: "allreduce", ..., "step". base: the peer that ratios are to. where: the world in words.

    machine: processor, cores, versions. notes: who was left out, and why.
    """

    kind: str
    base: str
    ranks: int
    dtype: str
    where: str
    machine: Mapping[str, str]
    notes: Sequence[str] = ()
    cases: Sequence[Case] = field(default_factory=tuple)

    def figures(self, case: Case) -> dict[str, Figures]:
        """The figures of every peer in a case."""
        return summarise(case.times, self.base)

    def peers(self) -> list[str]:
        """Every peer that is in some case, in order."""
        return list(dict.fromkeys(peer for case in self.cases for peer in case.times))


def bandwidths(report: Report, case: Case, seconds: float) -> tuple[float, float]:
    """Algorithm and bus bandwidth in bytes a second, as nccl-tests has them; 0 for a step."""
    algorithm = case.nbytes / seconds
    return algorithm, algorithm * bus_factor(report.kind, report.ranks) if case.nbytes else 0.0


def encode_report(report: Report) -> dict[str, Any]:
    """The report for JSON: all times, and the rows that are made of them."""
    return {"format": _FORMAT, **asdict(report), "rows": [row for case in report.cases for row in _rows(report, case)]}


def decode_report(document: Mapping[str, Any]) -> Report:
    """The report that `encode_report` has written. Raises KeyError or TypeError for anything else."""
    fields = {name: document[name] for name in Report.__dataclass_fields__}
    return Report(**{**fields, "cases": [Case(**case) for case in document["cases"]]})


def write_report(report: Report, path: Path) -> None:
    """Write JSON. Raises BenchError if the file cannot be written."""
    try:
        path.write_text(json.dumps(encode_report(report), indent=1) + "\n")
    except OSError as error:
        raise BenchError(
            f"{path} cannot be written: {error.strerror}. Name a file in a folder that is there."
        ) from None


def read_report(path: Path) -> Report:
    """Read what `write_report` has written. Raises BenchError if the file is not there, or is something else."""
    try:
        document = json.loads(path.read_text())
        if document["format"] != _FORMAT:
            raise KeyError
        return decode_report(document)
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror}. Make one with --save-baseline {path}.") from None
    except (ValueError, KeyError, TypeError):
        raise BenchError(f"{path} is no run of hvdkit bench. Make one with --save-baseline {path}.") from None


def _rows(report: Report, case: Case) -> list[dict[str, Any]]:
    rows = []
    for peer, figures in report.figures(case).items():
        algorithm, bus = bandwidths(report, case, figures.median_s)
        row = {"work": case.work, "nbytes": case.nbytes, "peer": peer, **asdict(figures)}
        rows.append({**row, "algorithm_bytes_s": algorithm, "bus_bytes_s": bus} if case.nbytes else row)
    return rows
