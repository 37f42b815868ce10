"""Samples for this rank: samplers for `torch.utils.data.DataLoader`, as `hvd.data`."""

from __future__ import annotations

from hvdkit.torch.data.balanced import BalancedSampler
from hvdkit.torch.data.sharded import SamplerState, ShardedSampler

__all__ = ["BalancedSampler", "SamplerState", "ShardedSampler"]
