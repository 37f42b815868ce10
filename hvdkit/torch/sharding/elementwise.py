"""Check that an optimizer updates each element independently, so that a rank may step on a shard of a parameter."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import torch

from hvdkit.torch.picklable_as_plain import own_class

#: Known by their definitions: every state has the parameter's shape, or is a number shared by all elements.
_KNOWN = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD")
)
_SHAPE, _STEPS = (4, 6), 3


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer that uses tensors as a whole (LARS, LAMB, Muon, Adafactor, L-BFGS, ...).

    Optimizers not from torch are tested: three steps on a small matrix, and on its elements as two vectors.
    """
    kind = type(optimizer)
    if kind in _KNOWN:
        return
    for group in optimizer.param_groups:
        try:
            differs = _differs(optimizer, group)
        except Exception as error:  # of any kind: it is another library's code
            why = f"it cannot step on a piece of a parameter ({type(error).__name__}: {error})"
        else:
            if not differs:
                continue
            why = "its step on a matrix differs from its steps on the same elements as two vectors"
        raise ValueError(
            f"DistributedOptimizer(): shard= needs an optimizer that treats every element by itself, as SGD, AdamW or "
            f"RMSprop do, and {kind.__name__} does not: {why}. Leave out shard, or use such an optimizer."
        )


def _differs(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_SHAPE, generator=generator)
    gradients = [torch.randn(_SHAPE, generator=generator) for _ in range(_STEPS)]
    whole = _run(optimizer, group, [start.clone()], [[gradient] for gradient in gradients])
    cut = start.numel() // 3
    sizes = [cut, start.numel() - cut]
    pieces = [part.clone() for part in start.view(-1).split(sizes)]
    parts = _run(optimizer, group, pieces, [list(gradient.view(-1).split(sizes)) for gradient in gradients])
    moved = not torch.equal(whole[0], start)
    return not moved or not torch.allclose(whole[0].view(-1), torch.cat(parts), rtol=1e-5, atol=1e-7)


def _run(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    values: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
) -> list[torch.Tensor]:
    """Return the values after steps of an optimizer of the same class and options.

    optimizer: to be imitated.
    group: its options.
    values: initial values.
    gradients: of each step.
    """
    parameters = [torch.nn.Parameter(value) for value in values]
    trial = _imitate(optimizer, group, parameters)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        _step(trial)
    return [parameter.detach() for parameter in parameters]


def _imitate(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Make an optimizer of the same own class, without state and hooks. options: of the group of `parameters`."""
    group = {**options, "params": parameters}
    if isinstance(group.get("lr"), (int, float)):
        group["lr"] = 0.1  # a warm-up may begin with 0
    trial = object.__new__(own_class(optimizer))
    trial.__dict__.update(vars(optimizer))
    hooks = {name: collections.OrderedDict[int, Any]() for name in vars(optimizer) if name.endswith("_hooks")}
    trial.__dict__.update({**hooks, "state": collections.defaultdict(dict), "param_groups": [group]})
    return trial


def _step(trial: torch.optim.Optimizer) -> None:
    """Step without torch's hooks for the steps of all optimizers, which may count them."""
    step = type(trial).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(trial)


def find_entries(optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> dict[str, str]:
    """Find what an optimizer of this class keeps of a parameter, by a step on a small one.

    options: of the parameter's group.
    Returns a kind by name: "elementwise" for a tensor of the parameter's shape, "number" for a tensor of one number,
    "other". Empty for an optimizer that cannot step here, as one for GPUs only.
    """
    on_host = {name: False for name in ("capturable", "foreach", "fused") if options.get(name)}
    parameter = torch.nn.Parameter(torch.ones(_SHAPE))
    parameter.grad = torch.ones(_SHAPE)
    try:
        trial = _imitate(optimizer, {**options, **on_host}, [parameter])
        _step(trial)
        state = dict(trial.state[parameter])
    except Exception:  # of any kind: it may be another library's code
        return {}
    return {name: _kind_of(value) for name, value in state.items()}


def _kind_of(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "other"
    return "elementwise" if tuple(value.shape) == _SHAPE else "number" if value.numel() == 1 else "other"
