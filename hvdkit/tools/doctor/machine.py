"""What can be seen of a machine and its place in the network, as data."""

from __future__ import annotations

from dataclasses import dataclass

#: A limit that is none.
UNLIMITED = -1


@dataclass(frozen=True)
class Interface:
    """An IPv4 address of a network interface. prefix: bits of its network. mbit: 0 if the driver does not tell."""

    name: str
    address: str
    prefix: int
    up: bool = True
    loopback: bool = False
    bridge: bool = False
    mbit: int = 0


@dataclass(frozen=True)
class Network:
    """How a host sees itself. addresses: what its own name leads to, () if to nothing; localhost: of that name."""

    addresses: tuple[str, ...] = ()
    localhost: tuple[str, ...] = ()
    interfaces: tuple[Interface, ...] = ()


@dataclass(frozen=True)
class Limits:
    """Soft limits of this process, UNLIMITED or a number: bytes of locked memory, files, processes."""

    memlock: int = UNLIMITED
    nofile: int = UNLIMITED
    nproc: int = UNLIMITED


@dataclass(frozen=True)
class Cpu:
    """cores: of the machine. allowed: those that this process may use. quota: of time, in cores; 0 for none."""

    cores: int = 0
    allowed: tuple[int, ...] = ()
    quota: float = 0.0


@dataclass(frozen=True)
class Leftover:
    """A file in shared memory that nobody uses any more."""

    path: str
    bytes: int
    age_s: float


@dataclass(frozen=True)
class SharedMemory:
    """The folder for node-shared memory. total_bytes: -1 if it is not there. filesystem: its kind, best tmpfs."""

    folder: str = "/dev/shm"
    total_bytes: int = -1
    free_bytes: int = -1
    filesystem: str = ""
    leftovers: tuple[Leftover, ...] = ()


@dataclass(frozen=True)
class Clock:
    """now: seconds since 1970. newest: when the newest of hvdkit's own files was written."""

    now: float = 0.0
    newest: float = 0.0


@dataclass(frozen=True)
class Fabrics:
    """Fast networks. infiniband, slingshot: their devices. nccl_plugins: libraries that NCCL could load for them."""

    infiniband: tuple[str, ...] = ()
    slingshot: tuple[str, ...] = ()
    nccl_plugins: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trial:
    """Two ranks, tried. mpirun: what started them. sizes: of the world, as each saw it; error: why there are not two.

    kinds: of srun, what it offers for --mpi.
    """

    mpirun: str = ""
    sizes: tuple[int, ...] = ()
    error: str = ""
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Port:
    """A port that MASTER_PORT names. free: nothing listens there on this host."""

    number: int = 0
    free: bool = True


@dataclass(frozen=True)
class Machine:
    """All of them. trial: of the mpirun on PATH; srun: of that, in an allocation. prefix_filesystem: Python's."""

    network: Network = Network()
    limits: Limits = Limits()
    cpu: Cpu = Cpu()
    shared: SharedMemory = SharedMemory()
    clock: Clock = Clock()
    fabrics: Fabrics = Fabrics()
    trial: Trial = Trial()
    srun: Trial = Trial()
    port: Port = Port()
    prefix_filesystem: str = ""
