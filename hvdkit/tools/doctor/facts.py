"""What can be seen on a host, as data: nothing here looks, and nothing judges."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdkit.tools.doctor.machine import Machine

#: Kinds of MPI, and of what else starts ranks, as people call them.
KIND_NAMES = {
    "open_mpi": "Open MPI",
    "mpich": "MPICH",
    "intel_mpi": "Intel MPI",
    "cray_mpich": "Cray MPICH",
    "mvapich": "MVAPICH",
    "pals": "Cray PALS",
    "slurm": "Slurm",
    "horovodrun": "Horovod",
    "torchrun": "torch",
}

_VERSION = re.compile(r"(?:version\s*:?\s*|library\s+|\bv)(\d[\w.]*)", re.IGNORECASE)


@dataclass(frozen=True)
class MpiLibrary:
    """The MPI library that mpi4py loads.

    mpi4py: its version, "" if it is not installed. library: what the library says of itself, in one line; "" if none
    was loaded. kind: open_mpi, mpich, intel_mpi, cray_mpich, mvapich, or "" for one that is not known.
    path: of the file. standard: the version of the MPI standard. threads: the level that it started with, "" if it did
    not start. error: why it was not loaded, or did not start.
    """

    mpi4py: str = ""
    library: str = ""
    kind: str = ""
    path: str = ""
    standard: str = ""
    threads: str = ""
    error: str = ""

    @property
    def name(self) -> str:
        """What it is called, with its version: "MPICH 5.0.2"; "" if none was loaded."""
        version = _VERSION.search(self.library)
        if self.kind not in KIND_NAMES or version is None:
            return self.library.partition(",")[0][:60]
        return f"{KIND_NAMES[self.kind]} {version[1]}"


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks. name: as on PATH. kind, version: as it says; "" if it does not, with the error."""

    name: str
    path: str
    kind: str = ""
    version: str = ""
    error: str = ""


@dataclass(frozen=True)
class HvdrunMpi:
    """The mpirun that hvdrun takes, or why there is none. site: it is not of this Python environment."""

    mpirun: str = ""
    kind: str = ""
    name: str = ""
    version: str = ""
    site: bool = False
    library: str = ""
    error: str = ""


@dataclass(frozen=True)
class Horovod:
    """Horovod as it is installed; version is "" if it is not.

    bindings: the frameworks whose library is there. built_for: framework -> the version it was compiled for.
    parts: of mpi, gloo, nccl, cuda, rocm, ccl, ddl, those that are built in. loaded: the bindings that could be loaded.
    errors: framework -> why its binding could not be loaded.
    """

    version: str = ""
    folder: str = ""
    bindings: tuple[str, ...] = ()
    built_for: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    loaded: tuple[str, ...] = ()
    errors: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver shows it."""

    index: int
    uuid: str
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Accelerators:
    """GPUs, and the libraries for them.

    gpus: all of the host, also those that the variables hide. devices: files in /dev that say there are GPUs.
    driver: its version. error: why the driver's tool does not answer. visible: CUDA_VISIBLE_DEVICES, None if not set.
    nccl, nccl_path: the version, if known, and where it is. cuda_home: of a toolkit. torch_cuda: for which CUDA torch
    was built, "" for a build for CPUs.
    """

    gpus: tuple[Gpu, ...] = ()
    devices: tuple[str, ...] = ()
    driver: str = ""
    error: str = ""
    visible: str | None = None
    nccl: str = ""
    nccl_path: str = ""
    cuda_home: str = ""
    torch_cuda: str = ""


@dataclass(frozen=True)
class Facts:
    """All of one host and one Python environment.

    packages: name -> version of what matters here, without those that are missing.
    keras_backend, keras_backend_origin: the backend that Keras would take, and what says so.
    settings: of hvdkit, name -> value; settings_error: why they cannot be read. engines, transports: those that this
    hvdkit has. environ: the variables that matter here.
    """

    host: str = ""
    python: str = ""
    executable: str = ""
    prefix: str = ""
    system: str = ""
    hvdkit: str = ""
    hvdkit_folder: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    keras_backend: str = ""
    keras_backend_origin: str = ""
    mpi: MpiLibrary = MpiLibrary()
    launchers: tuple[Launcher, ...] = ()
    hvdrun: HvdrunMpi = HvdrunMpi()
    horovod: Horovod = Horovod()
    accelerators: Accelerators = Accelerators()
    settings: Mapping[str, str] = field(default_factory=dict)
    settings_error: str = ""
    engines: tuple[str, ...] = ()
    transports: tuple[str, ...] = ()
    machine: Machine = field(default_factory=Machine)
    environ: Mapping[str, str] = field(default_factory=dict)
