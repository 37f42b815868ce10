"""Plan a job from its options and the facts; pure functions."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hvdkit.config import Config, read_config, read_settings
from hvdkit.errors import LaunchError
from hvdkit.launch.allocations.schedulers import find_incomplete_slurm_job
from hvdkit.launch.facts import Facts
from hvdkit.launch.hostfiles import format_hosts
from hvdkit.launch.options import LaunchOptions
from hvdkit.launch.plan.elasticity import Elasticity, read_elasticity
from hvdkit.launch.plan.environment import clean_environment, find_launcher_variables, is_number_of_rank, withhold
from hvdkit.launch.plan.gpu_sharing import choose_gpu_sharing
from hvdkit.launch.plan.horovod_options import find_ignored
from hvdkit.launch.plan.job import Job, plan_places, plan_ranks
from hvdkit.launch.plan.network import describe_unknown, parse_wish, plan_daemon_variables
from hvdkit.launch.plan.resources import plan_shared_gpus
from hvdkit.launch.plan_elastic import plan_elastic
from hvdkit.package_settings import check_settings
from hvdkit.setting import Settings
from hvdkit.startup import plan_variables
from hvdkit.suggestion import did_you_mean

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Options for ranks or hosts, with or without a value in the same word.
_GIVES_RANKS = re.compile(r"(-np?(\d+|gpu|auto)?|--np|--num-proc|-H|--hosts|--?hostfile)(=.*)?")
_ELASTIC_ONLY = ("HVDKIT_ELASTIC_CHECKPOINTS", "HVDKIT_ELASTIC_HANG_TIMEOUT_S", "HVDKIT_ELASTIC_SAVE_S")

_KERAS_BACKENDS = ("tensorflow", "torch", "jax", "numpy", "openvino")


def plan_job(options: LaunchOptions, facts: Facts, ranks: int | None = None) -> Job:
    """Plan the job. Raises LaunchError for a job that cannot be started.

    ranks: of a job that is restarted; None to take them from the options.
    """
    local, found = facts.local, facts.found
    restarted = ranks is not None
    ranks = _plan_ranks(options, facts) if ranks is None else ranks
    unknown = describe_unknown(host.name for host in found.hosts if not facts.of(host).known)
    if unknown and not options.dry_run:
        raise LaunchError(unknown, code="hosts-unknown")
    environ, sent = plan_environ(options, facts)
    if facts.command_problem and not restarted:
        raise facts.command_problem
    networks = parse_wish(options.network_interfaces) if options.network_interfaces is not None else ()
    if found.interface and options.network_interfaces is None:
        networks = (found.interface,)
    variables, config = _plan_variables(options, facts, ranks, networks, environ, sent)
    if options.show_ranks is not None:
        last = max(ranks, config.max_np) - 1
        if max(options.show_ranks) > last:
            raise LaunchError(
                f"--show-ranks {max(options.show_ranks)}: the ranks of this job are 0 to {last}.",
                code="show-ranks-invalid",
            )
    return Job(
        command=facts.command,
        ranks=ranks,
        hosts=found.hosts,
        local=local,
        environ=environ,
        variables=variables,
        forwarded=tuple(sent),
        root=facts.root,
        python=facts.python,
        notes=tuple(_plan_notes(options, facts, ranks, unknown, environ, config)),
        ssh_options=facts.ssh_options,
        launcher_arguments=split_words("--mpi-args", options.mpi_args) or (),
        binding=split_words("--binding-args", options.binding_args),
        bind=_choose_binding(config.bind, options.binding_args),
        gpu_sharing=choose_gpu_sharing(options.np, config),
        networks=networks,
        tcp=options.tcp,
        elasticity=read_elasticity(config),
        logs=options.output_filename or "",
        verbose=options.verbose,
        start_timeout_s=options.start_timeout,
        save_timeout_s=options.save_timeout,
        metrics_port=options.metrics_port,
        rank_variables=not options.wrap,  # a wrapped script must see a single process
    )


def with_elasticity(job: Job, elasticity: Elasticity) -> Job:
    """Return the job with another elasticity."""
    return replace(job, elasticity=elasticity, variables={**job.variables, **elasticity.variables})


def plan_environ(options: LaunchOptions, facts: Facts) -> tuple[dict[str, str], dict[str, str]]:
    """Plan the ranks' environment without hvdrun's variables; returns it, and the variables of -x that it includes.

    Raises LaunchError for a variable that cannot be sent.
    """
    kinds: tuple[type[Settings], ...] = (Config, *facts.packages)
    settings = [each.variable for kind in kinds for each in read_settings({}, kind)]
    sent = read_sent(options.env, facts.environ, settings, local=facts.local)
    removed = find_incomplete_slurm_job(facts.environ)
    environ = {name: value for name, value in clean_environment(facts.environ).items() if name not in removed}
    return {**withhold(environ, options.no_forward_env), **sent}, sent


def _plan_ranks(options: LaunchOptions, facts: Facts) -> int:
    found, command = facts.found, options.command
    requested = facts.requested_ranks
    if requested is None or options.host_discovery_script is not None:
        requested = found.ranks
    late = _find_late_option(command)
    if requested is None and not found.hosts and late:
        raise LaunchError(
            f"The number of ranks is missing: {late} stands after {command[0]}, so it is an argument of "
            f"that. hvdrun's options go before the command, like: hvdrun -np 2 {command[0]}",
            code="np-missing",
        )
    cores = {host.name: facts.cores for host in found.hosts if facts.of(host).local}
    return plan_ranks(requested, found.hosts, cores, more_slots_hint=found.more_slots_hint)


def _plan_variables(
    options: LaunchOptions,
    facts: Facts,
    ranks: int,
    networks: tuple[str, ...],
    environ: Mapping[str, str],
    sent: Mapping[str, str],
) -> tuple[dict[str, str], Config]:
    """Plan the variables that hvdrun sets for the ranks, and the settings that follow from them."""
    hosts, local = facts.found.hosts, facts.local
    home = {} if "HOME" in environ else facts.home
    variables = {**home, **sent, **_refuse_twice(sent, options.settings)}
    if not local:
        addresses = [facts.of(host).address for host in hosts if not facts.of(host).local]
        variables.update(plan_daemon_variables(addresses, facts.interfaces, networks, environ))
    variables.update(plan_variables(_plan_startup(options), environ))
    if options.wrap and "HVDKIT_WRAP_SEED" not in environ:
        variables["HVDKIT_WRAP_SEED"] = facts.seed
    if options.wrap and options.quiet and "HVDKIT_WRAP_TABLE" not in environ:
        variables["HVDKIT_WRAP_TABLE"] = "0"
    variables.update(plan_elastic(options, read_config({**environ, **variables}), ranks))
    config = read_config({**environ, **variables})
    check_settings({**environ, **variables}, facts.packages)
    unused = [name for name in _ELASTIC_ONLY if name in options.settings and not config.elastic]
    if unused:
        raise LaunchError(
            f"{options.set_by.get(unused[0], unused[0])} has no effect without --elastic. Add --elastic, or leave it "
            "out.",
            code="setting-needs-elastic",
        )
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
        directory = os.path.normpath(os.path.join(facts.directory, options.output_filename))
        variables["HVDKIT_OUTPUT_DIRECTORY"] = directory
    return variables, config


def _plan_notes(
    options: LaunchOptions, facts: Facts, ranks: int, unknown: str, environ: Mapping[str, str], config: Config
) -> list[str]:
    """Plan the messages before the start. unknown: the message on unknown hosts; "" for none."""
    found, late = facts.found, _find_late_option(options.command)
    notes = [*found.notes, *([unknown] if unknown else [])]
    if options.np is None and late.startswith("-np"):
        notes.append(f"{late} stands after {options.command[0]}: it is an argument of that, not an option of hvdrun.")
    backend = environ.get("KERAS_BACKEND", "")
    if backend and backend not in _KERAS_BACKENDS:
        notes.append(
            f"KERAS_BACKEND={backend} is not a backend of Keras: {', '.join(_KERAS_BACKENDS)}."
            f"{did_you_mean(backend, _KERAS_BACKENDS)}"
        )
    if options.network_interfaces is not None and facts.local:
        notes.append("--network-interfaces has no effect, because all ranks are on this machine.")
    notes += options.ignored
    if config.engine != "horovod":
        notes += find_ignored(environ)
    if found.allocated:
        notes.append(f"{ranks} rank{'s' * (ranks != 1)} on {format_hosts(found.hosts)}, from {found.source}.")
    return notes


def read_sent(
    words: Sequence[str], environ: Mapping[str, str], settings: Sequence[str], *, local: bool
) -> dict[str, str]:
    """Read the variables of -x.

    words: the values of -x.
    environ: hvdrun's variables.
    settings: the variables of all settings.
    local: all ranks are on this machine.

    Raises LaunchError for a variable without a value, one that hvdrun or the launcher sets, or one that cannot be sent.
    """
    sent: dict[str, str] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not _NAME.fullmatch(name):
            raise LaunchError(
                f"-x {word}: {name!r} is not a variable's name. Write -x NAME or -x NAME=VALUE.",
                code="variable-name-invalid",
            )
        if not sign:
            if name not in environ:
                raise LaunchError(
                    f"-x {name}: the variable is not set here. Set it, or write -x {name}=VALUE.",
                    code="variable-not-set",
                )
            value = environ[name]
        if find_launcher_variables([name]) or is_number_of_rank(name):
            raise LaunchError(
                f"-x {name}: hvdrun or the launcher sets this variable for each rank. Leave it out.",
                code="variable-of-launcher",
            )
        if name.startswith("HVDKIT_") and name not in settings:
            raise LaunchError(
                f"-x {name}: hvdkit has no setting of this name.{did_you_mean(name, settings, 0.85)} See hvdkit doctor "
                "--settings.",
                code="setting-unknown",
            )
        if sent.get(name, value) != value:
            raise LaunchError(
                f"-x {name} is given twice, with different values. Leave one of them out.", code="variable-given-twice"
            )
        if "\0" in value or ("\n" in value and not local):
            raise LaunchError(
                f"-x {name}: its value has a line break, which launchers do not send to other hosts. Put the value "
                "into a file that all hosts can read.",
                code="variable-with-line-break",
            )
        sent[name] = value
    return sent


def _refuse_twice(sent: Mapping[str, str], settings: Mapping[str, str]) -> Mapping[str, str]:
    """Return the settings. Raises LaunchError for a setting that -x sets to another value."""
    for name, value in settings.items():
        if sent.get(name, value) != value:
            raise LaunchError(
                f"-x {name}={sent[name]} contradicts the option for {name}, {value}. Leave one out.",
                code="variable-contradicts",
            )
    return settings


def _find_late_option(command: Sequence[str]) -> str:
    """Find an option of hvdrun for ranks or hosts among the command's arguments; "" without one."""
    return next((word for word in command[1:] if _GIVES_RANKS.fullmatch(word)), "")


