"""See all facts of this host."""

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
from hvdkit.tools.doctor.facts import Facts
from hvdkit.tools.doctor.look.accelerators import read_accelerators
from hvdkit.tools.doctor.look.horovod import read_horovod
from hvdkit.tools.doctor.look.mpi import read_hvdrun_mpi, read_launchers, read_library
from hvdkit.tools.doctor.look.network import read_network, read_port
from hvdkit.tools.doctor.look.packages import read_keras_backend, read_packages
from hvdkit.tools.doctor.look.shared_memory import read_shared_memory
from hvdkit.tools.doctor.look.system import find_filesystem, read_clock, read_cpu, read_fabrics, read_limits
from hvdkit.tools.doctor.look.trial import try_srun, try_two_ranks
from hvdkit.tools.doctor.machine import Machine

_TRANSPORTS = ("single", "mpi", "shared_memory", "hierarchical", "gloo")
# What may be shown, sent and compared. Anything else could be a secret.
_SHOWN = re.compile(
    r"HVDKIT_(?!CONTROL|PROFILE).*|HOROVOD_.*|(OMPI|PRTE|PMIX|OPAL)_.*|PMI_.*|MPI_LOCAL.*|I_MPI_.*|MPI4PY_.*|MPICH_.*|MV2_.*|PALS_.*"
    r"|JSM_.*|SLURM_(?!JWT).*|SLURMD_.*|SRUN_.*|PBS_(?!COOKIE).*|LSB_.*|LS_JOBPID|SGE_.*|PE_HOSTFILE|NSLOTS|NHOSTS"
    r"|CUDA_.*|ROCR_.*|HIP_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|NCCL_.*|RCCL_.*|FI_.*|UCX_.*|GLOO_.*|TP_SOCKET_IFNAME"
    r"|TORCH_NCCL_.*|TORCHELASTIC_(RUN_ID|RESTART_COUNT)|MASTER_(ADDR|PORT)|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE"
    r"|GROUP_RANK|GROUP_WORLD_SIZE|OMP_.*|MKL_NUM_THREADS|KERAS_.*|PATH|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH"
    r"|VIRTUAL_ENV|CONDA_PREFIX|LOADEDMODULES"
)


def collect(environ: Mapping[str, str]) -> Facts:
    """Look at everything; what takes long goes on at the same time."""
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
        return Facts(
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
            engines=("native", "horovod"),
            transports=_TRANSPORTS,
            machine=replace(machine.result(), trial=trial.result(), srun=srun.result()),
            environ={name: value for name, value in environ.items() if _SHOWN.fullmatch(name)},
        )


def read_machine(environ: Mapping[str, str], folder: str) -> Machine:
    """See what is quickly seen of the machine. folder: for node-shared memory."""
    return Machine(
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
