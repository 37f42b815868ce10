"""GPUs, from the kernel's files by the table of vendors, and from the vendors' tools where those lack them."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdkit.gpu_vendors import AMD, INTEL, NVIDIA, Folders, Vendor, list_gpus
from hvdkit.gpu_vendors import Gpu as ListedGpu
from hvdkit.launch.agent.host_info import SYSTEM, Cpu, divide_near, format_cpus, read_topology
from hvdkit.launch.process import run_program
from hvdkit.tools.doctor.facts import Gpu
from hvdkit.tools.installed import find_package, find_version

_TOOL_S = 10.0
#: Vendor -> arguments of its tool that list models and the driver's version as JSON.
_ARGUMENTS = {AMD.name: ("static", "--asic", "--driver", "--json"), INTEL.name: ("discovery", "-j")}
#: Files that a process has to open to use GPUs.
_DOORS = {AMD.name: "dev/kfd", INTEL.name: "dev/dri/renderD*"}
_LEVEL_ZERO = ("usr/lib64", "usr/lib/x86_64-linux-gnu")


@dataclass(frozen=True)
class VendorGpus:
    """GPUs and their software.

    driver, runtime: versions, "" if unknown. error: why the tool failed. denied: a device file. library: the path of
    the vendor's collectives, "" if unknown. library_version: its version, if the path or the package has it.
    """

    gpus: tuple[Gpu, ...]
    driver: str = ""
    runtime: str = ""
    error: str = ""
    denied: str = ""
    library: str = ""
    library_version: str = ""


def read_vendor_gpus(
    vendor: Vendor, listed: Sequence[ListedGpu], environ: Mapping[str, str], root: Path = Path("/")
) -> VendorGpus:
    """Collect facts about GPUs that the kernel lists; the tool is called if their models or the driver are unknown.

    vendor: of the GPUs.
    listed: the GPUs.
    environ: the variables, for the tool.
    root: of the folders of the system.
    """
    gpus = describe_gpus(listed, read_cpus(listed))
    driver = _read(root / vendor.driver.lstrip("/"))
    names: dict[str, str] = {}
    error = ""
    if not driver or any(gpu.name == f"{vendor.name} GPU" or "GPU 0x" in gpu.name for gpu in gpus):
        names, version, error = _ask_tool(vendor, environ)
        driver = driver or version
    gpus = tuple(replace(gpu, name=names.get(gpu.bus) or names.get(str(gpu.index)) or gpu.name) for gpu in gpus)
    runtime, library = _read_runtime(vendor, environ, root), _find_library(vendor, environ, root)
    return VendorGpus(gpus, driver, runtime, error, _find_denied(vendor, root), *library)


def read_cpus(listed: Sequence[ListedGpu], system: Path = SYSTEM) -> tuple[Cpu, ...]:
    """Look up the CPUs that are online, if any GPU names those near it."""
    try:
        online = (system / "cpu/online").read_text() if any(gpu.cpus for gpu in listed) else ""
    except OSError:
        online = ""
    numbers = [range(int(first), int(last or first) + 1) for first, last in re.findall(r"(\d+)(?:-(\d+))?", online)]
    return read_topology([number for each in numbers for number in each], system)


def describe_gpus(listed: Sequence[ListedGpu], cpus: Sequence[Cpu]) -> tuple[Gpu, ...]:
    """Describe GPUs with the cores that each would have if a rank ran on each of them; cpus: of the host."""
    near = [gpu.cpus for gpu in listed]
    shares = divide_near(cpus, near, "core") if all(near) and cpus else None
    own = [format_cpus(share.cpus) for share in shares] if shares else [""] * len(listed)
    return tuple(
        Gpu(gpu.number, gpu.uuid, gpu.model, gpu.memory_bytes, gpu.used_bytes, gpu.bus, gpu.part, gpu.cpus, share)
        for gpu, share in zip(listed, own, strict=True)
    )


def describe_selection(environ: Mapping[str, str], folders: Folders) -> dict[str, str | None]:
    """Describe the GPUs that variables show to this process, as the fields `visible` and `chosen` of a Rank."""
    vendor, listed = list_gpus(folders, environ)
    if vendor is NVIDIA or not vendor.find_set(environ):
        return {"visible": environ.get(NVIDIA.variable) if vendor is NVIDIA else None, "chosen": ""}
    seen = [gpu.place for gpu in vendor.select(environ, listed).gpus if gpu is not None]
    return {"visible": ",".join(seen), "chosen": vendor.describe_selection(environ)}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _ask_tool(vendor: Vendor, environ: Mapping[str, str]) -> tuple[dict[str, str], str, str]:
    """Ask the vendor's tool for models, by address or number, and the driver's version; also why it has no answer."""
    program = shutil.which(vendor.program, path=environ.get("PATH", os.defpath))
    if not program or vendor.name not in _ARGUMENTS:
        return {}, "", ""
    result = run_program([program, *_ARGUMENTS[vendor.name]], environ=environ, timeout_s=_TOOL_S)
    if result.status is None:
        return {}, "", f"{vendor.program} did not answer within {_TOOL_S:g} s"
    if result.status:
        line = next((line.strip() for line in result.output.splitlines() if line.strip()), "nothing")
        return {}, "", f"{vendor.program} printed {line!r}, {result.ending}"
    names, driver = parse_amd_smi(result.stdout) if vendor is AMD else (parse_xpu_smi(result.stdout), "")
    return names, driver, ""


def parse_amd_smi(text: str) -> tuple[dict[str, str], str]:
    """Parse `amd-smi static --asic --driver --json`: model by number of the GPU, and the driver's version.

    Newer versions print an object with the list in place of the list.
    """
    found = _parse(text)
    records = found.get("gpu_data", ()) if isinstance(found, dict) else found
    names, driver = {}, ""
    for record in records if isinstance(records, list) else ():
        if isinstance(record, dict):
            names[str(record.get("gpu"))] = _take(record, "asic", "market_name")
            driver = driver or _take(record, "driver", "version")
    return names, driver


def parse_xpu_smi(text: str) -> dict[str, str]:
    """Parse `xpu-smi discovery -j`: model by PCI address."""
    found = _parse(text)
    records = found.get("device_list", ()) if isinstance(found, dict) else ()
    known = [record for record in records if isinstance(record, dict)] if isinstance(records, list) else []
    return {str(record.get("pci_bdf_address")): str(record.get("device_name") or "") for record in known}


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _take(record: Mapping[str, object], part: str, name: str) -> str:
    inner = record.get(part)
    value = inner.get(name) if isinstance(inner, dict) else None
    return value if isinstance(value, str) and value != "N/A" else ""


def _read_runtime(vendor: Vendor, environ: Mapping[str, str], root: Path) -> str:
    """Read the version of ROCm, or of Intel's Level Zero driver; "" if unknown."""
    if vendor is AMD:
        folder = Path(environ["ROCM_PATH"]) if environ.get("ROCM_PATH") else root / "opt/rocm"
        version = _read(folder / ".info/version")
        return f"ROCm {version}" if version else ""
    if vendor is INTEL:
        names = sorted(path.name for folder in _LEVEL_ZERO for path in root.glob(f"{folder}/libze_intel_gpu.so.1.*"))
        return f"Level Zero driver {names[-1].partition('.so.')[2]}" if names else ""
    return ""


def _find_library(vendor: Vendor, environ: Mapping[str, str], root: Path) -> tuple[str, str]:
    """Find RCCL, torch's own first, or oneCCL; returns its path and its version, "" if unknown."""
    if vendor is AMD:
        own = find_package("torch", "torch/lib")
        folders = [own, Path(environ.get("ROCM_PATH") or root / "opt/rocm") / "lib"]
        found = [path for folder in folders if folder for path in sorted(folder.glob("librccl.so*"))]
        return (str(found[0]) if found else ""), ""
    if vendor is INTEL:
        module = environ.get("CCL_ROOT", "")
        version = re.search(r"[0-9]+(\.[0-9]+)+", module)
        return module, find_version("oneccl") or (version[0] if version else "")
    return "", ""


def _find_denied(vendor: Vendor, root: Path) -> str:
    """Find the device file that this user may not open; "" if one of them can be opened, or none exists."""
    paths = sorted(root.glob(_DOORS[vendor.name])) if vendor.name in _DOORS else []
    if not paths or any(os.access(path, os.R_OK | os.W_OK) for path in paths):
        return ""
    return str(paths[0])
