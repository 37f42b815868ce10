"""Pieces of variables on the PyTorch backend: views of the parameters' memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import torch

from hvdkit.engine.groups import Group
from hvdkit.engine.planned.plan import TensorSpec
from hvdkit.engine.request import ReduceOptions
from hvdkit.engine.sharding.arrays import ShardedArrays
from hvdkit.engine.sharding.pieces import Piece
from hvdkit.keras.sharding.drivers import Sum
from hvdkit.torch.tensors import as_buffer
from hvdkit.transport.buffer import Array


class TorchShards:
    """See ShardDriver. Numbers on a GPU go through the host's memory.

    Nothing is early: Keras' step reads all gradients from the parameters after backward.
    """

    def __init__(
        self,
        group: Group,
        tensors: Sequence[TensorSpec],
        variables: Sequence[Any],
        options: ReduceOptions,
        add: Sum,
        *,
        early: bool,
    ) -> None:
        self._parameters = [variable.value for variable in variables]
        for tensor, parameter in zip(tensors, self._parameters, strict=True):
            if not parameter.is_contiguous():
                raise ValueError(
                    f"DistributedOptimizer(): shard= needs variables whose elements lie in order in memory, and "
                    f"{tensor.name} has the strides {parameter.stride()}. Make its value contiguous before."
                )
        self.arrays = ShardedArrays(group, tensors, options, compute_threads=torch.get_num_threads())
        self._add = add
        self._results = [
            torch.empty(piece.count, dtype=self._parameters[piece.tensor].dtype) for piece in self.arrays.pieces
        ]

    def _view(self, piece: Piece) -> torch.Tensor:
        flat: torch.Tensor = self._parameters[piece.tensor].detach().view(-1)
        return flat[piece.offset : piece.offset + piece.count]

    def make_piece(self, piece: Piece, name: str) -> Any:
        """See ShardDriver.make_piece."""
        view = torch.nn.Parameter(self._view(piece), requires_grad=False)
        return keras.Variable(view, dtype=_name(view), trainable=False, name=name)

    def refresh(self, pieces: Sequence[Any]) -> None:
        """See ShardDriver.refresh: a parameter may have got other memory."""
        for piece, variable in zip(self.arrays.pieces, pieces, strict=True):
            view = self._view(piece)
            if view.data_ptr() != variable.value.data_ptr():
                variable.value.data = view

    def scatter(self, gradients: Sequence[Any]) -> list[Any]:
        """See ShardDriver.scatter."""
        arrays = [
            None if gradient is None else _array(gradient.detach(), parameter.dtype)
            for gradient, parameter in zip(gradients, self._parameters, strict=True)
        ]
        unused = self.arrays.scatter(arrays, [as_buffer(result).array for result in self._results])
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


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _array(tensor: torch.Tensor, dtype: torch.dtype) -> Array:
    array: Array = as_buffer(tensor.to("cpu", dtype).contiguous()).array
    return array
