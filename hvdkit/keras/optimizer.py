"""DistributedOptimizer: the user's own Keras optimizer, which steps on the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvdkit.engine import runtime as engine
from hvdkit.engine.compression import Coded
from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.engine.reduce_op import Average, ReduceOp
from hvdkit.engine.strategy import Strategy
from hvdkit.keras.compression import Compression, Compressor
from hvdkit.keras.distributed import Distributed, DistributedLossScale, mix_in
from hvdkit.keras.periodic import PeriodicOptimizer
from hvdkit.keras.settings import OptimizerSettings
from hvdkit.keras.sharding.optimizer import ShardedOptimizer, check_sharding, may_come_later
from hvdkit.keras.sharding.sync import ShardSync
from hvdkit.keras.sync import GradientSync
from hvdkit.strategies.periodic import PeriodicAverage


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer | str,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Coded = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    strategy: Strategy | None = None,
    shard: str | None = None,
) -> Any:
    """Make a Keras optimizer step on the gradients of all ranks, averaged by default.

    It works in fit(), in train_step() and in optimizer.apply(). Returns the same object, whose class is now a subclass
    of its own class with the same name. A saved `.keras` file of the model loads without hvdkit. Clipping, loss
    scaling, averages of weights and skipped steps see the gradients of all ranks; with gradient_accumulation_steps the
    gradients are reduced once per window.

    optimizer: an instance, also a LossScaleOptimizer, or a name such as "adam".
    name, device_dense, device_sparse: accepted as in Horovod, and ignored.
    compression: the dtype that is sent between hosts instead of float32; sums are computed in float32.
    sparse_as_dense: reduce sparse gradients (TensorFlow's IndexedSlices) as dense ones, instead of gathering rows.
    gradient_predivide_factor: divisor that is applied before sending; the rest of an average's division follows it.
    op: Average or Sum.
    backward_passes_per_step: n; sets gradient_accumulation_steps, so every n-th call updates the variables.
    average_aggregated_gradients: average the gradients of these passes, as Keras does. False: sum them, as in Horovod.
    num_groups, groups: accepted as in Horovod, and ignored.
    process_set: the ranks that train together; on other ranks the optimizer steps on its own gradients.
    scale_local_gradients: accepted as in Horovod, and ignored.
    strategy: an object of a subclass of hvdkit.engine.api.Strategy that replaces `op`; one object for each
    optimizer, and not together with op, compression or gradient_predivide_factor. Clipping is part of the optimizer's
    step, so it comes after before_step(). The strategy gets IndexedSlices as dense gradients. On TensorFlow and JAX it
    sees tensors through TensorSources only, and the values of parameters only if it has uses_values.
    shard: "optimizer" (ZeRO-1): each of n ranks keeps 1/n of the optimizer's state and updates that part of the
    variables, all ranks gather the result, and the gradients that a program can read are as without shard.
    "gradients" (ZeRO-2): as "optimizer", but gradients may be reduce-scattered and freed while backward runs, and a
    program cannot read them whole. Here a program reads its own rank's gradients before apply(), and both
    reduce-scatter, so that a step sends as many bytes as without shard. With "gradients" that is done while backward
    runs in compiled steps of TensorFlow and JAX and on PyTorch after scale_loss(), which fit() calls; elsewhere in
    apply(). For optimizers that update each element independently, of Keras or your own. build() is then collective,
    and the state is saved with hvd.checkpoint, or after optimizer.gather_state() on all ranks; in an elastic job sync()
    of a KerasState builds it. Not with strategy, op=Adasum or codings (ValueError).

    Raises NotInitializedError before init(), ValueError or TypeError for invalid arguments, ConfigError on a backend
    other than TensorFlow, PyTorch and JAX. A step raises PlanMismatchError if the ranks train different variables,
    RankLostError if a rank has died; a compiled step raises an error of the backend with the same text.
    """
    return wrap_optimizer(
        optimizer,
        OptimizerSettings(compression, op, gradient_predivide_factor, sparse_as_dense, process_set, strategy),
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
        shard=shard,
    )


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer | str,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Coded = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    strategy: Strategy | None = None,
) -> Any:
    """DistributedOptimizer that does not reduce the gradients of some layers; each rank trains its own variables there.

    local_layers: a Keras layer or a list of them (else ValueError).
    scale_local_gradients: divide their gradients by the number of ranks, so that they have the same weight as averaged
    gradients. `optimizer.register_local_var(variable)` adds a variable.
    The other arguments, and what it raises: as for DistributedOptimizer().
    """
    layers: Sequence[Any] = local_layers if isinstance(local_layers, (list, tuple)) else [local_layers]
    layers = [layer for layer in layers if layer is not None]
    wrong = [layer for layer in layers if not isinstance(layer, keras.layers.Layer)]
    if wrong:
        raise ValueError(
            f"PartialDistributedOptimizer(): local_layers holds {wrong[0]!r}; it must hold Keras layers only."
        )
    return wrap_optimizer(
        optimizer,
        OptimizerSettings(compression, op, gradient_predivide_factor, sparse_as_dense, process_set, strategy),
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
        local_layers=layers,
        scale_local=scale_local_gradients,
    )


def wrap_optimizer(
    optimizer: Any,
    settings: OptimizerSettings,
    *,
    passes: int,
    average_passes: bool,
    local_layers: Sequence[Any] = (),
    scale_local: bool = True,
    shard: str | None = None,
    mixin: type[Distributed] | None = None,
) -> Any:
    """Do the work of DistributedOptimizer().

    optimizer: an instance or a name.
    settings: of the reduction.
    passes: backward passes per step.
    average_passes: average the gradients of the passes, instead of summing them.
    local_layers: layers whose gradients are not reduced.
    scale_local: divide their gradients by the number of ranks.
    shard: as for DistributedOptimizer().
    mixin: added to the optimizer's class; None for the mixin of its strategy.
    """
    engine.runtime("DistributedOptimizer()")
    _refuse_other_keras(optimizer)
    optimizer = keras.optimizers.get(optimizer)
    outer = optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else None
    inner = outer.inner_optimizer if outer is not None else optimizer
    if isinstance(inner, Distributed):
        raise ValueError(
            "DistributedOptimizer(): this optimizer is already a DistributedOptimizer. Wrap each optimizer only once."
        )
    if shard is not None:
        check_sharding(inner, settings, shard)
    _set_passes(inner, passes)
    if shard is not None and (settings.size > 1 or (may_come_later() and settings.process_set.included())):
        factor = 1.0 if average_passes else float(passes)
        sync: GradientSync = ShardSync(settings, passes_factor=factor, early=shard == "gradients")
        mix_in(inner, ShardedOptimizer, sync)
        if outer is not None:
            mix_in(outer, inner._hvdkit_loss_scale(), sync)
        return optimizer
    sync = GradientSync(
        settings,
        local_layers=local_layers,
        scale_local=scale_local,
        passes_factor=1.0 if average_passes else float(passes),
    )
    if mixin is None:
        mixin = PeriodicOptimizer if isinstance(settings.strategy, PeriodicAverage) else Distributed
    mix_in(inner, mixin, sync)
    if outer is not None:
        mix_in(outer, DistributedLossScale, sync)
    if inner.built and not inner.gradient_accumulation_steps:
        sync.prepare(inner._trainable_variables)
    return optimizer


def _refuse_other_keras(optimizer: Any) -> None:
    """Raise TypeError for an optimizer of a Keras package other than the imported one."""
    origin = type(optimizer).__module__.partition(".")[0]
    if origin == "tf_keras" or (origin == "tensorflow" and hasattr(optimizer, "apply_gradients")):
        raise TypeError(
            f"DistributedOptimizer(): the optimizer is a {type(optimizer).__module__}.{type(optimizer).__name__} of "
            f"Keras 2; hvdkit.keras takes optimizers of Keras 3 ({keras.__version__} is installed). Unset "
            f"TF_USE_LEGACY_KERAS, so that tf.keras is Keras 3. `hvdrun --alias-horovod` translates common calls of "
            f"Keras 2."
        )


def _set_passes(optimizer: Any, passes: int) -> None:
    if passes < 1:
        raise ValueError(f"DistributedOptimizer(): backward_passes_per_step is {passes}; it must be 1 or more.")
    if passes == 1:
        return
    if optimizer.gradient_accumulation_steps:
        raise ValueError(
            f"DistributedOptimizer(): backward_passes_per_step={passes} and the optimizer's "
            f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps} have the same effect. Set only "
            f"one of them."
        )
    if optimizer.built:
        raise ValueError(
            f"DistributedOptimizer(): backward_passes_per_step={passes} needs variables for the sum of gradients, but "
            f"this optimizer is already built without them. Wrap the optimizer before its first use, or create it with "
            f"gradient_accumulation_steps={passes}."
        )
    optimizer.gradient_accumulation_steps = passes
