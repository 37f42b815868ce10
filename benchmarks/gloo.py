"""torch's own collectives between the ranks that hvdkit knows, to compare with."""

from __future__ import annotations

import os
import tempfile

import torch.distributed as dist

import hvdkit.torch as hvd


def join_gloo() -> None:
    """Let torch.distributed have the same ranks; collective."""
    path = hvd.broadcast_object(os.path.join(tempfile.mkdtemp(), "store") if hvd.rank() == 0 else "")
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=hvd.rank(), world_size=hvd.size())
