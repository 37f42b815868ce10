"""Gradients that stay on the GPU: reduced there by NCCL, from the memory in which TensorFlow has put them.

DLPack tells where that is, and gives no stream: the host waits until TensorFlow has computed the gradients, and until
NCCL has reduced them. So nothing is reduced beside backward; all gradients of a step are one operation instead. Which
gradients each rank has is told through the host's memory, before: a rank that has joined thereby knows when to take
part with zeros.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from hvdkit.engine import runtime
from hvdkit.engine.allreduce import AllReduce
from hvdkit.engine.groups import Group
from hvdkit.engine.named.submit import collective_step
from hvdkit.engine.one_step import OneStep
from hvdkit.engine.planned.agreement import check_tensors
from hvdkit.engine.planned.device_rounds import DeviceRounds
from hvdkit.engine.planned.plan import TensorSpec
from hvdkit.engine.planned.presence import Presence
from hvdkit.engine.planned.reducer import Context
from hvdkit.engine.planned.settings import settings_of
from hvdkit.engine.strategy import Strategy
from hvdkit.log import logger
from hvdkit.tensorflow import gpu
from hvdkit.tensorflow.tracing import call_on_device, check_nothing_dropped
from hvdkit.tensorflow.variables import VariableSpec
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import FLOATS
from hvdkit.transport.nccl.arrays import DeviceArrays
from hvdkit.transport.nccl.groups import DeviceSettings, close_groups, open_group
from hvdkit.transport.polling import Backoff

#: CUDA's own, to which TensorFlow gives nothing: what it has given others is done, as the host has waited for that.
_DEFAULT_STREAM = 0


def open_device_gradients(
    group: Group, specs: Sequence[VariableSpec], strategy: Strategy, device: str | None
) -> DeviceGradients | None:
    """What reduces the dense gradients of these variables in GPU memory; None where they have to go through the host.

    device: TensorFlow's name of the GPU that this rank's variables are on, or None. Collective; the ranks decide alike:
    on the variables, which they compare before, and on what open_group() finds.
    Raises PlanMismatchError where the ranks' variables differ, and what open_group() raises.
    """
    if type(strategy) is not AllReduce:
        return None
    current, options = runtime.runtime("The reduction of gradients"), strategy.options
    name = f"device.{group.engine.count('device')}"
    tensors = [TensorSpec(spec.name, tf.TensorShape(spec.shape).num_elements(), spec.dtype) for spec in specs]
    wires = [options.wire_for(spec.name, spec.dtype) for spec in specs]
    problem = _find_problem(specs, wires)

    def open_all(transport: Transport, _: Sequence[int]) -> DeviceGradients | None:
        shaped = [dataclasses.replace(one, shape=spec.shape) for one, spec in zip(tensors, specs, strict=True)]
        check_tensors(transport, shaped, str(options))
        if problem:
            if device is not None and transport.rank == 0:
                logger.info("%s: gradients go through the host's memory, because %s.", name, problem)
            return None
        config, index = current.config, None if device is None else gpu.cuda_index(device)
        settings = DeviceSettings(config.device_transport, config.nccl_library, config.share_gpus)
        devices = open_group(transport, index, current.world.host, settings)
        if devices is None:
            return None
        assert device is not None
        told = Context(transport, f"{name}.used", group.engine)
        presence = Presence(told, [spec.name for spec in specs], settings_of(config))
        before, after = options.factors(devices.size, devices.transport.local_ranks)
        sent = [one.dtype if wire == "none" else str(wire) for one, wire in zip(tensors, wires, strict=True)]
        counts = [(dtype, tensor.count) for dtype, tensor in zip(sent, tensors, strict=True)]
        arrays = DeviceArrays(devices, counts, before * after)
        rounds = DeviceRounds(
            name,
            group,
            devices.device,
            tensors,
            current.timeline,
            strategy.statistics,
            buckets=[range(len(tensors))],
            nbytes=[arrays.nbytes],
            sent_bytes=[arrays.sent_bytes],
        )
        return DeviceGradients(presence, arrays, rounds, device, specs, sent)

    opened: DeviceGradients | None = collective_step(group.engine, "plan", open_all, name=name)
    return opened


def _find_problem(specs: Sequence[VariableSpec], wires: Sequence[Any]) -> str:
    """Why such gradients are not reduced on a GPU; "" if they are. The same on all ranks whose variables are alike."""
    if not all(isinstance(wire, str) for wire in wires):
        return "coded ones are coded there"
    others = sorted({spec.dtype for spec in specs} - FLOATS)
    return f"{', '.join(others)} are not reduced on a GPU from TensorFlow" if others else ""


class DeviceGradients:
    """Dense gradients of one list of variables, see ArrayGradients; opened by all ranks together.

    presence: tells which of the gradients the ranks have. device: TensorFlow's name of the GPU. sent: the dtype in
    which each of the gradients is reduced.
    A gradient is multiplied by its rank's part of an average before the sum, in the dtype that is sent, as NCCL does.
    """

    def __init__(
        self,
        presence: Presence,
        arrays: DeviceArrays,
        rounds: DeviceRounds,
        device: str,
        specs: Sequence[VariableSpec],
        sent: Sequence[str],
    ) -> None:
        self._presence, self._arrays, self._rounds = presence, arrays, rounds
        self._device, self._specs, self._sent = device, list(specs), list(sent)
        self._lock, self._one_step = threading.Lock(), OneStep([spec.name for spec in specs])
        presence.on_zero_round(functools.partial(_take_part, weakref.ref(self)))

    def reduce_eagerly(self, gradients: Sequence[Any]) -> list[Any]:
        """See ArrayGradients.reduce_eagerly."""
        with tf.device(self._device):
            given = [None if one is None else self._narrow(at, one) for at, one in enumerate(gradients)]
            results, unused = self._reduce(given)
            return [None if at in unused else self._widen(at, one) for at, one in enumerate(results)]

    def reduce_in_graph(
        self, gradients: Sequence[Any], wanted: Sequence[int], find: Callable[[], DeviceGradients]
    ) -> list[Any]:
        """See ArrayGradients.reduce_in_graph."""
        present = [at for at, gradient in enumerate(gradients) if gradient is not None]

        def reduce(*given: Any) -> list[Any]:
            return find()._reduce_some(present, given, wanted)

        reduced: list[Any] = [None] * len(gradients)
        with tf.device(self._device):
            inputs = [self._narrow(at, gradients[at]) for at in present]
            dtypes = [tf.as_dtype(self._sent[at]) for at in wanted]
            results = call_on_device(reduce, inputs, dtypes, "hvdkit_reduce")
            for at, result in zip(wanted, results, strict=True):
                result.set_shape(self._specs[at].shape)
                reduced[at] = self._widen(at, result)
        return reduced

    def _reduce_some(self, present: Sequence[int], given: Sequence[Any], wanted: Sequence[int]) -> list[Any]:
        gradients: list[Any] = [None] * len(self._specs)
        for at, gradient in zip(present, given, strict=True):
            gradients[at] = gradient
        results, unused = self._reduce(gradients)
        check_nothing_dropped([spec.name for spec in self._specs], wanted, unused)
        return [results[at] for at in wanted]

    def _narrow(self, at: int, gradient: Any) -> Any:
        """As it is sent, on the GPU."""
        return tf.cast(tf.identity(gradient), self._sent[at])

    def _widen(self, at: int, result: Any) -> Any:
        return tf.cast(result, self._specs[at].dtype)

    def _reduce(self, gradients: Sequence[Any]) -> tuple[list[Any], Collection[int]]:
        """The sums or averages of eager tensors on the GPU, and the indices of those that no rank has a gradient of."""
        for spec, one in zip(self._specs, gradients, strict=True):
            if one is not None and tuple(one.shape) != spec.shape:
                raise ValueError(
                    f"The gradient of {spec.name} has shape {tuple(one.shape)}, but the variable has {spec.shape}."
                )
        with self._one_step.part(self, first=True, last=True), self._lock:
            missing = frozenset(at for at, gradient in enumerate(gradients) if gradient is None)
            unused = self._presence.tell(missing)
            return self._add_up(gradients), unused

    def take_part_with_zeros(self) -> None:
        """What a rank that has joined does in a step of the others; collective."""
        with self._lock, tf.init_scope():
            self._add_up([None] * len(self._specs), joined=True)

    def _add_up(self, gradients: Sequence[Any], *, joined: bool = False) -> list[Any]:
        with tf.device(self._device):
            sources = [
                tf.zeros(spec.shape, sent) if one is None else one
                for one, spec, sent in zip(gradients, self._specs, self._sent, strict=True)
            ]
            results = [gpu.empty_like(one) for one in sources]
        # The memory of results may have been that of tensors which the GPU still reads: the addresses are asked for
        # after that, so that the wait in it is for these too.
        addresses = [
            (gpu.address_of(source), gpu.address_of(result)) if source.shape.num_elements() else (0, 0)
            for source, result in zip(sources, results, strict=True)
        ]
        at, to = [one for one, _ in addresses], [one for _, one in addresses]
        arrays, stream = self._arrays, _DEFAULT_STREAM
        if joined:
            self._rounds.skip(lambda: arrays.start(at, to, stream))
        else:
            self._rounds.start(0, stream, lambda: arrays.start(at, to, stream))
            self._rounds.finish(lambda: arrays.join(stream))
        arrays.wait(Backoff().pause)
        return results

    def close(self) -> None:
        """Free the memory of what tells of gradients; collective."""
        self._presence.close()


def _take_part(held: weakref.ref[DeviceGradients]) -> None:
    gradients = held()
    if gradients is not None:
        gradients.take_part_with_zeros()


runtime.on_shutdown(close_groups)
