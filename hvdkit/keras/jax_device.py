"""Gradients that stay on the GPU on the JAX backend: calls from within the compiled step have NCCL reduce them there.

A call gets XLA's stream and the addresses of a bucket's gradients, and returns when their reduction is enqueued: the
host waits for nothing. Only the last bucket's call lets XLA's stream wait for NCCL, for all buckets; until then XLA may
go on with backward. A scalar is handed from call to call, so that all ranks enqueue the buckets in one order, wherever
XLA puts the calls.

Between its call and the last one a bucket belongs to NCCL. To XLA it is the result of the one and an argument of the
other, shares its memory with both, and is used by nothing else, so XLA has no cause to touch or to move it. The last
call looks whether it is where it was.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hvdkit.engine import runtime
from hvdkit.engine.allreduce import AllReduce
from hvdkit.engine.named.submit import collective_step
from hvdkit.engine.planned.agreement import check_tensors
from hvdkit.engine.planned.device_rounds import DeviceRounds
from hvdkit.engine.planned.plan import TensorSpec
from hvdkit.engine.planned.settings import device_plan_settings
from hvdkit.engine.strategy import Strategy
from hvdkit.errors import HorovodInternalError
from hvdkit.keras import jax_gpu, jax_in_place
from hvdkit.keras.settings import Settings
from hvdkit.log import logger
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import STORAGE
from hvdkit.transport.nccl.arrays import DeviceArrays, divide_arrays
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
        self._limit = device_plan_settings(runtime.runtime("a reduction of gradients").config).fusion_bytes
        nbytes = [tensor.count * STORAGE[dtype].itemsize for dtype, tensor in zip(self._dtypes, tensors, strict=True)]
        #: Of each the gradients, by index. Programs keep them in the worlds after this one too.
        self._buckets = divide_arrays(nbytes, self._limit)
        self._arrays: list[DeviceArrays] = []
        self._rounds: DeviceRounds | None = None
        self._lock = threading.Lock()
        self._started: list[list[int]] = []  # addresses of the round's buckets so far
        last = len(self._buckets) - 1
        self._calls = [
            jax_in_place.BufferCall(functools.partial(self._enqueue, bucket, bucket)) for bucket in range(last + 1)
        ]
        self._whole = jax_in_place.BufferCall(functools.partial(self._enqueue, 0, last))

    def enter(self) -> bool:
        """Connect the ranks; collective. False where gradients have to go through the host.

        Raises PlanMismatchError where the ranks' gradients differ, and what open_group() raises.
        """
        current, group = runtime.runtime("a reduction of gradients"), self._settings.group
        self._index = jax_gpu.common_gpu()
        options, name = self._strategy.options, f"arrays.{group.engine.count('arrays')}"

        def attach(_: Transport, __: Sequence[int]) -> list[DeviceArrays]:
            wanted = jax_gpu.device_settings(current.config)
            devices = open_group(group.transport, self._index, current.world.host, wanted)
            if devices is None:
                return []
            current.plans += 1
            check_tensors(group.transport, self._tensors, f"NCCL, {options}", self._limit)
            factor = 1.0 / devices.size if options.average else 1.0
            arrays = [
                DeviceArrays(devices, [(self._dtypes[at], self._tensors[at].count) for at in bucket], factor)
                for bucket in self._buckets
            ]
            self._rounds = DeviceRounds(
                name,
                group,
                devices.device,
                self._tensors,
                current.timeline,
                self._strategy.statistics,
                buckets=self._buckets,
                nbytes=[one.nbytes for one in arrays],
                sent_bytes=[one.sent_bytes for one in arrays],
            )
            return arrays

        self._arrays = collective_step(group.engine, "plan", attach, name=name)
        return bool(self._arrays)

    def __call__(self, gradients: Sequence[Any]) -> list[Any]:
        """The reduced gradients, as values of the program that is being traced; each has its gradient's dtype.

        Outside of a program they are reduced by one call: between two, XLA would copy what is NCCL's.
        """
        sent = [gradient.astype(dtype) for gradient, dtype in zip(gradients, self._dtypes, strict=True)]
        after, order = jnp.zeros((), "int32"), [at for bucket in self._buckets for at in bucket]
        given = [sent[at] for at in order]
        if isinstance(given[0], jax.core.Tracer):
            reduced: list[Any] = []
            for bucket, call in zip(self._buckets[:-1], self._calls, strict=False):
                some, after = call(given[len(reduced) : len(reduced) + len(bucket)], after)
                reduced += some
            results, _ = self._calls[-1]([*reduced, *given[len(reduced) :]], after)
        else:
            results, _ = self._whole(given, after)
        by_index = dict(zip(order, results, strict=True))
        return [by_index[at].astype(gradient.dtype) for at, gradient in enumerate(gradients)]

    def _enqueue(self, first: int, last: int, context: Any, buffers: Sequence[Any], results: Sequence[Any]) -> None:
        """Start the buckets from `first` to `last`; with the last one of all, end the round.

        buffers, results: of these buckets' gradients, and at the end of those of earlier calls before them.
        """
        if not self._arrays and not self.enter():  # a program of a world before
            raise HorovodInternalError(
                "This training step was compiled to reduce gradients by NCCL, which these ranks cannot use together. "
                "Compile the model again after init()."
            )
        rounds = self._rounds
        assert rounds is not None
        if buffers and (index := jax_gpu.index_of(buffers[0])) != self._index:
            raise HorovodInternalError(
                f"The gradients are on GPU {index}, but the first step was traced for GPU {self._index}, and NCCL is "
                'connected there. Select the GPU before the first step: jax.config.update("jax_default_device", '
                "jax.local_devices()[hvd.local_rank()]), or start the ranks so that each sees one GPU."
            )
        sources, targets = list(map(jax_gpu.address_of, buffers)), list(map(jax_gpu.address_of, results))
        stream, ends = jax_gpu.stream_of(context), last == len(self._buckets) - 1
        with self._lock:
            if (started := len(self._started)) != first:
                self._arrays[0].join(stream)  # raises what has ended the step before, if that was NCCL
                raise HorovodInternalError(
                    f"Bucket {first} of a step came after {started} of {len(self._buckets)} buckets. Either two steps "
                    "of an optimizer run at the same time: run one after the other. Or the step before was ended by "
                    "an error after some of its gradients had been sent, and the other ranks wait for the rest: let "
                    "the error end the job."
                )
            expected = [address for bucket in self._started for address in bucket] if ends else sources
            self._check_places(0 if ends else first, expected, sources, targets)
            at = len(expected) if ends else 0
            for bucket in range(first, last + 1):
                arrays, until = self._arrays[bucket], at + len(self._buckets[bucket])
                own = targets[at:until]
                rounds.start(bucket, stream, functools.partial(arrays.start, sources[at:until], own, stream))
                self._started.append(own)
                at = until
            if ends:
                rounds.finish(functools.partial(self._arrays[-1].join, stream))  # NCCL works them off in order
                self._started = []

    def _check_places(
        self, first: int, expected: Sequence[int], sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        """Raise HorovodInternalError if what NCCL has until the last call is not where it is expected.

        first: the bucket of the first of these addresses.
        """
        counts = [self._tensors[at].count for bucket in self._buckets[first:] for at in bucket]
        places = zip(counts, expected, sources, targets, strict=False)
        if any(count and not address == source == target for count, address, source, target in places):
            raise HorovodInternalError(
                "XLA has moved gradients while NCCL reduced them, so that this step's results are wrong. Have all of "
                "them reduced by one call, without overlap: HVDKIT_FUSION_BYTES above the bytes of the gradients. "
                "Please report this with the version of JAX."
            )

    def close(self) -> None:
        """Let go of the device group; programs that were compiled before connect anew. Nothing is to be under way."""
        self._arrays, self._rounds, self._started = [], None, []


def open_device_reduction(
    settings: Settings, strategy: Strategy, names: Sequence[str], gradients: Sequence[Any]
) -> DeviceReduction | None:
    """A reduction on the GPU of gradients like these; None where they go through the host. Collective.

    All ranks decide alike: on the strategy and the gradients, and on what open_group() finds.
    Raises what DeviceReduction.enter() raises.
    """
    if not jax_gpu.is_cuda_build() or not runtime.runtime("a reduction of gradients").provider.native:
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
