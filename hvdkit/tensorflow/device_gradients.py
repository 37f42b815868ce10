"""Reduction of gradients on the GPU by NCCL, in the memory that TensorFlow has allocated.

DLPack gives the address, but no stream: the host waits until TensorFlow has computed the gradients, and until NCCL has
reduced them. So no reduction overlaps backward; all gradients of a step are one operation. Before it the ranks
exchange, in host memory, which gradients each has: thereby a joined rank knows when to take part with zeros.
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
from hvdkit.engine.planned.reducer import Context
from hvdkit.engine.planned.settings import settings_of
from hvdkit.engine.planned.used_mask_exchange import UsedMaskExchange
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

#: The default stream. TensorFlow does not use it; its work on other streams is done, as the host has waited for it.
_DEFAULT_STREAM = 0


def open_device_gradients(
    group: Group, specs: Sequence[VariableSpec], strategy: Strategy, device: str | None
) -> DeviceGradients | None:
    """Open the reduction of the dense gradients of these variables in GPU memory; None to use the host.

    group: the ranks.
    specs: of the variables.
    strategy: of the user.
    device: TensorFlow's name of the GPU with this rank's variables, or None.

    Collective; all ranks decide alike: by the variables, which they compare before, and by the result of open_group().
    Raises PlanMismatchError if the variables differ between ranks, and what open_group() raises.
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
        config, index = current.config, None if device is None else gpu.device_index(device)
        wish, sums = config.device_transport, config.device_sums
        settings = DeviceSettings(wish, config.nccl_library, config.share_gpus, gpu.platform(), sums)
        devices = open_group(transport, index, current.world.host, settings)
        if devices is None:
            return None
        assert device is not None
        mask_context = Context(transport, f"{name}.used", group.engine)
        presence = UsedMaskExchange(mask_context, [spec.name for spec in specs], settings_of(config))
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
    """Describe why such gradients are not reduced on a GPU; "" if they are. Equal on ranks with equal variables."""
    if not all(isinstance(wire, str) for wire in wires):
        return "coded ones are coded there"
    others = sorted({spec.dtype for spec in specs} - FLOATS)
    return f"{', '.join(others)} are not reduced on a GPU from TensorFlow" if others else ""


class DeviceGradients:
    """Dense gradients of one list of variables, see ArrayGradients; all ranks construct it together.

    presence: exchanges which gradients the ranks have.
    device: TensorFlow's name of the GPU.
    sent: the dtype in which each gradient is reduced. A gradient is multiplied by its rank's factor of an average
    before the sum, in the wire dtype, as NCCL does.
    """

    def __init__(
        self,
        presence: UsedMaskExchange,
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
        """Return the gradient in the wire dtype, on the GPU."""
        return tf.cast(tf.identity(gradient), self._sent[at])

    def _widen(self, at: int, result: Any) -> Any:
        return tf.cast(result, self._specs[at].dtype)

    def _reduce(self, gradients: Sequence[Any]) -> tuple[list[Any], Collection[int]]:
        """Return sums or averages of eager tensors on the GPU, and the indices of gradients that no rank has."""
        for spec, one in zip(self._specs, gradients, strict=True):
            if one is not None and tuple(one.shape) != spec.shape:
                raise ValueError(
                    f"The gradient of {spec.name} has shape {tuple(one.shape)}, but the variable has {spec.shape}."
                )
        with self._one_step.part(self, first=True, last=True), self._lock:
            missing = frozenset(at for at, gradient in enumerate(gradients) if gradient is None)
            unused = self._presence.exchange(missing)
            return self._add_up(gradients), unused

    def take_part_with_zeros(self) -> None:
        """Take part in a step of other ranks as a joined rank; collective."""
        with self._lock, tf.init_scope():
            self._add_up([None] * len(self._specs), joined=True)

    def _add_up(self, gradients: Sequence[Any], *, joined: bool = False) -> list[Any]:
        with tf.device(self._device):
            sources = [
                tf.zeros(spec.shape, sent) if one is None else one
                for one, spec, sent in zip(gradients, self._specs, self._sent, strict=True)
            ]
            results = [gpu.empty_like(one) for one in sources]
        # The results' memory may have belonged to tensors that the GPU still reads: address_of() is called after the
        # allocation, so that its wait includes these.
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
        """Free the memory of the exchange of missing gradients; collective."""
        self._presence.close()


def _take_part(held: weakref.ref[DeviceGradients]) -> None:
    gradients = held()
    if gradients is not None:
        gradients.take_part_with_zeros()


runtime.on_shutdown(close_groups)
