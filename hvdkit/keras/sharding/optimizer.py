"""What an optimizer has, whose state is divided among the ranks, beside what every wrapped one has."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvdkit.engine import runtime as engine
from hvdkit.engine.reduce_op import Adasum
from hvdkit.engine.sharding.strategy import check_shard
from hvdkit.keras.distributed import Distributed, build_if_needed, sync_of
from hvdkit.keras.settings import Settings
from hvdkit.keras.sharding.clipping import clip_by_global_norm, clip_by_norms
from hvdkit.keras.sharding.elementwise import check_optimizer, refuse_loss_scale
from hvdkit.keras.sharding.state import IS_PIECE, Parts
from hvdkit.keras.sharding.sync import ShardSync


class ShardedOptimizer(Distributed):
    """Mixed in before the class of an optimizer, which is built on this rank's pieces and steps on them.

    apply() reduces gradients to those of the pieces, has the own class do everything with them that it does with
    variables, and gathers the pieces of all ranks. So does each pass of gradient_accumulation_steps but for the
    gathering: the sum of passes is in pieces, too.
    """

    built: bool

    def build(self, variables: Any) -> None:
        """The optimizer's own, on pieces; collective."""
        if self.built:
            return
        variables = list(variables)
        sync = sync_of(self)
        assert isinstance(sync, ShardSync)
        parts = self.__dict__["_hvdkit_parts"] = Parts(sync, variables)
        excluded = getattr(self, "_exclude_from_weight_decay", None)
        if excluded:
            for piece, tensor in zip(parts.pieces, parts.tensors_of(parts.pieces), strict=True):
                if tensor >= 0 and self._var_key(variables[tensor]) in excluded:  # type: ignore[attr-defined]
                    excluded.add(self._var_key(piece))  # type: ignore[attr-defined]
        super(Distributed, self).build(list(parts.pieces))  # type: ignore[misc]

    def add_optimizer_variables(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own."""
        layout = self.__dict__["_hvdkit_parts"].layout
        groups = len(layout.groups)
        made = super().add_optimizer_variables(*args, **kwargs)  # type: ignore[misc]
        del layout.groups[groups:]  # what add_variable_from_reference() has noted
        layout.add_group(made if isinstance(made, tuple) else (made,))
        return made

    def add_variable_from_reference(self, reference_variable: Any, name: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own."""
        made = super().add_variable_from_reference(reference_variable, name, *args, **kwargs)  # type: ignore[misc]
        setattr(made, IS_PIECE, True)
        self.__dict__["_hvdkit_parts"].layout.add(name, made)
        return made

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """The optimizer's own, on the pieces of gradients of all ranks; then variables are those of all ranks."""
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            build_if_needed(self, trainable_variables)
        parts, gradients = self._hvdkit_parts_of(), list(grads)
        variables = parts.variables if trainable_variables is None else trainable_variables
        present = _by_variable(parts, gradients, variables)
        if not gradients:
            return None
        driver, passes = parts.sync.driver, self.gradient_accumulation_steps  # type: ignore[attr-defined]
        scattered = driver.scatter(present)
        if all(gradient is None for gradient in [*present, *scattered]):
            raise ValueError("No gradients provided for any variable.")
        factor = parts.sync.passes_factor
        if factor != 1.0:
            scattered = [None if gradient is None else gradient * factor for gradient in scattered]
        own = parts.pieces[:-1]
        driver.refresh(own)
        nothing = keras.ops.zeros((1,), parts.pieces[-1].dtype)
        super(Distributed, self).apply([*scattered, nothing], list(parts.pieces))  # type: ignore[misc]
        # Keras counts a step as its last deed.
        driver.gather(own, self._iterations % passes == 0 if passes else True)  # type: ignore[attr-defined]
        for variable in variables:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))
        return None

    def _hvdkit_parts_of(self) -> Parts:
        parts: Parts | None = self.__dict__.get("_hvdkit_parts")
        if parts is None:
            raise ValueError("The optimizer is not built. Call optimizer.build(variables) on all ranks.")
        return parts

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """The optimizer's own, as `apply`."""
        parts, variables = self._hvdkit_parts_of(), self.variables  # type: ignore[attr-defined]
        mapping = [
            *zip(parts.variables, trainable_variables, strict=True),
            *zip(variables, optimizer_variables, strict=True),
        ]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            self.apply(grads)
        return (
            [scope.get_current_value(variable) for variable in parts.variables],
            [scope.get_current_value(variable) for variable in variables],
        )

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        self._hvdkit_parts_of().window = trainable_variables
        return super(Distributed, self)._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        parts = self._hvdkit_parts_of()
        add = parts.sync.driver.sum
        if (limit := self.clipnorm) and limit > 0:  # type: ignore[attr-defined]
            return clip_by_norms(grads, parts.tensors_of(parts.window), len(parts.variables), limit, add)
        if (limit := self.global_clipnorm) and limit > 0:  # type: ignore[attr-defined]
            return clip_by_global_norm(grads, limit, add)
        return super(Distributed, self)._clip_gradients(grads)  # type: ignore[misc]

    def gather_state(self) -> None:
        """Make the state whole, in host memory of this rank, so that it can be saved until the next step; collective.

        On JAX during fit() call model.jax_state_sync() before.
        """
        self._hvdkit_gather(keep=True)

    def _hvdkit_gather(self, *, keep: bool) -> None:
        if self.built:
            self._hvdkit_parts_of().gather(self.variables, self._hvdkit_steps(), keep=keep)  # type: ignore[attr-defined]

    def _hvdkit_take_over(self, root: int, broadcast: Any) -> None:
        parts: Parts = self._hvdkit_parts_of()
        parts.take_over(self.variables, root, broadcast)  # type: ignore[attr-defined]

    def _hvdkit_release(self) -> None:
        self._hvdkit_parts_of().release()

    def _hvdkit_steps(self) -> int:
        return int(keras.ops.convert_to_numpy(self._iterations))  # type: ignore[attr-defined]

    def save_own_variables(self, store: Any) -> None:
        """The plain optimizer's, after gather_state(). Raises RuntimeError without."""
        if not self.built:
            super().save_own_variables(store)  # type: ignore[misc]
        else:
            self._hvdkit_parts_of().save(self.variables, self._hvdkit_steps(), store)  # type: ignore[attr-defined]

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """The plain optimizer's, whatever the number of ranks was. All ranks load, or broadcast_model() follows."""
        if not self.built:
            super().load_own_variables(store)  # type: ignore[misc]
            return
        parts = self._hvdkit_parts_of()
        parts.load(self.variables, store)  # type: ignore[attr-defined]
        parts._kept_at = self._hvdkit_steps()

    def set_weights(self, weights: Sequence[Any]) -> None:
        """The state of a plain optimizer, as load_own_variables()."""
        self.load_own_variables({str(number): weight for number, weight in enumerate(weights)})

    def register_local_var(self, var: Any) -> None:
        """Raise ValueError: the variables are divided among the ranks."""
        raise ValueError("register_local_var(): not with shard=..., which divides all variables. Leave out shard.")

    def __setattr__(self, name: str, value: Any) -> None:
        outer = sys._getframe(1).f_locals.get("self") if name == "loss_scale_factor" else None
        if isinstance(outer, keras.optimizers.LossScaleOptimizer):
            refuse_loss_scale()
        super().__setattr__(name, value)


