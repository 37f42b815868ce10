"""hvdkit doctor on the machine and the job: each fault is found, and found alone; where all is well nothing is."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import pytest
from doctor_facts import HEALTHY, MACHINE, facts_with

from hvdkit.launch.plan.network import InterfaceAddress
from hvdkit.tools.doctor.checks.job import parse_counts
from hvdkit.tools.doctor.checks.network import select
from hvdkit.tools.doctor.collect.host import find_filesystem, parse_quota
from hvdkit.tools.doctor.collect.script import ScriptFacts, scan
from hvdkit.tools.doctor.evaluate import check_host
from hvdkit.tools.doctor.facts import (
    Accelerators,
    Clock,
    CpuFacts,
    FastNetworks,
    Leftover,
    Port,
    SharedMemory,
    Trial,
)
from hvdkit.tools.doctor.findings import JobRequest

TWO = JobRequest(hosts=2)
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_GPUS_ON_NODE": "4",
}
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"} | SLURM
GOOD = ScriptFacts("train.py", distributed="hvdkit.torch", saves=True)


def environ(**variables: str) -> dict[str, Any]:
    return {"environ": {**SLURM, **variables}}


def script(**changes: Any) -> JobRequest:
    return JobRequest(script=replace(GOOD, **changes), ranks=4)


# Fault -> what changes, the job, the name of the one finding, and its severity. The numbers are those of the mistakes
# that users make, in the table of tests/cluster/README.md.
BROKEN: dict[str, tuple[dict[str, Any], JobRequest, str, str]] = {
    "1 no distribution": ({}, script(distributed=""), "script-not-distributed", "warning"),
    "2 tasks that disagree": (environ(SLURM_NTASKS="4"), JobRequest(), "slurm-tasks", "error"),
    "2 tasks left to Slurm": (
        environ(SLURM_NTASKS="3", SLURM_NTASKS_PER_NODE="", SLURM_TASKS_PER_NODE="2,1", SLURM_GPUS_ON_NODE="2"),
        JobRequest(),
        "slurm-tasks",
        "warning",
    ),
    "2 one task on two nodes": (
        environ(SLURM_NTASKS="1", SLURM_NTASKS_PER_NODE="", SLURM_TASKS_PER_NODE="1", SLURM_GPUS_ON_NODE="1"),
        JobRequest(),
        "slurm-tasks",
        "warning",
    ),
    "2 gres counted for the job": (environ(SLURM_GPUS_ON_NODE="8"), JobRequest(), "slurm-gpus", "warning"),
    "3 fewer GPUs than tasks": (environ(SLURM_GPUS_ON_NODE="2"), JobRequest(), "slurm-gpus", "warning"),
    "3 more ranks than GPUs": ({}, JobRequest(ranks_here=6), "gpu-shared", "warning"),
    "3 more ranks than GPUs, and NCCL is asked for": (
        {"settings": {"device_transport": "nccl"}},
        JobRequest(ranks_here=6),
        "gpu-shared",
        "error",
    ),
    "3 fewer ranks than GPUs": ({}, JobRequest(ranks_here=2), "gpu-idle", "note"),
    "3 torchrun for each GPU": (
        {
            "environ": STEP
            | {"TORCHELASTIC_RUN_ID": "1", "RANK": "1", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
        },
        JobRequest(),
        "torchrun-per-gpu",
        "error",
    ),
    "4 one core": ({"machine__cpu": CpuFacts(16, (3,))}, JobRequest(), "one-core", "warning"),
    "4 fewer cores than ranks": (
        {"machine__cpu": CpuFacts(16, (0, 1)), "accelerators": Accelerators(torch_cuda="13.0")},
        JobRequest(ranks_here=4),
        "few-cores",
        "warning",
    ),
    "5 cores that srun forgets": (environ(SLURM_CPUS_PER_TASK="8"), JobRequest(), "cpus-per-task", "warning"),
    "6 RANK in the batch script": (environ(RANK="0"), JobRequest(), "rank-exported", "error"),
    "6 RANK in a step, not the task's": ({"environ": {**STEP, "RANK": "0"}}, JobRequest(), "rank-exported", "error"),
    "6 RANK left over": ({"environ": {"RANK": "0", "WORLD_SIZE": "4"}}, JobRequest(), "rank-exported", "warning"),
    "7 devices set too late": ({}, script(visible_late=12), "visible-devices-late", "error"),
    "7 local rank as device": ({"accelerators__visible": "2"}, script(device_by_rank=9), "device-by-rank", "error"),
    "8 a port that is taken": ({"machine__port": Port(29500, free=False)}, JobRequest(), "master-port", "error"),
    "8 a port for a whole array": (
        environ(SLURM_ARRAY_TASK_ID="3") | {"machine__port": Port(29500)},
        JobRequest(),
        "master-port",
        "warning",
    ),
    "9 every host its own master": (environ(MASTER_ADDR="127.0.0.1"), JobRequest(), "master-address", "error"),
    "9 a name that is loopback": ({"machine__network__addresses": ("127.0.1.1",)}, TWO, "hostname", "warning"),
    "9 a name that is nothing": ({"machine__network__addresses": ()}, TWO, "hostname", "warning"),
    "10 an interface that is not there": (
        environ(NCCL_SOCKET_IFNAME="ib0"),
        JobRequest(),
        "interface-missing",
        "error",
    ),
    "10 loopback between hosts": ({"environ": {"GLOO_SOCKET_IFNAME": "lo"}}, TWO, "interface-inside", "error"),
    "10 a bridge between hosts": (
        {"environ": {"OMPI_MCA_btl_tcp_if_include": "172.17.0.0/16"}},
        TWO,
        "interface-inside",
        "error",
    ),
    "11 no plugin for Slingshot": (
        {"machine__fabrics": FastNetworks(slingshot=("cxi0",))},
        TWO,
        "nccl-on-tcp",
        "warning",
    ),
    "11 InfiniBand switched off": (
        {"machine__fabrics": FastNetworks(infiniband=("mlx5_0",)), "environ": {"NCCL_IB_DISABLE": "1"}},
        TWO,
        "nccl-on-tcp",
        "warning",
    ),
    "12 two ranks, each alone": (
        {"machine__trial": Trial("/env/bin/mpirun", (1, 1))},
        JobRequest(),
        "singletons",
        "warning",
    ),
    "12 mpirun that fails": (
        {"machine__trial": Trial("/env/bin/mpirun", (), "it ended with status 1: boo")},
        JobRequest(),
        "mpirun-fails",
        "warning",
    ),
    "12 srun without PMI": (
        environ() | {"machine__srun": Trial("/usr/bin/srun", (1, 1), kinds=("none", "pmi2", "pmix_v4"))},
        JobRequest(),
        "srun-singletons",
        "warning",
    ),
    "12 srun that fails": (
        environ() | {"machine__srun": Trial("/usr/bin/srun", (), "it ended with status 1: boo")},
        JobRequest(),
        "srun-fails",
        "warning",
    ),
    "13 torch's mpi on Cray": (
        {"mpi__kind": "cray_mpich", "mpi__library": "CRAY MPICH version 8.1", "launchers": ()}
        | {"hvdrun__kind": "mpich", "hvdrun__library": "/m/libmpi.so"},
        script(backend_mpi=7),
        "backend-mpi",
        "error",
    ),
    "15 Python on NFS": ({"machine__prefix_filesystem": "nfs4"}, TWO, "python-on-nfs", "warning"),
    "16 no checkpoint": (
        environ(SLURM_NNODES="1", SLURM_JOB_NUM_NODES="1", SLURM_NTASKS="4", SLURM_TASKS_PER_NODE="4"),
        script(saves=False),
        "no-checkpoint",
        "warning",
    ),
    "17 more ranks than slots": ({}, JobRequest(ranks=8, slots=4), "slots", "error"),
    "a script that is none": ({}, JobRequest(script=ScriptFacts("x.py", problem="No such file")), "script", "error"),
    "no shared memory": ({"machine__shared": SharedMemory()}, JobRequest(), "shm-missing", "error"),
    "Docker's shared memory": (
        {"machine__shared": SharedMemory("/dev/shm", 64 << 20, 64 << 20, "tmpfs")},
        JobRequest(),
        "shm-small",
        "warning",
    ),
    "shared memory on a disk": ({"machine__shared__filesystem": "ext4"}, JobRequest(), "shm-on-disk", "warning"),
    "a little left over": (
        {"machine__shared__leftovers": (Leftover("/dev/shm/hvdkit-1-aa", 1000, 90),)},
        JobRequest(),
        "shm-leftovers",
        "note",
    ),
    "much left over": (
        {"machine__shared__leftovers": (Leftover("/dev/shm/hvdkit-1-aa", 10**10, 90),)},
        JobRequest(),
        "shm-leftovers",
        "warning",
    ),
    "few files": ({"machine__limits__nofile": 256}, JobRequest(), "limit-files", "warning"),
    "few processes": ({"machine__limits__nproc": 100}, JobRequest(), "limit-processes", "warning"),
    "little locked memory": (
        {"machine__limits__memlock": 65536, "machine__fabrics": FastNetworks(infiniband=("mlx5_0",))},
        JobRequest(),
        "limit-memlock",
        "warning",
    ),
    "less time than cores": ({"machine__cpu": replace(MACHINE.cpu, quota=1.5)}, JobRequest(), "cpu-quota", "warning"),
    "a clock that is behind": ({"machine__clock": Clock(1e9, 1.9e9)}, JobRequest(), "clock-behind", "warning"),
    "localhost elsewhere": ({"machine__network__localhost": ("10.0.0.1",)}, JobRequest(), "localhost", "error"),
    "lo down": (
        {"machine__network__loopback_up": False},
        JobRequest(),
        "loopback-down",
        "error",
    ),
    "variables of a launcher": (
        {"environ": {"OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_SIZE": "4"}},
        JobRequest(),
        "launcher-variables",
        "error",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_fault_is_found_and_nothing_else(fault: str) -> None:
    changes, job, name, severity = BROKEN[fault]
    findings = check_host(facts_with(**changes), job)
    assert [(finding.name, finding.severity) for finding in findings] == [(name, severity)]
    assert findings[0].seen[-1] in ".?" or name in ("mpirun-fails", "srun-fails", "localhost")
    assert findings[0].cure


@pytest.mark.parametrize(
    ("changes", "job"),
    [
        ({}, JobRequest(hosts=4, ranks=16, slots=16, ranks_here=4, script=GOOD)),
        ({"environ": SLURM}, JobRequest(hosts=2, slots=8, ranks_here=4, script=GOOD)),
        ({"environ": STEP}, JobRequest()),
        ({"environ": {**STEP, "RANK": "3"}}, JobRequest()),
        (environ(SLURM_CPUS_PER_TASK="8", SRUN_CPUS_PER_TASK="8"), JobRequest()),
        (environ(SLURM_ARRAY_TASK_ID="3", MASTER_PORT="14711") | {"machine__port": Port(14711)}, JobRequest()),
        (environ(MASTER_ADDR="node1", MASTER_PORT="29500"), JobRequest()),
        ({"machine__network__addresses": ("127.0.1.1",)}, JobRequest()),
        ({"machine__cpu": CpuFacts(1, (0,))}, JobRequest()),
        ({"machine__limits__memlock": 65536}, JobRequest()),
        ({"machine__fabrics": FastNetworks(slingshot=("cxi0",), nccl_plugins=("/x/libnccl-net.so",))}, TWO),
        ({"machine__fabrics": FastNetworks(infiniband=("mlx5_0",))}, TWO),
        ({"environ": {"NCCL_SOCKET_IFNAME": "^docker,lo"}}, TWO),
        ({"environ": {"NCCL_SOCKET_IFNAME": "eth", "OMPI_MCA_btl_tcp_if_include": "10.77.0.0/24"}}, TWO),
        ({"environ": {"LSB_JOBID": "1"}}, script()),
    ],
)
def test_where_all_is_well_nothing_is_found(changes: dict[str, Any], job: JobRequest) -> None:
    assert check_host(facts_with(**changes), job) == []


@pytest.mark.parametrize(
    ("variable", "value", "chosen"),
    [
        ("NCCL_SOCKET_IFNAME", "eth", ["eth0", "eth1"]),
        ("NCCL_SOCKET_IFNAME", "=eth1", ["eth1"]),
        ("NCCL_SOCKET_IFNAME", "^eth0,docker", ["eth1"]),
        ("NCCL_SOCKET_IFNAME", "ib", []),
        ("GLOO_SOCKET_IFNAME", "eth", []),
        ("GLOO_SOCKET_IFNAME", "eth1,eth0", ["eth0", "eth1"]),
        ("OMPI_MCA_btl_tcp_if_include", "10.1.0.0/16", ["eth0"]),
        ("OMPI_MCA_btl_tcp_if_include", "10.1.0.7/300", []),
        ("OMPI_MCA_btl_tcp_if_include", "lo", ["lo"]),
    ],
)
def test_interfaces_are_chosen_as_the_libraries_do(variable: str, value: str, chosen: list[str]) -> None:
    interfaces = [
        InterfaceAddress("lo", "127.0.0.1", "127.0.0.0/8"),
        InterfaceAddress("eth0", "10.1.0.7", "10.1.0.0/16"),
        InterfaceAddress("eth1", "10.2.0.7", "10.2.0.0/16"),
        InterfaceAddress("docker0", "172.17.0.1", "172.17.0.0/16"),
    ]
    assert [each.name for each in select(variable, value, interfaces)] == chosen


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import hvdkit.torch as hvd\nhvd.init()", {"distributed": "hvdkit.torch"}),
        ("from torch import distributed\n", {"distributed": "torch.distributed"}),
        ("from torch.nn.parallel import DistributedDataParallel as D", {}),
        ("import torch\ntorch.distributed.init_process_group('mpi')", {"backend_mpi": 2}),
        ("import torch.distributed as d\nd.init_process_group(backend='nccl')", {"distributed": "torch.distributed"}),
        ("import os\nhvd.init()\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'", {"visible_late": 3}),
        ("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\nhvd.init()", {"visible_late": 0}),
        ("import os\nhvd.init()\nos.environ.update(CUDA_VISIBLE_DEVICES='0')", {"visible_late": 3}),
        ("torch.cuda.set_device(hvd.local_rank())", {"device_by_rank": 1}),
        ("torch.cuda.set_device(0)", {"device_by_rank": 0}),
        ("model.save('x.keras')", {"saves": True}),
        ("callbacks = [keras.callbacks.ModelCheckpoint('x')]", {"saves": True}),
        ("print('hello')", {"distributed": "", "saves": False}),
    ],
)
def test_a_script_says_what_it_does(text: str, expected: dict[str, Any]) -> None:
    found = scan("x.py", ast.parse(text))
    assert {name: getattr(found, name) for name in expected} == expected


def test_small_texts_are_read() -> None:
    assert parse_counts("2(x3),1") == [2, 2, 2, 1]
    assert parse_counts("two") == []
    assert [parse_quota(text) for text in ("max 100000", "150000 100000", "", "1 0")] == [0.0, 1.5, 0.0, 0.0]
    mounts = ["/dev/sda / ext4 rw", "srv:/home /home nfs4 rw", "tmpfs /home/me tmpfs rw", "x /my\\040disk xfs rw"]
    kinds = [
        find_filesystem(path, mounts) for path in ("/usr", "/home/you/env", "/home/me/env", "/my disk/a", "/homes")
    ]
    assert kinds == ["ext4", "nfs4", "tmpfs", "xfs", "ext4"]
    assert HEALTHY.machine.cpu.cores == 16
