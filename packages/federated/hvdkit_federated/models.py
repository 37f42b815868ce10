"""Weights of a torch module or a Keras model as numpy arrays, and the proximal term of FedProx.

No framework is imported: the model's own framework is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit_federated.errors import FederatedError
from hvdkit_federated.vector import Arrays


def _is_torch(model: Any, call: str) -> bool:
    if hasattr(model, "get_weights") and hasattr(model, "trainable_variables"):
        return False  # Keras, whose models are torch modules too on that backend
    if hasattr(model, "state_dict") and hasattr(model, "named_parameters"):
        return True
    raise FederatedError(
        f"{call}: the model is a {type(model).__name__}, but must be a torch module or a Keras model. For other "
        "models pass their weights as a list of numpy arrays."
    )


def _floating(model: Any) -> list[Any]:
    return [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]


def get_weights(model: Any) -> list[NDArray[Any]]:
    """Return copies of the weights, in the model's order.

    model: a torch module, of which the parameters and buffers of floating-point numbers are used (a counter of batches
        is not); or a Keras model with float variables.
    Raises FederatedError for another object, and for a bfloat16 tensor of torch, which numpy does not have.
    """
    if not _is_torch(model, "get_weights()"):
        return [np.array(array) for array in model.get_weights()]
    tensors = _floating(model)
    if any(str(tensor.dtype) == "torch.bfloat16" for tensor in tensors):
        raise FederatedError("get_weights(): the module has bfloat16 tensors. Keep its weights in float32.")
    return [np.array(tensor.detach().cpu().numpy()) for tensor in tensors]


def set_weights(model: Any, weights: Arrays) -> None:
    """Write weights in the form of get_weights() into the model.

    Raises FederatedError for another number of arrays or other shapes.
    """
    torch = _is_torch(model, "set_weights()")
    targets = _floating(model) if torch else model.get_weights()
    here, there = [tuple(one.shape) for one in targets], [np.shape(one) for one in weights]
    if here != there:
        at = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there)))
        raise FederatedError(
            f"set_weights(): the model has {len(here)} arrays and {len(there)} were given; number {at} is the first "
            f"that differs: {here[at] if at < len(here) else 'none'} in the model, "
            f"{there[at] if at < len(there) else 'none'} given. Pass what get_weights() returned for this model."
        )
    if not torch:
        model.set_weights(list(weights))
        return
    for tensor, array in zip(targets, weights, strict=True):
        value = tensor.detach()  # the same memory, outside of autograd
        value.copy_(value.new_tensor(array))


def proximal_gradient(weights: Arrays, reference: Arrays, mu: float) -> list[NDArray[Any]]:
    """Compute mu * (weights - reference), FedProx's addition to the gradients, for models without a framework."""
    return [mu * (now - start) for now, start in zip(weights, reference, strict=True)]


class ProximalTerm:
    """FedProx's penalty mu/2 * |w - w0|^2 on the trained parameters (Li et al. 2020, arXiv 1812.06127).

    w0: the model's weights when this object is made. So make it in each round, after set_weights().
    Raises FederatedError for a negative mu, or an object that is not a model.
    """

    def __init__(self, model: Any, mu: float) -> None:
        if not mu >= 0:
            raise FederatedError(f"ProximalTerm(): mu is {mu}; it must be 0 or more.")
        self.mu, self._torch = mu, _is_torch(model, "ProximalTerm()")
        if self._torch:
            self._trained: Sequence[Any] = [one for one in model.parameters() if one.requires_grad]
            self._reference = [one.detach().clone() for one in self._trained]
        else:
            self._trained = list(model.trainable_variables)
            self._reference = [np.array(sys.modules["keras"].ops.convert_to_numpy(one)) for one in self._trained]

    def __call__(self) -> Any:
        """Compute the penalty, a scalar of the model's framework: `loss = loss + term()`."""
        square: Callable[[Any], Any] = (
            (lambda one: (one * one).sum()) if self._torch else lambda one: sys.modules["keras"].ops.sum(one * one)
        )
        pairs = zip(self._trained, self._reference, strict=True)
        return 0.5 * self.mu * sum(square(now - start) for now, start in pairs)

    def loss(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Make a loss for Keras: `loss(y_true, y_pred)` plus the penalty, for compile() in each round.

        A compiled step keeps the reference of its tracing.
        """

        def with_penalty(y_true: Any, y_pred: Any) -> Any:
            return loss(y_true, y_pred) + self()

        return with_penalty
