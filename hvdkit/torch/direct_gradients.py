"""Gradients that Horovod's core reduces one by one where they are, on the CPU or (with NCCL) on a GPU.

Horovod fuses them itself, so there are no buckets here; what a step costs beyond Horovod's own is one more small
tensor, which tells who had which gradient.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass

import torch

from hvdkit.engine.agreement import check_agreement
from hvdkit.engine.buckets import TensorSpec, describe_plan
from hvdkit.engine.horovod.binding import Binding, Move, Pending
from hvdkit.engine.horovod.transport import HorovodTransport, refuse_bfloat16, wait
from hvdkit.engine.planned import Statistics
from hvdkit.engine.process_sets import MemberGroup
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
    """What GradientPlan is, on Horovod's core; see there for the arguments.

    Opened by all ranks together; raises PlanMismatchError where their parameters differ, TypeError for a dtype that
    Horovod's core does not add.
    """

    def __init__(
        self,
        binding: Binding,
        group: MemberGroup,
        name: str,
        named: Named,
        *,
        options: ReduceOptions,
        touched: Collection[int],
        statistics: Statistics,
    ) -> None:
        assert isinstance(group.transport, HorovodTransport)
        specs = [TensorSpec(word, one.numel(), dtype_name(one), 0, layout_of(one), None) for word, one in named]
        for spec in specs:
            if "bfloat16" in (spec.dtype, options.wire_for(spec.dtype)):
                refuse_bfloat16(f"the gradient of {spec.name}")
        check_agreement(group.transport, describe_plan(specs, 0, str(options)))
        self._binding, self._set, self._name = binding, group.transport.process_set, name
        self._parameters, self._specs = [parameter for _, parameter in named], specs
        self._options, self._size = options, group.transport.size
        self._touched, self._statistics = touched, statistics
        self._sent: dict[int, _Sent] = {}
        self._sparse: set[int] = set()  # parameters whose gradient was made dense for this round
        self._lock = threading.RLock()  # gradients of several devices arrive from several threads
        self._began_s = 0.0

    def arrived(self, index: int) -> None:
        """See GradientPlan."""
        with self._lock:
            self._send(index)

    def started(self, index: int) -> bool:
        """See GradientPlan."""
        return index in self._sent

    @property
    def under_way(self) -> bool:
        """See GradientPlan."""
        return bool(self._sent)

    def _send(self, index: int) -> None:
        if not self._sent:
            self._began_s = time.perf_counter()
        numbers, dtype = self._numbers(index), self._specs[index].dtype
        narrow, name = None, f"{self._name}.{self._specs[index].name}"
        move = self._move(name, dtype)
        if self._options.wire_for(dtype) == "float16":
            prescale, postscale = self._options.factors(self._size, 1)
            narrow, move = to_half(numbers, prescale * postscale), Move("allreduce", name, self._set)
        given = numbers if narrow is None else narrow
        self._sent[index] = _Sent(numbers, narrow, self._binding.start(move, [given]))

    def _move(self, name: str, dtype: str) -> Move:
        """What Horovod is asked for. Its averages divide at the end; a sum of float16 may be too large by then."""
        if self._options.average and not self._options.predivide and dtype != "float16":
            return Move("allreduce", name, self._set, "average")
        prescale, postscale = self._options.factors(self._size, 1)
        if dtype == "float16":
            prescale, postscale = prescale * postscale, 1.0
        return Move("allreduce", name, self._set, "sum", prescale, postscale)

    def _numbers(self, index: int) -> torch.Tensor:
        """The gradient as (n,), its own memory if it may be overwritten and its elements follow each other."""
        parameter = self._parameters[index]
        gradient, strides = parameter.grad, strides_of(parameter)
        if gradient is None:
            return torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        if gradient.is_sparse:
            parameter.grad = gradient = gradient.to_dense()
            self._sparse.add(index)
        gradient = gradient.detach()
        if gradient.stride() != strides or index not in self._touched:
            like = torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device)
            gradient = like.copy_(gradient)
        return gradient.as_strided((parameter.numel(),), (1,))

    def finish(self) -> None:
        """See GradientPlan."""
        began = time.perf_counter()
        with self._lock:
            for index in range(len(self._specs)):
                if index not in self._sent:
                    self._send(index)
            there = torch.zeros(len(self._specs), device=self._parameters[0].device)
            there[sorted(self._touched)] = 1.0
            wait(self._binding.start(self._move(f"{self._name} presence", "float32"), [there]))
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
                parameter.grad.copy_(result.as_strided(parameter.shape, strides_of(parameter)))

    def retire(self) -> None:
        """See GradientPlan; Horovod takes a joined rank's part itself."""

    def close(self) -> None:
        """See GradientPlan."""
        self._parameters = []


def to_half(numbers: torch.Tensor, factor: float) -> torch.Tensor:
    """factor * numbers in float16; finite values too large for it become its largest, inf and nan stay."""
    scaled = numbers * factor
    made = scaled.half()
    if not torch.isfinite(made).all():
        largest = torch.finfo(torch.float16).max
        made = torch.where(torch.isinf(scaled), scaled, scaled.clamp(-largest, largest)).half()
    return made
