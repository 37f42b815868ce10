"""Rank and size from the environments that launchers really make."""

from __future__ import annotations

import socket

import pytest

from hvdkit.errors import WorldError
from hvdkit.world import World, check_world, complete_world, read_world, under_agent

HERE = socket.gethostname()

MPIRUN = {
    "PRTE_LAUNCHED": "1",
    "PMIX_NAMESPACE": "prterun-node1-6632@1",
    "PMIX_RANK": "3",
    "PMIX_HOSTNAME": "node2",
    "OMPI_UNIVERSE_SIZE": "4",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}
# What a daemon that mpirun started by srun on node2 hands down to its ranks.
SLURM_DAEMON = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURMD_NODENAME": "node2",
}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NNODES": "3",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "node[1-3]",
    "SLURMD_NODENAME": "node2",
}
HYDRA = {
    "PMI_RANK": "2",
    "PMI_SIZE": "3",
    "PMI_FD": "9",
    "PMI_HOSTNAME": "node2",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "1",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "5",
    "ROLE_WORLD_SIZE": "8",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29501",
    "TORCHELASTIC_RUN_ID": "job7",
}
HOROVODRUN = {
    "HOROVOD_RANK": "2",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_HOSTNAME": "node2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
}
PALS = {
    "PALS_APID": "3e0c1a7c",
    "PALS_RANKID": "5",
    "PALS_LOCAL_RANKID": "1",
    "PALS_NODEID": "1",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "4",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "7",
    "JSM_NAMESPACE_SIZE": "12",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "6",
    "PMIX_RANK": "7",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}

