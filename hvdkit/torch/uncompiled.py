"""Code that torch.compile is to leave alone: what talks to other ranks, and what autograd calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """The function, for torch.compile to call as it is, with all that it calls in turn.

    A compiled function may contain a whole training step. Traced, hvdkit's part of that fails, or leaves out what it
    does to other objects. Calling this loads the compiler, which takes seconds: only where an optimizer has done so.
    """
    left_alone: Function = torch.compiler.disable(function)
    # By this torch 2.4 finds the function of a method, and would call it without its object.
    vars(left_alone).pop("_torchdynamo_orig_callable", None)
    return left_alone
