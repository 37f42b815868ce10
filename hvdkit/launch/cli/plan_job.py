"""Plan a job from hvdrun's options."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence

from hvdkit.config import Config, read_config, read_settings
from hvdkit.errors import LaunchError
from hvdkit.launch.allocations.schedulers import describe_incomplete_slurm_job, find_incomplete_slurm_job
from hvdkit.launch.cli.command import check_command, plan_command
from hvdkit.launch.cli.horovod import find_ignored
from hvdkit.launch.cli.launcher_options import choose_launcher, read_ssh_options, split_words
from hvdkit.launch.cli.parser import nearest
from hvdkit.launch.elastic.options import find_discovered, plan_elastic
from hvdkit.launch.hostfiles import FoundHosts, format_hosts
from hvdkit.launch.plan.environment import clean_environment, find_launcher_variables, is_number_of_rank, withhold
from hvdkit.launch.plan.job import Job, plan_places, plan_ranks
from hvdkit.launch.plan.mpi import plan_home
from hvdkit.launch.plan.network import parse_wish
from hvdkit.launch.plan.resolve_hosts import count_cores, describe_unknown, find_hosts, is_local, plan_daemon_variables
from hvdkit.launch.plan.resources import choose_ranks, plan_shared_gpus
from hvdkit.startup import plan_variables

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Options that give ranks or hosts, with or without a value in the same word.
_GIVES_RANKS = re.compile(r"(-np?(\d+|gpu|auto)?|--np|--num-proc|-H|--hosts|--?hostfile)(=.*)?")
_ELASTIC_ONLY = ("HVDKIT_ELASTIC_CHECKPOINTS", "HVDKIT_ELASTIC_PATIENCE_S", "HVDKIT_ELASTIC_SAVE_S")

_KERAS_BACKENDS = ("tensorflow", "torch", "jax", "numpy", "openvino")


def plan_job(
    options: argparse.Namespace,
    environ: Mapping[str, str],
    found: FoundHosts | None = None,
    ranks: int | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> Job:
    """Turn the options into a job. Raises LaunchError for a job that cannot be started.

    found, ranks: of a job that is restarted; None to take them from the options. note: writes a line while it waits for
    hosts.
    """
    _refuse_contradictions(options)
    found = found or _find_hosts(options, environ, note)
    hosts = found.hosts
    here = [host for host in hosts if is_local(host)]
    local = len(here) == len(hosts)
    cores = count_cores()
    asked = choose_ranks(options.ranks, hosts, local=local, cores=cores, environ=environ)
    if asked is None or options.host_discovery_script is not None:
        asked = found.ranks
    late = _find_late_option(options.command)
    if ranks is None:
        if asked is None and not hosts and late:
            raise LaunchError(
                f"The number of ranks is missing: {late} stands after {options.command[0]}, so it is an argument of "
                f"that. hvdrun's options go before the command, like: hvdrun -np 2 {options.command[0]}"
            )
        ranks = plan_ranks(asked, hosts, {host.name: cores for host in here}, more=found.more)
    unknown = describe_unknown(hosts)
    if unknown and not options.dry_run:
        raise LaunchError(unknown)
    removed = find_incomplete_slurm_job(environ)
    sent = read_sent(options.env or (), environ, local=local)
    environ = {name: value for name, value in clean_environment(environ).items() if name not in removed}
    environ = {**withhold(environ, options.no_forward_env or ()), **sent}
    path = environ.get("PATH", os.defpath)
    if local:
        check_command(options.command, module=options.module, path=path)
    notes = [*found.notes, *([unknown] if unknown else [])]
    if options.ranks is None and late.startswith("-np"):
        notes.append(f"{late} stands after {options.command[0]}: it is an argument of that, not an option of hvdrun.")
    backend = environ.get("KERAS_BACKEND", "")
    if backend and backend not in _KERAS_BACKENDS:
        notes.append(
            f"KERAS_BACKEND={backend} is not a backend of Keras: {', '.join(_KERAS_BACKENDS)}."
            f"{nearest(backend, _KERAS_BACKENDS)}"
        )
    networks: tuple[str, ...] = (found.interface,) if found.interface else ()
    if options.network_interfaces is not None:
        networks = parse_wish(options.network_interfaces)
        if local:
            notes.append("--network-interfaces has no effect, because all ranks are on this machine.")
    variables = {**plan_home(environ), **sent, **_refuse_twice(sent, options.settings)}
    if not local:
        variables.update(plan_daemon_variables(hosts, networks, environ))
    variables.update(plan_variables(_plan_startup(options), environ))
    if options.wrap and "HVDKIT_WRAP_SEED" not in environ:
        variables["HVDKIT_WRAP_SEED"] = str(secrets.randbelow(2**31))
    if options.wrap and options.quiet and "HVDKIT_WRAP_TABLE" not in environ:
        variables["HVDKIT_WRAP_TABLE"] = "0"
    config = read_config({**environ, **variables})
    variables.update(plan_elastic(options, config, ranks))
    config = read_config({**environ, **variables})
    notes += getattr(options, "ignored", ())
    if config.engine != "horovod":
        notes += find_ignored(environ)
    if local and config.tuned:
        from hvdkit.engine.tuning.saved import read_entries  # takes 100 ms, for numpy

        read_entries(config.tuned)  # the ranks would notice in the first step
    unused = [name for name in _ELASTIC_ONLY if name in options.settings and not config.elastic]
    if unused:
        raise LaunchError(
            f"{options.set_by[unused[0]]} has no effect without --elastic. Add --elastic, or leave it out."
        )
    if options.show_ranks is not None:
        last = max(ranks, config.max_np) - 1
        if max(options.show_ranks) > last:
            raise LaunchError(f"--show-ranks {max(options.show_ranks)}: the ranks of this job are 0 to {last}.")
    if "PYTHONUNBUFFERED" not in environ:
        variables["PYTHONUNBUFFERED"] = "1"  # so that the output of a killed rank is complete
    if options.tcp and "NCCL_IB_DISABLE" not in environ:
        variables["NCCL_IB_DISABLE"] = "1"
    if config.share_gpus:
        variables.update(plan_shared_gpus(1 if local else len(plan_places(ranks, hosts)), environ))
    if options.metrics_port is not None and "HVDKIT_METRICS_S" not in environ:
        variables["HVDKIT_METRICS_S"] = "2"
    if options.no_prefix:
        variables["HVDKIT_PREFIX"] = "0"
    if options.output_filename:
        variables["HVDKIT_OUTPUT_DIRECTORY"] = os.path.abspath(options.output_filename)
    if found.allocated:
        notes.append(f"{ranks} rank{'s' * (ranks != 1)} on {format_hosts(found.hosts)}, from {found.source}.")
    return Job(
        command=tuple(plan_command(options.command, module=options.module, path=path)),
        ranks=ranks,
        hosts=hosts,
        local=local,
        environ=environ,
        variables=variables,
        forwarded=tuple(sent),
        root=os.geteuid() == 0,
        python=sys.executable,
        notes=tuple(notes),
        ssh_options=read_ssh_options(options),
        launcher_arguments=split_words("--mpi-args", options.mpi_args) or (),
        binding=split_words("--binding-args", options.binding_args),
        bind=_choose_binding(config.bind, options.binding_args),
        own_gpus=_choose_own_gpus(options, config),
        networks=networks,
        tcp=options.tcp,
        elastic=config.elastic,
        logs=options.output_filename or "",
        verbose=options.verbose,
        start_timeout_s=options.start_timeout,
        save_timeout_s=options.save_timeout,
        metrics_port=options.metrics_port,
        rank_variables=not options.wrap,  # a script for one process is to see one process
    )


def read_sent(words: Sequence[str], environ: Mapping[str, str], *, local: bool) -> dict[str, str]:
    """Read the variables of -x. local: all ranks are on this machine.

    Raises LaunchError for a variable without a value, of hvdrun's or the launcher's own, or that cannot be sent.
    """
    sent: dict[str, str] = {}
    settings = {setting.variable for setting in read_settings({})}
    for word in words:
        name, sign, value = word.partition("=")
        if not _NAME.fullmatch(name):
            raise LaunchError(f"-x {word}: {name!r} is not a variable's name. Write -x NAME or -x NAME=VALUE.")
        if not sign:
            if name not in environ:
                raise LaunchError(f"-x {name}: the variable is not set here. Set it, or write -x {name}=VALUE.")
            value = environ[name]
        if find_launcher_variables([name]) or is_number_of_rank(name):
            raise LaunchError(f"-x {name}: hvdrun or the launcher sets this variable for each rank. Leave it out.")
        if name.startswith("HVDKIT_") and name not in settings:
            raise LaunchError(
                f"-x {name}: hvdkit has no setting of this name.{nearest(name, settings, 0.85)} See hvdkit doctor "
                "--settings."
            )
        if sent.get(name, value) != value:
            raise LaunchError(f"-x {name} is given twice, with different values. Leave one of them out.")
        if "\0" in value or ("\n" in value and not local):
            raise LaunchError(
                f"-x {name}: its value has a line break, which launchers do not send to other hosts. Put the value "
                "into a file that all hosts can read."
            )
        sent[name] = value
    return sent


def _refuse_twice(sent: Mapping[str, str], settings: Mapping[str, str]) -> Mapping[str, str]:
    """Return the settings. Raises LaunchError for one that -x sets to another value."""
    for name, value in settings.items():
        if sent.get(name, value) != value:
            raise LaunchError(f"-x {name}={sent[name]} contradicts the option for {name}, {value}. Leave one out.")
    return settings


def _refuse_contradictions(options: argparse.Namespace) -> None:
    named, withheld = [word.partition("=")[0] for word in options.env or ()], options.no_forward_env or ()
    pairs = (
        ("--quiet", options.quiet, "--verbose", options.verbose),
        ("--no-prefix", options.no_prefix, "--tag-output", options.tag_output),
        ("--wrap", options.wrap, "--alias-horovod", options.alias_horovod),
        *((f"-x {name}", True, f"--no-forward-env {name}", name in withheld) for name in named),
        ("-np gpu", options.ranks == "gpu", "--host-discovery-script", options.host_discovery_script is not None),
    )
    for one, has_one, other, has_other in pairs:
        if has_one and has_other:
            raise LaunchError(f"{one} contradicts {other}. Leave one of them out.")
    if options.output_filename == "":
        raise LaunchError("--output-filename is empty. Name a directory, or leave it out.")
    launcher = choose_launcher(options)
    ssh = [flag for flag, value in (("-p", options.ssh_port), ("-i", options.ssh_identity_file)) if value is not None]
    if ssh and launcher in ("srun", "jsrun"):
        raise LaunchError(f"{ssh[0]} is for ssh, which {launcher} does not use. Leave it out, or use --launcher ssh.")


def _find_late_option(command: Sequence[str]) -> str:
    """Find an option among the command's arguments that gives ranks or hosts to hvdrun; "" if there is none."""
    return next((word for word in command[1:] if _GIVES_RANKS.fullmatch(word)), "")


