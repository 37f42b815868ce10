"""A table of GPU vendors: how to list the GPUs of a host, and which of them the variables show to a process.

Lists come from /sys and /proc, without a vendor's library or tool. hvdrun's agent loads this file on every host.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdkit.visible_gpus import read_visible


class Gpu(NamedTuple):
    """A GPU as the vendor's runtime counts them: an MI250X is two, and a card of Intel's one for each tile in FLAT.

    number: its number in the runtime's order, without variables that select. bus: its PCI address. part: the number of
    the tile or partition of a card that is several; -1 for a whole card. uuid: its name in the vendor's variable; ""
    if unknown. model: the vendor's name for it. memory_bytes, used_bytes: 0 if unknown. node: its NUMA node; -1 if
    unknown. cpus: the CPUs near it, as "0-31"; "" if unknown.
    """

    number: int
    bus: str
    part: int = -1
    uuid: str = ""
    model: str = ""
    memory_bytes: int = 0
    used_bytes: int = 0
    node: int = -1
    cpus: str = ""

    @property
    def place(self) -> str:
        """A name that no other GPU of the host has."""
        return self.bus if self.part < 0 else f"{self.bus}/{self.part}"


class Visible(NamedTuple):
    """The GPUs that variables show to a process.

    gpus: in the order in which the runtime then numbers them; None for a part of a GPU (MIG). variable: the variable
    that the next two are about. invalid: its word that names no GPU; None if there is none. repeated: its word that
    names a GPU again; None if there is none.
    """

    gpus: tuple[Gpu | None, ...]
    variable: str = ""
    invalid: str | None = None
    repeated: str | None = None


class Folders(NamedTuple):
    """Folders of the kernel. devices: of PCI devices. kfd: of AMD's compute driver. nvidia: of NVIDIA's driver."""

    devices: Path = Path("/sys/bus/pci/devices")
    kfd: Path = Path("/sys/class/kfd/kfd/topology/nodes")
    nvidia: Path = Path("/proc/driver/nvidia/gpus")

    @classmethod
    def under(cls, root: Path) -> Folders:
        """Return the folders of a tree that was recorded on another machine."""
        return cls(*(root / folder.relative_to("/") for folder in cls()))


class Vendor(NamedTuple):
    """How GPUs of a vendor are listed and selected.

    name: the vendor's.
    variables: that select GPUs, in the order in which they apply; the first one is the one to use.
    list_gpus: lists the GPUs that this process can reach, from folders and variables (Intel's change the count).
    select: chooses those that variables show.
    shows: an assignment that shows GPUs, with {} for their numbers, to processes of a scheduler such as Ray.
    hides: an assignment that hides all GPUs from the frameworks.
    program: the vendor's tool.
    library: the vendor's collectives.
    sharing: what becomes of two ranks on one GPU there.
    driver: the file with the driver's version.
    job_numbers: may a scheduler's numbers in the variable count the GPUs of the job where the folders show all?
    """

    name: str
    variables: tuple[str, ...]
    list_gpus: Callable[[Folders, Mapping[str, str]], tuple[Gpu, ...]]
    select: Callable[[Mapping[str, str], Sequence[Gpu]], Visible]
    shows: str
    hides: str
    program: str
    library: str
    sharing: str
    driver: str
    job_numbers: bool

    @property
    def variable(self) -> str:
        """The first variable that selects."""
        return self.variables[0]

    def find_set(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Find the vendor's variables that are set."""
        return {name: environ[name] for name in self.variables if name in environ}

    def describe_selection(self, environ: Mapping[str, str]) -> str:
        """Write the variables that are set as in a shell, or which one is not set."""
        chosen = " ".join(f"{name}={value!r}" for name, value in self.find_set(environ).items())
        return chosen or f"{self.variable} is not set"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _read_number(path: Path, unknown: int = 0) -> int:
    text = _read(path)
    return int(text) if re.fullmatch(r"-?[0-9]{1,19}", text) else unknown


def _list_folders(folder: Path, pattern: str = "*") -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def _describe_device(device: Path) -> dict[str, int | str]:
    """Read what the kernel's PCI code knows of any device (kernel documentation, sysfs-bus-pci)."""
    return {"node": _read_number(device / "numa_node", -1), "cpus": _read(device / "local_cpulist")}


# NVIDIA


def _list_nvidia(folders: Folders, environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """List NVIDIA's GPUs by PCI address, which is CUDA's order where all are one model."""
    found = []
    for number, folder in enumerate(_list_folders(folders.nvidia)):
        text = _read(folder / "information")
        uuid, model = _find_field("GPU UUID", text), _find_field("Model", text)
        device = folders.devices / folder.name.lower()
        found.append(Gpu(number, folder.name, uuid=uuid, model=model, **_describe_device(device)))  # type: ignore[arg-type]
    return tuple(found)


def _find_field(name: str, text: str) -> str:
    found = re.search(rf"^{name}:\s*(.*?)\s*$", text, re.MULTILINE)
    return found[1] if found else ""


def _select_nvidia(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> Visible:
    seen = read_visible(environ.get("CUDA_VISIBLE_DEVICES"), [gpu.uuid for gpu in gpus])
    chosen = tuple(None if one.number is None else gpus[one.number] for one in seen.gpus)
    return Visible(chosen, "CUDA_VISIBLE_DEVICES", seen.invalid, seen.repeated)


# AMD

#: GPUs of a host that all have less memory than this are those of a desktop's processor.
_LEAST_BYTES = 4 * 2**30


def _list_amd(folders: Folders, environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """List AMD's GPUs in the order of the compute driver's nodes, which is that of ROCr (amd_topology.cpp).

    Each GCD of an MI250X and each partition of an MI300 is a node. A process whose control group denies it a GPU cannot
    read that node's properties (kfd_topology.c), and ROCr does not count the node either: so numbers that Slurm gives
    count what is listed here.
    """
    nodes = [folder for folder in _list_folders(folders.kfd) if folder.name.isdecimal()]
    texts = [_read(folder / "properties") for folder in sorted(nodes, key=lambda folder: int(folder.name))]
    known = [{key: int(value) for key, value in re.findall(r"^(\w+) ([0-9]+)$", text, re.MULTILINE)} for text in texts]
    cards = [node for node in known if node.get("simd_count")]  # the others are CPUs
    buses = [_name_bus(node.get("domain", 0), node.get("location_id", 0)) for node in cards]
    found = []
    for number, (node, bus) in enumerate(zip(cards, buses, strict=True)):
        device, several = folders.devices / bus, buses.count(bus) > 1
        gpu = Gpu(
            number,
            bus,
            buses[:number].count(bus) if several else -1,
            f"GPU-{node['unique_id']:016x}" if node.get("unique_id") else "",
            _read(device / "product_name") or "AMD GPU",
            _read_number(device / "mem_info_vram_total"),
            _read_number(device / "mem_info_vram_used"),
            **_describe_device(device),  # type: ignore[arg-type]
        )
        found.append(gpu)
    small = bool(found) and all(0 < gpu.memory_bytes < _LEAST_BYTES for gpu in found)
    return () if small else tuple(found)


def _name_bus(domain: int, location: int) -> str:
    """Write a PCI address from the driver's numbers; the bits above the lowest 16 number a partition."""
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def _select_amd(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> Visible:
    """Apply ROCR_VISIBLE_DEVICES, and to what is left HIP_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES.

    ROCm documentation, GPU isolation; rules of ROCr (amd_filter_device.cpp) and HIP (rocdevice.cpp): HIP reads
    CUDA_VISIBLE_DEVICES where HIP_VISIBLE_DEVICES is empty, and an empty value hides nothing.
    """
    seen = Visible(tuple(gpus), "ROCR_VISIBLE_DEVICES")
    if "ROCR_VISIBLE_DEVICES" in environ:
        seen = _filter_amd("ROCR_VISIBLE_DEVICES", environ["ROCR_VISIBLE_DEVICES"], gpus)
    name = "HIP_VISIBLE_DEVICES" if environ.get("HIP_VISIBLE_DEVICES") else "CUDA_VISIBLE_DEVICES"
    if not environ.get(name):
        return seen
    left = [gpu for gpu in seen.gpus if gpu is not None]
    chosen = _filter_amd(name, environ[name], left)
    faulty = chosen if seen.invalid is seen.repeated is None else seen
    return faulty._replace(gpus=chosen.gpus)


def _filter_amd(name: str, value: str, gpus: Sequence[Gpu]) -> Visible:
    """Take GPUs by number or beginning of the UUID. A wrong word ends the list; in ROCR a repeated one does too."""
    chosen: list[Gpu] = []
    repeated = None
    for word in (part.strip() for part in value.split(",")) if value else ():
        if word.upper().startswith("GPU-"):
            named = [gpu for gpu in gpus if gpu.uuid.upper().startswith(word.upper())]
        else:
            number = int(word) if re.fullmatch(r"[0-9]{1,9}", word) else -1
            named = list(gpus[number : number + 1]) if number >= 0 else []
        if len(named) != 1:
            return Visible(tuple(chosen), name, invalid=word)
        if named[0] not in chosen:
            chosen.append(named[0])
            continue
        repeated = word
        if name == "ROCR_VISIBLE_DEVICES":
            break
    return Visible(tuple(chosen), name, repeated=repeated)


# Intel

_INTEL, _DISPLAY = "0x8086", "0x03"
#: The PCI address of the GPU that is a part of an Intel processor; GPUs in slots are behind a bridge.
_INTEGRATED = "0000:00:02.0"
_MODELS = {"0x0bd5": "Data Center GPU Max 1550", "0x0bda": "Data Center GPU Max 1100"}


def _list_intel(folders: Folders, environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """List Intel's GPUs, without the one of the processor, by PCI address, as the driver does.

    Level Zero specification, device hierarchy: with ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE a card is a device, otherwise,
    and where it is not set, a tile is one. The driver i915 has a folder gt/gt* for each tile, xe a folder tile*.
    """
    cards = [
        device
        for device in _list_folders(folders.devices)
        if (device / "drm").is_dir()
        and _read(device / "vendor") == _INTEL
        and _read(device / "class").startswith(_DISPLAY)
        and device.name != _INTEGRATED
    ]
    flat = environ.get("ZE_FLAT_DEVICE_HIERARCHY") != "COMPOSITE"
    found: list[Gpu] = []
    for device in cards:
        tiles = _list_folders(device, "tile[0-9]*") or _list_folders(device, "drm/card*/gt/gt[0-9]*")
        parts = max(1, len(tiles)) if flat else 1
        patterns = ("drm/card*/lmem_total_bytes", "tile[0-9]*/physical_vram_size_bytes")
        sizes = [path for pattern in patterns for path in _list_folders(device, pattern)]
        for part in range(parts):
            gpu = Gpu(
                len(found),
                device.name,
                part if parts > 1 else -1,
                model=f"Intel {_MODELS.get(_read(device / 'device'), 'GPU ' + _read(device / 'device'))}",
                memory_bytes=sum(map(_read_number, sizes)) // parts,
                **_describe_device(device),  # type: ignore[arg-type]
            )
            found.append(gpu)
    return tuple(found)


def _select_intel(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> Visible:
    """Apply ZE_AFFINITY_MASK, and to what is left ONEAPI_DEVICE_SELECTOR.

    Level Zero specification, affinity mask, and Intel's driver (execution_environment.cpp): the order stays that of the
    driver, words that name no GPU are skipped, and card.tile is known with COMPOSITE only. An empty mask hides nothing.
    """
    mask = environ.get("ZE_AFFINITY_MASK", "")
    flat = environ.get("ZE_FLAT_DEVICE_HIERARCHY") != "COMPOSITE"
    chosen, invalid = {gpu.number for gpu in gpus}, None
    if mask and mask != "default":
        chosen = set()
        for word in (part.strip() for part in mask.split(",")):
            found = re.fullmatch(r"([0-9]{1,9})(\.[0-9]{1,9})?", word)
            if found and int(found[1]) < len(gpus) and not (flat and found[2]):
                chosen.add(int(found[1]))
            else:
                invalid = word if invalid is None else invalid
    left = tuple(gpu for gpu in gpus if gpu.number in chosen)
    numbers = _read_selector(environ.get("ONEAPI_DEVICE_SELECTOR", ""), len(left))
    kept = tuple(gpu for number, gpu in enumerate(left) if number in numbers)
    return Visible(kept, "ZE_AFFINITY_MASK", invalid=invalid)


def _read_selector(text: str, count: int) -> set[int]:
    """Read the numbers of Level Zero's GPUs in a selector such as "level_zero:0,1" (oneAPI, environment variables)."""
    everything = set(range(count))
    terms = [term.strip().lower() for term in text.split(";") if term.strip()]
    accepted = [term.partition(":") for term in terms if not term.startswith("!")]
    if not accepted:
        return everything
    found: set[int] = set()
    for backend, _, devices in accepted:
        for word in devices.split(",") if backend in ("level_zero", "*") else ():
            if word in ("gpu", "*"):
                found |= everything
            elif number := re.match(r"[0-9]{1,9}", word):
                found.add(int(number[0]))
    return found


NVIDIA = Vendor(
    name="NVIDIA",
    variables=("CUDA_VISIBLE_DEVICES",),
    list_gpus=_list_nvidia,
    select=_select_nvidia,
    shows="CUDA_VISIBLE_DEVICES={}",
    hides="CUDA_VISIBLE_DEVICES=''",
    program="nvidia-smi",
    library="NCCL",
    sharing="NCCL refuses two ranks on one GPU",
    driver="/sys/module/nvidia/version",
    job_numbers=True,
)
AMD = Vendor(
    name="AMD",
    variables=("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    list_gpus=_list_amd,
    select=_select_amd,
    shows="HIP_VISIBLE_DEVICES={}",
    hides="ROCR_VISIBLE_DEVICES=''",
    program="amd-smi",
    library="RCCL",
    sharing="RCCL refuses two ranks on one GPU",
    driver="/sys/module/amdgpu/version",
    job_numbers=False,
)
INTEL = Vendor(
    name="Intel",
    variables=("ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY", "ONEAPI_DEVICE_SELECTOR"),
    list_gpus=_list_intel,
    select=_select_intel,
    shows="ONEAPI_DEVICE_SELECTOR=level_zero:{}",
    hides="ONEAPI_DEVICE_SELECTOR=opencl:cpu",
    program="xpu-smi",
    library="oneCCL",
    sharing="oneCCL is made for one rank on each GPU",
    driver="/sys/module/i915/version",
    job_numbers=True,
)
#: In the order in which a host is searched: GPUs of the first vendor that has some are used.
VENDORS = (NVIDIA, AMD, INTEL)
#: All variables that select GPUs.
VARIABLES = tuple(dict.fromkeys(name for vendor in VENDORS for name in vendor.variables))


def find_vendor(name: str) -> Vendor:
    """Find a vendor by its name; NVIDIA for a name that is not in the table."""
    return next((vendor for vendor in VENDORS if vendor.name == name), NVIDIA)


def list_gpus(folders: Folders, environ: Mapping[str, str]) -> tuple[Vendor, tuple[Gpu, ...]]:
    """List the GPUs of this host, of the first vendor that has some; NVIDIA and () if none has."""
    for vendor in VENDORS:
        if gpus := vendor.list_gpus(folders, environ):
            return vendor, gpus
    return NVIDIA, ()


#: With these, numbers in a variable may count the GPUs of the job instead of those of the host.
SLURM_NUMBERS = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS")


def knows_order(vendor: Vendor, gpus: Iterable[Gpu], environ: Mapping[str, str]) -> bool:
    """Is it certain which GPU of the host a number in the vendor's variables is?"""
    if vendor.job_numbers and any(name in environ for name in SLURM_NUMBERS):
        return False
    alike = len({gpu.model for gpu in gpus}) == 1  # with different models, CUDA begins with the fastest
    return vendor is not NVIDIA or alike or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def read_seen(vendor: Vendor, gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[list[str]]:
    """List [place, CPUs near it] of each GPU that variables show; both are "" if it is unknown which one it is.

    Empty if the variables show none, parts of GPUs (MIG), or a GPU of NVIDIA's twice.
    """
    certain = knows_order(vendor, gpus, environ)
    seen = vendor.select(environ, gpus).gpus
    named = [[gpu.place, gpu.cpus] if certain else ["", ""] for gpu in seen if gpu is not None]
    return named if len(named) == len(seen) else []
