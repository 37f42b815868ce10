"""Optimizer mixin for sharded state (ZeRO-1 and ZeRO-2)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvdkit.engine import runtime as engine
from hvdkit.engine.reduce_op import Adasum
from hvdkit.engine.sharding.strategy import check_shard
from hvdkit.keras.distributed import Distributed, build_if_needed, sync_of
from hvdkit.keras.settings import OptimizerSettings
from hvdkit.keras.sharding.clipping import clip_by_global_norm, clip_by_norms
from hvdkit.keras.sharding.elementwise import check_optimizer, check_slots
from hvdkit.keras.sharding.loss_scale import ShardedLossScale
from hvdkit.keras.sharding.state import IS_PIECE, Parts
from hvdkit.keras.sharding.sync import ShardSync


class ShardedOptimizer(Distributed):
    """Mixin of an optimizer class, which is built on this rank's slices and steps on them.

    apply() reduces gradients to those of the slices, applies the own class's operations to these, and gathers the
    slices of all ranks. Each pass of gradient_accumulation_steps does the same without gathering: the sum of the passes
    is sharded, too.
    """

    built: bool

    def build(self, variables: Any) -> None:
        """Build the optimizer on slices; collective. In an elastic job sync() of a KerasState does it.

        In such a job ranks may join later, and be here while the others train.
        """
        if self.built:
            return
        self.__dict__["_hvdkit_variables"] = list(variables)
        if not may_come_later():
            self._hvdkit_divide()

    def _hvdkit_divide(self) -> None:
        """Build on this rank's slices among the present ranks, with a new state; collective.

        Does nothing if that is done already. Raises ValueError for an optimizer whose build() was not called.
        """
        variables = self.__dict__.get("_hvdkit_variables")
        if variables is None:
            raise ValueError(_NOT_BUILT)
        if self._hvdkit_is_divided:
            return
        sync = sync_of(self)
        assert isinstance(sync, ShardSync)
        parts = Parts(sync, variables)  # if a rank is lost here, the optimizer remains unchanged
        for variable in self.__dict__.pop("_hvdkit_made", ()):
            self._untrack_variable(variable)  # type: ignore[attr-defined]
        self._trainable_variables_indices.clear()  # type: ignore[attr-defined]
        self.built, before = False, self.variables  # type: ignore[attr-defined]
        self.__dict__["_hvdkit_parts"] = parts
        self.__dict__["_hvdkit_wholes"] = {
            self._var_key(piece): variables[tensor]  # type: ignore[attr-defined]
            for piece, tensor in zip(parts.pieces, parts.tensors_of(parts.pieces), strict=True)
            if tensor >= 0
        }
        super(Distributed, self).build(list(parts.pieces))  # type: ignore[misc]
        known = {id(variable) for variable in before}
        made = self.__dict__["_hvdkit_made"] = [one for one in self.variables if id(one) not in known]  # type: ignore[attr-defined]
        check_slots(made, self, IS_PIECE)

    @property
    def _hvdkit_is_divided(self) -> bool:
        sync = sync_of(self)
        return "_hvdkit_parts" in self.__dict__ and isinstance(sync, ShardSync) and sync.is_open

    def _use_weight_decay(self, variable: Any) -> Any:
        whole = self.__dict__["_hvdkit_wholes"].get(self._var_key(variable), variable)  # type: ignore[attr-defined]
        return super()._use_weight_decay(whole)  # type: ignore[misc]

    def add_optimizer_variables(self, *args: Any, **kwargs: Any) -> Any:
        """Call the own class's method, and record the slots."""
        layout = self.__dict__["_hvdkit_parts"].layout
        groups = len(layout.groups)
        made = super().add_optimizer_variables(*args, **kwargs)  # type: ignore[misc]
        del layout.groups[groups:]  # recorded by add_variable_from_reference()
        layout.add_group(made if isinstance(made, tuple) else (made,))
        return made

    def add_variable_from_reference(self, reference_variable: Any, name: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Call the own class's method, and record the slot."""
        made = super().add_variable_from_reference(reference_variable, name, *args, **kwargs)  # type: ignore[misc]
        setattr(made, IS_PIECE, True)
        self.__dict__["_hvdkit_parts"].layout.add(name, made)
        return made

    def scale_loss(self, loss: Any) -> Any:
        """Scale the loss. With shard="gradients" the following backward sends gradients on PyTorch."""
        self._hvdkit_before_backward()
        return super().scale_loss(loss)  # type: ignore[misc]

    def _hvdkit_before_backward(self) -> None:
        if "_hvdkit_parts" in self.__dict__:
            self._hvdkit_parts_of().sync.driver.before_backward()

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Apply slices of the reduced gradients, then gather the variables from all ranks."""
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            build_if_needed(self, trainable_variables)
        parts, gradients = self._hvdkit_parts_of(), list(grads)
        variables = parts.variables if trainable_variables is None else trainable_variables
        if parts.reduced is not None:
            variables = parts.reduced
        elif not gradients:
            return None
        else:
            gradients = self._hvdkit_scatter(gradients, variables)
        driver, passes = parts.sync.driver, self.gradient_accumulation_steps  # type: ignore[attr-defined]
        factor = parts.sync.passes_factor
        if factor != 1.0:
            gradients = [None if gradient is None else gradient * factor for gradient in gradients]
        own = parts.pieces[:-1]
        driver.refresh(own)
        super(Distributed, self).apply(gradients, list(parts.pieces))  # type: ignore[misc]
        # Keras increments the step count last, and overwrites variables with their averages within windows, too.
        always = not passes or self.ema_overwrite_frequency  # type: ignore[attr-defined]
        driver.gather(own, True if always else self._iterations % passes == 0)  # type: ignore[attr-defined]
        for variable in variables:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))
        return None

    def _hvdkit_scatter(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients of the slices, for apply() within parts.reduced_of(variables); collective."""
        parts = self._hvdkit_parts_of()
        driver, present = parts.sync.driver, _by_variable(parts, gradients, variables)
        left_out = set(driver.sent).difference(parts.index_of[id(variable)] for variable in variables)
        if left_out:
            raise ValueError(
                f'DistributedOptimizer(shard="gradients"): apply() got no {parts.variables[min(left_out)].path}, whose '
                f'gradient was sent during backward. Pass all variables that backward trains, or use shard="optimizer".'
            )
        scattered = driver.scatter(present)
        return [*scattered, keras.ops.zeros((1,), parts.pieces[-1].dtype)]

    def _hvdkit_parts_of(self) -> Parts:
        parts: Parts | None = self.__dict__.get("_hvdkit_parts")
        if parts is None:
            raise ValueError(_NOT_DIVIDED if "_hvdkit_variables" in self.__dict__ else _NOT_BUILT)
        return parts

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Apply reduced gradients without state, as `apply` does."""
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

    def finalize_variable_values(self, var_list: Any) -> None:
        """Set the variables to their averages, with use_ema, as the own class does; collective.

        Raises ValueError for variables other than those on which the optimizer was built.
        """
        if not self.use_ema:  # type: ignore[attr-defined]
            return
        parts, variables = self._hvdkit_parts_of(), list(var_list)
        if [id(one) for one in variables] != [id(one) for one in parts.variables]:
            raise ValueError(
                f"finalize_variable_values() got {len(variables)} variables that are not the {len(parts.variables)} of "
                f"which the optimizer has averages. Pass those that it was built on."
            )
        parts.sync.driver.gather(self._model_variables_moving_average[:-1], True)  # type: ignore[attr-defined]

    def gather_state(self) -> None:
        """Gather the whole state in this rank's host memory, so that it can be saved until the next step; collective.

        On JAX during fit() first call model.jax_state_sync().
        """
        self._hvdkit_gather(keep=True)

    def _hvdkit_gather(self, *, keep: bool) -> None:
        if "_hvdkit_parts" in self.__dict__:
            self._hvdkit_parts_of().gather(self.variables, self._hvdkit_steps(), keep=keep)  # type: ignore[attr-defined]

    def _hvdkit_take_over(self, root: int, broadcast: Any) -> None:
        parts: Parts = self._hvdkit_parts_of()
        parts.take_over(self.variables, self._hvdkit_steps(), root, broadcast)  # type: ignore[attr-defined]

    def _hvdkit_release(self) -> None:
        self._hvdkit_parts_of().release()

    def _hvdkit_steps(self) -> int:
        return int(keras.ops.convert_to_numpy(self._iterations))  # type: ignore[attr-defined]

    def save_own_variables(self, store: Any) -> None:
        """Save the plain optimizer's variables, after gather_state(). Raises RuntimeError otherwise."""
        if "_hvdkit_parts" not in self.__dict__:
            super().save_own_variables(store)  # type: ignore[misc]
        else:
            self._hvdkit_parts_of().save(self.variables, self._hvdkit_steps(), store)  # type: ignore[attr-defined]

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Load a plain optimizer's variables, from any number of ranks. All load, or broadcast_model() follows."""
        if "_hvdkit_variables" not in self.__dict__:
            super().load_own_variables(store)  # type: ignore[misc]
            return
        parts = self._hvdkit_parts_of()
        parts.load(self.variables, store)  # type: ignore[attr-defined]
        parts._whole_state_step = self._hvdkit_steps()

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Load the state of a plain optimizer, as load_own_variables() does."""
        self.load_own_variables({str(number): weight for number, weight in enumerate(weights)})

    def register_local_var(self, var: Any) -> None:
        """Raise ValueError: the variables are divided among the ranks."""
        raise ValueError("register_local_var(): not with shard=..., which divides all variables. Leave out shard.")

    def _hvdkit_loss_scale(self) -> type:
        return ShardedLossScale


def find_sharded(optimizer: Any) -> ShardedOptimizer | None:
    """Return the sharded optimizer: this one or the inner one of a LossScaleOptimizer; None if not sharded."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner if isinstance(inner, ShardedOptimizer) else None


def refuse_swaps() -> None:
    """Make keras.callbacks.SwapEMAWeights refuse a model whose averages are divided among the ranks."""
    own = keras.callbacks.SwapEMAWeights.set_model

    @functools.wraps(own)
    def set_model(self: Any, model: Any) -> None:
        own(self, model)
        optimizer = getattr(model, "optimizer", None)
        if any(find_sharded(one) is not None for one in (optimizer, *getattr(optimizer, "optimizers", ()))):
            raise ValueError(
                f"{type(self).__name__} cannot swap weights with averages that are divided among the ranks "
                f"(shard=...). At its end fit() gives the model the averages; to do so before, call "
                f"optimizer.finalize_variable_values(model.trainable_variables) on all ranks."
            )

    keras.callbacks.SwapEMAWeights.set_model = set_model


def may_come_later() -> bool:
    """Return whether ranks may begin while the others train."""
    config = engine.runtime("DistributedOptimizer()").config
    return config.elastic and not config.elastic_restarts


_NOT_BUILT = "The optimizer is not built. Call optimizer.build(variables) on all ranks."
_NOT_DIVIDED = (
    "The optimizer has shard=..., and in an elastic job its state is divided by sync() of a KerasState. Make state = "
    "hvd.elastic.KerasState(model), and train and load checkpoints within the function that hvd.elastic.run calls."
)


def _by_variable(parts: Parts, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Return a gradient, or None, for each variable on which the optimizer was built."""
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


def check_sharding(optimizer: Any, settings: OptimizerSettings, shard: str) -> None:
    """Raise ValueError for settings that cannot be combined with shard."""
    check_shard(shard, strategy=settings.strategy is not None, adasum=settings.op is Adasum)
    if not isinstance(settings.options.wire, str):
        raise ValueError(
            f"DistributedOptimizer(): shard={shard!r} reduce-scatters gradients, which codings such as "
            f"{settings.compression!r} cannot. Use compression=hvd.Compression.fp16 or bf16, or leave out shard."
        )
    check_optimizer(optimizer)
