"""Change environment variables of this process before a framework is loaded."""

from __future__ import annotations

import glob
import os

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


def show_one_gpu(local_rank: int | None) -> str | None:
    """Set CUDA_VISIBLE_DEVICES as plan_visible_gpu chooses; returns its choice."""
    count = len([path for path in glob.glob("/dev/nvidia*") if path.removeprefix("/dev/nvidia").isdigit()])
    chosen = plan_visible_gpu(os.environ.get("CUDA_VISIBLE_DEVICES"), count, local_rank)
    if chosen is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = chosen
    return chosen
