"""What a recording says of its rank, beside its times."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class RankFacts:
    """Of one rank.

    node: what ranks have in common whose clocks are one. cores: that it has, of its host's. fusion_bytes: the setting.
    link: (latency_s, byte_s, message_s) between hosts, where that was measured; see transport.cost.Link.
    """

    rank: int
    size: int
    host: str
    node: str
    transport: str
    cores: float
    fusion_bytes: int
    link: tuple[float, float, float] | None = None


def read_node(host: str) -> str:
    """What this machine has in common with no other that is up; its name where the system does not say."""
    try:
        return f"{host} {_BOOT.read_text().strip()}"
    except OSError:
        return host
