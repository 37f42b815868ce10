"""Loss scaling around an optimizer whose state is divided among the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from hvdkit.keras.distributed import build_if_needed
from hvdkit.keras.sharding.state import Parts


class ShardedLossScale:
    """Mixin of a LossScaleOptimizer around a ShardedOptimizer: all ranks skip the same steps.

    Scaled gradients are reduce-scattered first; each rank checks and unscales its slices.
    """

    def scale_loss(self, loss: Any) -> Any:
        """See ShardedOptimizer.scale_loss."""
        self._hvdkit_inner._hvdkit_before_backward()
        return super().scale_loss(loss)  # type: ignore[misc]

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Apply this rank's slices of the reduced gradients."""
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            build_if_needed(self, trainable_variables)
        parts, gradients = self._hvdkit_parts_of(), list(grads)
        if not gradients:
            return None
        variables = parts.variables if trainable_variables is None else trainable_variables
        scattered = self._hvdkit_inner._hvdkit_scatter(gradients, variables)
        with self._hvdkit_on_pieces(parts, variables):
            return super().apply(scattered)  # type: ignore[misc]

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Apply reduced gradients without state, as `apply` does."""
        parts = self._hvdkit_parts_of()
        scattered = self._hvdkit_inner._hvdkit_scatter(list(grads), parts.variables)
        with self._hvdkit_on_pieces(parts, parts.variables):
            return super().stateless_apply(optimizer_variables, scattered, trainable_variables)  # type: ignore[misc]

    @contextmanager
    def _hvdkit_on_pieces(self, parts: Parts, variables: Sequence[Any]) -> Iterator[None]:
        """Context in which gradients are those of the slices. variables: to which they belong."""
        own = self.__dict__["_trainable_variables"]
        self.__dict__["_trainable_variables"] = parts.pieces  # not assigned: Keras would count them as its variables
        try:
            with parts.reduced_of(variables):
                yield
        finally:
            self.__dict__["_trainable_variables"] = own

    def check_finite(self, grads: Any) -> Any:
        """Return whether the gradients of all ranks' slices are finite; collective."""
        finite = keras.ops.cast(super().check_finite(grads), "float32")  # type: ignore[misc]
        infinite = self._hvdkit_parts_of().sync.driver.sum(keras.ops.reshape(1.0 - finite, (1,)))
        return keras.ops.equal(infinite[0], 0.0)

    @property
    def _hvdkit_inner(self) -> Any:
        return self.inner_optimizer  # type: ignore[attr-defined]

    def _hvdkit_parts_of(self) -> Parts:
        parts: Parts = self._hvdkit_inner._hvdkit_parts_of()
        return parts

    def gather_state(self) -> None:
        """See ShardedOptimizer.gather_state."""
        self._hvdkit_inner.gather_state()

    def save_own_variables(self, store: Any) -> None:
        """Save the plain optimizer's variables, the inner optimizer's last. See ShardedOptimizer.save_own_variables."""
        state: dict[str, Any] = {}
        self._hvdkit_inner.save_own_variables(state)
        own = self._variables  # type: ignore[attr-defined]
        for number, variable in enumerate(own):
            store[str(number)] = keras.ops.convert_to_numpy(variable).copy()
        for number in range(len(state)):
            store[str(len(own) + number)] = state[str(number)]

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """See ShardedOptimizer.load_own_variables."""
        own = self._variables  # type: ignore[attr-defined]
        inner = {str(number): store[str(len(own) + number)] for number in range(len(store.keys()) - len(own))}
        self._hvdkit_inner.load_own_variables(inner)
        for number, variable in enumerate(own):
            variable.assign(store[str(number)])
