"""hvd.profile(): records the steps of a block of the script and prints the verdict on them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hvdkit.engine import runtime as engine
from hvdkit.engine.job_objects import allgather_object
from hvdkit.engine.observe.recording import RECORDER
from hvdkit.errors import ProfileError

if TYPE_CHECKING:  # imported when it is needed: every script imports this file
    from hvdkit.profiling.network import Network
    from hvdkit.profiling.recordings import RankRecording
    from hvdkit.profiling.verdict import Verdict

_GATHERED_BYTES = 64 << 20  # of the last rounds of all ranks


@dataclass
class Profile:
    """The result of profile(): filled on rank 0 when the block has ended.

    verdict: in numbers; None where nothing was reduced. text: the same for people.
    """

    verdict: Verdict | None = None
    text: str = ""


@contextmanager
def profile(save: str | os.PathLike[str] | None = None, *, network: str = "") -> Iterator[Profile]:
    """Record the steps of a `with` block on all ranks; rank 0 prints to stderr where their time went.

    save: a file for the recording; `hvdkit profile --read FILE -o report.html` draws it.
    network: the network between hosts to predict for, such as "10gbit" or "100gbit,5us"; default: that of the job.
    The end of the block is collective, unless an exception ends it. Under `hvdkit profile`, which records all steps, it
    does nothing. Raises NotInitializedError before init(), ProfileError for an invalid network.
    """
    from hvdkit.profiling.network import parse_network
    from hvdkit.profiling.recordings import as_recording

    runtime = engine.runtime("profile()")
    wanted = parse_network(network) if network else None
    result = Profile()
    if RECORDER.on:
        yield result
        return
    RECORDER.start()
    try:
        yield result
    finally:
        RECORDER.stop()
        plans = RECORDER.take()
    for rounds in plans:
        most = max(10, _GATHERED_BYTES // runtime.world.size // (8 * rounds.facts.row))
        while len(rounds.rows) > most:
            rounds.rows.popleft()
    recordings = allgather_object(as_recording(runtime.facts(), plans), "profile")
    if runtime.world.rank == 0:
        _report(result, recordings, wanted, save)


def _report(
    result: Profile, recordings: list[RankRecording], network: Network | None, save: str | os.PathLike[str] | None
) -> None:
    from hvdkit.profiling.recordings import write_recordings
    from hvdkit.profiling.text import describe
    from hvdkit.profiling.verdict import analyse

    if save is not None:
        write_recordings(recordings, Path(save))
    try:
        result.verdict = analyse(recordings, network).verdict
        result.text = describe(result.verdict)
    except ProfileError as error:
        result.text = f"There is no profile of these steps. {error}"
    sys.stderr.write(f"\n{result.text}\n")
