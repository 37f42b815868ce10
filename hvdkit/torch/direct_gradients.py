"""Gradients that Horovod's core reduces one by one where they are, on the CPU or (with NCCL) on a GPU.

Horovod fuses them itself, so there are no buckets here; what a step costs beyond Horovod's own is one more small
tensor, which tells who had which gradient.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hvdkit.engine.groups import Group
from hvdkit.engine.horovod.binding import Binding, Pending
from hvdkit.engine.horovod.gradients import agree_on, gradient_move, narrow_wire
from hvdkit.engine.horovod.transport import HorovodTransport, wait
from hvdkit.engine.planned.reducer import Statistics
from hvdkit.engine.request import ReduceOptions
from hvdkit.engine.strategy import Parameters
from hvdkit.torch.layout import strides_of
from hvdkit.torch.source import TorchSource
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
    """The GradientReducer of Horovod's core; see BucketReducer for the calls.

    Opened by all ranks together; raises PlanMismatchError where their parameters differ, TypeError for a dtype that
    Horovod's core does not add.
    """

    def __init__(
        self, binding: Binding, group: Group, parameters: Parameters, options: ReduceOptions, statistics: Statistics
    ) -> None:
        source, transport = parameters.gradients, group.transport
        assert isinstance(transport, HorovodTransport) and isinstance(source, TorchSource)
        agree_on(transport, [replace(tensor, place=0, group=None, shape=()) for tensor in parameters.tensors], options)
        used = torch.empty(1, device=source.parameters[0].device)

        def prepare(name: str, like: torch.Tensor) -> tuple[Callable[[torch.Tensor], Pending], float]:
            dtype = dtype_name(like)
            wire = "none" if like is used else narrow_wire(name, dtype, options)
            move, factor = gradient_move(
                f"{parameters.name}.{name}", transport.process_set, dtype, options, transport.size, wire
            )
            sent = torch.empty(1, dtype=torch.float16 if factor else like.dtype, device=like.device)
            return binding.prepare(move, sent), factor

        self._source, self._parameters = source, source.parameters
        self._starts = [
            prepare(tensor.name, parameter)
            for tensor, parameter in zip(parameters.tensors, self._parameters, strict=True)
        ]
        self._start_mask, _ = prepare("used_mask", used)
        self._strides = [strides_of(parameter) for parameter in self._parameters]
        self._plain = [parameter.is_contiguous() for parameter in self._parameters]
        self._statistics = statistics
        self._sent: dict[int, _Sent] = {}
        self._mask: tuple[torch.Tensor, Pending] | None = None
        self._lock = threading.RLock()  # gradients of several devices arrive from several threads
        self._began_s = 0.0

    def arrived(self, index: int) -> None:
        """See BucketReducer.arrived."""
        with self._lock:
            last = len(self._sent) == len(self._parameters) - 1
            if last and len(self._source.written) == len(self._parameters):
                self._send_mask()  # before it, so that both go in one cycle of Horovod's
            self._send(index)

    def _send_mask(self) -> None:
        mask = torch.zeros(len(self._parameters), device=self._parameters[0].device)
        mask[list(self._source.written)] = 1.0
        self._mask = mask, self._start_mask(mask)

    def forget_arrivals(self) -> None:
        """See BucketReducer.forget_arrivals. Nothing is remembered: a gradient is sent when it arrives."""

    def started(self, index: int) -> bool:
        """See BucketReducer.started."""
        return index in self._sent

    @property
    def under_way(self) -> bool:
        """See BucketReducer.under_way."""
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
        parameter, gradient = self._parameters[index], self._source.dense_gradient(index)
        if gradient is None:
            return torch.zeros(self._shape(index), dtype=parameter.dtype, device=parameter.device)
        if gradient.requires_grad:
            gradient = gradient.detach()
        if gradient.stride() != self._strides[index] or index not in self._source.written:
            like = torch.empty_strided(
                gradient.shape, self._strides[index], dtype=gradient.dtype, device=gradient.device
            )
            gradient = like.copy_(gradient)
        return gradient if self._plain[index] else gradient.as_strided((gradient.numel(),), (1,))

    def _shape(self, index: int) -> tuple[int, ...]:
        parameter = self._parameters[index]
        return tuple(parameter.shape) if self._plain[index] else (parameter.numel(),)

    def finish(self) -> None:
        """See BucketReducer.finish."""
        began = time.perf_counter()
        with self._lock:
            for index in range(len(self._parameters)):
                if index not in self._sent:
                    self._send(index)
            if self._mask is None:
                self._send_mask()
            assert self._mask is not None
            mask, pending = self._mask
            self._mask = None
            wait(pending)
            users: list[float] = mask.tolist()
            for index, sent in self._sent.items():
                wait(sent.pending)
                if users[index] > 0:
                    self._put(index, sent)
            self._sent.clear()
        ended = time.perf_counter()
        self._statistics.generations += 1
        self._statistics.reduced_bytes += sum(parameter.nbytes for parameter in self._parameters)
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
        """See BucketReducer.drain_and_close; Horovod takes a joined rank's part itself."""
        self.close()

    def close(self) -> None:
        """See BucketReducer.close."""
        self._parameters = []


def to_half(numbers: torch.Tensor, factor: float) -> torch.Tensor:
    """factor * numbers in float16; finite values too large for it become its largest, inf and nan stay."""
    scaled = numbers * factor
    narrow = scaled.half()
    if not torch.isfinite(narrow).all():
        largest = torch.finfo(torch.float16).max
        narrow = torch.where(torch.isinf(scaled), scaled, scaled.clamp(-largest, largest)).half()
    return narrow
