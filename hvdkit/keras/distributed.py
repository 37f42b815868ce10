"""What a wrapped optimizer has beside its own class: mixed in before it, where Keras calls it."""

from __future__ import annotations

import functools
from typing import Any

import keras

from hvdkit.keras.backends import uncompiled
from hvdkit.keras.sync import GradientSync


class Distributed:
    """Mixed in before the class of an optimizer that updates variables.

    Gradients are reduced as the first thing in `apply`, so that all that follows (unscaling, clipping, weight decay,
    the update, averages of weights) does on every rank what it would do in one process. With gradient accumulation
    that would be once a pass; there they are reduced once a window, when the optimizer is about to clip and use them.
    """

    def build(self, variables: Any) -> None:
        """The optimizer's own."""
        super().build(variables)  # type: ignore[misc]
        if not self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            sync_of(self).prepare(list(variables))

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """The optimizer's own, on gradients of all ranks."""
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            build_if_needed(self, trainable_variables)
        sync, passes = sync_of(self), self.gradient_accumulation_steps  # type: ignore[attr-defined]
        if not passes:
            variables = self._trainable_variables if trainable_variables is None else trainable_variables  # type: ignore[attr-defined]
            if len(grads := list(grads)) == len(variables):  # else the optimizer's own message says it better
                grads = sync.reduce(grads, variables)
        result = super().apply(grads, trainable_variables)  # type: ignore[misc]
        # Keras counts a step as its last deed.
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
        """Leave the gradient of this variable on this rank; see PartialDistributedOptimizer."""
        sync_of(self).add_local(var)

    def _hvdkit_loss_scale(self) -> type:
        """What is mixed in before a LossScaleOptimizer around this optimizer."""
        return DistributedLossScale


class DistributedLossScale:
    """Mixed in before LossScaleOptimizer, around a distributed optimizer: all ranks skip the same steps."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """The optimizer's own, on scaled gradients of all ranks: infinite on one rank, they are so on all."""
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
        """The optimizer's own, as `apply`."""
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
        """Are the gradients finite on all ranks?"""
        return sync_of(self).agree(super().check_finite(grads))  # type: ignore[misc]


def watch_loss_scale() -> None:
    """Have every LossScaleOptimizer that is made around a distributed optimizer ask the other ranks.

    compile() makes one by itself for a model of mixed_float16. It decides whether a step is skipped.
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
    """Build an optimizer as its own apply() would, before it asks for gradients of other ranks.

    What is built on PyTorch is reduced during backward, else when it is applied: those are two plans, and ranks that
    have come to different ones wait for each other. A rank that has come later is not built when the others are.
    """
    if variables and not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
        optimizer.built = True


def sync_of(optimizer: Any) -> GradientSync:
    """What mix_in gave the optimizer."""
    sync: GradientSync = optimizer.__dict__["_hvdkit"]
    return sync


def mix_in(optimizer: Any, mixin: type, sync: GradientSync) -> None:
    """Change an optimizer, in place, to a subclass of its own class and `mixin`.

    It goes on saying that it is of its own class: Keras saves what `optimizer.__class__` is, so the file holds the same
    as without hvdkit and is loaded without it.
    """
    own = type(optimizer)
    attributes = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    calls = {name: uncompiled(getattr(mixin, name)) for name in ("apply", "scale_loss") if hasattr(mixin, name)}
    mixed = type(own.__name__, (mixin, own), {**attributes, **calls, "__class__": property(lambda self: own)})
    # Past Keras, and past TensorFlow, which keep account of what is assigned to an optimizer.
    object.__setattr__(optimizer, "__class__", mixed)
    optimizer.__dict__["_hvdkit"] = sync
