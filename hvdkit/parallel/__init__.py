"""Models that do not fit into one GPU: `from hvdkit import parallel`, for PyTorch.

This folder contains the arithmetic of meshes and stages. Functions on torch's modules are in hvdkit.torch.parallel, and
are imported from there on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdkit.torch.parallel import (
        Mesh,
        Pipeline,
        clip_grad_norm_,
        init,
        load,
        loss_parallel,
        pipeline,
        recompute,
        save,
        shard,
        tensor_parallel,
    )

__all__ = [
    "Mesh",
    "Pipeline",
    "clip_grad_norm_",
    "init",
    "load",
    "loss_parallel",
    "pipeline",
    "recompute",
    "save",
    "shard",
    "tensor_parallel",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hvdkit.parallel' has no attribute {name!r}")
    return getattr(importlib.import_module("hvdkit.torch.parallel"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
