"""The gradients of a list of parameters, on their way into the engine's buckets and back."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from hvdkit.engine.buckets import Slot, TensorSpec
from hvdkit.engine.planned import PlannedReduction, Statistics
from hvdkit.engine.progress import has_spare_core
from hvdkit.engine.request import ReduceOptions
from hvdkit.engine.runtime import Runtime
from hvdkit.torch import staging
from hvdkit.torch.tensors import as_tensor, dtype_name
from hvdkit.transport.base import Buffer, Transport

Named = Sequence[tuple[str, torch.nn.Parameter]]
_Seen = list[tuple[Slot, torch.Tensor]]


class GradientPlan:
    """Dense gradients in buckets: copied out when a bucket starts, back into `parameter.grad` when it is reduced.

    transport: between the ranks that train together. named: (name, parameter), in the order in which all ranks have
    them. touched: indices of the parameters whose gradient autograd has written since the last reduction; kept by the
    owner.
    Opened by all ranks together; raises PlanMismatchError where their parameters differ.
    """

    def __init__(
        self,
        made: Runtime,
        transport: Transport,
        named: Named,
        *,
        options: ReduceOptions,
        touched: Collection[int],
        statistics: Statistics,
    ) -> None:
        self._parameters = [parameter for _, parameter in named]
        self._strides = [_strides(parameter) for parameter in self._parameters]
        self._touched = touched
        self._fills: dict[int, _Seen] = {}
        self._drains: dict[int, _Seen] = {}
        self._sparse: set[int] = set()  # parameters whose gradient was made dense for this round
        self._pinned = staging.PinnedMemory()
        devices = list(dict.fromkeys(parameter.device for parameter in self._parameters))
        self._moving = PlannedReduction(
            transport,
            [
                TensorSpec(name, one.numel(), dtype_name(one), devices.index(one.device), _layout(one))
                for name, one in named
            ],
            self,
            options=options,
            limit_bytes=made.config.fusion_bytes,
            depth=made.config.buckets_in_flight,
            threaded=_threaded(made),
            statistics=statistics,
        )

    def arrived(self, index: int) -> None:
        """The gradient of this parameter is complete."""
        self._moving.arrived(index)

    def started(self, index: int) -> bool:
        """Has this parameter's gradient been sent? It must not be written to before it is back."""
        return self._moving.started(index)

    @property
    def under_way(self) -> bool:
        """Has anything of the present reduction been sent?"""
        return self._moving.under_way

    def finish(self) -> None:
        """Wait until every gradient is reduced; one that another rank had and this one had not appears here as well."""
        self._moving.finish()
        for index in self._sparse:  # an optimizer for sparse gradients takes no others
            gradient = self._parameters[index].grad
            self._parameters[index].grad = gradient.to_sparse(1) if gradient is not None else None
        self._sparse.clear()

    def close(self) -> None:
        """Free the buckets; collective."""
        self._fills.clear()
        self._drains.clear()
        self._pinned.close()
        self._moving.close()
        self._parameters = []  # the plan knows the engine's part and is known by it: both are long in going

    def fill(self, bucket: int, memory: Buffer) -> Collection[int]:
        """See Gradients.fill. Absent are the gradients that autograd has not written since the last reduction."""
        host, device = as_tensor(memory), self._device(bucket)
        staged = staging.is_staged(device)
        flat = torch.empty_like(host, device=device) if staged else host
        absent, sources, targets = set(), [], []
        for slot, view in self._see(bucket, [flat], None if staged else self._fills):
            parameter = self._parameters[slot.tensor]
            if slot.tensor not in self._touched:
                absent.add(slot.tensor)
            if parameter.grad is None:
                view.zero_()
            else:
                sources.append(self._part(parameter, slot))
                targets.append(view)
        _copy(targets, sources)
        if staged:
            self._pinned.add(host)
            host.copy_(flat)
        return absent

    def drain(self, bucket: int, result: Sequence[Buffer], gone: Collection[int]) -> None:
        """See Gradients.drain."""
        flats, device = [as_tensor(piece) for piece in result], self._device(bucket)
        staged = staging.is_staged(device)
        if staged:
            for flat in flats:
                self._pinned.add(flat)
            flats = [flat.to(device, copy=True) for flat in flats]
        sources, targets = [], []
        for slot, view in self._see(bucket, flats, None if staged else self._drains):
            if slot.tensor in gone:
                continue
            parameter = self._parameters[slot.tensor]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            sources.append(view)
            targets.append(self._part(parameter, slot))
        _copy(targets, sources)

    def _device(self, bucket: int) -> torch.device:
        return self._parameters[self._moving.buckets[bucket].slots[0].tensor].device

    def _see(self, bucket: int, flats: list[torch.Tensor], known: dict[int, _Seen] | None) -> _Seen:
        """The bucket's slots, cut where `flats` end, with a view of each: of the parameter's shape, or flat for a part.

        known: what was seen before in the same memory; None for memory that is new each time.
        """
        if known is not None and bucket in known:
            return known[bucket]
        seen = []
        for slot in self._moving.buckets[bucket].slots:
            at, left = 0, True
            for flat in flats:
                first, last = max(slot.start, at), min(slot.stop, at + flat.numel())
                if first < last or (left and first == last == slot.stop):  # an empty tensor is seen once
                    part = Slot(slot.tensor, first, last, slot.offset + first - slot.start)
                    seen.append((part, self._view(flat, first - at, part)))
                    left = False
                at += flat.numel()
        if known is not None:
            known[bucket] = seen
        return seen

    def _view(self, flat: torch.Tensor, start: int, slot: Slot) -> torch.Tensor:
        parameter, count = self._parameters[slot.tensor], slot.stop - slot.start
        if count == parameter.numel():
            return flat.as_strided(parameter.shape, self._strides[slot.tensor], flat.storage_offset() + start)
        return flat[start : start + count]

    def _part(self, parameter: torch.nn.Parameter, slot: Slot) -> torch.Tensor:
        """The slot's elements of the parameter's gradient, sharing memory."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            parameter.grad = gradient = gradient.to_dense()
            self._sparse.add(slot.tensor)
        count = slot.stop - slot.start
        if count == parameter.numel():
            return gradient
        strides = self._strides[slot.tensor]
        if gradient.stride() != strides:
            like = torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device)
            parameter.grad = gradient = like.copy_(gradient)
        return gradient.as_strided((count,), (1,), gradient.storage_offset() + slot.offset)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    with torch.no_grad():
        if len(targets) == 1:
            targets[0].copy_(sources[0])
        elif targets:
            torch._foreach_copy_(targets, sources)


def _threaded(made: Runtime) -> bool:
    if made.config.progress != "auto":
        return made.config.progress == "thread"
    return has_spare_core(local_size=made.world.local_size or 1, compute_threads=torch.get_num_threads())


def _layout(parameter: torch.Tensor) -> str:
    """How a dense parameter's elements follow each other in memory; "" for row by row, as for what is not dense."""
    if parameter.is_contiguous():
        return ""
    for dimensions, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if parameter.dim() == dimensions and parameter.is_contiguous(memory_format=layout):
            return str(layout).removeprefix("torch.")
    return ""


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    if parameter.is_contiguous() or _layout(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()
