"""TorchGradientSink: stores this rank's gradient shards, for shard="gradients" (ZeRO-2)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from hvdkit.engine.groups import Group
from hvdkit.engine.named.operation import Action
from hvdkit.engine.named.submit import collective_step
from hvdkit.engine.planned.source import OwnTensors
from hvdkit.torch.sharding.gradient import ShardedGradient
from hvdkit.torch.sharding.slices import Slice
from hvdkit.torch.sharding.state import flatten
from hvdkit.torch.tensors import as_tensor
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import Buffer, as_buffer


class TorchGradientSink:
    """See GradientSink. Gradients are freed after they were copied; `grad` is a ShardedGradient after the reduction."""

    in_place = False

    def __init__(self) -> None:
        self._source: OwnTensors | None = None
        self._group: Group | None = None
        self._name = ""
        self._slices: dict[int, list[Slice]] = {}  # by bucket
        self._gradients: list[ShardedGradient] = []  # gradients of all parameters
        self._norms: dict[float, dict[str, torch.Tensor]] = {}

    def divide(self, source: OwnTensors, slices: Sequence[Slice], name: str, group: Group) -> None:
        """Receive the gradients of these slices from now on.

        source: of the gradients.
        slices: of this rank.
        name: of the optimizer, the same on all ranks.
        group: the ranks among which the gradients are divided.
        """
        self._source, self._name, self._group = source, name, group
        self._slices.clear()
        pieces: dict[torch.nn.Parameter, list[torch.Tensor]] = {}
        for one in slices:
            one.received = torch.empty(one.count, dtype=one.owner.dtype, device=one.owner.device)
            self._slices.setdefault(one.piece.bucket, []).append(one)
            pieces.setdefault(one.owner, []).append(one.received)
        self._gradients = [
            ShardedGradient(parameter, spec.name, pieces.get(parameter, ()), self)
            for parameter, spec in zip(source.parameters, source.tensors, strict=True)
        ]

    def restore(self, gradients: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """Accept whole gradients that were reduced before the parameters were divided anew."""
        for slices in self._slices.values():
            for one in slices:
                if one.owner in gradients and one.received is not None:
                    flat = flatten(gradients[one.owner], one.layout.strides)
                    one.received.copy_(flat[one.piece.elements])
        assert self._source is not None
        for index, parameter in enumerate(self._source.parameters):
            if parameter in gradients:
                parameter.grad = self._gradients[index]

    def release(self, tensor: int) -> None:
        """See GradientSink.release. A gradient of an earlier round stays, as in torch, until zero_grad()."""
        if self._source is not None and not isinstance(self._source.parameters[tensor].grad, ShardedGradient):
            self._source.release(tensor)

    def receive(self, bucket: int, memory: Buffer) -> None:
        """See GradientSink.receive."""
        numbers = as_tensor(memory)
        for one in self._slices.get(bucket, ()):
            assert one.received is not None
            if isinstance(one.owner.grad, ShardedGradient):
                continue
            one.received.copy_(numbers[one.piece.in_bucket])

    def received(self, unused: Collection[int]) -> None:
        """See GradientSink.received."""
        self.changed()
        assert self._source is not None
        for index, parameter in enumerate(self._source.parameters):
            if index not in unused:
                parameter.grad = self._gradients[index]

    def norm(self, gradient: ShardedGradient, order: float) -> torch.Tensor:
        """See WholeGradients.norm. Raises ValueError for an order that is neither above 0 nor infinite."""
        if not order > 0:
            raise ValueError(f'With shard="gradients" norms of an order above 0 are known, not of {order}.')
        if order not in self._norms:
            self._norms[order] = self._find_norms(order)
        return self._norms[order][gradient.owner]

    def _find_norms(self, order: float) -> dict[str, torch.Tensor]:
        """Compute the norms of all gradients, in one message; collective."""
        infinite = math.isinf(order)
        sums = np.zeros(len(self._gradients))
        for at, gradient in enumerate(self._gradients):
            for piece in gradient.pieces:
                found = float(
                    torch.linalg.vector_norm(piece.to(torch.promote_types(piece.dtype, torch.float32)), order)
                )
                sums[at] = max(sums[at], found) if infinite else sums[at] + found**order
        if infinite:  # a maximum may lose nan
            sums = np.where(np.isnan(sums), np.inf, sums)

        def reduce(transport: Transport, _: Sequence[int]) -> None:
            transport.allreduce(as_buffer(sums), "max" if infinite else "sum")

        self._together("gradient_norm", reduce)
        norms = sums if infinite else sums ** (1 / order)
        return {one.owner: torch.tensor(norm) for one, norm in zip(self._gradients, norms, strict=True)}

    def changed(self) -> None:
        """See WholeGradients.changed."""
        self._norms.clear()

    def spread(self, found: torch.Tensor) -> None:
        """See WholeGradients.spread."""
        number = np.array([found.item()], np.float32)

        def reduce(transport: Transport, _: Sequence[int]) -> None:
            transport.allreduce(as_buffer(number), "max")

        self._together("found_inf", reduce)
        found.fill_(float(number[0]))

    def _together(self, kind: str, action: Action) -> None:
        assert self._group is not None
        collective_step(self._group.engine, kind, action, name=self._name)
