"""hvd.profile(): the verdict on some steps, from within the script."""

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

if TYPE_CHECKING:  # what judges is imported by those who ask: every script imports this file
    from hvdkit.profiling.network import Network
    from hvdkit.profiling.recordings import RankRecording
    from hvdkit.profiling.verdict import Verdict

_GATHERED_BYTES = 64 << 20  # of all ranks' rounds; the last ones


@dataclass
class Profile:
    """What profile() found, once its block is over. On rank 0, else as it is before: nothing.

    verdict: in numbers; None where nothing was reduced. text: in words.
    """

    verdict: Verdict | None = None
    text: str = ""


@contextmanager
def profile(save: str | os.PathLike[str] | None = None, *, network: str = "") -> Iterator[Profile]:
    """Record the steps of the block, and have rank 0 say on stderr where their time went; every rank has the block.

    save: a file for what was recorded; `hvdkit profile --read FILE -o report.html` draws it. network: between hosts, to
    predict for, like "10gbit" or "100gbit,5us"; what the job's hosts showed if left out.
    The end of the block is collective, unless it is left by an exception. Inside of `hvdkit profile`, which sees all
    steps, nothing is done. Raises NotInitializedError before init(), ProfileError for a network that cannot be read.
    """
    from hvdkit.profiling.network import parse_network
    from hvdkit.profiling.recordings import as_recording

    made = engine.runtime("profile()")
    given = parse_network(network) if network else None
    found = Profile()
    if RECORDER.on:
        yield found
        return
    RECORDER.start()
    try:
        yield found
    finally:
        RECORDER.stop()
        taken = RECORDER.take()
    for rounds in taken:
        kept = max(10, _GATHERED_BYTES // made.world.size // (8 * rounds.facts.row))
        while len(rounds.rows) > kept:
            rounds.rows.popleft()
    recordings = allgather_object(as_recording(made.facts(), taken), "profile")
    if made.world.rank == 0:
        _tell(found, recordings, given, save)


def _tell(
    found: Profile, recordings: list[RankRecording], network: Network | None, save: str | os.PathLike[str] | None
) -> None:
    from hvdkit.profiling.recordings import write_recordings
    from hvdkit.profiling.verdict import analyse
    from hvdkit.profiling.words import tell

    if save is not None:
        write_recordings(recordings, Path(save))
    try:
        found.verdict = analyse(recordings, network).verdict
        found.text = tell(found.verdict)
    except ProfileError as error:
        found.text = f"Nothing to say of these steps. {error}"
    sys.stderr.write(f"\n{found.text}\n")
