"""Which rank an agent takes itself for, from variables as launchers really set them."""

from __future__ import annotations

import pytest

from hvdkit.launch.agent.rank_identity import identify_rank
from hvdkit.world import read_world

STEP = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
DAEMON = {**STEP, "SLURM_STEP_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
SEEN = {
    "openmpi under slurm": (
        {
            **DAEMON,
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
            "SLURM_NODEID": "1",
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "PMIX_RANK": "3",
            "PMIX_NAMESPACE": "prterun-node1-77@1",
            "PMIX_HOSTNAME": "node2",
        },
        (3, 4, 2),
    ),
    "mpich over ssh": (
        {"PMI_RANK": "2", "PMI_SIZE": "6", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "PMI_HOSTNAME": "node2"},
        (2, 6, 2),
    ),
    "srun with pmix": (
        {
            **STEP,
            "SLURM_PROCID": "3",
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_LOCALID": "1",
            "SLURM_NODEID": "1",
            "PMIX_RANK": "3",
            "PMIX_NAMESPACE": "slurm.pmix.7.0",
        },
        (3, 4, 2),
    ),
    "srun with pmi2": (
        {
            **STEP,
            "SLURM_PROCID": "1",
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_LOCALID": "1",
            "SLURM_NODEID": "0",
            "PMI_RANK": "1",
            "PMI_SIZE": "4",
        },
        (1, 4, 2),
    ),
    "srun by itself": (
        {
            **STEP,
            "SLURM_STEP_TASKS_PER_NODE": "3,1",
            "SLURM_PROCID": "3",
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "1",
        },
        (3, 4, 1),
    ),
    "pals": ({"PALS_RANKID": "5", "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_SIZE": "4"}, (5, 8, 4)),
    "jsrun": (
        {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_LOCAL_SIZE": "2", "PMIX_RANK": "1"},
        (1, 2, 2),
    ),
    "a batch script": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, (0, 1, 1)),
    "nobody": ({}, (0, 1, 1)),
}


@pytest.mark.parametrize("name", SEEN)
def test_the_agent_and_the_rank_agree_on_who_they_are(name: str) -> None:
    variables, expected = SEEN[name]
    place = identify_rank(variables)
    assert (place.rank, place.size, place.local_size) == expected
    world = read_world(variables)
    assert (world.rank, world.size) == expected[:2]
    assert world.local_size in (None, expected[2])
