"""The receiver of what the ranks of a job record, on any host and under any launcher.

Both sides prove that they know the job's key, and each frame bears a code (hvdkit.handshake); what is sent is numbers
and JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdkit.engine.observe.record_sender import ABOUT, PLAN, PURPOSE, ROWS
from hvdkit.engine.observe.recording import Rounds
from hvdkit.errors import HvdkitError
from hvdkit.handshake import AuthenticationError
from hvdkit.launch.agent.host_info import read_interfaces
from hvdkit.launch.cli.options import parse_arguments
from hvdkit.launch.job.authenticated_server import AuthenticatedServer, Channel, ServerThread, raise_file_limit
from hvdkit.launch.plan.network import parse_interfaces
from hvdkit.launch.plan.resolve_hosts import find_addresses, find_hosts, is_local
from hvdkit.log import logger
from hvdkit.profiling.recordings import RankRecording, as_recording, parse_facts, parse_plan
from hvdkit.tools.training_command import find_launcher
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
    """Listens in a thread of its own until close().

    addresses: of this host, by which ranks reach it, the best first. place: key, port and addresses, as
    record_sender.connect takes them. restore_files: for child processes, see raise_file_limit.
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
        """Stop, and return the recordings by rank; of a rank that was restarted, the last one."""
        self._thread.close(_GRACE_S)
        self.restore_files()
        by_rank = {each.facts.rank: each for each in (as_recording(parse_facts(r.facts), r.plans) for r in self._ranks)}
        return [by_rank[rank] for rank in sorted(by_rank)]
