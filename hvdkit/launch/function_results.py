"""The results that ranks write into a folder; launch() returns their values or raises their exceptions."""

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
    """Name the file of a process's result. start: number of the job's start, from 1."""
    return f"{_RESULT}{start}.{process}.{host}.pickle"


class Result(NamedTuple):
    """The result that a rank has written.

    seconds: time of writing by the clock of its host, since 1970. outcome: a FunctionOutcome, pickled.
    start: number of the job's start, from 1.
    """

    rank: int
    host: str
    seconds: float
    raised: bool
    outcome: bytes
    start: int = 1

    def get(self) -> Any:
        """Return the function's value, or raise its exception."""
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
        """Did the function raise HorovodInternalError?"""
        return self.raised and bool(pickle.loads(self.outcome).internal)


def read_results(folder: Path) -> list[Result]:
    """Read the results that the ranks have written, by rank."""
    results = [pickle.loads(file.read_bytes()) for file in folder.glob(f"{_RESULT}*.pickle")]
    return sorted(results, key=lambda result: result.rank)


def find_last(results: Sequence[Result]) -> list[Result]:
    """Find the results without an exception of the last start that has any, by rank."""
    returned = [result for result in results if not result.raised]
    last = max((result.start for result in returned), default=0)
    return sorted((result for result in returned if result.start == last), key=lambda result: result.rank)


def give_results(results: Sequence[Result], ranks: int, status: int, folder: object) -> list[Any]:
    """Return the value of each rank, by rank. Raises the same errors as launch().

    results: of the ranks that have written a result.
    ranks: number of ranks.
    status: exit code of hvdrun.
    folder: of the results.
    """
    failed = sorted((result for result in results if result.raised), key=lambda result: result.seconds)
    # Ranks that waited for the failed rank raise HorovodInternalError, perhaps before the failed rank has ended.
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
