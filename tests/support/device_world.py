"""Training by process groups of torch: Gloo's, on tensors of the CPU, in place of an accelerator's."""

from __future__ import annotations

from typing import Any
from unittest import mock

from torch_world import Case, Weights, train_on_ranks

from hvdkit.torch.device.buckets import TorchBuckets

#: Settings of init() under which only a process group of torch will do.
TORCH = {"device_transport": "torch"}


def train_on_devices(case: Case, **more: Any) -> Weights:
    """See train_on_ranks: with buckets that a process group of torch has reduced."""
    with mock.patch.object(TorchBuckets, "begin", autospec=True, side_effect=TorchBuckets.begin) as begun:
        weights = train_on_ranks(case, "auto", {**TORCH, **more.pop("settings", {})}, **more)
    assert begun.call_count >= case.steps
    return weights
