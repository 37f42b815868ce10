"""Sharded state on the PyTorch backend: slices are views of the parameters' memory."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import torch
from torch.utils.hooks import RemovableHandle

from hvdkit.engine.sharding.tensor_ranges import TensorRange
from hvdkit.keras.sharding.drivers import ShardDriver, TrainedVariables
from hvdkit.torch.conversions import PlannedMetadata
from hvdkit.torch.tensors import as_buffer
from hvdkit.torch.uncompiled import uncompiled
from hvdkit.transport.buffer import Array


class TorchShards(ShardDriver):
    """See ShardDriver. Data on a GPU goes through host memory.

    Nothing is early: Keras' step reads all gradients from the parameters after backward.
    """

    def __init__(self, trained: TrainedVariables) -> None:
        self._parameters = [variable.value for variable in trained.variables]
        self._names = [tensor.name for tensor in trained.tensors]
        _check_contiguous(self._names, self._parameters)
        self.arrays = trained.open(compute_threads=torch.get_num_threads())
        self._add, self._early = trained.add, trained.early
        self._results = [
            torch.empty(piece.count, dtype=self._parameters[piece.tensor].dtype) for piece in self.arrays.pieces
        ]
        self._planned = PlannedMetadata(list(zip(self._names, self._parameters, strict=True)))
        #: Tensors whose gradients backward has passed on; None outside of before_backward() to scatter().
        self._arrived: set[int] | None = None
        if trained.early:
            find, computed = weakref.ref(self), uncompiled(_computed)
            hooks = [
                parameter.register_post_accumulate_grad_hook(functools.partial(computed, find, index))
                for index, parameter in enumerate(self._parameters)
                if parameter.requires_grad
            ]
            weakref.finalize(self, _remove, hooks).atexit = False

    def _view(self, piece: TensorRange) -> torch.Tensor:
        flat: torch.Tensor = self._parameters[piece.tensor].detach().view(-1)
        return flat[piece.elements]

    def make_piece(self, piece: TensorRange, name: str) -> Any:
        """See ShardDriver.make_piece."""
        view = torch.nn.Parameter(self._view(piece), requires_grad=False)
        return keras.Variable(view, dtype=_name(view), trainable=False, name=name)

    def refresh(self, pieces: Sequence[Any]) -> None:
        """See ShardDriver.refresh. A parameter may have new memory.

        Raises ValueError for a parameter that was converted to another dtype, shape or memory format.
        """
        self._planned.check()
        _check_contiguous(self._names, self._parameters)
        for piece, variable in zip(self.arrays.pieces, pieces, strict=True):
            view = self._view(piece)
            if view.data_ptr() != variable.value.data_ptr():
                variable.value.data = view

    @property
    def sent(self) -> Collection[int]:
        """See ShardDriver.sent."""
        return self._arrived or ()

    def close(self) -> None:
        """See ShardDriver.close. Remaining references to this driver do not make it accept gradients."""
        self._arrived = None
        self.arrays.close()

    def before_backward(self) -> None:
        """See ShardDriver.before_backward. Raises BackwardInterruptedError as ShardedArrays.begin() does."""
        if self._early and not self._arrived:
            self._planned.check()
            self._begin()
            self._arrived = set()

    def _begin(self) -> None:
        self.arrays.begin([as_buffer(result).array for result in self._results])

    def computed(self, tensor: int) -> None:
        """Send and free a gradient that backward has computed. Raises RuntimeError for the second one in a step."""
        if self._arrived is None:
            return
        arrived, self._arrived = self._arrived, None  # and remains None if this fails
        if tensor in arrived:
            raise RuntimeError(
                f'DistributedOptimizer(shard="gradients"): backward computed the gradient of {self._names[tensor]} '
                f"again, after it was sent and before apply() was called. Add up the losses and call backward() once "
                f'before apply(), use gradient_accumulation_steps, or shard="optimizer".'
            )
        parameter = self._parameters[tensor]
        self.arrays.arrived(tensor, _array(parameter.grad.detach(), parameter.dtype))
        parameter.grad = None
        arrived.add(tensor)
        self._arrived = arrived

    def scatter(self, gradients: Sequence[Any]) -> list[Any]:
        """See ShardDriver.scatter. Raises ValueError as refresh(), and for a gradient that backward has passed on."""
        self._planned.check()
        if self._arrived is None:
            self._begin()
        arrived, self._arrived = self._arrived or set(), None
        for index in reversed(range(len(gradients))):
            gradient, dtype = gradients[index], self._parameters[index].dtype
            if index not in arrived:
                self.arrays.arrived(index, None if gradient is None else _array(gradient.detach(), dtype))
            elif gradient is not None:
                raise ValueError(
                    f'DistributedOptimizer(shard="gradients"): apply() got a gradient of {self._names[index]}, which '
                    f'was sent during backward(). To change gradients before apply(), use shard="optimizer".'
                )
        unused = self.arrays.finish()
        return [
            None if piece.tensor in unused else result.to(self._parameters[piece.tensor].device)
            for piece, result in zip(self.arrays.pieces, self._results, strict=True)
        ]

    def gather(self, pieces: Sequence[Any], due: Any) -> None:
        """See ShardDriver.gather."""
        if not due:
            return
        wholes = [parameter.detach().cpu() for parameter in self._parameters]  # on the host their own memory
        own = [_array(variable.value.detach(), variable.value.dtype) for variable in pieces]
        self.arrays.gather(own, [as_buffer(whole).array for whole in wholes])
        for parameter, whole in zip(self._parameters, wholes, strict=True):
            if parameter.device.type != "cpu":
                parameter.data.copy_(whole)

    def sum(self, numbers: Any) -> Any:
        """See ShardDriver.sum."""
        host = numbers.detach().cpu().clone()
        self._add(host.numpy())
        return host.to(numbers.device)


def _check_contiguous(names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
    for name, parameter in zip(names, parameters, strict=True):
        if not parameter.is_contiguous():
            raise ValueError(
                f"DistributedOptimizer(): shard= needs variables whose elements lie in order in memory, and {name} has "
                f"the strides {parameter.stride()} for the shape {tuple(parameter.shape)}. Make its value contiguous: "
                "variable.value.data = variable.value.data.contiguous()."
            )


def _computed(find: Callable[[], TorchShards | None], tensor: int, _: torch.Tensor) -> None:
    driver = find()
    if driver is not None:
        driver.computed(tensor)


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _array(tensor: torch.Tensor, dtype: torch.dtype) -> Array:
    array: Array = as_buffer(tensor.to("cpu", dtype).contiguous()).array
    return array
