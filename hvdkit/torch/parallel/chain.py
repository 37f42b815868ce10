"""A model as a chain of modules: their selection, the check against the model, and the time that each takes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hvdkit.engine import runtime as engine
from hvdkit.engine.job_objects import broadcast_object
from hvdkit.errors import ParallelError
from hvdkit.parallel.patterns import select
from hvdkit.torch.device.accelerator import module_of

_RUNS = 3


def find_parts(model: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """Return the names of the chain's parts. patterns: in the chain's order; None for the children, and those of lists.

    Raises ParallelError for a pattern without a module, for a part that is named twice, and for parameters in no part.
    """
    if patterns is None:
        names = list(_expand(model, ""))
    else:
        known = [name for name, _ in model.named_modules() if name]
        names = [name for pattern in patterns for name in select("pipeline(parts=...)", [pattern], known)]
    inside = {id(parameter) for name in names for parameter in model.get_submodule(name).parameters()}
    outside = [name for name, parameter in model.named_parameters() if id(parameter) not in inside]
    if outside or len({*names}) < len(names):
        what = f"{outside[0]} is in none of them" if outside else "one of them is named twice"
        raise ParallelError(
            f"pipeline(): the parts of the chain are {', '.join(names)}, but {what}. Put every parameter into a module "
            "that takes one tensor and returns one, and name these with parts=[...] in the order of forward()."
        )
    return names


def _expand(module: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            yield from _expand(child, f"{prefix}{name}.")
        else:
            yield prefix + name


def check_sharing(model: nn.Module, stages: Sequence[Sequence[str]]) -> None:
    """Raise ParallelError for a parameter that two stages share. stages: names of each stage's parts."""
    owners: dict[int, tuple[int, str]] = {}
    for number, names in enumerate(stages):
        for part in names:
            for name, parameter in model.get_submodule(part).named_parameters(part, remove_duplicate=False):
                owner, other = owners.setdefault(id(parameter), (number, name))
                if owner != number:
                    raise ParallelError(
                        f"pipeline(): {other} of stage {owner} and {name} of stage {number} are one parameter, which "
                        "would be trained twice, differently. Give the layers parameters of their own (untie them)."
                    )


def measure(
    model: nn.Module, names: Sequence[str], example: torch.Tensor, costs: Sequence[float] | None
) -> list[float]:
    """Return the costs of the parts, the same on all ranks; collective.

    model: the whole model.
    names: of its parts.
    example: inputs of a micro-batch.
    costs: the user's; None to measure seconds on rank 0.

    Raises ParallelError, on all ranks, if the chain of the parts does not return the model's result.
    """
    if costs is not None:
        if len(costs) != len(names) or min(costs) < 0:
            raise ParallelError(
                f"pipeline(costs=...) must hold a number of 0 or more for each of the {len(names)} parts: "
                f"{', '.join(names)}. It holds {list(costs)}."
            )
        return [float(cost) for cost in costs]
    answer: list[float] | str = ""
    if engine.runtime("pipeline()").world.rank == 0:
        parts = [model.get_submodule(name) for name in names]
        buffers = [buffer.clone() for buffer in model.buffers()]  # the measurement must not change running averages
        try:
            with torch.random.fork_rng():
                answer = _check_chain(model, parts, names, example) or _time_parts(parts, example)
        except Exception as error:  # the other ranks wait for an answer
            answer = (
                f"pipeline(): rank 0 cannot run forward and backward of the parts ({type(error).__name__}: {error}). "
                "Give their costs with costs=[...], or correct the model."
            )
        finally:
            with torch.no_grad():
                for buffer, before in zip(model.buffers(), buffers, strict=True):
                    buffer.copy_(before)
    answer = broadcast_object(answer, 0, "parallel.costs")
    if isinstance(answer, str):
        raise ParallelError(answer)
    return answer


def _check_chain(model: nn.Module, parts: Sequence[nn.Module], names: Sequence[str], example: torch.Tensor) -> str:
    """Describe why the model is not the chain of these parts; "" if it is."""
    training = {module: module.training for module in model.modules()}
    problem, at = "", -1  # -1 is the model itself
    model.eval()
    try:
        with torch.no_grad():
            expected: Any = model(example)
            value, at = example, 0
            for part in parts:
                value, at = part(value), at + 1
        problem = _difference(value, expected)
    except Exception as error:
        seen = f"({type(error).__name__}: {error})"
        if at < 0:
            return f"pipeline(): the model does not take the example, whose shape is {tuple(example.shape)} {seen}."
        problem = f"{names[at]} does not take what comes before it {seen}"
    finally:
        for module, was in training.items():
            module.training = was
    return problem and (
        f"pipeline(): the model does not do what its parts {', '.join(names)} do one after the other: {problem}. Write "
        "forward() as such a chain, each part with one tensor in and out, and name the parts with parts=[...] in "
        "its order."
    )


def _difference(value: Any, expected: Any) -> str:
    """Describe how the parts' result differs from the model's; "" for equal results."""
    for what, result in (("the model", expected), ("the last part", value)):
        if not isinstance(result, torch.Tensor):
            return f"{what} returns a {type(result).__name__}, not a tensor"
    if value.shape != expected.shape:
        return f"their result has the shape {tuple(value.shape)}, the model's has {tuple(expected.shape)}"
    if value.dtype != expected.dtype:
        return f"their result is of {value.dtype}, the model's of {expected.dtype}"
    if not torch.allclose(value, expected, rtol=1e-4, atol=1e-5):
        return f"their results differ by up to {(value - expected).abs().max().item():.3g}"
    return ""


def _time_parts(parts: Sequence[nn.Module], example: torch.Tensor) -> list[float]:
    """Measure the seconds of forward and backward of each part; returns the smallest of several runs."""
    seconds = []
    value = example
    for part in parts:
        wanted = [parameter for parameter in part.parameters() if parameter.requires_grad]
        best = float("inf")
        for _ in range(_RUNS):
            entry = value.detach().requires_grad_(value.is_floating_point())
            _wait(value)
            begin = time.perf_counter()
            result = part(entry)
            if result.requires_grad:
                targets = [*wanted, *([entry] if entry.requires_grad else [])]
                torch.autograd.grad(result, targets, torch.ones_like(result), allow_unused=True)
            _wait(value)
            best = min(best, time.perf_counter() - begin)
        seconds.append(best)
        value = result.detach()
    return seconds


def _wait(value: torch.Tensor) -> None:
    if not value.is_cpu:
        module_of(value.device.type).synchronize(value.device)
