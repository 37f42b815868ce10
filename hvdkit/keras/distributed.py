"""Mixins that wrapped optimizers get: Keras calls their methods before those of the optimizer's own class."""

from __future__ import annotations

import functools
from typing import Any

import keras

from hvdkit.keras.backends import uncompiled
from hvdkit.keras.sync import GradientSync


class Distributed:
    """Mixin of distributed optimizers; its methods precede those of the class that updates variables.

    `apply` begins with the reduction of gradients, so that all later operations (unscaling, clipping, weight decay,
    the update, averages of weights) have the same effect on every rank as in one process. With gradient accumulation
    `apply` runs in each pass; then gradients are reduced once per window, just before the optimizer clips them.
    """

    def build(self, variables: Any) -> None:
        """Build the optimizer, and prepare the reduction of gradients."""
        super().build(variables)  # type: ignore[misc]
        if not self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            sync_of(self).prepare(list(variables))

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Apply the reduced gradients of all ranks."""
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            build_if_needed(self, trainable_variables)
        sync, passes = sync_of(self), self.gradient_accumulation_steps  # type: ignore[attr-defined]
        if not passes:
            variables = self._trainable_variables if trainable_variables is None else trainable_variables  # type: ignore[attr-defined]
            if len(grads := list(grads)) == len(variables):  # else the optimizer's own error message is clearer
                grads = sync.reduce(grads, variables)
        result = super().apply(grads, trainable_variables)  # type: ignore[misc]
        # Keras increments the step count last.
        sync.after_step(self._iterations % passes == 0 if passes else True)  # type: ignore[attr-defined]
        return result

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        with sync_of(self).window_of(trainable_variables):
            return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        passes = self.gradient_accumulation_steps  # type: ignore[attr-defined]
        if passes:
            grads = sync_of(self).reduce_window(grads, lambda: (self._iterations + 1) % passes == 0)  # type: ignore[attr-defined]
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def register_local_var(self, var: Any) -> None:
        """Exclude this variable's gradient from the reduction; see PartialDistributedOptimizer."""
        sync_of(self).add_local(var)

    def _hvdkit_loss_scale(self) -> type:
        """Return the mixin for a LossScaleOptimizer around this optimizer."""
        return DistributedLossScale


class DistributedLossScale:
    """Mixin of a LossScaleOptimizer around a distributed optimizer: all ranks skip the same steps."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Apply scaled, reduced gradients: if they are infinite on one rank, they are so on all."""
        inner, sync = self.inner_optimizer, sync_of(self)  # type: ignore[attr-defined]
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            build_if_needed(self, trainable_variables)
        if inner.gradient_accumulation_steps:
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        variables = inner._trainable_variables if trainable_variables is None else trainable_variables
        if len(grads := list(grads)) == len(variables):  # see Distributed.apply
            grads = sync.reduce(grads, variables)
        with sync.done():
            return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Apply reduced gradients without state, as `apply` does."""
        inner, sync = self.inner_optimizer, sync_of(self)  # type: ignore[attr-defined]
        if inner.gradient_accumulation_steps:
            return super().stateless_apply(optimizer_variables, grads, trainable_variables)  # type: ignore[misc]
        variables = inner._trainable_variables
        if len(grads := list(grads)) == len(variables) == len(trainable_variables):
            with keras.StatelessScope(state_mapping=list(zip(variables, trainable_variables, strict=True))):
                grads = sync.reduce(grads, variables)
        with sync.done():
            return super().stateless_apply(optimizer_variables, grads, trainable_variables)  # type: ignore[misc]

    def check_finite(self, grads: Any) -> Any:
        """Return whether the gradients are finite on all ranks."""
        return sync_of(self).agree(super().check_finite(grads))  # type: ignore[misc]


def watch_loss_scale() -> None:
    """Make every later LossScaleOptimizer around a distributed optimizer agree with the other ranks.

    compile() makes one for a mixed_float16 model. It decides whether a step is skipped.
    """
    kind = keras.optimizers.LossScaleOptimizer
    own = kind.__init__

    @functools.wraps(own)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        inner = self.inner_optimizer
        if isinstance(inner, Distributed) and not isinstance(self, inner._hvdkit_loss_scale()):
            mix_in(self, inner._hvdkit_loss_scale(), sync_of(inner))

    kind.__init__ = init


def build_if_needed(optimizer: Any, variables: list[Any]) -> None:
    """Build an optimizer as its own apply() would, before it reduces gradients.

    On PyTorch a built optimizer reduces gradients during backward, another one in apply(): these are two plans, and
    ranks with different plans would wait for each other. A newly joined rank's optimizer is not built while those of
    others are.
    """
    if variables and not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
        optimizer.built = True


def sync_of(optimizer: Any) -> GradientSync:
    """Return the GradientSync that mix_in gave the optimizer."""
    sync: GradientSync = optimizer.__dict__["_hvdkit"]
    return sync


def mix_in(optimizer: Any, mixin: type, sync: GradientSync) -> None:
    """Change an optimizer, in place, to a subclass of its own class and `mixin`.

    `optimizer.__class__` remains its own class: Keras saves that, so the file has the same content as without hvdkit
    and can be loaded without it.
    """
    own = type(optimizer)
    attributes = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    calls = {name: uncompiled(getattr(mixin, name)) for name in ("apply", "scale_loss") if hasattr(mixin, name)}
    mixed = type(own.__name__, (mixin, own), {**attributes, **calls, "__class__": property(lambda self: own)})
    # Bypasses Keras and TensorFlow, which track assignments to an optimizer.
    object.__setattr__(optimizer, "__class__", mixed)
    optimizer.__dict__["_hvdkit"] = sync
