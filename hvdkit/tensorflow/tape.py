"""DistributedGradientTape: a tape that reduces gradients over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdkit.engine import runtime as engine
from hvdkit.engine.allreduce import AllReduce
from hvdkit.engine.compression import Coded, wire_of
from hvdkit.engine.groups import ProcessSet, check_process_set, global_process_set
from hvdkit.engine.reduce_op import Adasum, Average, ReduceOp
from hvdkit.engine.request import ReduceOptions, gradient_options
from hvdkit.engine.strategy import Strategy, refuse_contradictions
from hvdkit.tensorflow import gpu
from hvdkit.tensorflow.compression import Compression, Compressor
from hvdkit.tensorflow.naming import count, place
from hvdkit.tensorflow.ops import grouped_allreduce
from hvdkit.tensorflow.sync import GradientSync
from hvdkit.tensorflow.tracing import in_python, in_session
from hvdkit.tensorflow.variables import describe

#: Reduces gradients (second argument) of variables (first).
Reduce = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


_NO_JACOBIAN = (
    "DistributedGradientTape() has no {name}() of all ranks. Call {name}() of the tape that you wrapped, and "
    "hvd.allreduce() with its result."
)


class _DistributedTape:
    """Mixin of wrapped tapes; its methods precede those of the tape's own class."""

    _hvdkit_reduce: Reduce
    _hvdkit_set: ProcessSet
    _hvdkit_local: dict[int, Any]  # sources by id(); the references keep the ids valid
    _hvdkit_scale: bool

    def register_local_source(self, source: Any) -> None:
        """Exclude this variable's gradient from the reduction: each rank keeps its own; see scale_local_gradients."""
        self._hvdkit_local[id(source)] = source

    @in_python
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Return the reduced gradients; collective, for the same sources in the same order on every rank.

        Arguments as for tf.GradientTape.gradient(). use_generic_names: accepted as in Horovod, and ignored.
        """
        structure = super().gradient(target, sources, output_gradients, unconnected_gradients)  # type: ignore[misc]
        variables = tf.nest.flatten(sources)
        gradients = _flatten(structure)
        shared = [index for index, variable in enumerate(variables) if id(variable) not in self._hvdkit_local]
        reduced = self._hvdkit_reduce([variables[index] for index in shared], [gradients[index] for index in shared])
        if self._hvdkit_scale:
            gradients = [
                gradient if index in shared else self._scaled(gradient) for index, gradient in enumerate(gradients)
            ]
        for index, gradient in zip(shared, reduced, strict=True):
            gradients[index] = gradient
        return _like(structure, gradients)

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError: only gradient() reduces over ranks."""
        raise NotImplementedError(_NO_JACOBIAN.format(name="jacobian"))

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError: only gradient() reduces over ranks."""
        raise NotImplementedError(_NO_JACOBIAN.format(name="batch_jacobian"))

    def _scaled(self, gradient: Any) -> Any:
        if gradient is None:
            return None
        size = self._hvdkit_set.size()
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / size, gradient.indices, gradient.dense_shape)
        return gradient / size

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return the gradients of a list of sources as (source, gradient): those of local sources, and the others.

        target, sources, output_gradients: as for tf.GradientTape.gradient().
        use_generic_names: accepted as in Horovod, and ignored.
        """
        gradients = self.gradient(target, sources, output_gradients)
        pairs = list(zip(sources, gradients, strict=True))
        local = [pair for pair in pairs if id(pair[0]) in self._hvdkit_local]
        return local, [pair for pair in pairs if id(pair[0]) not in self._hvdkit_local]


def _flatten(gradients: Any) -> list[Any]:
    """Return gradients in the order of their sources; IndexedSlices stay whole."""
    return list(tf.nest.flatten(gradients, expand_composites=False))


def _like(structure: Any, gradients: Sequence[Any]) -> Any:
    return tf.nest.pack_sequence_as(structure, gradients, expand_composites=False)


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Coded = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    strategy: Strategy | None = None,
) -> Any:
    """Make a tape whose gradient() returns the gradients of all ranks, averaged by default.

    Its class is a subclass of `gradtape`'s class, and it has the operations that `gradtape` has recorded.

    device_dense, device_sparse: accepted as in Horovod, and ignored.
    compression: the dtype that is sent between hosts instead of float32; sums are computed in float32.
    sparse_as_dense: reduce IndexedSlices as dense tensors, instead of gathering their rows.
    op: Average, Sum or Adasum. Adasum needs gradients of the same variables on all ranks, and no IndexedSlices.
    gradient_predivide_factor: divisor that is applied before sending; the rest of an average's division follows it.
    num_groups, groups: accepted as in Horovod, and ignored.
    process_set: the ranks that train together; other ranks keep their own gradients.
    scale_local_gradients: divide the gradients of sources that are registered with register_local_source() by the
    number of ranks, as if they were averaged too.
    strategy: an object of a subclass of hvdkit.engine.api.Strategy that replaces `op`; the same object for all
    tapes of a training, and not together with op, compression or gradient_predivide_factor. It gets IndexedSlices as
    dense gradients. A strategy that changes parameters after the optimizer's step raises ValueError.

    A gradient that no rank has stays None, see GradientSync.reduce. Inside a tf.function, buckets are reduced while
    the rest of the backward pass runs; with jit_compile=True it raises XlaError.
    Raises NotInitializedError before init(), ValueError or TypeError for invalid arguments.
    """
    engine.runtime("DistributedGradientTape()")
    check_process_set(process_set, "DistributedGradientTape()")
    if num_groups < 0 or not (groups is None or isinstance(groups, list) or groups >= 0):
        raise ValueError(
            f"DistributedGradientTape(): num_groups is {num_groups} and groups is {groups!r}; each must be a "
            f"non-negative integer, or groups a list of lists of variables."
        )
    own = type(gradtape)
    tape: Any = object.__new__(type(own.__name__, (_DistributedTape, own), {"__module__": own.__module__}))
    tape.__dict__.update(gradtape.__dict__)
    if strategy is None:
        reduce = reduction(compression, sparse_as_dense, op, gradient_predivide_factor, process_set)
    else:
        options = gradient_options(op, gradient_predivide_factor, compression)
        _check_strategy(strategy, op, gradient_predivide_factor != 1.0, options.wire != "none")
        reduce = _make_reduce_by(strategy, process_set)
    tape._hvdkit_reduce = reduce
    tape._hvdkit_set, tape._hvdkit_scale, tape._hvdkit_local = process_set, scale_local_gradients, {}
    return tape


