"""The variables of torchrun, Keras, JAX and Horovod that hvdrun gives its ranks."""

from __future__ import annotations

import socket

import pytest
from refused import refused

from hvdkit.launch.agent.host_info import hold_free_ports
from hvdkit.launch.agent.wire import find_unplanned
from hvdkit.launch.plan.environment import clean_environment, plan_horovod_variables, plan_rank_variables
from hvdkit.transport.gloo.rendezvous import find_rendezvous_store
from hvdkit.world import read_world

HOSTS = {0: "a", 1: "b", 2: "a", 3: "c"}


def plan(environ: dict[str, str], ports: tuple[int, ...] = (20001, 20002)) -> dict[int, dict[str, str]]:
    return plan_rank_variables(HOSTS, "10.0.0.1", ports, "77", environ)


def column(planned: dict[int, dict[str, str]], name: str) -> list[str]:
    return [planned[rank][name] for rank in range(4)]


def test_ranks_are_numbered_in_the_job_on_their_host_and_by_host() -> None:
    planned = plan({})
    for name in ("RANK", "ROLE_RANK", "KERAS_DISTRIBUTION_PROCESS_ID", "JAX_PROCESS_ID"):
        assert column(planned, name) == ["0", "1", "2", "3"]
    assert column(planned, "LOCAL_RANK") == ["0", "0", "1", "0"]
    assert column(planned, "LOCAL_WORLD_SIZE") == ["2", "1", "2", "1"]
    assert column(planned, "GROUP_RANK") == ["0", "1", "0", "2"]
    for name in ("WORLD_SIZE", "ROLE_WORLD_SIZE", "KERAS_DISTRIBUTION_NUM_PROCESSES", "JAX_NUM_PROCESSES"):
        assert column(planned, name) == ["4"] * 4
    assert column(planned, "GROUP_WORLD_SIZE") == ["3"] * 4
    assert column(planned, "MASTER_ADDR") == ["10.0.0.1"] * 4 and column(planned, "MASTER_PORT") == ["20001"] * 4
    for name in ("KERAS_DISTRIBUTION_JOB_ADDRESSES", "JAX_COORDINATOR_ADDRESS"):
        assert column(planned, name) == ["10.0.0.1:20002"] * 4
    assert not find_unplanned(name for each in planned.values() for name in each)


def test_scripts_for_horovod_find_their_numbers_as_under_horovodrun() -> None:
    planned = plan({})
    assert column(planned, "HOROVOD_RANK") == ["0", "1", "2", "3"] and column(planned, "HOROVOD_SIZE") == ["4"] * 4
    assert column(planned, "HOROVOD_LOCAL_RANK") == ["0", "0", "1", "0"]
    assert column(planned, "HOROVOD_LOCAL_SIZE") == ["2", "1", "2", "1"]
    # Among the ranks of the same local rank: three hosts have a first rank, one has a second.
    assert column(planned, "HOROVOD_CROSS_RANK") == ["0", "1", "0", "2"]
    assert column(planned, "HOROVOD_CROSS_SIZE") == ["3", "3", "1", "3"]
    assert column(planned, "HOROVOD_HOSTNAME") == ["a", "b", "a", "c"]


def test_ranks_of_a_world_that_has_changed_are_numbered_among_those_that_are_left() -> None:
    planned = plan_horovod_variables({1: "b", 2: "a", 5: "a"})
    assert {number: own["HOROVOD_RANK"] for number, own in planned.items()} == {1: "0", 2: "1", 5: "2"}
    assert {number: own["HOROVOD_LOCAL_RANK"] for number, own in planned.items()} == {1: "0", 2: "0", 5: "1"}
    assert all(own["HOROVOD_SIZE"] == "3" and "RANK" not in own for own in planned.values())
    assert not find_unplanned(name for own in planned.values() for name in own)


def test_an_address_of_ipv6_and_its_port_are_told_apart() -> None:
    planned = plan_rank_variables({0: "a"}, "fd00::1", (20001, 20002), "77", {})
    assert planned[0]["MASTER_ADDR"] == "fd00::1" and planned[0]["JAX_COORDINATOR_ADDRESS"] == "[fd00::1]:20002"


def test_the_coordinator_is_not_behind_a_proxy() -> None:
    assert "no_grpc_proxy" not in plan({"no_proxy": "site"})[0]
    assert column(plan({"https_proxy": "p"}), "no_grpc_proxy") == ["10.0.0.1"] * 4
    assert column(plan({"http_proxy": "p", "no_proxy": "site"}), "no_grpc_proxy") == ["10.0.0.1,site"] * 4
    assert "no_grpc_proxy" not in plan({"http_proxy": "p", "no_grpc_proxy": "site"})[0]
    assert "no_grpc_proxy" not in plan({"http_proxy": "p"}, ports=())[0]
    assert not find_unplanned(plan({"http_proxy": "p"})[0])


