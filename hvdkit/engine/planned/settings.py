"""What a plan of gradients can be carried out with, whatever it reduces: the same numbers come out of all of them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from hvdkit.config import Config


@dataclass(frozen=True)
class PlanSettings:
    """How buckets are cut and driven; fields as those of Config, the same on all ranks of a plan."""

    fusion_bytes: int
    buckets_in_flight: int
    chunk_bytes: int
    progress: str
    algorithm: str

    def __str__(self) -> str:
        return (
            f"buckets of {format_bytes(self.fusion_bytes)}, {self.buckets_in_flight} in flight, chunks of "
            f"{format_bytes(self.chunk_bytes)}, progress {self.progress}, algorithm {self.algorithm}"
        )


def settings_of(config: Config) -> PlanSettings:
    """Those that were asked for."""
    return PlanSettings(**{one.name: getattr(config, one.name) for one in fields(PlanSettings)})


def format_bytes(nbytes: int) -> str:
    """As a person writes it: "4 MiB", "512 KiB", "100 bytes"."""
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} bytes"