def reduction(
    compression: type[Compressor] | Coded,
    sparse_as_dense: bool,
    op: ReduceOp,
    predivide: float,
    process_set: ProcessSet,
) -> Reduce:
    """Make the reduction of a step's gradients without a user's strategy; arguments of DistributedGradientTape."""
    options = None if op is Adasum else gradient_options(op, predivide, compression)
    if options is None:
        wire_of(compression)

    def reduce(variables: Sequence[Any], gradients: Sequence[Any]) -> Sequence[Any]:
        alone = process_set.included() and process_set.size() == 1 and not engine.runtime("gradient()").config.elastic
        if alone or not (variables and process_set.included()):
            return [_dense(gradient, sparse_as_dense) for gradient in gradients]
        if options is None:
            dense = [_dense(gradient, sparse_as_dense) for gradient in gradients]
            return _reduce_by_adasum(dense, compression, process_set)
        return _find_sync(variables, options, process_set, sparse_as_dense).reduce(gradients)

    return reduce


def _check_strategy(strategy: Strategy, op: ReduceOp, predivides: bool, compresses: bool) -> None:
    refuse_contradictions(
        strategy, {"op": op is not Average, "gradient_predivide_factor": predivides, "compression": compresses}
    )
    if strategy.uses_values:
        raise ValueError(
            f"DistributedGradientTape(): the strategy {type(strategy).__name__} changes parameters after the "
            f"optimizer's step, and a tape has no such step. Use hvdkit.tensorflow.DistributedOptimizer(strategy=...)."
        )


def _make_reduce_by(strategy: Strategy, process_set: ProcessSet) -> Reduce:
    def reduce(variables: Sequence[Any], gradients: Sequence[Any]) -> Sequence[Any]:
        if not (variables and process_set.included()):
            return gradients
        return _find_sync(variables, strategy, process_set, True).reduce(gradients)

    return reduce


def _reduce_by_adasum(gradients: Sequence[Any], compression: Any, process_set: ProcessSet) -> Sequence[Any]:
    """Reduce as one operation, so that ranks with gradients of other variables raise an error."""
    present = [index for index, gradient in enumerate(gradients) if gradient is not None]
    if not present:
        raise ValueError(
            f"op=hvd.Adasum needs gradients of the same variables on every rank, but none of the {len(gradients)} "
            f"variables has a gradient on this rank. Check that the loss depends on them."
        )
    inputs = [gradients[index] for index in present]
    results = grouped_allreduce(inputs, compression=compression, op=Adasum, process_set=process_set)
    reduced = dict(zip(present, results, strict=True))
    return [reduced.get(index) for index in range(len(gradients))]


def _dense(gradient: Any, wanted: bool) -> Any:
    return tf.convert_to_tensor(gradient) if wanted and isinstance(gradient, tf.IndexedSlices) else gradient


#: A script makes a new tape each step; its GradientSync stays the same as long as the variables' descriptions and GPU
#: are equal, and after another init(), as for graphs. In a graph for sessions each reduction has its own, as several
#: may run at the same time; reductions of two graphs, and two calls of one function, do not.
_syncs: dict[Any, GradientSync] = {}


def _find_sync(
    variables: Sequence[Any], how: ReduceOptions | Strategy, process_set: ProcessSet, sparse_as_dense: bool
) -> GradientSync:
    key: tuple[Any, ...] = (describe(variables), how, process_set, sparse_as_dense, gpu.gpu_for(variables))
    if in_session():
        graph = tf.compat.v1.get_default_graph()
        key = *key, place(graph), count(graph, "gradients", process_set, key)
    if key not in _syncs:
        strategy = AllReduce(how) if isinstance(how, ReduceOptions) else how
        _syncs[key] = GradientSync(
            variables, strategy=strategy, process_set=process_set, sparse_as_dense=sparse_as_dense
        )
    return _syncs[key]


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Coded = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    strategy: Strategy | None = None,
) -> Any:
    """A DistributedGradientTape that does not reduce the gradients of some layers; each rank keeps its own.

    local_layers: a layer or a collection of them (ValueError for anything else).
    The other arguments, and what it raises: as for DistributedGradientTape().
    """
    layers = [] if local_layers is None else list(local_layers) if isinstance(local_layers, _LISTS) else [local_layers]
    wrong = [layer for layer in layers if not hasattr(layer, "trainable_weights")]
    if wrong:
        raise ValueError(
            f"PartialDistributedGradientTape(): local_layers holds {wrong[0]!r}; it must hold Keras layers only."
        )
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
        strategy,
    )
    for layer in layers:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


_LISTS = (list, tuple, set, frozenset)
