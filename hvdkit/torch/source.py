"""Tensor sources: copies of parameters' gradients and values into the engine's buckets and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from hvdkit.engine.planned.plan import Plan, Slot, cut_slots
from hvdkit.engine.planned.source import Filled
from hvdkit.engine.strategy import Parameters
from hvdkit.torch import staging
from hvdkit.torch.conversions import conversion_error
from hvdkit.torch.device.accelerator import Accelerator
from hvdkit.torch.layout import Named, arrange, describe_parameters, strides_of
from hvdkit.torch.local_shards import local_shards
from hvdkit.torch.sharding.gradient import ShardedGradient
from hvdkit.torch.tensors import TensorBuffer, as_buffer, as_tensor
from hvdkit.transport.buckets import InPlaceSegment
from hvdkit.transport.buffer import Buffer


@dataclass(frozen=True)
class _Part:
    """A slot, or a part of it. view: its memory in the bucket. own: only this rank reads it."""

    slot: Slot
    view: torch.Tensor
    own: bool


class _BucketView:
    """A bucket as its parts.

    whole: real-valued parameters that lie in the bucket undivided and are copied, as most small ones are; they are
    processed together to save time in Python. views: of their memory. tensors: their indices. others: the other parts.
    """

    def __init__(self, parts: list[_Part], parameters: Sequence[torch.nn.Parameter]) -> None:
        whole = [one for one in parts if _is_simple(one, parameters)]
        self.parts = parts
        self.whole = [parameters[one.slot.tensor] for one in whole]
        self.views = [one.view for one in whole]
        self.tensors = frozenset(one.slot.tensor for one in whole)
        self.others = [one for one in parts if not _is_simple(one, parameters)]

    def gradients(self) -> list[torch.Tensor] | None:
        """Return the gradients of `whole`; None if one is missing or sparse."""
        found = []
        for parameter in self.whole:
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse:
                return None
            found.append(gradient)
        return found


def _is_simple(part: _Part, parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Return whether it is an undivided, copied, real parameter; complex gradients may be lazily conjugated."""
    slot, parameter = part.slot, parameters[part.slot.tensor]
    return not part.own and slot.stop - slot.start == parameter.numel() and not parameter.is_complex()