def _plan_startup(options: argparse.Namespace) -> dict[str, str]:
    """The variables of hvdkit.startup: what ranks do before the script."""
    unused = [name for name in options.settings if name.startswith("HVDKIT_WRAP_")]
    if unused and not options.wrap:
        raise LaunchError(f"{options.set_by[unused[0]]} has no effect without --wrap. Add --wrap, or leave it out.")
    names = {
        "HVDKIT_WRAP": options.wrap,
        "HVDKIT_ALIAS_HOROVOD": options.alias_horovod,
        "HVDKIT_MPI_BACKEND": options.mpi_backend,
    }
    return {name: "1" for name, is_asked in names.items() if is_asked}


def _choose_binding(bind: str, binding_args: str | None) -> str:
    """The setting `bind`, unless the launcher is to bind the ranks."""
    if binding_args is None:
        return bind
    if bind in ("core", "numa"):
        raise LaunchError(
            f"--bind {bind} contradicts --binding-args: hvdkit or the launcher binds the ranks. Leave one of them out."
        )
    return "none"


def _choose_own_gpus(options: argparse.Namespace, config: Config) -> str | None:
    """See Job.own_gpus: a job on CPUs may have more ranks than its hosts have GPUs, so these must be asked for."""
    if config.share_gpus or config.device_transport == "host":
        return None
    return "-np gpu" if options.ranks == "gpu" else "device_transport=nccl" if config.device_transport == "nccl" else ""


def _find_hosts(options: argparse.Namespace, environ: Mapping[str, str], note: Callable[[str], None]) -> FoundHosts:
    if options.host_discovery_script is not None:
        return find_discovered(options, environ, note)
    found = find_hosts(
        options.hosts, options.hostfile, environ, format=options.hostfile_format, slots=options.slots_per_host
    )
    return found or FoundHosts((), "this machine", describe_incomplete_slurm_job(environ))
