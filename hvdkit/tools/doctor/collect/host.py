"""Collects all facts of this host; this file reads cores, limits, clock, file systems and addresses itself."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import hvdkit
from hvdkit.errors import HvdkitError
from hvdkit.launch.agent.host_info import allowed_cpus, read_interfaces
from hvdkit.launch.agent.shm_cleanup import list_open_files
from hvdkit.launch.detect.command import list_names
from hvdkit.launch.detect.hosts import is_own_address, resolve
from hvdkit.launch.plan.network import InterfaceAddress, parse_interfaces
from hvdkit.package_settings import read_all_settings
from hvdkit.tools.doctor.collect.mpi import read_hvdrun_mpi, read_launchers, read_library, try_srun, try_two_ranks
from hvdkit.tools.doctor.collect.software import read_accelerators, read_horovod, read_keras_backend, read_packages
from hvdkit.tools.doctor.facts import (
    UNLIMITED,
    Clock,
    CpuFacts,
    FastNetworks,
    HostFacts,
    HostNetwork,
    Leftover,
    MachineFacts,
    Port,
    ResourceLimits,
    SharedMemory,
)


def read_limits() -> ResourceLimits:
    """Read the soft limits."""

    def limit(kind: int) -> int:
        soft = resource.getrlimit(kind)[0]
        return UNLIMITED if soft == resource.RLIM_INFINITY else soft

    return ResourceLimits(limit(resource.RLIMIT_MEMLOCK), limit(resource.RLIMIT_NOFILE), limit(resource.RLIMIT_NPROC))


def parse_quota(text: str) -> float:
    """Turn cgroup's "150000 100000" into 1.5 cores; 0 for "max", or nothing."""
    words = text.split()
    if len(words) != 2 or not all(re.fullmatch("[0-9]{1,18}", word) for word in words) or not int(words[1]):
        return 0.0
    return int(words[0]) / int(words[1])


def read_clock() -> Clock:
    """Read the clock, and the time at which the newest of hvdkit's own files was written."""
    newest = 0.0
    for path in Path(hvdkit.__file__).parent.glob("*.py"):
        with contextlib.suppress(OSError):
            newest = max(newest, path.stat().st_mtime)
    return Clock(time.time(), newest)


def read_fabrics(environ: Mapping[str, str]) -> FastNetworks:
    """List InfiniBand's and Slingshot's devices, and NCCL's plugins in the library path."""
    folders = environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    plugins = [
        str(path) for folder in filter(None, folders) for path in sorted(Path(folder).glob("lib[nr]ccl-net*.so*"))
    ]
    return FastNetworks(list_names("/sys/class/infiniband"), list_names("/sys/class/cxi"), tuple(plugins))


def find_filesystem(path: str, mounts: Iterable[str] | None = None) -> str:
    """Find the type of a path's file system, in the form of /proc/mounts; "" if that cannot be read."""
    lines = _read("/proc/self/mounts").splitlines() if mounts is None else mounts
    real = os.path.realpath(path)
    best, kind = -1, ""
    for line in lines:
        words = line.split()
        if len(words) < 3:
            continue
        place = words[1].replace("\\040", " ")
        inside = place == "/" or real == place or real.startswith(f"{place}/")
        if inside and len(place) >= best:  # a later mount hides an earlier one
            best, kind = len(place), words[2]
    return kind


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


#: File names of hvdkit, Open MPI, MPICH, Intel MPI, NCCL, torch, Gloo and Python's multiprocessing.
_NAMES = re.compile(
    r"hvdkit-.*|(vader|sm|smsc)_segment\..*|osc_rdma\..*|openmpi-.*|mpich_shar_.*|mpich-.*|Intel_MPI_.*|shm_mpi_.*"
    r"|nccl-.*|torch_\d+_.*|psm_[0-9a-f]+|psm2_.*|ucx_shm_.*|cma_.*"
)
#: Least age of a leftover in seconds: a process may map a file a moment after it makes it.
_LEAST_AGE_S = 60.0


def read_shared_memory(folder: str) -> SharedMemory:
    """Measure the folder, and find this user's files there that none of the user's processes has mapped or open."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return SharedMemory(folder)
    return SharedMemory(folder, usage.total, usage.free, find_filesystem(folder), tuple(_find_leftovers(folder)))


def _find_leftovers(folder: str) -> Iterator[Leftover]:
    candidates = {path: info for path, info in _list_files(folder) if _NAMES.fullmatch(os.path.basename(path))}
    if not candidates:
        return
    used: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the files of that process cannot be listed
            used |= list_open_files(process.name)
    for path, info in candidates.items():
        age = time.time() - max(info.st_mtime, info.st_ctime)
        if os.path.basename(path) not in used and age > _LEAST_AGE_S:
            yield Leftover(path, info.st_blocks * 512, round(age))


def _list_files(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    try:
        for entry in os.scandir(folder):
            info = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
                yield entry.path, info
    except OSError:
        return


_LOOPBACK = InterfaceAddress("lo", "127.0.0.1", "127.0.0.0/8")


def read_network() -> HostNetwork:
    """Resolve this host's own name, and list its interfaces."""
    rows = read_interfaces()
    interfaces = [each for each in parse_interfaces(rows) if ":" not in each.address]
    return HostNetwork(
        resolve(socket.gethostname()),
        resolve("localhost"),
        (_LOOPBACK, *interfaces) if rows else (),
        is_own_address(_LOOPBACK.address),
    )


