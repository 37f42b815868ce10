"""Reports of a job's tasks about their ranks, and the choice of the failure that caused the others."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hvdkit.errors import HorovodInternalError

Status = Literal["returned", "raised", "lost a rank", "died", "not started", "executor lost"]

#: Statuses by how well they explain the others, the best first: a rank that has lost another rank only follows.
_CAUSES: tuple[Status, ...] = ("not started", "raised", "died", "lost a rank", "executor lost")


@dataclass(frozen=True)
class Report:
    """How the rank of a task ended.

    rank: the number of the task until the rank is known.
    host: "" for a failure that belongs to no certain rank.
    outcome: of a rank that returned or raised, pickled (see integrations/ranks.py).
    text: of the others, what happened.
    The status "lost a rank" is a rank that raised HorovodInternalError.
    """

    rank: int
    host: str
    status: Status
    outcome: bytes = b""
    text: str = ""


def find_cause(reports: Sequence[Report]) -> Report | None:
    """Find the report that explains the others; None if all ranks returned."""
    for status in _CAUSES:
        for report in sorted(reports, key=lambda report: report.rank):
            if report.status == status:
                return report
    return None


def read_results(reports: Sequence[Report]) -> list[Any]:
    """Return the results of the ranks, by rank.

    Raises what the function raised on a rank, HorovodInternalError for a rank that ended otherwise.
    """
    cause = find_cause(reports)
    if cause is not None:
        raise_failure(cause)
    return [_load(report) for report in sorted(reports, key=lambda report: report.rank)]


def raise_failure(cause: Report) -> None:
    """Raise the failure that a report describes."""
    if cause.outcome:
        _load(cause)
    raise HorovodInternalError(describe_failure(cause))


def describe_failure(cause: Report) -> str:
    """Describe a failure, with the name of its rank."""
    text = cause.text or "a collective operation failed"
    return f"Rank {cause.rank} on {cause.host}: {text}" if cause.host else text


def describe_loss(error: str) -> Report:
    """Make the report of a task that Spark has lost. error: Spark's own, which ends its job at once.

    Raises HorovodInternalError if it is another error.
    """
    reason = " ".join(error.partition("\n\tat ")[0].rpartition("Most recent failure reason:")[2].split())
    if "ExecutorLostFailure" not in reason:
        raise HorovodInternalError(f"Spark could not run the ranks: {reason}")
    text = f"Spark has lost a task of the job: {reason}. The driver's log may say more (Lost executor)."
    return Report(-1, "", "executor lost", text=text)


def _load(report: Report) -> Any:
    where = f"rank {report.rank} on {report.host}"
    try:
        outcome = pickle.loads(report.outcome)
    except Exception as error:
        raise HorovodInternalError(
            f"What {where} returned or raised cannot be unpickled here: {type(error).__name__}: {error}. Its class "
            "must be importable on the driver."
        ) from error
    return outcome.get(where)
