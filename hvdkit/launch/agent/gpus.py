"""The GPUs that a rank sees, and the CPUs near each. Read from /proc and /sys, as nvidia-smi may take seconds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_DRIVER, _DEVICES = Path("/proc/driver/nvidia/gpus"), Path("/sys/bus/pci/devices")
#: With these, numbers in CUDA_VISIBLE_DEVICES may count the GPUs of the job instead of those of the host.
_SLURM = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS")


def read_gpus(environ: Mapping[str, str], driver: Path = _DRIVER, devices: Path = _DEVICES) -> list[list[str]]:
    """List [PCI bus id, CPUs near it, as "0-31"] of each GPU, in CUDA's order; both "" where the order is not known.

    environ: of the rank. Empty if the rank sees none, if the driver shows none here, or with CUDA_VISIBLE_DEVICES that
    names parts of GPUs (MIG) or one twice.
    """
    try:
        folders = sorted(driver.iterdir())
    except OSError:
        return []
    details = [_read(folder / "information") for folder in folders]
    gpus = [[folder.name, _read(devices / folder.name.lower() / "local_cpulist")] for folder in folders]
    uuids = [_find("GPU UUID", text) for text in details]
    alike = len({_find("Model", text) for text in details}) == 1  # else CUDA begins with the fastest
    ordered = alike or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if any(name in environ for name in _SLURM) or not ordered:
        gpus = [["", ""] for _ in folders]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    words = [word.strip() for word in visible.split(",")]
    if "MIG-" in visible or len(set(words)) < len(words):
        return []
    found = []
    for word in words:
        by_uuid = [at for at, uuid in enumerate(uuids) if word.startswith("GPU-") and uuid.startswith(word)]
        at = by_uuid[0] if by_uuid else int(word) if re.fullmatch("[0-9]{1,3}", word) else len(gpus)
        if at >= len(gpus):
            break  # CUDA ignores an entry that is invalid, and all after it
        found.append(gpus[at])
    return found


def _find(name: str, text: str) -> str:
    found = re.search(rf"^{name}:\s*(.*?)\s*$", text, re.MULTILINE)
    return found[1] if found else ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
