"""The options of hvdkit doctor, as data."""

from __future__ import annotations

from dataclasses import dataclass

from hvdkit.launch.hostfiles import AUTO


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The options by their names; None and "" stand for an option that is not given. ranks: 0 for none."""

    hosts: str | None = None
    hostfile: str | None = None
    hostfile_format: str = AUTO
    ranks: int = 0
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    script: str | None = None
    via: str = "auto"
    here: bool = False
    no_allreduce: bool = False
    strict: bool = False
    verbose: bool = False
    quiet: bool = False
    json: bool = False
