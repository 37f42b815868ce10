"""Predictions beside measurements: a table of rows in, the same with times, memory and errors out."""

from __future__ import annotations

import csv
import io
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import PlanError
from hvdkit.tools.plan.calibration import Calibration
from hvdkit.tools.plan.cluster import GIB, Gpu
from hvdkit.tools.plan.rows import Row, find_columns, read_row
from hvdkit.tools.plan.search import Candidate, Job, assess

TIME, MEMORY, STATE = "predicted time (ms)", "predicted memory (GiB)", "predicted parameters and optimizer (GiB)"
ERROR, ASSUMED = "error of time (%)", "assumed"
_ADDED = (TIME, MEMORY, STATE, ERROR, ASSUMED)


@dataclass(frozen=True)
class Verdict:
    """What is said of a row. problem: why there is no prediction; "" if there is one. candidate: None for bad rows."""

    row: Row | None
    candidate: Candidate | None
    problem: str = ""

    @property
    def error(self) -> float | None:
        """Of the time, relative to what was measured; above 0 if the prediction is too long."""
        if self.row is None or self.row.measured is None or self.candidate is None or self.problem:
            return None
        return self.candidate.time.total / self.row.measured - 1


@dataclass(frozen=True)
class Evaluation:
    """A table with its predictions. header, cells: as they were read."""

    header: list[str]
    cells: list[dict[str, str]]
    verdicts: list[Verdict]

    def errors(self) -> list[float]:
        """Errors of all rows whose time is known and predicted, without signs."""
        return [abs(verdict.error) for verdict in self.verdicts if verdict.error is not None]

    def regrets(self) -> list[float]:
        """By how much the layout called best is slower than the best measured, for each job with several layouts."""
        groups: dict[object, list[tuple[float, float]]] = defaultdict(list)
        for verdict in self.verdicts:
            row = verdict.row
            if row and verdict.candidate and row.measured and not verdict.problem:
                key = (row.model, row.cluster.gpus, row.batch)
                groups[key].append((verdict.candidate.time.total, row.measured))
        return [min(rows)[1] / min(time for _, time in rows) - 1 for rows in groups.values() if len(rows) > 1]


def evaluate(text: str, gpu: Gpu, constants: Calibration, defaults: Mapping[str, str]) -> Evaluation:
    """Predict every row of a table of comma-separated values. Raises PlanError if it is no such table."""
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
    """Predict a row: of its layouts that fit the fastest; one that recomputes only if no other fits."""
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
    """Sum up: rows, those predicted, that do not fit, that are wrong; errors of time and regrets as shares."""
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
    """Write the sums, and the first problems, in lines."""
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
