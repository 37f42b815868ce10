"""Gradients that Horovod's core reduces one by one where they are, on the CPU or (with NCCL) on a GPU.

Horovod fuses them itself, so there are no buckets here; what a step costs beyond Horovod's own is one more small
tensor, which tells who had which gradient.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from hvdkit.engine.groups import Group
from hvdkit.engine.horovod.binding import Binding, Pending
from hvdkit.engine.horovod.gradients import agree_on, gradient_move, narrow_wire
from hvdkit.engine.horovod.transport import HorovodTransport, wait
from hvdkit.engine.planned.plan import TensorSpec
from hvdkit.engine.planned.reducer import Statistics
from hvdkit.engine.request import ReduceOptions
from hvdkit.torch.layout import Named, layout_of, strides_of
from hvdkit.torch.tensors import dtype_name


@dataclass
class _Sent:
    """A gradient under way.

    numbers: (n,), of the gradient's dtype. narrow: what is reduced in its place, if not None.
    """

    numbers: torch.Tensor
    narrow: torch.Tensor | None
    pending: Pending


class DirectGradients:
    """What TorchSource is, on Horovod's core; see there for the arguments.

    Opened by all ranks together; raises PlanMismatchError where their parameters differ, TypeError for a dtype that
    Horovod's core does not add.
    """

    def __init__(
        self,
        binding: Binding,
        group: Group,
        name: str,
        named: Named,
        *,
        options: ReduceOptions,
        touched: Collection[int],
        statistics: Statistics,
    ) -> None:
        assert isinstance(group.transport, HorovodTransport)
        specs = [TensorSpec(word, one.numel(), dtype_name(one), 0, layout_of(one), None) for word, one in named]
        agree_on(group.transport, specs, options)
        process_set, size = group.transport.process_set, group.transport.size

        told = torch.empty(1, device=named[0][1].device)

        def prepare(word: str, like: torch.Tensor) -> tuple[Callable[[torch.Tensor], Pending], float]:
            dtype = dtype_name(like)
            wire = "none" if like is told else narrow_wire(word, dtype, options)
            move, factor = gradient_move(f"{name}.{word}", process_set, dtype, options, size, wire)
            sent = torch.empty(1, dtype=torch.float16 if factor else like.dtype, device=like.device)
            return binding.prepare(move, sent), factor

        self._starts = [prepare(word, parameter) for word, parameter in named]
        self._tell, _ = prepare("presence", told)
        self._parameters = [parameter for _, parameter in named]
        self._strides = [strides_of(parameter) for parameter in self._parameters]
        self._plain = [parameter.is_contiguous() for parameter in self._parameters]
        self._touched, self._statistics = touched, statistics
        self._sent: dict[int, _Sent] = {}
        self._presence: tuple[torch.Tensor, Pending] | None = None
        self._sparse: set[int] = set()  # parameters whose gradient was made dense for this round
        self._lock = threading.RLock()  # gradients of several devices arrive from several threads
        self._began_s = 0.0

    def arrived(self, index: int) -> None:
        """See TorchSource."""
        with self._lock:
            last = len(self._sent) == len(self._parameters) - 1
            if last and len(self._touched) == len(self._parameters):
                self._tell_presence()  # before it, so that both go in one cycle of Horovod's
            self._send(index)

    def _tell_presence(self) -> None:
        there = torch.zeros(len(self._parameters), device=self._parameters[0].device)
        there[list(self._touched)] = 1.0
        self._presence = there, self._tell(there)

    def started(self, index: int) -> bool:
        """See TorchSource."""
        return index in self._sent

    @property
    def under_way(self) -> bool:
        """See TorchSource."""
        return bool(self._sent)

    def _send(self, index: int) -> None:
        if not self._sent:
            self._began_s = time.perf_counter()
        numbers = self._numbers(index)
        start, factor = self._starts[index]
        narrow = to_half(numbers, factor) if factor else None
        self._sent[index] = _Sent(numbers, narrow, start(numbers if narrow is None else narrow))

    def _numbers(self, index: int) -> torch.Tensor:
        """The gradient, its own memory if that may be overwritten and its elements follow each other there.

        Of the parameter's shape, or (n,) for one that does not lie row by row.
        """
        parameter = self._parameters[index]
        gradient = parameter.grad
        if gradient is None:
            return torch.zeros(self._shape(index), dtype=parameter.dtype, device=parameter.device)
        if gradient.is_sparse:
            parameter.grad = gradient = gradient.to_dense()
            self._sparse.add(index)
        if gradient.requires_grad:
            gradient = gradient.detach()
        if gradient.stride() != self._strides[index] or index not in self._touched:
            like = torch.empty_strided(
                gradient.shape, self._strides[index], dtype=gradient.dtype, device=gradient.device
            )
            gradient = like.copy_(gradient)
        return gradient if self._plain[index] else gradient.as_strided((gradient.numel(),), (1,))

    def _shape(self, index: int) -> tuple[int, ...]:
        parameter = self._parameters[index]
        return tuple(parameter.shape) if self._plain[index] else (parameter.numel(),)

    def finish(self) -> None:
        """See TorchSource."""
        began = time.perf_counter()
        with self._lock:
            for index in range(len(self._parameters)):
                if index not in self._sent:
                    self._send(index)
            if self._presence is None:
                self._tell_presence()
            assert self._presence is not None
            there, told = self._presence
            self._presence = None
            wait(told)
            present: list[float] = there.tolist()
            for index, sent in self._sent.items():
                wait(sent.pending)
                if present[index] > 0:
                    self._put(index, sent)
            self._sent.clear()
        for index in self._sparse:  # an optimizer for sparse gradients takes no others
            gradient = self._parameters[index].grad
            self._parameters[index].grad = gradient.to_sparse(1) if gradient is not None else None
        self._sparse.clear()
        ended = time.perf_counter()
        self._statistics.generations += 1
        self._statistics.reduced_bytes += sum(one.numel() * one.element_size() for one in self._parameters)
        self._statistics.busy_s += ended - self._began_s
        self._statistics.exposed_s += ended - began

    def _put(self, index: int, sent: _Sent) -> None:
        """The result goes where the gradient is now; a hook may have put another tensor there."""
        parameter = self._parameters[index]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        result = sent.numbers if sent.narrow is None else sent.narrow
        if result.data_ptr() != parameter.grad.data_ptr():
            with torch.no_grad():
                parameter.grad.copy_(result.as_strided(parameter.shape, self._strides[index]))

    def drain_and_close(self) -> None:
        """See TorchSource; Horovod takes a joined rank's part itself."""
        self.close()

    def close(self) -> None:
        """See TorchSource."""
        self._parameters = []


def to_half(numbers: torch.Tensor, factor: float) -> torch.Tensor:
    """factor * numbers in float16; finite values too large for it become its largest, inf and nan stay."""
    scaled = numbers * factor
    made = scaled.half()
    if not torch.isfinite(made).all():
        largest = torch.finfo(torch.float16).max
        made = torch.where(torch.isinf(scaled), scaled, scaled.clamp(-largest, largest)).half()
    return made
