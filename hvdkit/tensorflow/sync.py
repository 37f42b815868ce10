"""GradientSync: reduces the gradients of one list of variables, in eager mode and as operations of a graph."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvdkit.engine import runtime as engine
from hvdkit.engine.allreduce import AllReduce
from hvdkit.engine.array_sync import CANNOT_WEIGHT
from hvdkit.engine.gradient_hook import GradientHook
from hvdkit.engine.groups import Group, ProcessSet, global_process_set
from hvdkit.engine.job_objects import allgather_object
from hvdkit.engine.strategy import Strategy
from hvdkit.errors import HorovodInternalError
from hvdkit.tensorflow import gpu
from hvdkit.tensorflow.array_gradients import ArrayGradients
from hvdkit.tensorflow.sparse import reduce_slices, take_part_when_joined
from hvdkit.tensorflow.tracing import check_not_compiled, in_python
from hvdkit.tensorflow.variables import VariableSpec, describe

if TYPE_CHECKING:
    from hvdkit.tensorflow.device_gradients import DeviceGradients

_numbers = itertools.count()
_turns = itertools.count(1)
_planning = threading.Lock()


class GradientSync:
    """Reduces the gradients of the same variables over all ranks, step after step.

    variables: of TensorFlow or Keras, or tensors; their names, shapes and dtypes are the same on all ranks, in the
    same order.
    strategy: reduces the gradients.
    process_set: the ranks that train together.
    sparse_as_dense: reduce IndexedSlices as dense tensors rather than by gathering their rows; a strategy other than
    AllReduce gets dense tensors in any case.
    specs: descriptions of the variables, if describe() does not give those of all ranks.

    The first reduce() makes the plan, on all ranks together. Close it on all ranks at the same point, or leave that to
    shutdown(). After another init() the plan is made anew, also by earlier traced graphs when they run.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        *,
        strategy: Strategy,
        process_set: ProcessSet = global_process_set,
        sparse_as_dense: bool = False,
        specs: Sequence[VariableSpec] | None = None,
    ) -> None:
        self.number = next(_numbers)  # the same on all ranks, which make them in the same order
        self.strategy = strategy
        self._specs = describe(variables) if specs is None else tuple(specs)
        self._variables = list(variables) if strategy.uses_values else []
        for spec in self._specs:
            strategy.check(f"the variable {spec.name}", spec.dtype)
        self._process_set = process_set
        self._sparse_as_dense = sparse_as_dense or not isinstance(strategy, AllReduce)
        self._average = isinstance(strategy, AllReduce) and strategy.options.average
        self._device = gpu.gpu_for(variables)
        # For dense tensors; None without any.
        self._gradients: ArrayGradients | DeviceGradients | Any = None
        self._gradient_hook: GradientHook | None = None
        self._planned = False
        #: Indices of this rank's sparse and of its existing gradients; before the first reduce(), none and all.
        self._mine: tuple[Sequence[int], Sequence[int]] = (), range(len(self._specs))
        self._turn = 0
        self._graph: Callable[[], Any] = _nothing
        _syncs.add(self)

    @in_python
    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """Reduce one gradient per variable (a tensor, IndexedSlices or None); every rank calls it equally often.

        Works in eager mode and while a tf.function is traced. A gradient that no rank has stays None. A rank without a
        gradient gets that of the others; inside a tf.function only if that was so when the plan was made, otherwise
        the step fails with HorovodInternalError, because a graph cannot decide it anew.

        Raises PlanMismatchError on the first call if the ranks have different variables, RankLostError if a rank has
        ended; from inside a graph TensorFlow raises its own UnknownError with the same text. XlaError if XLA would
        compile it.
        """
        call = "The reduction of gradients"
        given = list(gradients)
        if len(given) != len(self._specs):
            raise ValueError(
                f"{call} got {len(given)} gradients for {len(self._specs)} variables. Pass one gradient, or None, for "
                f"each variable."
            )
        engine.runtime(call)
        check_not_compiled(call)
        if not self._planned:
            self._plan_first(
                [i for i, g in enumerate(given) if not self._sparse_as_dense and _is_sparse(g)],
                [i for i, g in enumerate(given) if g is not None],
            )
        if not tf.executing_eagerly():
            self._graph = _outermost_graph()
        prepared = [self._prepare(at, gradient) for at, gradient in enumerate(given)]
        dense = [prepared[index] for index in self._dense]
        if self._gradients is None:
            results = dense
        elif tf.executing_eagerly():
            results = self._gradients.reduce_eagerly(dense)
        else:
            results = self._gradients.reduce_in_graph(dense, self._wanted(dense), self._find())
        reduced = self._spread(results)
        for index in self._sparse:
            reduced[index] = self._reduce_sparse(index, prepared[index])
        return reduced

    def attach(self) -> None:
        """Make the plan, of all gradients as dense ones, unless reduce() has done so; collective then."""
        if not self._planned:
            self._plan_first(*self._mine)

    def set_gradient_hook(self, hook: GradientHook) -> None:
        """Set the object that takes part in each step, in place of an earlier one.

        Raises ValueError, now or in a step, for gradients that it cannot weight.
        """
        self._gradient_hook = hook
        if self._planned:
            self._install_hook()

    def _install_hook(self) -> None:
        if self._gradient_hook is None:
            return
        if self._sparse:
            raise ValueError(
                f"The gradient of {self._specs[self._sparse[0]].name} is sparse, and cannot be weighted by rows. Pass "
                f"sparse_as_dense=True to DistributedOptimizer()."
            )
        if isinstance(self._gradients, ArrayGradients):
            self._gradients.set_gradient_hook(self._gradient_hook)
        elif self._gradients is not None:
            raise ValueError(CANNOT_WEIGHT)

    def after_step(self, due: Any = True) -> None:
        """Let a strategy with uses_values change the variables after the optimizer's step; collective.

        due: whether the optimizer has stepped; equal on all ranks.
        """
        if not (self._variables and isinstance(self._gradients, ArrayGradients)):
            return
        values = [tf.convert_to_tensor(variable) for variable in self._variables]
        if tf.executing_eagerly():
            results = self._gradients.after_step_eagerly(values) if due else values
        elif due is True:
            results = self._gradients.after_step_in_graph(values, self._find())
        else:
            step = functools.partial(self._gradients.after_step_in_graph, values, self._find())
            results = tf.cond(due, step, lambda: values)
        for variable, result in zip(self._variables, results, strict=True):
            variable.assign(result)

    def change_values(self, change: Callable[[], None]) -> None:
        """Let the strategy change the variables between two steps, eagerly, by `change`; collective if `change` is.

        Does nothing before the first step.
        """
        if self._variables and isinstance(self._gradients, ArrayGradients):
            results = self._gradients.change_values(change, self._read_values())
            for variable, result in zip(self._variables, results, strict=True):
                variable.assign(result)

    def _read_values(self) -> list[Any]:
        with tf.init_scope():
            return [tf.convert_to_tensor(variable) for variable in self._variables]

    def _wanted(self, dense: Sequence[Any]) -> list[int]:
        """Return indices of dense gradients that a graph uses: its own, and those that only some ranks have."""
        return [
            position
            for position, index in enumerate(self._dense)
            if dense[position] is not None or index in self._uneven
        ]

    def _find(self) -> Callable[[], Any]:
        """Return a function that finds, when a graph runs, the present world's reducer of dense gradients."""
        held = weakref.ref(self)
        return lambda: _still_there(held)._gradients

    def _prepare(self, at: int, gradient: Any) -> Any:
        """Convert the gradient to the form, dense or not, in which all ranks send it."""
        if gradient is None:
            return None
        dtype = tf.as_dtype(self._specs[at].dtype)
        if _is_sparse(gradient):
            if at in self._sparse:
                return tf.IndexedSlices(tf.cast(gradient.values, dtype), gradient.indices, gradient.dense_shape)
            gradient = tf.convert_to_tensor(gradient)
        gradient = tf.cast(gradient, dtype)
        if at in self._sparse:
            return tf.IndexedSlices(gradient, tf.range(tf.shape(gradient, tf.int64)[0]))
        return gradient

    def _plan_first(self, sparse: Sequence[int], present: Sequence[int]) -> None:
        self._turn = next(_turns)
        self._make_plan(sparse, present)

    def _make_plan(self, sparse: Sequence[int], present: Sequence[int]) -> None:
        """Agree with the other ranks on the sparse and the existing gradients and on the buckets; collective."""
        group = self._process_set.group("The reduction of gradients")
        self._mine = sparse, present
        self._name = f"variables.{group.engine.count('variables')}"
        facts = allgather_object((sparse, present), self._name, self._process_set)
        self._sparse = sorted({i for each, _ in facts for i in each})
        for at in self._sparse:
            take_part_when_joined(group.engine, f"{self._name}.{at}", self._specs[at])
        #: Gradients that some ranks lack: inside a graph every rank gets them.
        some = {i for _, each in facts for i in each}
        self._uneven = {i for i in some if any(i not in each for _, each in facts)}
        self._dense = [i for i in range(len(self._specs)) if i not in self._sparse]
        specs = [self._specs[i] for i in self._dense]
        if specs:
            provider = engine.runtime("The reduction of gradients").provider
            direct = None if provider.native else provider.gradients_of("tensorflow")
            if direct is not None and isinstance(self.strategy, AllReduce):
                self._gradients = direct(group, self._name, specs, self.strategy.options)
            else:
                devices = self._open_device_gradients(group, specs) if provider.native else None
                self._gradients = devices or ArrayGradients(group, specs, self.strategy, self._read_values)
        self._kind = type(self._gradients)
        self._install_hook()
        self._planned = True

    def _open_device_gradients(self, group: Group, specs: Sequence[VariableSpec]) -> DeviceGradients | None:
        if not gpu.platform():
            return None  # without a collective call
        from hvdkit.tensorflow.device_gradients import open_device_gradients

        return open_device_gradients(group, specs, self.strategy, self._device)

    def _make_plan_again(self) -> None:
        """Make the plan for a graph from another world, as a rank does that traces it in this world; collective.

        Makes the plans of all reducers of a graph before it runs, in their order.
        """
        graph = self._graph()
        for sync in sorted(_syncs, key=lambda sync: sync._turn):
            if not sync._planned and (sync is self or (graph is not None and sync._graph() is graph)):
                before = sync._traced_for()
                sync._make_plan(*sync._mine)
                if sync._traced_for() != before:
                    raise HorovodInternalError(
                        "This tf.function was traced before the ranks changed. The ranks now have gradients of other "
                        "variables, sparse ones in place of dense ones, or reduce them on GPUs where they did not, or "
                        "the other way round. Create a new tf.function after each change of the ranks."
                    )

    def _traced_for(self) -> tuple[object, ...]:
        """Return the facts on which a graph depends."""
        return self._sparse, self._uneven, self._kind

    def _spread(self, dense: Sequence[Any]) -> list[Any]:
        """Return a list with dense results at their variables' positions."""
        reduced: list[Any] = [None] * len(self._specs)
        for index, result in zip(self._dense, dense, strict=True):
            reduced[index] = result
        return reduced

    def _reduce_sparse(self, at: int, gradient: Any) -> Any:
        """See reduce_slices. Returns None if the graph neither sends nor needs rows."""
        wanted = tf.executing_eagerly() or gradient is not None or at in self._uneven
        return reduce_slices(
            self._process_set,
            f"{self._name}.{at}",
            gradient,
            self._specs[at],
            average=self._average,
            wanted=wanted,
            ready=functools.partial(_still_there, weakref.ref(self)),
        )

    def close(self) -> None:
        """Free the buckets; collective."""
        if self._gradients is not None:
            self._gradients.close()
        self._gradients, self._planned = None, False


def _still_there(held: weakref.ref[GradientSync]) -> Any:
    """Return the GradientSync of a running graph, with its plan in this world."""
    sync = held()
    if sync is None:
        raise HorovodInternalError(
            "The DistributedOptimizer that this tf.function was traced with no longer exists. Keep a reference to the "
            "optimizer, or create a new tf.function."
        )
    with _planning:
        if not sync._planned:
            sync._make_plan_again()
    return sync


def _nothing() -> None:
    return None


def _outermost_graph() -> Callable[[], Any]:
    """Return a weak reference to the graph of the outermost function that is being traced."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(getattr(graph, "outer_graph", None), type(graph)):
        graph = graph.outer_graph
    return weakref.ref(graph)


def _is_sparse(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


_syncs: weakref.WeakSet[GradientSync] = weakref.WeakSet()
engine.follow(_syncs, enter=False)
