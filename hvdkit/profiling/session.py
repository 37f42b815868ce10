"""Provides hvd.profile() and hvd.scaling_report(), which record and report the steps of a block of the script."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hvdkit.engine import runtime as engine
from hvdkit.engine.job_objects import allgather_object
from hvdkit.engine.observe.recording import RECORDER
from hvdkit.errors import ProfileError

if TYPE_CHECKING:  # imported when it is needed: every script imports this file
    from hvdkit.profiling.mesh_steps import MeshSteps
    from hvdkit.profiling.network import Network
    from hvdkit.profiling.recordings import RankRecording
    from hvdkit.profiling.scaling_report import ScalingReport
    from hvdkit.profiling.verdict import Verdict

_GATHERED_BYTES = 64 << 20  # of the last rounds of all ranks


@dataclass
class Profile:
    """The result of profile(): filled on rank 0 when the block has ended.

    verdict: the result in numbers; None if nothing was reduced. mesh: the result for a training on a Mesh, else None.
    text: the same results as text.
    """

    verdict: Verdict | None = None
    mesh: MeshSteps | None = None
    text: str = ""


@dataclass
class Scales:
    """The result of scaling_report(): filled on rank 0 when the block has ended.

    report: the result in numbers; None if nothing was reduced. text: the same result as text.
    """

    report: ScalingReport | None = None
    text: str = ""


@contextmanager
def profile(save: str | os.PathLike[str] | None = None, *, network: str = "") -> Iterator[Profile]:
    """Record the steps of a `with` block on all ranks; rank 0 prints to stderr where their time went.

    save: a file for the recording; `hvdkit profile --read FILE -o report.html` draws it.
    network: the network between hosts to predict for, such as "10gbit" or "100gbit,5us"; default: that of the job.
    The end of the block is collective, unless an exception ends it. Under `hvdkit profile`, which records all steps, it
    does nothing. Raises NotInitializedError before init(), ProfileError for an invalid network.
    """
    result = Profile()

    def tell(verdict: Verdict) -> str:
        from hvdkit.profiling.text import describe

        result.verdict = verdict
        return describe(verdict)

    def tell_mesh(steps: MeshSteps) -> str:
        from hvdkit.profiling.mesh_steps import describe_mesh_steps

        result.mesh = steps
        return describe_mesh_steps(steps)

    with _recording("profile()", save, network, None, tell, tell_mesh) as told:
        yield result
    result.text = "".join(told)


@contextmanager
def scaling_report(
    save: str | os.PathLike[str] | None = None, *, network: str = "", one_rank_s: float | None = None
) -> Iterator[Scales]:
    """Record the steps of a `with` block on all ranks; rank 0 prints their speedup and efficiency against one rank.

    It reports weak scaling, in which each rank keeps its batch, and strong scaling, in which all ranks together keep
    theirs: for this job as measured, and for 2, 4 and 8 times its hosts as predicted.
    save: as for profile(); `hvdkit profile --read FILE -o report.html` draws the curves.
    network: as for profile().
    one_rank_s: measured seconds of a step on one rank with the same batch a rank; None to estimate it from this job.
    Collective and without effect under `hvdkit profile`, as profile(). Raises NotInitializedError before init(),
    ProfileError for an invalid network or duration.
    """
    if one_rank_s is not None and not 0 < one_rank_s < float("inf"):
        raise ProfileError(f"scaling_report(one_rank_s={one_rank_s!r}) is no duration. Give seconds, such as 0.025.")
    result = Scales()

    def tell(verdict: Verdict) -> str:
        from hvdkit.profiling.scaling_report import describe_scaling

        result.report = verdict.scaling
        return f"{describe_scaling(verdict.scaling)}\nPredicted for {verdict.network}."

    with _recording("scaling_report()", save, network, one_rank_s, tell) as told:
        yield result
    result.text = "".join(told)


@contextmanager
def _recording(
    call: str,
    save: str | os.PathLike[str] | None,
    network: str,
    one_rank_s: float | None,
    tell: Callable[[Verdict], str],
    tell_mesh: Callable[[MeshSteps], str] | None = None,
) -> Iterator[list[str]]:
    """Record a block; on rank 0 analyse it, and print and append to the list the text of `tell` and `tell_mesh`."""
    from hvdkit.profiling.network import parse_network
    from hvdkit.profiling.recordings import as_recording

    runtime = engine.runtime(call)
    wanted = parse_network(network) if network else None
    told: list[str] = []
    if RECORDER.on:
        yield told
        return
    RECORDER.start()
    try:
        yield told
    finally:
        RECORDER.stop()
        plans = RECORDER.take()
    for rounds in plans:
        most = max(10, _GATHERED_BYTES // runtime.world.size // (8 * rounds.facts.row))
        while len(rounds.rows) > most:
            rounds.rows.popleft()
    recordings = allgather_object(as_recording(runtime.facts(), plans), "profile")
    if runtime.world.rank == 0:
        told.append(_report(recordings, wanted, one_rank_s, save, tell, tell_mesh))
        sys.stderr.write(f"\n{told[0]}\n")


def _report(
    recordings: list[RankRecording],
    network: Network | None,
    one_rank_s: float | None,
    save: str | os.PathLike[str] | None,
    tell: Callable[[Verdict], str],
    tell_mesh: Callable[[MeshSteps], str] | None,
) -> str:
    from hvdkit.profiling.mesh_steps import find_mesh_steps
    from hvdkit.profiling.recordings import write_recordings
    from hvdkit.profiling.verdict import analyse

    if save is not None:
        write_recordings(recordings, Path(save))
    mesh = find_mesh_steps(recordings) if tell_mesh is not None else None
    texts = [] if mesh is None or tell_mesh is None else [tell_mesh(mesh)]
    try:
        texts.insert(0, tell(analyse(recordings, network, one_rank_s).verdict))
    except ProfileError as error:
        texts = texts or [f"There is no profile of these steps. {error}"]
    return "\n\n".join(texts)
