"""Exclusion from torch.compile of code that communicates with other ranks or that autograd calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Return the function in a form that torch.compile calls without tracing it, or its callees.

    A compiled function may contain a whole training step. Tracing hvdkit's code in it fails, or omits its effects on
    other objects. This call loads the compiler, which takes seconds: call it only if an optimizer has loaded it.
    """
    left_alone: Function = torch.compiler.disable(function)
    # torch 2.4 finds a method's function by this attribute, and would call it without its object.
    vars(left_alone).pop("_torchdynamo_orig_callable", None)
    return left_alone