class TorchSource:
    """The TensorSource of gradients: copied out when a bucket starts, back to `parameter.grad` when reduced.

    Large segments that this rank itself sums (see Buckets.owned) are not copied: they are reduced where they are.
    Sparse gradients are made dense; restore_sparse() undoes that.

    named: (name, parameter), in the order in which all ranks have them. groups: see number_groups.
    """

    def __init__(self, named: Named, groups: Mapping[int, int]) -> None:
        named = local_shards(named)
        self.parameters = [parameter for _, parameter in named]
        self.tensors = describe_parameters(named, groups)
        #: Indices of the parameters whose gradient was written since the last reduction; kept by the owner.
        self.written: set[int] = set()
        self._plan = Plan((), ())
        #: Strides of each parameter as planned: it may be converted to another memory format later.
        self.strides = [strides_of(parameter) for parameter in self.parameters]
        self._shapes = [parameter.shape for parameter in self.parameters]
        self._views: dict[int, _BucketView] = {}
        #: bucket -> first element -> (address of the gradient, the sent part of it)
        self._in_place: dict[int, dict[int, tuple[int, torch.Tensor]]] = {}
        self._sparse: set[int] = set()  # parameters whose gradient was made dense for this round
        self._pinned = staging.PinnedMemory()

    def dense_gradient(self, index: int) -> torch.Tensor | None:
        """Return the parameter's gradient; a sparse one is made dense in `parameter.grad` first."""
        parameter = self.parameters[index]
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            parameter.grad = gradient = gradient.to_dense()
            self._sparse.add(index)
        return gradient

    def release(self, index: int) -> None:
        """Free the parameter's gradient, which was copied on the current stream; it may belong to another stream."""
        gradient = self.parameters[index].grad
        if gradient is not None and not gradient.is_cpu and not isinstance(gradient, ShardedGradient):
            Accelerator(gradient.device).record_use([gradient])
        self.parameters[index].grad = None
        self._sparse.discard(index)

    def restore_sparse(self) -> None:
        """Make sparse again the gradients that were made dense: optimizers for sparse gradients take no dense ones."""
        for index in self._sparse:
            gradient = self.parameters[index].grad
            self.parameters[index].grad = gradient.to_sparse(1) if gradient is not None else None
        self._sparse.clear()

    def describe(self, name: str) -> Parameters:
        """Describe the parameters for a strategy. name: of their optimizer, the same on all ranks."""
        values = TorchValues(self.parameters, self.strides)
        return Parameters(name, self.tensors, self, values, torch.get_num_threads(), self)

    def on_plan(self, plan: Plan) -> None:
        self._plan = plan
        self._views.clear()
        self._in_place.clear()
        self._pinned.close()

    def fill(self, bucket: int, memory: Buffer, owned: tuple[int, int]) -> Filled:
        device = self._device(bucket)
        if _is_staged(device, memory):
            host = as_tensor(memory)
            flat = torch.empty_like(host, device=device)
            filled = self._fill(bucket, self._view_bucket(bucket, flat, (0, 0)))
            self._pinned.add(host)
            host.copy_(flat)
            return filled
        if bucket not in self._views:  # the memory is the same each time
            self._views[bucket] = self._view_bucket(bucket, as_tensor(memory), owned)
        return self._fill(bucket, self._views[bucket])

    def _fill(self, bucket: int, view: _BucketView) -> Filled:
        unused, segments = set(), []
        in_place = self._in_place[bucket] = {}
        parts, sources, targets = view.others, None, view.views
        if view.tensors <= self.written:
            sources = view.gradients()
        if sources is None:
            parts, sources, targets = view.parts, [], []
        elif parts:
            targets = targets.copy()
        for one in parts:
            slot, parameter = one.slot, self.parameters[one.slot.tensor]
            there = slot.tensor in self.written
            if not there:
                unused.add(slot.tensor)
            if parameter.grad is None or (not there and isinstance(parameter.grad, ShardedGradient)):
                one.view.zero_()
                continue
            gradient = self._part(parameter, slot)
            numbers = self._flat(gradient, slot) if one.own and there else None
            if numbers is not None:
                in_place[slot.start] = parameter.grad.data_ptr(), numbers
                buffer = as_buffer(numbers)
                segments.append(InPlaceSegment(slot.start, buffer, buffer))
            else:
                sources.append(gradient)
                targets.append(one.view)
        self._copy(targets, sources)
        return Filled(frozenset(unused), segments)

    def drain(self, bucket: int, memory: Buffer, globally_unused: Collection[int]) -> None:
        device = self._device(bucket)
        if _is_staged(device, memory):
            host = as_tensor(memory)
            self._pinned.add(host)
            self._drain(bucket, self._view_bucket(bucket, host.to(device, copy=True), (0, 0)), globally_unused)
        else:
            self._drain(bucket, self._views[bucket], globally_unused)

    def _drain(self, bucket: int, view: _BucketView, globally_unused: Collection[int]) -> None:
        in_place = self._in_place.pop(bucket)
        parts, sources, targets = view.others, view.views, None if globally_unused else view.gradients()
        if targets is None:
            parts, sources, targets = view.parts, [], []
        elif parts:
            sources = sources.copy()
        for one in parts:
            slot, parameter = one.slot, self.parameters[one.slot.tensor]
            if slot.tensor in globally_unused:
                continue
            source = one.view
            if slot.start in in_place:
                address, numbers = in_place[slot.start]
                if parameter.grad is not None and parameter.grad.data_ptr() == address:
                    continue
                source = self._view(numbers, 0, slot)  # a hook has replaced the gradient
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            sources.append(source)
            targets.append(self._part(parameter, slot))
        self._copy(targets, sources)

    def _copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        try:
            _copy(targets, sources)
        except RuntimeError:
            for index in range(len(self.parameters)):
                self._check_shape(index)
            raise

    def _check_shape(self, index: int) -> None:
        """Raise ValueError for a parameter whose shape has changed."""
        planned, now = self._shapes[index], self.parameters[index].shape
        if now != planned:
            raise conversion_error(self.tensors[index].name, "shape", planned, now)

    def _is_whole(self, slot: Slot) -> bool:
        return slot.stop - slot.start == self.tensors[slot.tensor].count

    def _device(self, bucket: int) -> torch.device:
        return self.parameters[self._plan.buckets[bucket].slots[0].tensor].device

    def _view_bucket(self, bucket: int, flat: torch.Tensor, owned: tuple[int, int]) -> _BucketView:
        """Split `flat` into the bucket's slots, and these at the ends of `owned`.

        Views have the parameter's shape; views of parts are flat.
        """
        parts = cut_slots(self._plan.buckets[bucket].slots, owned, flat.element_size())
        return _BucketView(
            [_Part(part, self._view(flat, part.start, part), mine) for part, mine in parts], self.parameters
        )

    def _view(self, flat: torch.Tensor, start: int, slot: Slot) -> torch.Tensor:
        if self._is_whole(slot):
            return flat.as_strided(self._shapes[slot.tensor], self.strides[slot.tensor], flat.storage_offset() + start)
        return flat[start : start + slot.stop - slot.start]

    def _flat(self, gradient: torch.Tensor, slot: Slot) -> torch.Tensor | None:
        """Return the gradient's part as (n,), sharing memory, or None if its elements are not contiguous."""
        if not self._is_whole(slot):
            return gradient
        if gradient.stride() != self.strides[slot.tensor]:
            return None
        return gradient.detach().as_strided((gradient.numel(),), (1,))

    def _part(self, parameter: torch.nn.Parameter, slot: Slot) -> torch.Tensor:
        """Return the slot's elements of the parameter's gradient, sharing memory."""
        self._check_shape(slot.tensor)
        gradient = self.dense_gradient(slot.tensor)
        assert gradient is not None
        if gradient.is_conj():  # its memory holds the conjugate
            parameter.grad = gradient = gradient.resolve_conj()
        if self._is_whole(slot):
            return gradient
        strides = self.strides[slot.tensor]
        if gradient.stride() != strides:
            parameter.grad = gradient = arrange(gradient, strides)
        count = slot.stop - slot.start
        return gradient.as_strided((count,), (1,), gradient.storage_offset() + slot.offset)


