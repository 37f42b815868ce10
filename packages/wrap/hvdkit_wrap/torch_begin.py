"""Wrap optimizers before they use their first gradient, and broadcast rank 0's models to all ranks."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

import hvdkit.torch as hvd
from hvdkit.torch import DistributedOptimizer, init
from hvdkit_wrap import torch_models, torch_steps
from hvdkit_wrap.places import user_callsite
from hvdkit_wrap.session import active, current

#: Optimizers that are not wrapped yet.
_pending: list[weakref.ref[torch.optim.Optimizer]] = []
#: Wrapped optimizers.
_wrapped: list[weakref.ref[torch.optim.Optimizer]] = []
_alike: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_watch: RemovableHandle | None = None


def join() -> None:
    """Call init(), unless this rank has done so."""
    if not hvd.is_initialized():
        init()
        current().size = hvd.size()


def watch() -> None:
    """Record every new optimizer, and wrap it right before its first use."""
    init, zero_grad = torch.optim.Optimizer.__init__, torch.optim.Optimizer.zero_grad

    def __init__(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if active():
            _note(self)

    def zeroed(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        begin()
        zero_grad(self, *args, **kwargs)

    torch.optim.Optimizer.__init__ = __init__  # type: ignore[method-assign]
    torch.optim.Optimizer.zero_grad = zeroed  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: begin())


def optimizers() -> list[Any]:
    """Return the optimizers that still exist: the wrapped ones and then the others, each in the order of creation."""
    return [one for one in (held() for held in (*_wrapped, *_pending)) if one is not None]


def is_training() -> bool:
    """Does training follow? That is so if gradients are recorded and an optimizer has a model in training mode."""
    if not active() or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    there = optimizers()
    roots = torch_models.trained_roots(there)
    return bool(there) and (not roots or any(module.training for root in roots for module in root.modules()))


def begin() -> None:
    """Wrap the optimizers made since the last call, and broadcast rank 0's models; collective."""
    global _watch
    if not _pending or not active() or not torch.is_grad_enabled():
        return
    made = [one for one in (held() for held in _pending) if one is not None]
    _pending.clear()
    if _watch is not None:
        _watch.remove()
        _watch = None
    join()
    if current().settings.batch_norm == "all":
        _join_batch_norms(made)
    for optimizer in made:
        DistributedOptimizer(optimizer, torch_models.names_of(optimizer))
        torch_steps.watch(optimizer)
        _wrapped.append(weakref.ref(optimizer))
    _make_alike(made)
    _tell(made)


def _note(optimizer: torch.optim.Optimizer) -> None:
    global _watch
    optimizer._hvdkit_line = user_callsite()  # type: ignore[attr-defined]
    _pending.append(weakref.ref(optimizer))
    if _watch is None:
        _watch = register_module_forward_pre_hook(lambda module, inputs: begin())


def _join_batch_norms(made: list[Any]) -> None:
    kinds = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
    for root in torch_models.trained_roots(made):
        for module in root.modules():
            if type(module) in kinds:
                module.__class__ = hvd.SyncBatchNorm


def _make_alike(made: list[Any]) -> None:
    """Broadcast models, parameters that belong to no model, and optimizer state (from a checkpoint, for example)."""
    new = [root for root in torch_models.roots() if root not in _alike]
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    for at, root in enumerate(new):
        _alike.add(root)
        for name, tensor in torch_models.tensors_of(root):
            tensors.setdefault(id(tensor), (f"{type(root).__name__}.{at}.{name}", tensor))
    for at, optimizer in enumerate(made):
        for name, parameter in torch_models.names_of(optimizer):
            tensors.setdefault(id(parameter), (f"optimizer.{at}.{name}", parameter))
    hvd.broadcast_parameters(list(tensors.values()))
    for optimizer in made:
        owned = [one for group in optimizer.param_groups for one in group["params"]]
        without = [one for one in owned if one.grad is None]
        hvd.broadcast_optimizer_state(optimizer)
        for one in without:  # the gradient of zeros that it creates would change momentum and apply weight decay
            one.grad = None


def _tell(made: list[Any]) -> None:
    say, session = current().report.say, current()
    say("ranks", hvd.describe())
    for optimizer in made:
        say("optimizer", f"{type(optimizer).__name__} at {optimizer._hvdkit_line}: steps on the gradients of all ranks")
    names = [type(root).__name__ for root in torch_models.trained_roots(made)]
    held = ", ".join(names) or "parameters"
    say("state", f"{held} and optimizer state of rank 0, broadcast to all ranks before the first step")
    norms = [
        module
        for root in torch_models.trained_roots(made)
        for module in root.modules()
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
    ]
    if norms:
        joined = session.settings.batch_norm == "all"
        say(
            "batch",
            "batch normalization uses the rows of all ranks"
            if joined
            else "batch normalization uses the rows of each rank, unlike one process; see --wrap-batch-norm",
        )
    say("output", "only rank 0 prints, shows progress and writes with torch.save; every rank writes files from open()")
    say(
        "metrics",
        "loss.item() is the loss of the whole batch; other values from a split batch, its number of rows and sums of "
        "correct answers too, are of the rows of rank 0: divide them by rows counted in the same loop",
    )
