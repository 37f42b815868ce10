"""Gradients that stay on the GPU on the JAX backend: calls from within the compiled step have NCCL reduce them there.

A call gets XLA's stream and the addresses of a bucket's gradients, and returns after enqueuing their reduction: the
host does not wait. Only the last bucket's call makes XLA's stream wait for NCCL, for all buckets; until then XLA may
continue with backward. A scalar passes from call to call, so that all ranks enqueue the buckets in one order, in
whatever order XLA would run the calls.

DeviceReduction.trace() adds the calls to the program being traced; they execute DeviceReduction._run().

Between its own call and the last one NCCL owns a bucket. For XLA the bucket is the result of the first and an argument
of the other, shares its memory with both, and has no other use, so XLA has no reason to touch or move it. The last
call checks that its address is unchanged.
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
from hvdkit.keras.settings import OptimizerSettings
from hvdkit.log import logger
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import STORAGE
from hvdkit.transport.nccl.arrays import DeviceArrays, divide_arrays
from hvdkit.transport.nccl.groups import close_groups, open_group, wait_for_groups


class DeviceReduction:
    """Reduces the gradients of one list of variables, from within programs; see open_device_reduction().

    tensors: specifications of the gradients.
    wires: the wire dtype of each, "none" for its own.
    """

    def __init__(
        self, settings: OptimizerSettings, strategy: AllReduce, tensors: Sequence[TensorSpec], wires: Sequence[str]
    ) -> None:
        self._settings, self._strategy, self._tensors = settings, strategy, list(tensors)
        self._dtypes = [tensor.dtype if wire == "none" else wire for tensor, wire in zip(tensors, wires, strict=True)]
        self._index: int | None = None
        self._limit = device_plan_settings(runtime.runtime("a reduction of gradients").config).fusion_bytes
        nbytes = [tensor.count * STORAGE[dtype].itemsize for dtype, tensor in zip(self._dtypes, tensors, strict=True)]
        #: The gradients of each bucket, by index. Programs keep them in later worlds too.
        self._buckets = divide_arrays(nbytes, self._limit)
        self._arrays: list[DeviceArrays] = []
        self._rounds: DeviceRounds | None = None
        self._lock = threading.Lock()
        self._started: list[list[int]] = []  # addresses of the round's buckets so far
        last = len(self._buckets) - 1
        self._calls = [
            jax_in_place.BufferCall(functools.partial(self._run, bucket, bucket)) for bucket in range(last + 1)
        ]
        self._whole = jax_in_place.BufferCall(functools.partial(self._run, 0, last))

    def enter(self) -> bool:
        """Connect the ranks; collective. Returns False if gradients must go through the host.

        Raises PlanMismatchError if the gradients differ between ranks, and what open_group() raises.
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

    def trace(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients, as values of the program being traced; each has its gradient's dtype.

        Outside of a program a single call reduces them: between two calls, XLA would copy memory that NCCL owns.
        """
        sent = [gradient.astype(dtype) for gradient, dtype in zip(gradients, self._dtypes, strict=True)]
        after, order = jnp.zeros((), "int32"), [at for bucket in self._buckets for at in bucket]
        given = [sent[at] for at in order]
        if isinstance(given[0], jax.core.Tracer):
            reduced: list[Any] = []
            for bucket, call in zip(self._buckets[:-1], self._calls, strict=False):
                some, after = call.trace(given[len(reduced) : len(reduced) + len(bucket)], after)
                reduced += some
            results, _ = self._calls[-1].trace([*reduced, *given[len(reduced) :]], after)
        else:
            results, _ = self._whole.trace(given, after)
        by_index = dict(zip(order, results, strict=True))
        return [by_index[at].astype(gradient.dtype) for at, gradient in enumerate(gradients)]

    def _run(self, first: int, last: int, context: Any, buffers: Sequence[Any], results: Sequence[Any]) -> None:
        """Start, when a program runs, the buckets from `first` to `last`; with the very last bucket, end the round.

        buffers, results: these buckets' gradients; in the last call those of earlier calls precede them.
        """
        if not self._arrays and not self.enter():  # a program from an earlier world
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
                self._arrays[0].join(stream)  # raises the error that has ended the previous step, if NCCL caused it
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
                rounds.finish(functools.partial(self._arrays[-1].join, stream))  # NCCL runs them in order
                self._started = []

    def _check_places(
        self, first: int, expected: Sequence[int], sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        """Raise HorovodInternalError if memory that NCCL owns until the last call has another address than expected.

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
        """Close the device group while nothing is under way; programs that were compiled before connect anew."""
        self._arrays, self._rounds, self._started = [], None, []


def open_device_reduction(
    settings: OptimizerSettings, strategy: Strategy, names: Sequence[str], gradients: Sequence[Any]
) -> DeviceReduction | None:
    """Open a reduction of such gradients on the GPU, or return None if they go through the host; collective.

    All ranks decide alike: by the strategy and the gradients, and by the result of open_group().

    settings: of the optimizer.
    strategy: of the optimizer.
    names: of the gradients, for errors.
    gradients: shapes and dtypes count.

    Raises what DeviceReduction.enter() raises.
    """
    if not jax_gpu.is_gpu_build() or not runtime.runtime("a reduction of gradients").provider.native:
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


runtime.on_wait_for_devices(wait_for_groups)
runtime.on_shutdown(close_groups)
