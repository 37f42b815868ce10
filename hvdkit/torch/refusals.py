"""Errors of collectives for arguments without numbers to send: lists, sparse, nested and meta tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hvdkit.errors import HvdkitError


def refuse(error: Exception, call: str, *args: Any, **kwargs: Any) -> None:
    """Raise TypeError in place of Python's or torch's `error` if the arguments of the call caused it.

    The first argument of the call is a tensor, or a sequence of tensors.
    """
    if isinstance(error, (AttributeError, RuntimeError)) and not isinstance(error, HvdkitError):
        given = args[0] if args else kwargs.get("tensor", kwargs.get("tensors"))
        check_numbers(given if isinstance(given, (list, tuple)) and call.startswith("grouped") else [given], call)


def check_numbers(tensors: Iterable[Any], call: str) -> None:
    """Raise TypeError for an object that is not a tensor with numbers to send."""
    for each in tensors:
        if problem := _problem(each):
            raise TypeError(f"{call}() takes {problem}") from None


def _problem(given: Any) -> str | None:
    if not isinstance(given, torch.Tensor):
        return (
            f"torch tensors, not {type(given).__name__}. Pass torch.tensor(...) of it; Python objects go through "
            "hvd.allgather_object() and hvd.broadcast_object()."
        )
    if given.is_nested:
        return "no nested tensors. Pass their components, tensor.unbind(), to a grouped call, or tensor.values()."
    if given.layout is not torch.strided:
        return (
            f"dense tensors, and this one is sparse ({given.layout}). Use hvd.sparse_allreduce_async() for the sum or "
            "the average of sparse COO tensors, or pass tensor.to_dense()."
        )
    if given.is_meta:
        return "tensors that have numbers, and this one is on the meta device. Fill it on a real device before."
    return None
