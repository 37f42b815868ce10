"""Collect all facts of this host."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import hvdkit
from hvdkit.config import read_settings
from hvdkit.errors import ConfigError
from hvdkit.tools.doctor.collect.gpus import read_accelerators
from hvdkit.tools.doctor.collect.machine import (
    find_filesystem,
    read_clock,
    read_cpu,
    read_fabrics,
    read_limits,
    read_network,
    read_port,
    read_shared_memory,
)
from hvdkit.tools.doctor.collect.mpi import read_hvdrun_mpi, read_launchers, read_library, try_srun, try_two_ranks
from hvdkit.tools.doctor.collect.software import read_horovod, read_keras_backend, read_packages
from hvdkit.tools.doctor.facts import HostFacts, MachineFacts

# What may be shown, sent and compared. Anything else could be a secret.
_SHOWN = re.compile(
    r"HVDKIT_(?!CONTROL|PROFILE).*|HOROVOD_.*|(OMPI|PRTE|PMIX|OPAL)_.*|PMI_.*|MPI_LOCAL.*|I_MPI_.*|MPI4PY_.*|MPICH_.*|MV2_.*|PALS_.*"
    r"|JSM_.*|SLURM_(?!JWT).*|SLURMD_.*|SRUN_.*|PBS_(?!COOKIE).*|LSB_.*|LS_JOBPID|SGE_.*|PE_HOSTFILE|NSLOTS|NHOSTS"
    r"|CUDA_.*|ROCR_.*|HIP_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|NCCL_.*|RCCL_.*|FI_.*|UCX_.*|GLOO_.*|TP_SOCKET_IFNAME"
    r"|TORCH_NCCL_.*|TORCHELASTIC_(RUN_ID|RESTART_COUNT)|MASTER_(ADDR|PORT)|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE"
    r"|GROUP_RANK|GROUP_WORLD_SIZE|OMP_.*|MKL_NUM_THREADS|KERAS_.*|PATH|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH"
    r"|VIRTUAL_ENV|CONDA_PREFIX|LOADEDMODULES"
)


def collect(environ: Mapping[str, str]) -> HostFacts:
    """Collect all facts; what takes long runs at the same time."""
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
    """See what is quickly seen of the machine. folder: for node-shared memory."""
    return MachineFacts(
        network=read_network(),
        limits=read_limits(),
        cpu=read_cpu(),
        shared=read_shared_memory(folder),
        clock=read_clock(),
        fabrics=read_fabrics(environ),
        port=read_port(environ.get("MASTER_PORT", "")),
        prefix_filesystem=find_filesystem(sys.prefix),
    )


def _read_settings(environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    try:
        return {setting.name: str(setting.shown) for setting in read_settings(environ)}, ""
    except ConfigError as error:
        return {}, str(error)