def read_port(text: str) -> Port:
    """Check whether a port is free on this host. text: a number; other text counts as free."""
    if not text.isdecimal() or not 0 < int(text) < 65536:
        return Port()
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(text)))
        except OSError:
            return Port(int(text), free=False)
    return Port(int(text))


# Variables that may be shown, sent and compared. Any other could be a secret.
_SHOWN = re.compile(
    r"HVDKIT_(?!CONTROL|PROFILE).*|HOROVOD_.*|(OMPI|PRTE|PMIX|OPAL)_.*|PMI_.*|MPI_LOCAL.*|I_MPI_.*|MPI4PY_.*|MPICH_.*|MV2_.*|PALS_.*"
    r"|JSM_.*|SLURM_(?!JWT).*|SLURMD_.*|SRUN_.*|PBS_(?!COOKIE).*|LSB_.*|LS_JOBPID|SGE_.*|PE_HOSTFILE|NSLOTS|NHOSTS"
    r"|CUDA_.*|ROCR_.*|HIP_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_.*|ONEAPI_DEVICE_SELECTOR"
    r"|NCCL_.*|RCCL_.*|FI_.*|UCX_.*|GLOO_.*|TP_SOCKET_IFNAME"
    r"|TORCH_NCCL_.*|TORCHELASTIC_(RUN_ID|RESTART_COUNT)|MASTER_(ADDR|PORT)|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE"
    r"|GROUP_RANK|GROUP_WORLD_SIZE|OMP_.*|MKL_NUM_THREADS|KERAS_.*|PATH|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH"
    r"|VIRTUAL_ENV|CONDA_PREFIX|LOADEDMODULES"
)


def collect(environ: Mapping[str, str]) -> HostFacts:
    """Collect all facts; slow collectors run at the same time."""
    with ThreadPoolExecutor() as pool:
        mpi = pool.submit(read_library, environ)
        horovod = pool.submit(read_horovod, environ)
        launchers = pool.submit(read_launchers, environ)
        hvdrun = pool.submit(read_hvdrun_mpi, environ)
        accelerators = pool.submit(read_accelerators, environ)
        settings, settings_error = _read_settings(environ)
        folder = settings.get("shared_directory", "/dev/shm")
        trial = pool.submit(try_two_ranks, environ)
        srun = pool.submit(try_srun, environ)
        machine = pool.submit(read_machine, environ, folder)
        backend, origin = read_keras_backend(environ)
        return HostFacts(
            host=socket.gethostname(),
            python=platform.python_version(),
            executable=sys.executable,
            prefix=sys.prefix,
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            hvdkit=hvdkit.__version__,
            hvdkit_folder=os.path.dirname(hvdkit.__file__),
            packages=read_packages(),
            keras_backend=backend,
            keras_backend_origin=origin,
            mpi=mpi.result(),
            launchers=launchers.result(),
            hvdrun=hvdrun.result(),
            horovod=horovod.result(),
            accelerators=accelerators.result(),
            settings=settings,
            settings_error=settings_error,
            machine=replace(machine.result(), trial=trial.result(), srun=srun.result()),
            environ={name: value for name, value in environ.items() if _SHOWN.fullmatch(name)},
        )


def read_machine(environ: Mapping[str, str], folder: str) -> MachineFacts:
    """Read the facts of the machine that are quick to read. folder: for node-shared memory."""
    return MachineFacts(
        network=read_network(),
        limits=read_limits(),
        cpu=CpuFacts(os.cpu_count() or 1, tuple(sorted(allowed_cpus())), parse_quota(_read("/sys/fs/cgroup/cpu.max"))),
        shared=read_shared_memory(folder),
        clock=read_clock(),
        fabrics=read_fabrics(environ),
        port=read_port(environ.get("MASTER_PORT", "")),
        prefix_filesystem=find_filesystem(sys.prefix),
    )


def _read_settings(environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    try:
        return {setting.name: str(setting.shown) for setting in read_all_settings(environ)}, ""
    except HvdkitError as error:
        return {}, str(error)