def _by_variable(parts: Parts, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """A gradient, or None, for each variable that the optimizer was built on."""
    if len(gradients) != len(variables):
        raise ValueError(f"apply() got {len(gradients)} gradients for {len(variables)} variables.")
    ordered: list[Any] = [None] * len(parts.variables)
    for gradient, variable in zip(gradients, variables, strict=True):
        index = parts.index_of.get(id(variable))
        if index is None:
            raise ValueError(
                f"Unknown variable: {variable}. The optimizer was built on other variables. Make a new optimizer for "
                f"new variables."
            )
        ordered[index] = gradient
    return ordered


def check_sharding(optimizer: Any, settings: Settings, shard: str) -> None:
    """Raise ValueError for what cannot be combined with shard."""
    check_shard(shard, strategy=settings.strategy is not None, adasum=settings.op is Adasum)
    if not isinstance(settings.options.wire, str):
        raise ValueError(
            f"DistributedOptimizer(): shard={shard!r} reduce-scatters gradients, which codings such as "
            f"{settings.compression!r} cannot. Use compression=hvd.Compression.fp16 or bf16, or leave out shard."
        )
    check_optimizer(optimizer)
    if engine.runtime("DistributedOptimizer()").config.elastic:
        raise ValueError(
            f"DistributedOptimizer(): shard={shard!r} of Keras does not go with an elastic job: the part of the state "
            f"that a lost rank had would be lost. Leave out shard, or start hvdrun without --elastic and load "
            f"checkpoints."
        )