RECORDED: dict[str, tuple[dict[str, str], World]] = {
    "mpirun": (MPIRUN, World(3, 4, 1, 2, None, None, "node2", "openmpi")),
    "mpirun in a Slurm job": (MPIRUN | SLURM_DAEMON, World(3, 4, 1, 2, None, None, "node2", "openmpi")),
    "srun --mpi=none": (SRUN, World(3, 5, 1, 2, 1, 3, "node2", "slurm")),
    "srun --mpi=pmix": (
        SRUN | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.7.0", "PMIX_HOSTNAME": "node2"},
        World(3, 5, 1, 2, 1, 3, "node2", "slurm"),
    ),
    "srun --mpi=pmi2": (
        SRUN | {"PMI_RANK": "3", "PMI_SIZE": "5", "PMI_FD": "12"},
        World(3, 5, 1, 2, 1, 3, "node2", "slurm"),
    ),
    "srun on one node": (
        SRUN | {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "5"},
        World(3, 5, 3, 5, 0, 1, "node2", "slurm"),
    ),
    "mpiexec of MPICH": (HYDRA, World(2, 3, 0, 1, None, None, "node2", "hydra")),
    "mpiexec of MPICH in a Slurm job": (HYDRA | SLURM_DAEMON, World(2, 3, 0, 1, None, None, "node2", "hydra")),
    "PMI alone": ({"PMI_RANK": "1", "PMI_SIZE": "2"}, World(1, 2, None, None, None, None, HERE, "hydra")),
    "PMIx alone": (
        {"PMIX_RANK": "1", "PMIX_HOSTNAME": "node2"},
        World(1, 0, None, None, None, None, "node2", "pmix"),
    ),
    "PMIx in a Slurm job": (
        {"PMIX_RANK": "0", "PMIX_HOSTNAME": "node2", "PMIX_NAMESPACE": "prterun-node1-6632@1"} | SLURM_DAEMON,
        World(0, 0, None, None, None, None, "node2", "pmix"),
    ),
    "torchrun": (TORCHRUN, World(5, 8, 1, 4, 1, 2, HERE, "torchrun")),
    "torchrun started by mpirun": (TORCHRUN | MPIRUN, World(5, 8, 1, 4, 1, 2, HERE, "torchrun")),
    "torchrun started by srun": (TORCHRUN | SRUN, World(5, 8, 1, 4, 1, 2, HERE, "torchrun")),
    "horovodrun": (HOROVODRUN, World(2, 4, 0, 2, 1, 2, "node2", "horovodrun")),
    "PALS": (PALS, World(5, 8, 1, 4, 1, None, HERE, "pals")),
    "jsrun": (JSRUN, World(7, 12, 1, 6, None, None, HERE, "jsrun")),
    "MVAPICH on one host": (MVAPICH, World(1, 2, 1, 2, 0, 1, HERE, "mvapich")),
    "a batch script": (BATCH_SCRIPT, World(0, 1, 0, 1, 0, 1, HERE, "none")),
    "an interactive allocation": (
        BATCH_SCRIPT | {"SLURM_STEP_ID": "4294967290"},
        World(0, 1, 0, 1, 0, 1, HERE, "none"),
    ),
    "a PyTorch script that sets RANK itself": (
        {"RANK": "1", "WORLD_SIZE": "2"},
        World(0, 1, 0, 1, 0, 1, HERE, "none"),
    ),
    "empty variables": ({"OMPI_COMM_WORLD_RANK": "", "PMI_RANK": ""}, World(0, 1, 0, 1, 0, 1, HERE, "none")),
    "nothing": ({}, World(0, 1, 0, 1, 0, 1, HERE, "none")),
    "mpirun -n 1": (
        MPIRUN | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        World(0, 1, 0, 1, 0, 1, "node2", "openmpi"),
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_environment_is_read(name: str) -> None:
    environ, expected = RECORDED[name]
    assert read_world(environ) == expected


@pytest.mark.parametrize(
    "environ, words",
    [
        (MPIRUN | {"OMPI_COMM_WORLD_RANK": "two"}, ["OMPI_COMM_WORLD_RANK='two'", "number"]),
        (MPIRUN | {"OMPI_COMM_WORLD_RANK": "4"}, ["OMPI_COMM_WORLD_RANK=4", "OMPI_COMM_WORLD_SIZE=4"]),
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, ["OMPI_COMM_WORLD_LOCAL_RANK=2", "LOCAL_SIZE=2"]),
        (HYDRA | {"PMI_RANK": "-1"}, ["PMI_RANK='-1'"]),
        (HYDRA | {"PMI_RANK": "x", "PMI_SIZE": "y"}, ["PMI_RANK='x'", "PMI_SIZE='y'"]),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_SIZE is not set"]),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2x"}, ["SLURM_STEP_TASKS_PER_NODE='2x'"]),
    ],
)
def test_bad_values_are_named(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(WorldError) as caught:
        read_world(environ)
    for word in words:
        assert word in str(caught.value)


def test_mpi_completes_what_the_launcher_left_out() -> None:
    world = complete_world(
        read_world({"PMIX_RANK": "1"}),
        rank=1,
        size=4,
        local_rank=1,
        local_size=2,
        cross_rank=0,
        cross_size=2,
        homogeneous=True,
    )
    assert world == World(1, 4, 1, 2, 0, 2, HERE, "pmix", homogeneous=True)


OPEN_MPI = "Open MPI v5.0.11, package: Open MPI builder, ident: 5.0.11"
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: ..."


@pytest.mark.parametrize(
    "environ, library, words",
    [
        (SRUN, OPEN_MPI, ["slurm started 5 tasks", "world of size 1", "srun --mpi=pmix", "hvdrun", "Open MPI v5.0.11"]),
        (SRUN, MPICH, ["srun --mpi=pmi2", "MPICH Version:"]),
        (MPIRUN, MPICH, ["openmpi started 4 tasks", "MPICH Version:", "mpirun"]),
        (HYDRA, OPEN_MPI, ["hydra started 3 tasks", "Open MPI v5.0.11", "Use the mpirun of that library"]),
        (TORCHRUN, OPEN_MPI, ["torchrun does not start MPI", "hvdrun -np 8"]),
        (HOROVODRUN, OPEN_MPI, ["Gloo", "hvdrun -np 4"]),
        (PALS, OPEN_MPI, ["cray-mpich"]),
        (JSRUN, OPEN_MPI, ["Spectrum MPI"]),
        (MVAPICH, OPEN_MPI, ["MVAPICH"]),
    ],
)
def test_singletons_are_an_error_with_a_cure(environ: dict[str, str], library: str, words: list[str]) -> None:
    with pytest.raises(WorldError) as caught:
        check_world(read_world(environ), 1, library)
    for word in words:
        assert word in str(caught.value)


def test_every_launcher_that_tells_a_size_has_a_cure() -> None:
    for environ, _ in RECORDED.values():
        world = read_world(environ)
        if world.size > 1:
            with pytest.raises(WorldError):
                check_world(world, 1, OPEN_MPI)


def test_nested_launchers_are_an_error() -> None:
    with pytest.raises(WorldError, match="inside another"):
        check_world(read_world(TORCHRUN), 4, OPEN_MPI)


@pytest.mark.parametrize("environ, size", [(MPIRUN, 4), ({}, 1), ({}, 4), ({"PMIX_RANK": "1"}, 4)])
def test_agreement_is_no_error(environ: dict[str, str], size: int) -> None:
    check_world(read_world(environ), size, OPEN_MPI)


def test_agent_is_seen() -> None:
    assert under_agent({"HVDKIT_AGENT": "1"}) and not under_agent({})
