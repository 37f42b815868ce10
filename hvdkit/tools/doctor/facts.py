"""The facts of a host, as data."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from hvdkit.gpu_vendors import NVIDIA
from hvdkit.launch.plan.network import InterfaceAddress

T = TypeVar("T")

#: The value of an unlimited resource.
UNLIMITED = -1


@dataclass(frozen=True)
class HostNetwork:
    """The addresses of a host.

    addresses: addresses to which its own name resolves there, () for none.
    localhost: addresses to which localhost resolves.
    interfaces: IPv4 addresses, that of the loopback interface first; () if the system does not list them.
    loopback_up: is the loopback interface up?
    """

    addresses: tuple[str, ...] = ()
    localhost: tuple[str, ...] = ()
    interfaces: tuple[InterfaceAddress, ...] = ()
    loopback_up: bool = True


@dataclass(frozen=True)
class ResourceLimits:
    """Soft limits of this process, UNLIMITED or a number: bytes of locked memory, files, processes."""

    memlock: int = UNLIMITED
    nofile: int = UNLIMITED
    nproc: int = UNLIMITED


@dataclass(frozen=True)
class CpuFacts:
    """Cores of the machine. allowed: cores that this process may use. quota: of time, in cores; 0 for none."""

    cores: int = 0
    allowed: tuple[int, ...] = ()
    quota: float = 0.0


@dataclass(frozen=True)
class Leftover:
    """A file in shared memory that no process uses any more."""

    path: str
    bytes: int
    age_s: float


@dataclass(frozen=True)
class SharedMemory:
    """The folder for node-shared memory.

    folder: its path.
    total_bytes: its size; -1 if it does not exist.
    free_bytes: free bytes.
    filesystem: its type, ideally tmpfs.
    leftovers: files that no process uses any more.
    """

    folder: str = "/dev/shm"
    total_bytes: int = -1
    free_bytes: int = -1
    filesystem: str = ""
    leftovers: tuple[Leftover, ...] = ()


@dataclass(frozen=True)
class Clock:
    """The clock. now: seconds since 1970. newest: when the newest of hvdkit's own files was written."""

    now: float = 0.0
    newest: float = 0.0


@dataclass(frozen=True)
class FastNetworks:
    """Fast networks. infiniband, slingshot: their devices. nccl_plugins: libraries that NCCL could load for them."""

    infiniband: tuple[str, ...] = ()
    slingshot: tuple[str, ...] = ()
    nccl_plugins: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trial:
    """A trial start of two ranks.

    mpirun: the program that started them.
    sizes: size of the world as each rank reported it.
    error: the reason if two ranks did not report.
    kinds: the values that srun offers for --mpi.
    """

    mpirun: str = ""
    sizes: tuple[int, ...] = ()
    error: str = ""
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Port:
    """The port of MASTER_PORT. free: no process listens there on this host."""

    number: int = 0
    free: bool = True


@dataclass(frozen=True)
class MachineFacts:
    """The machine.

    network: its addresses.
    limits: soft limits of this process.
    cpu: its cores.
    shared: the folder for node-shared memory.
    clock: its clock.
    fabrics: its fast networks.
    trial: two ranks, started with the mpirun on PATH.
    srun: two ranks, started with srun in an allocation.
    port: the port of MASTER_PORT.
    prefix_filesystem: type of the file system of Python's prefix.
    """

    network: HostNetwork = HostNetwork()
    limits: ResourceLimits = ResourceLimits()
    cpu: CpuFacts = CpuFacts()
    shared: SharedMemory = SharedMemory()
    clock: Clock = Clock()
    fabrics: FastNetworks = FastNetworks()
    trial: Trial = Trial()
    srun: Trial = Trial()
    port: Port = Port()
    prefix_filesystem: str = ""


