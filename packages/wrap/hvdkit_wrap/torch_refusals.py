"""Refuse scripts that already train on several ranks, because --wrap would average gradients twice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

import hvdkit.torch as hvd
from hvdkit.startup.after_import import after_import
from hvdkit_wrap.places import called_from_hvdkit
from hvdkit_wrap.refusal import refuse
from hvdkit_wrap.session import active

_CURE = "Start it with its own launcher, or let `hvdkit migrate` rewrite it for hvdkit."
_OWN = "Start it with hvdrun without --wrap."


def watch() -> None:
    """Patch the functions of distributed training to raise WrapError when the script calls them."""
    several = "the script calls torch.distributed.init_process_group(), so it already trains on several ranks"
    if torch.distributed.is_available():
        _refuse(torch.distributed, "init_process_group", several, _CURE)
    parallel = torch.nn.parallel.DistributedDataParallel
    _refuse(
        parallel,
        "__init__",
        "the script uses DistributedDataParallel, which also averages gradients over the ranks",
        _CURE,
    )
    _refuse(hvd, "init", "the script calls hvd.init(), so it already uses hvdkit", _OWN)
    _refuse(hvd, "DistributedOptimizer", "the script calls hvd.DistributedOptimizer(), so it already uses hvdkit", _OWN)
    after_import("torch.distributed.fsdp", _refuse_fsdp)


def _refuse_fsdp(module: ModuleType) -> None:
    _refuse(
        module.FullyShardedDataParallel,
        "__init__",
        "the script uses FullyShardedDataParallel, which also averages gradients over the ranks",
        _CURE,
    )


def _refuse(owner: Any, name: str, what: str, cure: str) -> None:
    plain: Callable[..., Any] = getattr(owner, name)

    def refusing(*args: Any, **kwargs: Any) -> Any:
        if active() and not called_from_hvdkit() and sys.is_finalizing() is False:
            raise refuse(what, cure)
        return plain(*args, **kwargs)

    setattr(owner, name, refusing)
