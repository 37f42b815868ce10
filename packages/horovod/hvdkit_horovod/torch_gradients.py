"""Gradients that Horovod's core reduces one by one in their own memory, on the CPU or (with NCCL) on a GPU.

Horovod fuses them itself, so this file has no buckets; a step costs one small tensor more than Horovod's own: it marks
which rank had which gradient.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from hvdkit.engine.api import Group, Parameters, ReduceOptions, Statistics
from hvdkit.torch import Compression
from hvdkit.torch.layout import strides_of
from hvdkit_horovod.binding import Request
from hvdkit_horovod.operations import plan_gradients
from hvdkit_horovod.transport import wait

_Sent = tuple[torch.Tensor, Request]  # the tensor that is reduced in place


class DirectGradients:
    """The GradientReducer of Horovod's core; see BucketReducer for the calls.

    Opened by all ranks together.
    binding: Horovod's binding of PyTorch.
    group: the group of the process set.
    parameters: the parameters.
    options: options of the reduction.
    statistics: statistics to update.
    Raises PlanMismatchError if the ranks' parameters differ, TypeError for a dtype that Horovod's core cannot reduce.
    """

    def __init__(
        self, binding: Any, group: Group, parameters: Parameters, options: ReduceOptions, statistics: Statistics
    ) -> None:
        self._source, self._statistics = parameters.own_tensors("Horovod's core"), statistics
        self._parameters = list(self._source.parameters)
        self._strides = [strides_of(parameter) for parameter in self._parameters]
        calls, mask_call = plan_gradients(group.transport, parameters.name, parameters.tensors, options)
        self._factors = [factor for _, factor in calls]
        dtypes = [torch.float16 if factor else self._parameters[at].dtype for at, factor in enumerate(self._factors)]
        self._starts = [
            binding.prepare(call, torch.empty(1, dtype=dtype, device=parameter.device))
            for (call, _), dtype, parameter in zip(calls, dtypes, self._parameters, strict=True)
        ]
        self._start_mask = binding.prepare(mask_call, torch.empty(1, device=self._parameters[0].device))
        self._sent: dict[int, _Sent] = {}
        self._mask: _Sent | None = None
        self._lock = threading.RLock()  # gradients of several devices arrive from several threads
        self._began_s = 0.0

    def arrived(self, index: int) -> None:
        with self._lock:
            last = len(self._sent) == len(self._parameters) - 1
            if last and len(self._source.written) == len(self._parameters):
                self._mask = self._send_mask()  # before the gradient, so that both are in one cycle of Horovod
            self._send(index)

    def check(self) -> None:
        """Do nothing: Horovod reports failures to the calls that wait for its results."""

    def forget_arrivals(self) -> None:
        """See BucketReducer.forget_arrivals. Nothing is stored: a gradient is sent when it arrives."""

    def started(self, index: int) -> bool:
        return index in self._sent

    @property
    def under_way(self) -> bool:
        return bool(self._sent)

    def _send_mask(self) -> _Sent:
        mask = torch.zeros(len(self._parameters), device=self._parameters[0].device)
        mask[list(self._source.written)] = 1.0
        return mask, self._start_mask(mask)

    def _send(self, index: int) -> None:
        if not self._sent:
            self._began_s = time.perf_counter()
        numbers, factor = self._numbers(index), self._factors[index]
        if factor:
            numbers, _ = Compression.fp16.compress(numbers * factor)
        self._sent[index] = numbers, self._starts[index](numbers)

    def _numbers(self, index: int) -> torch.Tensor:
        """Return the gradient as (n,): its own memory if that may be overwritten and is contiguous, else a copy."""
        parameter = self._parameters[index]
        gradient: torch.Tensor | None = self._source.dense_gradient(index)
        if gradient is None:
            return torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        if gradient.requires_grad:
            gradient = gradient.detach()
        strides = self._strides[index]
        if gradient.stride() != strides or index not in self._source.written:
            like = torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device)
            gradient = like.copy_(gradient)
        return gradient.as_strided((gradient.numel(),), (1,))

    def finish(self) -> None:
        began = time.perf_counter()
        with self._lock:
            for index in range(len(self._parameters)):
                if index not in self._sent:
                    self._send(index)
            (mask, request), self._mask = self._mask or self._send_mask(), None
            wait(request)
            users: list[float] = mask.tolist()
            for index, (result, request) in self._sent.items():
                wait(request)
                if users[index] > 0:
                    self._put(index, result)
            self._sent.clear()
        ended = time.perf_counter()
        self._statistics.generations += 1
        self._statistics.reduced_bytes += sum(parameter.nbytes for parameter in self._parameters)
        self._statistics.busy_s += ended - self._began_s
        self._statistics.exposed_s += ended - began
        self._statistics.waited_s = (self._statistics.waited_s or 0.0) + ended - began

    def _put(self, index: int, result: torch.Tensor) -> None:
        """Copy the result into the present gradient; a hook may have set another tensor."""
        parameter = self._parameters[index]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if result.data_ptr() != parameter.grad.data_ptr():
            with torch.no_grad():
                parameter.grad.copy_(result.as_strided(parameter.shape, self._strides[index]))

    def drain_and_close(self) -> None:
        """See BucketReducer.drain_and_close; Horovod itself acts for a joined rank."""
        self.close()

    def close(self) -> None:
        self._parameters = []