def _plan_startup(options: LaunchOptions) -> dict[str, str]:
    """Plan the variables of hvdkit.startup, which the ranks run before the script."""
    unused = [name for name in options.settings if name.startswith("HVDKIT_WRAP_")]
    if unused and not options.wrap:
        raise LaunchError(
            f"{options.set_by.get(unused[0], unused[0])} has no effect without --wrap. Add --wrap, or leave it out.",
            code="setting-needs-wrap",
        )
    names = {
        "HVDKIT_WRAP": options.wrap,
        "HVDKIT_ALIAS_HOROVOD": options.alias_horovod,
        "HVDKIT_MPI_BACKEND": options.mpi_backend,
    }
    return {name: "1" for name, is_asked in names.items() if is_asked}


def _choose_binding(bind: str, binding_args: str | None) -> str:
    """Return the setting `bind`, or "none" if the launcher is to bind the ranks."""
    if binding_args is None:
        return bind
    if bind in ("core", "numa"):
        raise LaunchError(
            f"--bind {bind} contradicts --binding-args: hvdkit or the launcher binds the ranks. Leave one of them out.",
            code="binding-contradicts",
        )
    return "none"


def split_words(flag: str, text: str | None) -> tuple[str, ...] | None:
    """Split the value of an option as a shell does; None for None. Raises LaunchError for an open quote."""
    try:
        return None if text is None else tuple(shlex.split(text))
    except ValueError as error:
        raise LaunchError(
            f"{flag} {text!r} cannot be split into words: {error}. Close the quote.", code="option-quotes"
        ) from None
