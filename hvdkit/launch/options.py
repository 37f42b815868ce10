"""The options of a job, as data: from hvdrun's command line, or from Python for `hvdkit.launch`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from hvdkit.errors import LaunchError
from hvdkit.launch.hostfiles import AUTO
from hvdkit.launch.plan.elasticity import Elasticity
from hvdkit.launch.plan.selected_launcher import LAUNCHERS


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """hvdrun's options, by their names; None, () and "" stand for an option that is not given.

    Fields that are not listed have the meaning of hvdrun's option of the same name.

    np: a number of ranks, "auto" or "gpu".
    hosts: like "node1:4,node2:4".
    command: of each rank.
    module: the first word of the command is a Python module.
    env: "NAME" or "NAME=VALUE" of -x, for the ranks.
    no_forward_env: patterns of variables that the ranks do not get.
    elastic, min_np, max_np: the same as their settings; `settings` takes precedence.
    settings: variables of settings (HVDKIT_...) and their values.
    set_by: the options that have set them, for messages.
    ignored: notes on options without effect.

    Raises LaunchError for a launcher or a number of ranks that does not exist.
    """

    np: int | str | None = None
    hosts: str | None = None
    hostfile: str | None = None
    hostfile_format: str = AUTO
    slots_per_host: int | None = None
    command: tuple[str, ...] = ()
    module: bool = False
    env: tuple[str, ...] = ()
    no_forward_env: tuple[str, ...] = ()
    launcher: str = ""
    mpi_args: str | None = None
    binding_args: str | None = None
    tcp: bool = False
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    network_interfaces: str | None = None
    start_timeout: float = 60.0
    save_timeout: float = 25.0
    alias_horovod: bool = False
    wrap: bool = False
    mpi_backend: bool = False
    dry_run: bool = False
    output_filename: str | None = None
    show_ranks: frozenset[int] | None = None
    no_prefix: bool = False
    tag_output: bool = False
    quiet: bool = False
    verbose: bool = False
    metrics_port: int | None = None
    elastic: Elasticity = Elasticity.OFF
    min_np: int | None = None
    max_np: int | None = None
    host_discovery_script: str | None = None
    blacklist_cooldown_range: tuple[float, float] | None = None
    reset_limit: int | None = None
    elastic_timeout: float | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    set_by: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.launcher not in ("", *LAUNCHERS):
            raise LaunchError(
                f"launcher={self.launcher!r} does not exist. It is one of {', '.join(LAUNCHERS)}.",
                code="launcher-unknown",
            )
        if isinstance(self.np, str) and self.np not in ("auto", "gpu"):
            raise LaunchError(
                f'np={self.np!r} is not a number of ranks. Give a number, "auto" or "gpu".', code="np-invalid"
            )
        numbers = {"HVDKIT_MIN_NP": self.min_np, "HVDKIT_MAX_NP": self.max_np}
        given = {name: str(number) for name, number in numbers.items() if number is not None}
        object.__setattr__(self, "settings", {**self.elastic.variables, **given, **self.settings})

    @property
    def names_hosts(self) -> bool:
        """Has the user named the hosts?"""
        return any(one is not None for one in (self.hosts, self.hostfile, self.host_discovery_script))


#: The names of the options.
OPTIONS = frozenset(each.name for each in fields(LaunchOptions))


def check_options(options: LaunchOptions) -> None:
    """Raise LaunchError for options that contradict each other."""
    named = [word.partition("=")[0] for word in options.env]
    pairs = (
        ("--quiet", options.quiet, "--verbose", options.verbose),
        ("--no-prefix", options.no_prefix, "--tag-output", options.tag_output),
        ("--wrap", options.wrap, "--alias-horovod", options.alias_horovod),
        *((f"-x {name}", True, f"--no-forward-env {name}", name in options.no_forward_env) for name in named),
        ("-np gpu", options.np == "gpu", "--host-discovery-script", options.host_discovery_script is not None),
    )
    for one, has_one, other, has_other in pairs:
        if has_one and has_other:
            raise LaunchError(f"{one} contradicts {other}. Leave one of them out.", code="options-contradict")
    if options.output_filename == "":
        raise LaunchError(
            "--output-filename is empty. Name a directory, or leave it out.", code="output-directory-empty"
        )
    ssh = [flag for flag, value in (("-p", options.ssh_port), ("-i", options.ssh_identity_file)) if value is not None]
    if ssh and options.launcher in ("srun", "jsrun"):
        raise LaunchError(
            f"{ssh[0]} is for ssh, which {options.launcher} does not use. Leave it out, or use --launcher ssh.",
            code="ssh-options-unused",
        )
