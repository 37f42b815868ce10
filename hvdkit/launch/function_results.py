"""The results that ranks write into a folder, and the values or exceptions that launch() makes of them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdkit.errors import HorovodInternalError
from hvdkit.launch.function_outcome import FunctionOutcome

#: The file of the function and its arguments.
FUNCTION = "function.pickle"
_RESULT = "result."


def result_name(host: str, process: int, start: int) -> str:
    """The file of the result of a process. start: of the job, from 1."""
    return f"{_RESULT}{start}.{process}.{host}.pickle"


class Result(NamedTuple):
    """The result that a rank has written.

    seconds: when, by the clock of its host. outcome: a FunctionOutcome, pickled. start: of the job, from 1.
    """

    rank: int
    host: str
    seconds: float
    raised: bool
    outcome: bytes
    start: int = 1

    def get(self) -> Any:
        """Return what the function returned. Raises what it raised."""
        where = f"rank {self.rank} on {self.host}"
        try:
            outcome: FunctionOutcome = pickle.loads(self.outcome)
        except Exception as error:  # whatever the class of the value does
            raise HorovodInternalError(
                f"What {where} returned cannot be unpickled here: {type(error).__name__}: {error}. Its class must be "
                "importable here."
            ) from error
        return outcome.get(where)

    @property
    def is_internal(self) -> bool:
        """Has the function raised HorovodInternalError?"""
        return self.raised and bool(pickle.loads(self.outcome).internal)


def read_results(folder: Path) -> list[Result]:
    """Read the results that the ranks have written, by rank."""
    results = [pickle.loads(file.read_bytes()) for file in folder.glob(f"{_RESULT}*.pickle")]
    return sorted(results, key=lambda result: result.rank)


def find_last(results: Sequence[Result]) -> list[Result]:
    """Find what the ranks of the last start have returned, by rank."""
    returned = [result for result in results if not result.raised]
    last = max((result.start for result in returned), default=0)
    return sorted((result for result in returned if result.start == last), key=lambda result: result.rank)


def give_results(results: Sequence[Result], ranks: int, status: int, folder: object) -> list[Any]:
    """Return what each rank returned, by rank.

    results: of the ranks that have left one. status: exit code of hvdrun. folder: of the results. Raises as launch().
    """
    failed = sorted((result for result in results if result.raised), key=lambda result: result.seconds)
    # Ranks that have waited for the one that failed raise HorovodInternalError, perhaps before it has come to its end.
    for result in sorted(failed, key=lambda result: result.is_internal):
        result.get()
    if status:
        raise HorovodInternalError(f"The job ended with exit code {status}; its output says why.")
    missing = sorted(set(range(ranks)) - {result.rank for result in results})
    if missing:
        raise HorovodInternalError(
            f"Rank {missing[0]} left no result in {folder}. Call run() or launch() in a directory that all hosts of "
            "the job see."
        )
    return [result.get() for result in results]
