"""Runs a job under the profiler and collects the recordings of its ranks, on any host and under any launcher.

Both sides prove that they know the job's key, and each frame has an authentication code (hvdkit.handshake); the data
are numbers and JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hvdkit.config import read_environment
from hvdkit.engine.observe.record_sender import ABOUT, PLAN, PURPOSE, ROWS
from hvdkit.engine.observe.recording import Rounds
from hvdkit.errors import HvdkitError, ProfileError
from hvdkit.handshake import AuthenticationError
from hvdkit.launch.agent.host_info import read_interfaces
from hvdkit.launch.agent.session_reaper import die_with_parent
from hvdkit.launch.cli.options import parse_arguments
from hvdkit.launch.detect.hosts import find_addresses, find_hosts, is_local
from hvdkit.launch.detect.mpi import parse_version
from hvdkit.launch.plan.network import parse_interfaces
from hvdkit.launch.process import run_program
from hvdkit.launch.state.authenticated_server import AuthenticatedServer, Channel, ServerThread, raise_file_limit
from hvdkit.log import logger
from hvdkit.profiling.mesh_steps import MeshSteps, describe_mesh_steps, find_mesh_steps
from hvdkit.profiling.network import parse_network
from hvdkit.profiling.recordings import (
    RankRecording,
    as_recording,
    parse_facts,
    parse_plan,
    read_recordings,
    write_recordings,
)
from hvdkit.profiling.text import describe
from hvdkit.profiling.verdict import Analysis, analyse
from hvdkit.tools.profile.report import build_report, build_trace, check_report
from hvdkit.tools.training_command import find_launcher, plan_command, strip_dashes
from hvdkit.transport.addresses import LOOPBACK


def choose_addresses(command: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Choose the addresses for a job of hvdrun: those towards its hosts, or the loopback's if all ranks are local.

    The hosts of another launcher are unknown: then all addresses that may lead to other hosts, and the loopback's.
    """
    if find_launcher(command) == "hvdrun":
        arguments = command[1:] if Path(command[0]).name == "hvdrun" else command[3:]
        # hvdrun itself reports the options that it refuses.
        with contextlib.suppress(HvdkitError, SystemExit), contextlib.redirect_stderr(io.StringIO()):
            options = parse_arguments(arguments)
            if options.host_discovery_script is None:
                found = find_hosts(
                    options.hosts,
                    options.hostfile,
                    environ,
                    format=options.hostfile_format,
                    slots=options.slots_per_host,
                )
                remote = [host for host in found.hosts if not is_local(host)] if found is not None else []
                return find_addresses(remote) if remote else (LOOPBACK,)
    interfaces = [each for each in parse_interfaces(read_interfaces()) if each.between_hosts]
    return (LOOPBACK, *dict.fromkeys(each.address for each in interfaces))


_GRACE_S = 2.0  # after the end of the job, to read connections to their end


@dataclass
class _Rank:
    facts: dict[str, object]
    plans: list[Rounds] = field(default_factory=list)


