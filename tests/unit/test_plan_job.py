"""Options and facts become a job: data is compared, and nothing of this machine is read."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
from refused import refused

from hvdkit.errors import LaunchError
from hvdkit.launch.facts import Facts, KnownHost
from hvdkit.launch.hostfiles import FoundHosts, Host
from hvdkit.launch.launchers import build_launch
from hvdkit.launch.options import LaunchOptions
from hvdkit.launch.plan.elasticity import Elasticity
from hvdkit.launch.plan.mpi import Mpi
from hvdkit.launch.plan.selected_launcher import LauncherEnvironment
from hvdkit.launch.plan_job import plan_job
from hvdkit.launch.plan_start import plan_restart, plan_start

HOSTS = (Host("node1", 2), Host("node2", 2))
OPEN_MPI_5 = Mpi("open_mpi", "Open MPI", "5.0.11", "/bin/mpirun")
OPEN_MPI_4 = Mpi("open_mpi", "Open MPI", "4.1.6", "/bin/mpirun")


def facts(*hosts: Host, unknown: str = "", mpi: Mpi = OPEN_MPI_5) -> Facts:
    return Facts(
        environ={"PATH": "/bin", "HOME": "/root"},
        found=FoundHosts(hosts, "-H"),
        hosts={host.login: KnownHost(local=False, known=host.name != unknown, address="10.0.0.1") for host in hosts},
        requested_ranks=None if hosts else 2,
        command=("true",),
        seed="7",
        directory="/data",
        launchers=LauncherEnvironment(mpi=mpi, local=not hosts, named_hosts=bool(hosts)),
    )


def code_of(options: LaunchOptions, known: Facts) -> str:
    with pytest.raises(LaunchError) as caught:
        plan_job(options, known)
    return caught.value.code


def test_the_same_options_and_facts_give_the_same_job() -> None:
    options = LaunchOptions(np=2, command=("true",), wrap=True, output_filename="logs")
    job = plan_job(options, facts())
    assert job == plan_job(options, facts())
    assert (job.ranks, job.command, job.local, job.elasticity) == (2, ("true",), True, Elasticity.OFF)
    assert job.variables["HVDKIT_WRAP_SEED"] == "7"
    assert job.variables["HVDKIT_OUTPUT_DIRECTORY"] == "/data/logs"


def test_a_plan_opens_no_file_starts_no_program_and_writes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    options = LaunchOptions(
        np=4,
        command=("true",),
        elastic=Elasticity.SURVIVE,
        wrap=True,
        show_ranks=frozenset({1}),
        env=("HOME",),
        mpi_args="--display map",
        network_interfaces="eth0",
        output_filename="logs",
    )
    plan_start(options, facts(*HOSTS))  # imports what it needs
    events: list[str] = []
    counts = True
    # A hook cannot be removed.
    sys.addaudithook(lambda event, arguments: events.append(event) if counts else None)
    plan = plan_start(options, facts(*HOSTS))
    plan_restart(plan, replace(plan.facts, found=replace(plan.facts.found, hosts=HOSTS[:1])), 2, 3)
    build_launch(plan.job, plan.choice)
    counts = False
    assert not [event for event in events if not event.startswith(("object.", "compile", "sys._getframe", "gc."))]
    assert capfd.readouterr() == ("", "")


def test_an_unknown_host_is_an_error_and_in_a_dry_run_a_note() -> None:
    known = facts(*HOSTS, unknown="node2")
    assert code_of(LaunchOptions(command=("true",)), known) == "hosts-unknown"
    job = plan_job(LaunchOptions(command=("true",), dry_run=True), known)
    assert job.ranks == 4 and job.notes[0].startswith("Unknown host: node2")


def test_a_command_that_does_not_exist_is_refused_after_the_ranks() -> None:
    known = replace(facts(), command_problem=LaunchError("not on PATH", code="program-not-on-path"))
    assert code_of(LaunchOptions(np=2, command=("x",)), known) == "program-not-on-path"
    assert code_of(LaunchOptions(command=("x",)), replace(known, requested_ranks=None)) == "np-missing"


def test_what_contradicts_itself_is_refused_with_a_code() -> None:
    def refused(known: Facts | None = None, **options: Any) -> str:
        return code_of(LaunchOptions(command=("true",), **options), known or facts())

    assert refused(replace(facts(*HOSTS), requested_ranks=5), np=5) == "not-enough-slots"
    assert refused(settings={"HVDKIT_ELASTIC_SAVE_S": "3"}) == "setting-needs-elastic"
    assert refused(settings={"HVDKIT_WRAP_WARMUP": "3"}) == "setting-needs-wrap"
    assert refused(settings={"HVDKIT_BIND": "core"}, binding_args="--bind-to core") == "binding-contradicts"
    assert refused(show_ranks=frozenset({2})) == "show-ranks-invalid"
    assert refused(mpi_args="'open") == "option-quotes"
    assert refused(min_np=3) == "min-np-too-large"
    assert refused(max_np=1) == "max-np-too-small"
    assert refused(blacklist_cooldown_range=(3, 1)) == "cooldown-range"
    for word in ("1A=2", "NOT_SET_HERE", "OMPI_COMM_WORLD_RANK=1", "HVDKIT_NO_SUCH=1"):
        assert refused(env=(word,)).startswith(("variable-", "setting-unknown"))


@pytest.mark.parametrize(
    ("requested", "mpi", "planned"),
    [
        (Elasticity.OFF, OPEN_MPI_5, Elasticity.OFF),
        (Elasticity.RESTART, OPEN_MPI_5, Elasticity.RESTART),
        (Elasticity.SURVIVE, OPEN_MPI_5, Elasticity.SURVIVE),
        (Elasticity.SURVIVE, OPEN_MPI_4, Elasticity.RESTART),
    ],
)
def test_elasticity_is_one_value_from_the_options_to_the_variables_of_ranks(
    requested: Elasticity, mpi: Mpi, planned: Elasticity
) -> None:
    job = plan_start(LaunchOptions(np=2, command=("true",), elastic=requested), facts(mpi=mpi)).job
    assert job.elasticity is planned
    assert {name: job.variables.get(name) for name in planned.variables} == planned.variables
    assert ("HVDKIT_ELASTIC_RESTARTS" in job.variables) == (planned is Elasticity.RESTART)
    assert any("starts the job again" in note for note in job.notes) == (planned is Elasticity.RESTART)


def test_a_restart_has_the_seed_of_the_first_start_and_fewer_hosts() -> None:
    options = LaunchOptions(command=("true",), elastic=Elasticity.SURVIVE, wrap=True, min_np=2)
    plan = plan_start(options, facts(*HOSTS, mpi=OPEN_MPI_4))
    left = replace(plan.facts, found=replace(plan.facts.found, hosts=HOSTS[:1]))
    again = plan_restart(plan, left, 2, 3)
    assert (plan.job.ranks, again.ranks, again.hosts) == (4, 2, HOSTS[:1])
    assert again.variables["HVDKIT_WRAP_SEED"] == plan.job.variables["HVDKIT_WRAP_SEED"] == "7"
    assert again.variables["HVDKIT_START"] == "3"
    assert again.elasticity is Elasticity.RESTART


def test_options_that_do_not_exist_are_refused() -> None:
    with refused("launcher-unknown", names=["launcher='rsh'", "mpirun"]):
        LaunchOptions(launcher="rsh")
    with refused("np-invalid", names=["np='many'"]):
        LaunchOptions(np="many")
