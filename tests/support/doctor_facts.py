"""A healthy host, for tests that break one thing of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hvdkit.launch.plan.network import InterfaceAddress
from hvdkit.tools.doctor.facts import (
    UNLIMITED,
    Accelerators,
    Clock,
    CpuFacts,
    Gpu,
    Horovod,
    HostFacts,
    HostNetwork,
    HvdrunMpi,
    Launcher,
    MachineFacts,
    MpiLibrary,
    ResourceLimits,
    SharedMemory,
    Trial,
)

GPUS = tuple(Gpu(index, f"GPU-{index}aa", "NVIDIA H100", 80 * 2**30) for index in range(4))
MACHINE = MachineFacts(
    network=HostNetwork(
        ("10.77.0.11",),
        ("127.0.0.1",),
        (
            InterfaceAddress("lo", "127.0.0.1", "127.0.0.0/8"),
            InterfaceAddress("eth0", "10.77.0.11", "10.77.0.0/24", 10000),
            InterfaceAddress("docker0", "172.17.0.1", "172.17.0.0/16"),
        ),
    ),
    limits=ResourceLimits(UNLIMITED, 65536, 100000),
    cpu=CpuFacts(16, tuple(range(16))),
    shared=SharedMemory("/dev/shm", 64 * 10**9, 60 * 10**9, "tmpfs"),
    clock=Clock(2e9, 1.9e9),
    trial=Trial("/env/bin/mpirun", (2, 2)),
    prefix_filesystem="ext4",
)
HEALTHY = HostFacts(
    host="node1",
    python="3.11.7",
    executable="/env/bin/python",
    prefix="/env",
    system="Linux 6.1 x86_64",
    hvdkit="0.1.0",
    hvdkit_folder="/env/lib/hvdkit",
    packages={
        "torch": "2.13.0+cu130",
        "tensorflow": "2.21.0",
        "keras": "3.15.1",
        "mpi4py": "4.1.2",
        "horovod": "0.28.1",
        "hvdkit-horovod": "0.1.0",
    },
    keras_backend="torch",
    keras_backend_origin="KERAS_BACKEND",
    mpi=MpiLibrary(
        mpi4py="4.1.2",
        library="Open MPI v5.0.11, package: Open MPI",
        kind="open_mpi",
        path="/env/lib/libmpi.so.40",
        standard="3.1",
        threads="MPI_THREAD_MULTIPLE",
    ),
    launchers=(
        Launcher("mpirun", "/env/bin/mpirun", "open_mpi", "5.0.11"),
        Launcher("mpiexec", "/env/bin/mpiexec", "open_mpi", "5.0.11"),
        Launcher("torchrun", "/env/bin/torchrun", "torchrun", "2.13.0"),
    ),
    hvdrun=HvdrunMpi("/env/bin/mpirun", "open_mpi", "Open MPI", "5.0.11"),
    horovod=Horovod(
        version="0.28.1",
        folder="/env/lib/horovod",
        bindings=("torch", "tensorflow"),
        built_for={"torch": "2.13.0+cu130", "tensorflow": "2.21.0"},
        parts=("mpi", "gloo", "nccl"),
        loaded=("torch", "tensorflow"),
    ),
    accelerators=Accelerators(
        gpus=GPUS,
        devices=("nvidia0", "nvidia1", "nvidia2", "nvidia3"),
        driver="580.1",
        nccl="2.28.3",
        nccl_path="its wheel",
        torch_cuda="13.0",
    ),
    settings={"engine": "auto", "transport": "auto", "shared_directory": "/dev/shm"},
    machine=MACHINE,
)


def facts_with(**changes: Any) -> HostFacts:
    """The healthy host with some facts changed; part__name=value changes a fact of a part."""
    facts = HEALTHY
    for name, value in changes.items():
        facts = _change(facts, name.split("__"), value)
    return facts


def _change(whole: Any, path: list[str], value: Any) -> Any:
    inner = _change(getattr(whole, path[0]), path[1:], value) if path[1:] else value
    return replace(whole, **{path[0]: inner})
