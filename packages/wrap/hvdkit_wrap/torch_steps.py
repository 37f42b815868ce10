"""Hooks around each step of a wrapped optimizer: the learning rate, the closure, and a check of gradients."""

from __future__ import annotations

from typing import Any

import torch

import hvdkit.torch as hvd
from hvdkit.training.schedules import warmup_multiplier
from hvdkit_wrap import torch_progress, torch_weights
from hvdkit_wrap.refusal import refuse
from hvdkit_wrap.session import active, current


def watch(optimizer: Any) -> None:
    """Install the hooks before and after each step of this optimizer."""
    if optimizer._hvdkit is not None:
        optimizer._hvdkit.weigh_loss = _weigh
    optimizer.register_step_pre_hook(_before)
    optimizer.register_step_post_hook(_after)
    optimizer._hvdkit_passes = torch_weights.passes


def average_plateaus() -> None:
    """Give ReduceLROnPlateau the average of the ranks' metrics, so that all ranks have the same learning rate."""
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau
    plain = scheduler.step

    def step(self: Any, metrics: Any, *args: Any, **kwargs: Any) -> None:
        if active() and hvd.is_initialized():
            told = hvd.allgather_object(float(metrics), name="wrap.plateau")
            metrics = sum(told) / len(told)
        plain(self, metrics, *args, **kwargs)

    scheduler.step = step  # type: ignore[method-assign]


def _before(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not active():
        return
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        _check_gradients(optimizer)
    factor = rate_factor()
    if factor != 1.0:
        optimizer._hvdkit_rates = [group.get("lr") for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            if group.get("lr") is not None:
                group["lr"] = group["lr"] * factor


def _after(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not active():
        return
    for group, rate in zip(optimizer.param_groups, optimizer.__dict__.pop("_hvdkit_rates", ()), strict=False):
        group["lr"] = rate
    session = current()
    if not session.report.shown:
        if session.multiplies:
            factor = f"the script's times {session.rate_factor:.4g} ({session.settings.rate}) during each step"
            warmup = f", after a warm-up of {session.settings.warmup:g} epochs" if session.settings.warmup else ""
            session.report.say("learning rate", factor + warmup + "; the script reads its own values")
        else:
            session.report.say("learning rate", "the script's, as all ranks together train on its batches")
        if not torch_progress.begun():
            session.report.say(
                "data",
                "not split, because no batch came from a DataLoader: every rank trains on all rows, and more ranks "
                "gain nothing. Read the data by a DataLoader",
            )
        session.report.show(here=session.shows_table)


def rate_factor() -> float:
    """Return the factor of the learning rate in this step."""
    session = current()
    if session.rate_factor == 1.0:
        return 1.0
    return session.rate_factor * warmup_multiplier(
        torch_progress.epoch(), factor=session.rate_factor, warmup_epochs=session.settings.warmup
    )


def _check_gradients(optimizer: Any) -> None:
    """Raise WrapError for gradients that no backward pass computed: they are of this rank's rows only."""
    if optimizer._hvdkit_passes != torch_weights.passes or not torch_weights.is_split():
        optimizer._hvdkit_passes = -1
        return
    if any(one.grad is not None for group in optimizer.param_groups for one in group["params"]):
        raise refuse(
            "optimizer.step() uses gradients that backward() did not compute (for example from torch.autograd.grad()), "
            "and each rank has computed them from its own rows",
            "Use loss.backward(), or run `hvdkit migrate` on the script and average them with hvd.allreduce().",
        )


def _weigh(loss: Any) -> Any:
    """Multiply the loss of a closure by the weight of its gradients, because DistributedOptimizer averages both."""
    if loss is None or not active() or not torch_weights.is_split():
        return loss
    weight = torch_weights.weight_of(loss) if isinstance(loss, torch.Tensor) and loss.grad_fn is not None else 1.0
    return torch.as_tensor(loss).detach() * weight
