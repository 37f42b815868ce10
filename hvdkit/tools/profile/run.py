"""Running a job that is profiled, and what is said of it."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from hvdkit.config import read_environment
from hvdkit.errors import ProfileError
from hvdkit.launch.mpi import parse_version
from hvdkit.profiling.network import parse_network
from hvdkit.profiling.recordings import RankRecording, read_recordings, write_recordings
from hvdkit.profiling.text import describe
from hvdkit.profiling.verdict import Analysis, analyse
from hvdkit.tools.profile.addresses import choose_addresses
from hvdkit.tools.profile.collector import Collector
from hvdkit.tools.profile.report import build_report
from hvdkit.tools.profile.trace import build_trace

_VARIABLE = "HVDKIT_PROFILE"
_MPIRUNS = ("mpirun", "mpiexec", "orterun")


def profile(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code of the job. Raises ProfileError if nothing can be said."""
    network = parse_network(options.network) if options.network else None
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if bool(command) == bool(options.read):
        raise ProfileError(
            "Give it a job to run, like: hvdkit profile -- hvdrun -np 4 python train.py; or --read FILE, and no job."
        )
    if options.read:
        code, recordings = 0, read_recordings(Path(options.read))
    else:
        code, recordings = _run(command, read_environment())
    if options.save and recordings:
        write_recordings(recordings, Path(options.save))
    try:
        analysis = analyse(recordings, network)
    except ProfileError as error:
        if not code:
            raise
        raise ProfileError(f"The job ended with exit code {code}, and there is no profile of it. {error}") from None
    _show(analysis, options)
    return code


def _show(analysis: Analysis, options: argparse.Namespace) -> None:
    print(json.dumps(asdict(analysis.verdict), indent=2) if options.json else "\n" + describe(analysis.verdict))
    if options.output:
        Path(options.output).write_text(build_report(analysis), encoding="utf-8")
    if options.trace:
        Path(options.trace).write_text(json.dumps(build_trace(analysis)), encoding="utf-8")


def _run(command: Sequence[str], environ: Mapping[str, str]) -> tuple[int, list[RankRecording]]:
    collector = Collector(choose_addresses(command, environ))
    try:
        job = subprocess.Popen(
            forward(command, environ),
            env={**environ, _VARIABLE: collector.place},
            preexec_fn=collector.restore_files,
        )
    except OSError as error:
        raise ProfileError(f"{command[0]} cannot be started: {error.strerror}.") from None
    # Ctrl-C goes to the whole group: the job ends by itself, and is still told of.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    ended = signal.signal(signal.SIGTERM, lambda *_: job.terminate())
    try:
        code = job.wait()
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, ended)
    return (code if code >= 0 else 128 - code), collector.close()


def forward(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The command, so that the variable reaches ranks on other hosts: Open MPI's mpirun has to be told of it."""
    if Path(command[0]).name in _MPIRUNS and _is_open_mpi(command[0], environ):
        return [command[0], "-x", _VARIABLE, *command[1:]]
    return list(command)


def _is_open_mpi(mpirun: str, environ: Mapping[str, str]) -> bool:
    try:
        answer = subprocess.run(
            [mpirun, "--version"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False  # starting it will say more
    return (parse_version(answer.stdout + answer.stderr) or ("",))[0] == "open_mpi"
