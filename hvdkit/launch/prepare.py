"""Collect the facts of a job from files, the name service, programs and schedulers, before its start."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

from hvdkit.errors import LaunchError
from hvdkit.launch.agent.host_info import read_interfaces
from hvdkit.launch.allocations.schedulers import describe_incomplete_slurm_job
from hvdkit.launch.detect.command import check_command, plan_command
from hvdkit.launch.detect.gpus import choose_ranks
from hvdkit.launch.detect.hosts import count_cores, find_hosts, is_known, is_local, resolve
from hvdkit.launch.detect.launchers import detect_launchers
from hvdkit.launch.detect.mpi import choose_home
from hvdkit.launch.elastic.options import find_discovered
from hvdkit.launch.facts import Facts, KnownHost
from hvdkit.launch.hostfiles import FoundHosts, Host
from hvdkit.launch.options import LaunchOptions, check_options
from hvdkit.launch.plan.network import parse_interfaces
from hvdkit.launch.plan_job import plan_environ, plan_job
from hvdkit.package_settings import find_package_settings
from hvdkit.startup import find_module


def prepare(
    options: LaunchOptions, environ: Mapping[str, str], note: Callable[[str], None] = lambda line: None
) -> Facts:
    """Collect all facts. Raises LaunchError for a job that cannot be started.

    environ: hvdrun's variables. note: writes a line while it waits for hosts.
    """
    facts = collect_facts(options, environ, note)
    job = plan_job(options, facts)  # errors in the options are reported before a launcher is examined
    if job.local and job.config.tuned:
        from hvdkit.engine.tuning.saved import read_entries  # takes 100 ms, for numpy

        read_entries(job.config.tuned)  # the ranks would report an error only in the first step
    launchers = detect_launchers(
        job.environ,
        sys.prefix,
        local=job.local,
        named_hosts=options.names_hosts,
        wish=options.launcher,
        own_ssh=bool(job.ssh_options),
    )
    return replace(facts, launchers=launchers)


def collect_facts(
    options: LaunchOptions, environ: Mapping[str, str], note: Callable[[str], None] = lambda line: None
) -> Facts:
    """Collect the facts that `plan_job` needs, without those of launchers. See prepare.

    Raises MissingDependencyError for --wrap if its package is not installed.
    """
    check_options(options)
    if options.wrap:
        find_module("HVDKIT_WRAP")
    found = _find_hosts(options, environ, note)
    packages = tuple(find_package_settings().values())
    facts = on_hosts(Facts(environ=environ, found=found, packages=packages), found.hosts)
    cores, local = count_cores(), facts.local
    requested = choose_ranks(options.np, found.hosts, local=local, cores=cores, environ=environ)
    path = plan_environ(options, facts)[0].get("PATH", os.defpath)
    problem: LaunchError | None = None
    if local:
        try:
            check_command(options.command, module=options.module, path=path)
        except LaunchError as error:
            problem = error
    return replace(
        facts,
        cores=cores,
        requested_ranks=requested,
        command=tuple(plan_command(options.command, module=options.module, path=path)),
        command_problem=problem,
        home=choose_home(environ),
        ssh_options=read_ssh_options(options.ssh_port, options.ssh_identity_file),
        seed=str(secrets.randbelow(2**31)) if options.wrap else "",
        directory=os.getcwd(),
        root=os.geteuid() == 0,
        python=sys.executable,
    )


def on_hosts(facts: Facts, hosts: tuple[Host, ...]) -> Facts:
    """Return the facts for these hosts; only new hosts are looked up."""
    known = {host.login: facts.hosts.get(host.login) or _look_up(host) for host in hosts}
    interfaces = facts.interfaces
    if not interfaces and not all(each.local for each in known.values()):
        interfaces = tuple(parse_interfaces(read_interfaces()))
    found = replace(facts.found, hosts=hosts)
    return replace(facts, found=found, hosts={**facts.hosts, **known}, interfaces=interfaces)


def _look_up(host: Host) -> KnownHost:
    if is_local(host):
        return KnownHost(local=True)
    return KnownHost(local=False, known=is_known(host), address=next(iter(resolve(host.name)), ""))


def _find_hosts(options: LaunchOptions, environ: Mapping[str, str], note: Callable[[str], None]) -> FoundHosts:
    if options.host_discovery_script is not None:
        return find_discovered(options, environ, note)
    found = find_hosts(
        options.hosts, options.hostfile, environ, format=options.hostfile_format, slots=options.slots_per_host
    )
    return found or FoundHosts((), "this machine", describe_incomplete_slurm_job(environ))


def read_ssh_options(port: int | None, file: str | None) -> tuple[str, ...]:
    """Convert -p and -i to options of ssh. Raises LaunchError for a file that ssh or the launcher cannot use."""
    if file is not None and not os.path.isfile(file):
        raise LaunchError(
            f"--ssh-identity-file {file}: there is no such file. Check the path.", code="identity-file-missing"
        )
    if file is not None and not re.fullmatch(r"[^\s'\"\\\x00-\x1f]+", os.path.abspath(file)):
        raise LaunchError(
            f"--ssh-identity-file {file!r} has a space or a quote in its path, which launchers do not pass to ssh "
            "correctly. Write 'IdentityFile PATH' for these hosts in ~/.ssh/config.",
            code="identity-file-name",
        )
    return (
        *(("-p", str(port)) if port is not None else ()),
        *(("-i", os.path.abspath(file)) if file is not None else ()),
    )
