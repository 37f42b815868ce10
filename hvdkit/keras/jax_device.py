"""Gradients that stay on the GPU on the JAX backend: a call from within the compiled step has NCCL reduce them there.

The call gets XLA's stream and the addresses of the arrays, and returns when the reduction is enqueued: the host waits
for nothing. Calls are in no order but that of XLA, which is the same on all ranks, as their programs are.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from hvdkit.engine import runtime
from hvdkit.engine.allreduce import AllReduce
from hvdkit.engine.named.submit import collective_step
from hvdkit.engine.planned.agreement import check_agreement
from hvdkit.engine.planned.device_rounds import DeviceRounds
from hvdkit.engine.planned.plan import TensorSpec, describe_plan
from hvdkit.engine.strategy import Strategy
from hvdkit.errors import HorovodInternalError
from hvdkit.keras import jax_gpu, jax_in_place
from hvdkit.keras.settings import Settings
from hvdkit.log import logger
from hvdkit.transport.api import Transport
from hvdkit.transport.nccl.arrays import DeviceArrays
from hvdkit.transport.nccl.groups import close_groups, open_group, settle_groups


class DeviceReduction:
    """Reduces the gradients of one list of variables, from within programs; see open_device_reduction().

    tensors: of the gradients. wires: the dtype that each is sent in, "none" for its own.
    """

    def __init__(
        self, settings: Settings, strategy: AllReduce, tensors: Sequence[TensorSpec], wires: Sequence[str]
    ) -> None:
        self._settings, self._strategy, self._tensors = settings, strategy, list(tensors)
        self._dtypes = [tensor.dtype if wire == "none" else wire for tensor, wire in zip(tensors, wires, strict=True)]
        self._index: int | None = None
        self._arrays: DeviceArrays | None = None
        self._rounds: DeviceRounds | None = None
        self._lock = threading.Lock()
        self._call = jax_in_place.BufferCall(self._enqueue)

    def enter(self) -> bool:
        """Connect the ranks; collective. False where gradients have to go through the host.

        Raises PlanMismatchError where the ranks' gradients differ, and what open_group() raises.
        """
        current, group = runtime.runtime("a reduction of gradients"), self._settings.group
        self._index = jax_gpu.common_gpu()
        options, name = self._strategy.options, f"arrays.{group.engine.count('arrays')}"

        def attach(_: Transport, __: Sequence[int]) -> DeviceArrays | None:
            wanted = jax_gpu.device_settings(current.config)
            devices = open_group(group.transport, self._index, current.world.host, wanted)
            if devices is None:
                return None
            current.plans += 1
            check_agreement(group.transport, describe_plan(self._tensors, 0, f"NCCL, {options}"))
            counts = [(dtype, tensor.count) for dtype, tensor in zip(self._dtypes, self._tensors, strict=True)]
            arrays = DeviceArrays(devices, counts, 1.0 / devices.size if options.average else 1.0)
            self._rounds = DeviceRounds(
                name,
                group,
                devices.device,
                self._tensors,
                current.timeline,
                self._strategy.statistics,
                nbytes=arrays.nbytes,
                sent_bytes=arrays.sent_bytes,
            )
            return arrays

        self._arrays = collective_step(group.engine, "plan", attach, name=name)
        return self._arrays is not None

    def __call__(self, gradients: Sequence[Any]) -> list[Any]:
        """The reduced gradients, as values of the program that is being traced; each has its gradient's dtype."""
        sent = [gradient.astype(dtype) for gradient, dtype in zip(gradients, self._dtypes, strict=True)]
        results, _ = self._call(sent, jnp.zeros((), "int32"))
        return [result.astype(gradient.dtype) for result, gradient in zip(results, gradients, strict=True)]

    def _enqueue(self, context: Any, buffers: Sequence[Any], results: Sequence[Any]) -> None:
        if self._arrays is None and not self.enter():  # a program of a world before
            raise HorovodInternalError(
                "This training step was compiled to reduce gradients by NCCL, which these ranks cannot use together. "
                "Compile the model again after init()."
            )
        arrays, rounds = self._arrays, self._rounds
        assert arrays is not None and rounds is not None
        if buffers and (index := jax_gpu.index_of(buffers[0])) != self._index:
            raise HorovodInternalError(
                f"The gradients are on GPU {index}, but the first step was traced for GPU {self._index}, and NCCL is "
                'connected there. Select the GPU before the first step: jax.config.update("jax_default_device", '
                "jax.local_devices()[hvd.local_rank()]), or start the ranks so that each sees one GPU."
            )
        sources, targets = list(map(jax_gpu.address_of, buffers)), list(map(jax_gpu.address_of, results))
        stream = jax_gpu.stream_of(context)
        with self._lock:
            rounds.run(stream, lambda: arrays.start(sources, targets, stream), lambda: arrays.join(stream))

    def close(self) -> None:
        """Let go of the device group; programs that were compiled before connect anew. Nothing is to be under way."""
        self._arrays = self._rounds = None


def open_device_reduction(
    settings: Settings, strategy: Strategy, names: Sequence[str], gradients: Sequence[Any]
) -> DeviceReduction | None:
    """A reduction on the GPU of gradients like these; None where they go through the host. Collective.

    All ranks decide alike: on the strategy and the gradients, and on what open_group() finds.
    Raises what DeviceReduction.enter() raises.
    """
    if not jax_gpu.is_cuda_build() or runtime.runtime("a reduction of gradients").horovod is not None:
        return None
    if type(strategy) is not AllReduce or not jax_in_place.has_call():
        return None
    tensors = [
        TensorSpec(name, math.prod(gradient.shape), str(gradient.dtype), shape=tuple(gradient.shape))
        for name, gradient in zip(names, gradients, strict=True)
    ]
    wires = [strategy.options.wire_for_tensor(tensor) for tensor in tensors]
    if not all(isinstance(wire, str) for wire in wires):
        if settings.group.transport.rank == 0:
            logger.info("Coded gradients go through the host's memory, where they are coded.")
        return None
    reduction = DeviceReduction(settings, strategy, tensors, list(map(str, wires)))
    return reduction if reduction.enter() else None


runtime.on_settle(settle_groups)
runtime.on_shutdown(close_groups)
