"""Change environment variables of this process before a framework is loaded."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence

from hvdkit.gpu_vendors import NVIDIA, Folders, Gpu, Vendor, list_gpus
from hvdkit.visible_gpus import read_visible


def disable_in_children() -> None:
    """Disable --wrap in the Python processes that this rank starts."""
    os.environ["HVDKIT_WRAP"] = "0"


def plan_visible_gpu(visible: str | None, count: int, local_rank: int | None) -> str | None:
    """Choose the only GPU that this rank sees, so that "cuda" and "cuda:0" mean the same; None changes nothing.

    visible: CUDA_VISIBLE_DEVICES, None if it is not set. count: GPUs of this host, 0 if unknown.
    """
    seen = [gpu.word for gpu in read_visible(visible, [""] * count or None).gpus]
    if local_rank is None or len(seen) < 2:
        return None
    return seen[local_rank % len(seen)]


def plan_shown_gpu(
    vendor: Vendor, gpus: Sequence[Gpu], environ: Mapping[str, str], local_rank: int | None
) -> tuple[str, str] | None:
    """Choose the only GPU of AMD or Intel that this rank sees; None changes nothing.

    vendor, gpus: of this host. environ: the variables, which may show fewer. Returns the variable and its value: the
    number of the GPU among those that the vendor's variables before this one leave.
    """
    seen = vendor.select(environ, gpus).gpus
    if local_rank is None or len(seen) < 2:
        return None
    name, _, form = vendor.shows.partition("=")
    before = {key: value for key, value in environ.items() if key not in (name, NVIDIA.variable)}
    number = vendor.select(before, gpus).gpus.index(seen[local_rank % len(seen)])
    return name, form.format(number)


def show_one_gpu(local_rank: int | None) -> str | None:
    """Set the vendor's variable so that this rank sees one GPU of several; returns its value, None if nothing was set.

    It is CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES or ONEAPI_DEVICE_SELECTOR.
    """
    vendor, gpus = list_gpus(Folders(), os.environ)
    if vendor is not NVIDIA:
        shown = plan_shown_gpu(vendor, gpus, os.environ, local_rank)
        os.environ.update([shown] if shown else [])
        return shown[1] if shown else None
    count = len([path for path in glob.glob("/dev/nvidia*") if path.removeprefix("/dev/nvidia").isdigit()])
    chosen = plan_visible_gpu(os.environ.get("CUDA_VISIBLE_DEVICES"), count, local_rank)
    if chosen is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = chosen
    return chosen