class Collector:
    """Collects recordings in a thread of its own until close().

    addresses: addresses of this host for the ranks, the best first. place: key, port and addresses, in the form of
    record_sender.connect. restore_files: for child processes, see raise_file_limit.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        key = secrets.token_hex(32)
        self.restore_files = raise_file_limit(0)
        server = AuthenticatedServer(key.encode(), PURPOSE, self._read)
        self.place = f"{key}@{server.listen_tcp(addresses)}@{','.join(addresses)}"
        self._ranks: list[_Rank] = []
        self._thread = ServerThread(server, "hvdkit-collector")

    async def _read(self, channel: Channel) -> None:
        rank: _Rank | None = None
        try:
            while True:
                kind, payload = await channel.read()
                if kind == ABOUT:
                    rank = _Rank(json.loads(payload))
                    self._ranks.append(rank)
                elif kind == PLAN and rank is not None:
                    rank.plans.append(Rounds(parse_plan(json.loads(payload))))
                elif kind == ROWS and rank is not None:
                    rounds = rank.plans[int.from_bytes(payload[:4], "little")]
                    size = 8 * rounds.facts.row
                    rounds.rows.extend(payload[at : at + size] for at in range(4, len(payload), size))
        except AuthenticationError as error:
            who = f"rank {rank.facts['rank']} on {rank.facts['host']}" if rank else "a rank"
            logger.warning("The recording of %s is incomplete, because its connection failed: %s.", who, error)

    def close(self) -> list[RankRecording]:
        """Stop, and return the recordings by rank; of a rank that was restarted, the last recording."""
        self._thread.close(_GRACE_S)
        self.restore_files()
        by_rank = {each.facts.rank: each for each in (as_recording(parse_facts(r.facts), r.plans) for r in self._ranks)}
        return [by_rank[rank] for rank in sorted(by_rank)]


_VARIABLE = "HVDKIT_PROFILE"
_MPIRUNS = ("mpirun", "mpiexec", "orterun")


def profile(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code of the job. Raises ProfileError if there is no profile."""
    network = parse_network(options.network) if options.network else None
    if options.one_rank_s is not None and not 0 < options.one_rank_s < float("inf"):
        raise ProfileError(f"--one-rank-s {options.one_rank_s:g} is no duration. Give seconds, such as 0.025.")
    command = strip_dashes(options.command)
    if not command and not options.read:
        raise ProfileError("No script was given. Example: hvdkit profile -np 4 -- python train.py")
    if options.read and (command or options.hvdrun):
        extra = command[0] if command else options.hvdrun[0].words[0]
        raise ProfileError(f"--read {options.read} runs no job, so {extra} has no effect. Remove one of the two.")
    if options.output:
        check_report()
    for path in filter(None, (options.output, options.trace, options.save)):
        if not Path(path).absolute().parent.is_dir():
            raise ProfileError(f"The folder of {path} does not exist. Create it first.")
    if options.read:
        code, recordings = 0, read_recordings(Path(options.read))
    else:
        # stdout is reserved for the JSON document.
        output = sys.stderr.fileno() if options.json else None
        code, recordings = _run(plan_command(command, options.hvdrun), read_environment(), output)
    if options.save and recordings:
        write_recordings(recordings, Path(options.save))
    mesh, analysis = find_mesh_steps(recordings), None
    try:
        analysis = analyse(recordings, network, options.one_rank_s)
    except ProfileError as error:
        if mesh is None and code:
            raise ProfileError(f"The job ended with exit code {code}, and there is no profile. {error}") from None
        if mesh is None:
            raise
        if options.trace:
            raise ProfileError(f"--trace {options.trace}: there is nothing to draw. {error}") from None
    _show(analysis, mesh, options)
    return code


def _show(analysis: Analysis | None, mesh: MeshSteps | None, options: argparse.Namespace) -> None:
    """Print and write the report: on reduced gradients, and on steps on a mesh."""
    if options.json:
        parts = {} if mesh is None else {"mesh": asdict(mesh)}
        print(json.dumps({**(asdict(analysis.verdict) if analysis else {}), **parts}, indent=2))
    else:
        texts = [describe(analysis.verdict)] if analysis else []
        texts += [describe_mesh_steps(mesh)] if mesh else []
        print("\n" + "\n\n".join(texts))
    if options.output:
        Path(options.output).write_text(build_report(analysis, mesh), encoding="utf-8")
    if options.trace and analysis:
        Path(options.trace).write_text(json.dumps(build_trace(analysis)), encoding="utf-8")


def _run(command: Sequence[str], environ: Mapping[str, str], output: int | None) -> tuple[int, list[RankRecording]]:
    """Run the job; returns its exit code and the recordings. output: the file that receives the job's stdout."""
    collector = Collector(choose_addresses(command, environ))
    end_with_caller = die_with_parent(os.getpid(), signal.SIGHUP)

    def prepare() -> None:
        collector.restore_files()
        end_with_caller()

    try:
        job = subprocess.Popen(
            forward(command, environ), env={**environ, _VARIABLE: collector.place}, stdout=output, preexec_fn=prepare
        )
    except OSError as error:
        collector.close()
        raise ProfileError(f"{command[0]} cannot be started: {error.strerror}.") from None
    # Ctrl-C goes to the whole process group: the job ends by itself, and its profile is still reported.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    ended = signal.signal(signal.SIGTERM, lambda *_: job.terminate())
    try:
        code = job.wait()
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, ended)
    return (code if code >= 0 else 128 - code), collector.close()


def forward(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Add -x to a command of Open MPI's mpirun, which forwards only the named variables to other hosts."""
    # If the program does not answer, its start shows a better error.
    version = ""
    if Path(command[0]).name in _MPIRUNS:
        version = run_program([command[0], "--version"], environ=environ, timeout_s=20.0).output
    if (parse_version(version) or ("",))[0] == "open_mpi":
        return [command[0], "-x", _VARIABLE, *command[1:]]
    return list(command)