#: Names of the kinds of MPI, and of other launchers, for messages.
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

    mpi4py: its version, "" if it is not installed.
    library: its version text, in one line; "" if none was loaded.
    kind: open_mpi, mpich, intel_mpi, cray_mpich, mvapich, or "" for an unknown one.
    path: path of the file.
    standard: the version of the MPI standard.
    threads: the thread level that it started with, "" if it did not start.
    error: why it was not loaded, or did not start.
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
        """Its name with its version: "MPICH 5.0.2"; "" if none was loaded."""
        version = _VERSION.search(self.library)
        if self.kind not in KIND_NAMES or version is None:
            return self.library.partition(",")[0][:60]
        return f"{KIND_NAMES[self.kind]} {version[1]}"


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks.

    name: its name on PATH.
    path: its path.
    kind, version: as it prints them; "" if it prints none.
    error: the reason for which it prints none.
    """

    name: str
    path: str
    kind: str = ""
    version: str = ""
    error: str = ""


@dataclass(frozen=True)
class HvdrunMpi:
    """The mpirun that hvdrun uses, or the reason for which it has none.

    site: it is outside of this Python environment.
    """

    mpirun: str = ""
    kind: str = ""
    name: str = ""
    version: str = ""
    site: bool = False
    library: str = ""
    error: str = ""


@dataclass(frozen=True)
class Horovod:
    """The installed Horovod; version is "" if it is not installed.

    version: its version.
    folder: its folder.
    bindings: the frameworks for which it has a library.
    built_for: framework -> the version for which the library was compiled.
    parts: the built-in features, out of mpi, gloo, nccl, cuda, rocm, ccl, ddl.
    loaded: the bindings that could be loaded.
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
    """A GPU as its driver shows it.

    used_bytes: memory in use by all processes; 0 if unknown.
    bus: its PCI address; "" if unknown.
    part: the number of the tile or partition, see hvdkit.gpu_vendors.Gpu.
    cpus: the CPUs near it, as "0-31"; "" if unknown.
    share: those of a rank on it, if a rank runs on each GPU of the host.
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int
    used_bytes: int = 0
    bus: str = ""
    part: int = -1
    cpus: str = ""
    share: str = ""


@dataclass(frozen=True)
class Accelerators:
    """GPUs, and the libraries for them.

    gpus: all GPUs of the host, also those that the variables hide.
    vendor: the vendor's name in hvdkit.gpu_vendors.
    devices: files in /dev that show that the host has GPUs.
    driver: its version.
    driver_cuda: the newest CUDA that the driver runs, "" if unknown.
    error: why the driver's tool does not work.
    visible: CUDA_VISIBLE_DEVICES, None if not set; other vendors' variables are in HostFacts.environ.
    nccl, nccl_path: NCCL's version, if known, and its path; RCCL's or oneCCL's where GPUs are of AMD or Intel.
    nccl_error: why it cannot be loaded.
    nccl_wheels: the installed wheels of NCCL, with their versions.
    cuda_home: folder of a toolkit.
    torch_cuda: the CUDA for which torch was built, "" for a build for CPUs.
    cuda_of: the same for TensorFlow and JAX, by name, if installed.
    runtime: name and version of the runtime of another vendor's GPUs, "" if unknown.
    denied: the device file that this user may not open, "" if there is none.
    torch_other: "hip" and "xpu" -> the version for which torch was built.
    """

    gpus: tuple[Gpu, ...] = ()
    vendor: str = NVIDIA.name
    devices: tuple[str, ...] = ()
    driver: str = ""
    driver_cuda: str = ""
    error: str = ""
    visible: str | None = None
    nccl: str = ""
    nccl_path: str = ""
    nccl_error: str = ""
    nccl_wheels: Mapping[str, str] = field(default_factory=dict)
    cuda_home: str = ""
    torch_cuda: str = ""
    cuda_of: Mapping[str, str] = field(default_factory=dict)
    runtime: str = ""
    denied: str = ""
    torch_other: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HostFacts:
    """All facts of one host and one Python environment.

    packages: name -> version of the relevant packages that are installed.
    keras_backend, keras_backend_origin: the backend of Keras, and the origin of that setting.
    settings: hvdkit's settings, name -> value.
    settings_error: why they cannot be read.
    environ: the relevant variables.
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
    machine: MachineFacts = field(default_factory=MachineFacts)
    environ: Mapping[str, str] = field(default_factory=dict)


def decode(kind: type[T], data: Mapping[str, Any]) -> T:
    """Build a dataclass from decoded JSON; unknown fields are ignored, missing fields get their defaults."""
    hints = get_type_hints(kind)
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: _build_field(hints[name], value) for name, value in data.items() if name in known})


def _build_field(hint: Any, value: Any) -> Any:
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
        return decode(hint, value)
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        inner = get_args(hint)[0]
        return tuple(_build_field(inner, item) for item in value)
    if get_origin(hint) in (Union, types.UnionType) and value is not None:
        return _build_field(next(choice for choice in get_args(hint) if choice is not type(None)), value)
    return value