class TorchValues:
    """The TensorSource of parameter values, for strategies that change them; every rank uses all parameters.

    parameters: in the order that all ranks have. strides: of each, as planned.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], strides: Sequence[tuple[int, ...]]) -> None:
        self._parameters, self._strides, self._plan = parameters, strides, Plan((), ())

    def on_plan(self, plan: Plan) -> None:
        self._plan = plan

    @torch.no_grad()
    def fill(self, bucket: int, memory: Buffer, owned: tuple[int, int]) -> Filled:
        host = as_tensor(memory)
        for slot in self._plan.buckets[bucket].slots:
            values = arrange(self._parameters[slot.tensor].detach(), self._strides[slot.tensor])
            host[slot.start : slot.stop].copy_(_flat_part(values, slot))
        return Filled(frozenset())

    @torch.no_grad()
    def drain(self, bucket: int, memory: Buffer, globally_unused: Collection[int]) -> None:
        host = as_tensor(memory)
        for slot in self._plan.buckets[bucket].slots:
            if slot.tensor not in globally_unused:
                parameter = self._parameters[slot.tensor]
                values = arrange(parameter.detach(), self._strides[slot.tensor])
                _flat_part(values, slot).copy_(host[slot.start : slot.stop])
                if values.data_ptr() != parameter.data_ptr():
                    parameter.copy_(values)


def _is_staged(device: torch.device, memory: Buffer) -> bool:
    """Return whether the gradients are on a device and the bucket is in host memory."""
    return staging.is_staged(device) and not isinstance(memory, TensorBuffer)


def _flat_part(tensor: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Return the slot's elements of a dense tensor, (n,), sharing memory."""
    return tensor.as_strided((slot.stop - slot.start,), (1,), tensor.storage_offset() + slot.offset)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if torch.is_grad_enabled():  # not in a backward pass: entering the context takes a third of a small copy
        with torch.no_grad():
            _copy(targets, sources)
    elif len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets and targets[0].is_cpu:
        torch._foreach_copy_(targets, sources)
    elif targets:
        # Before torch 2.11 one call takes the first target's dtype for all of them on CUDA (pytorch#173531).
        for dtype in dict.fromkeys([target.dtype for target in targets]):
            alike = [pair for pair in zip(targets, sources, strict=True) if pair[0].dtype == dtype]
            torch._foreach_copy_([target for target, _ in alike], [source for _, source in alike])