def test_what_the_user_has_set_stays_where_it_can_be_true() -> None:
    planned = plan({"MASTER_ADDR": "head", "MASTER_PORT": "29500", "WORLD_SIZE": "4"})
    assert not {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"} & planned[0].keys()
    assert planned[0]["JAX_COORDINATOR_ADDRESS"] == "10.0.0.1:20002"


def test_without_free_ports_addresses_are_the_users_own_affair() -> None:
    planned = plan({}, ports=())
    assert "MASTER_ADDR" not in planned[0] and planned[0]["WORLD_SIZE"] == "4"


def test_contradictions_are_listed_together() -> None:
    names = ["RANK=0 (each rank has its own), WORLD_SIZE=8 (4)"]
    with refused("environment-contradicts", names=names) as caught:
        plan({"WORLD_SIZE": "8", "RANK": "0", "GROUP_WORLD_SIZE": "3"})
    assert str(caught.value).endswith("unset RANK WORLD_SIZE")
    for port in ("x", "0", "70000", ""):
        with refused("master-port-invalid", names=[f"MASTER_PORT={port} "]):
            plan({"MASTER_PORT": port})


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
OPEN_MPI |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "HVDKIT_AGENT": "1"}
RANK_1 = plan_rank_variables({0: "a", 1: "a"}, "127.0.0.1", (20001, 20002), "77", {})[1]


def test_no_rank_of_hvdrun_is_taken_for_one_of_horovodrun() -> None:
    assert RANK_1["HOROVOD_RANK"] == "1"
    for launcher in (OPEN_MPI, {"PMI_RANK": "1", "PMI_SIZE": "2"}):
        assert read_world({**launcher, **RANK_1}).launcher in ("openmpi", "hydra")
    # An mpirun that a rank has started, and a process of which a script has hidden the launcher.
    inner = {**OPEN_MPI, **RANK_1, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
    assert (read_world(inner).launcher, read_world(inner).rank) == ("openmpi", 3)
    assert (read_world(RANK_1).launcher, read_world(RANK_1).size) == ("none", 1)
    # horovodrun inside a rank of hvdrun.
    numbers = {"HOROVOD_RANK": "2", "HOROVOD_SIZE": "3", "HOROVOD_LOCAL_RANK": "2", "HOROVOD_LOCAL_SIZE": "3"}
    store = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711"}
    own = read_world({**OPEN_MPI, **RANK_1, **numbers, **store})
    assert (own.launcher, own.rank, own.size) == ("horovodrun", 2, 3)


def test_a_rank_of_hvdrun_is_mpis_and_meets_through_mpi() -> None:
    environ = {**OPEN_MPI, **RANK_1}
    assert read_world(environ).launcher == "openmpi"
    # The port is for the script's own group.
    assert find_rendezvous_store(environ, "openmpi").kind == "mpi"


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, "hydra"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}, "slurm"),
    ],
)
def test_so_is_one_of_mpich_and_of_srun(environ: dict[str, str], launcher: str) -> None:
    found = read_world({**environ, **RANK_1, "HVDKIT_AGENT": "1"})
    assert (found.launcher, found.rank, found.size) == (launcher, 1, 2)
    assert find_rendezvous_store(RANK_1, launcher).kind == "mpi"


def test_below_a_torchrun_that_a_rank_of_hvdrun_has_started_torchrun_counts() -> None:
    below = {**OPEN_MPI, **RANK_1, "TORCHELASTIC_RUN_ID": "none", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    below |= {"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    assert (read_world(below).launcher, read_world(below).rank) == ("torchrun", 3)


@pytest.mark.parametrize("run", ["hvdrun-77", "none"])
def test_variables_of_a_rank_do_not_reach_a_job_that_it_starts(run: str) -> None:
    kept = {"PATH": "/bin", "NCCL_DEBUG": "INFO"}
    assert clean_environment({**kept, **RANK_1, "TORCHELASTIC_RUN_ID": run, "TORCHELASTIC_MAX_RESTARTS": "3"}) == kept


def test_variables_of_horovodrun_do_not_reach_a_job_that_its_rank_starts() -> None:
    numbers = {name: value for name, value in RANK_1.items() if name.startswith("HOROVOD_")}
    store = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711"}
    kept = {"PATH": "/bin", "HOROVOD_TIMELINE": "trace.json", "HOROVOD_GLOO_IFACE": "eth0"}
    assert clean_environment({**kept, **numbers, **store, "HOROVOD_CONTROLLER": "gloo"}) == kept


def test_variables_that_only_the_user_can_have_set_stay() -> None:
    own = {"MASTER_ADDR": "head", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "HOROVOD_SIZE": "4"}
    assert clean_environment(own) == own


def test_rank_0_gets_two_ports_on_which_its_script_can_listen() -> None:
    held = hold_free_ports(0)
    assert not hold_free_ports(1) and len(held) == 2
    for holder in held:
        port = holder.getsockname()[1]
        with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
            pass


def test_a_host_without_free_ports_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(*_: object) -> None:
        raise OSError("Address already in use")

    monkeypatch.setattr(socket.socket, "bind", bind)
    assert hold_free_ports(0) == []


def test_no_other_program_gets_a_port_that_is_held() -> None:
    (holder, _) = hold_free_ports(0)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", holder.getsockname()[1]))
