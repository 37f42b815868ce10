"""The gradients of one list of variables, equal on all ranks: in eager mode, and as operations of a graph."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import tensorflow as tf

from hvdkit.engine import runtime as engine
from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.engine.horovod.binding import GraphBinding
from hvdkit.engine.job_objects import allgather_object
from hvdkit.engine.planned.arrays import ArraySource
from hvdkit.engine.planned.plan import TensorSpec
from hvdkit.engine.planned.reducer import Statistics
from hvdkit.engine.request import ReduceOptions, check_gradient
from hvdkit.errors import BackwardInterruptedError, HorovodInternalError
from hvdkit.tensorflow.direct_gradients import DirectGradients
from hvdkit.tensorflow.result_memory import ResultMemory
from hvdkit.tensorflow.sparse import reduce_slices, take_part_when_joined
from hvdkit.tensorflow.tensors import array_of, as_tensor, flat_storage
from hvdkit.tensorflow.tracing import call_in_graph, check_not_compiled, in_python
from hvdkit.tensorflow.variables import describe

_numbers = itertools.count()
_turns = itertools.count(1)


class GradientSync:
    """Reduces the gradients of the same variables over all ranks, step after step.

    variables: of TensorFlow or Keras, or tensors; their names, shapes and dtypes are the same on all ranks, in the
    same order. options: average or sum, and what goes over the wire. process_set: the ranks that train together.
    sparse_as_dense: reduce IndexedSlices as dense tensors rather than by gathering their rows.

    The first reduce() makes the plan, on all ranks together. Close it on all ranks at the same point, or leave that to
    shutdown(). After another init() it is made anew, by graphs that were traced before when they run.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        *,
        options: ReduceOptions,
        process_set: ProcessSet = global_process_set,
        sparse_as_dense: bool = False,
    ) -> None:
        self.number = next(_numbers)  # the same on all ranks, as they make them in the same order
        self.statistics = Statistics()
        self._specs = describe(variables)
        horovod = engine.runtime("A reduction of gradients").horovod is not None
        for spec in self._specs:
            check_gradient(f"the variable {spec.name}", spec.dtype, horovod=horovod)
        self._options, self._process_set, self._sparse_as_dense = options, process_set, sparse_as_dense
        self._plan: ArraySource | None = None
        self._direct: DirectGradients | None = None
        self._planned = False
        self._turn = 0
        self._graph: Callable[[], Any] = _nothing
        _reducers.add(self)

    @in_python
    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """Reduce one gradient a variable (a tensor, IndexedSlices or None); every rank calls it equally often.

        Works in eager mode and while a tf.function is traced. What no rank has stays None. A rank that has None where
        others have a gradient gets theirs; inside a tf.function only if that was so when the plan was made, and else
        the step fails with HorovodInternalError, because a graph cannot decide it anew.

        Raises PlanMismatchError on the first call if the ranks have different variables, RankLostError if a rank has
        ended; from inside a graph TensorFlow raises its own UnknownError with the same text. XlaError where XLA would
        compile it.
        """
        call = "A reduction of gradients"
        given = list(gradients)
        if len(given) != len(self._specs):
            raise ValueError(f"{call}: there are {len(given)} gradients for {len(self._specs)} variables.")
        engine.runtime(call)
        check_not_compiled(call)
        if not self._planned:
            self._turn = next(_turns)
            self._make_plan(
                [i for i, g in enumerate(given) if not self._sparse_as_dense and _is_sparse(g)],
                [i for i, g in enumerate(given) if g is not None],
            )
        if not tf.executing_eagerly():
            self._graph = _outermost_graph()
        prepared = [self._prepare(at, gradient) for at, gradient in enumerate(given)]
        dense = self._reduce_eagerly(prepared) if tf.executing_eagerly() else self._reduce_in_graph(prepared)
        for at in self._sparse:
            dense[at] = self._reduce_sparse(at, prepared[at])
        return dense

    def _prepare(self, at: int, gradient: Any) -> Any:
        """The gradient in the form, dense or not, in which all ranks send it."""
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

    def _make_plan(self, sparse: Sequence[int], present: Sequence[int]) -> None:
        """Agree with the other ranks on what is sparse, what is there and on the buckets; collective."""
        group = self._process_set.group("A reduction of gradients")
        self._mine = sparse, present
        self._name = f"variables.{group.engine.count('variables')}"
        facts = allgather_object((sparse, present), self._name, self._process_set)
        self._sparse = sorted({i for each, _ in facts for i in each})
        for at in self._sparse:
            take_part_when_joined(group.engine, f"{self._name}.{at}", self._specs[at])
        #: What some ranks have and some have not: inside a graph every rank gets it.
        some = {i for _, each in facts for i in each}
        self._uneven = {i for i in some if any(i not in each for _, each in facts)}
        self._dense = [i for i in range(len(self._specs)) if i not in self._sparse]
        specs = [self._specs[i] for i in self._dense]
        horovod = engine.runtime("A reduction of gradients").horovod
        if specs and horovod is not None:
            self._direct = DirectGradients(cast(GraphBinding, horovod), group, self._name, specs, self._options)
        elif specs:
            self._plan = ArraySource(
                group,
                [TensorSpec(one.name, _count(one.shape), one.dtype, shape=tuple(one.shape)) for one in specs],
                options=self._options,
                compute_threads=tf.config.threading.get_intra_op_parallelism_threads(),
                statistics=self.statistics,
            )
        self._results = ResultMemory([one.shape for one in specs], [one.dtype for one in specs])
        self._planned = True

    def _make_plan_again(self) -> None:
        """In a graph that was traced in another world: what a rank does that traces it in this one; collective.

        That makes the plans of all reducers of a graph before it runs, in the order in which they come.
        """
        graph = self._graph()
        for one in sorted(_reducers, key=lambda other: other._turn):
            if not one._planned and (one is self or (graph is not None and one._graph() is graph)):
                before = one._sparse, one._uneven
                one._make_plan(*one._mine)
                if (one._sparse, one._uneven) != before:
                    raise HorovodInternalError(
                        "The ranks that there are now have gradients of other variables, or of another kind, than "
                        "those had that this tf.function was traced with. Make a new tf.function when the ranks change."
                    )

    def _reduce_eagerly(self, gradients: Sequence[Any]) -> list[Any]:
        reduced: list[Any] = [None] * len(gradients)
        mine = [gradients[i] for i in self._dense]
        if self._direct is not None:
            return self._spread(self._direct.reduce_eagerly(mine))
        if self._plan is None:
            return reduced
        self._begin()
        sources = [None if one is None else self._flat(at, array_of(one)) for at, one in enumerate(mine)]
        unused = self._plan.reduce(sources, self._results)
        for at, index in enumerate(self._dense):
            if at not in unused:
                reduced[index] = as_tensor(self._results.take(at), self._specs[index].dtype)
        return reduced

    def _reduce_in_graph(self, gradients: Sequence[Any]) -> list[Any]:
        reduced: list[Any] = [None] * len(gradients)
        mine = [gradients[i] for i in self._dense]
        kept = [at for at, i in enumerate(self._dense) if mine[at] is not None or i in self._uneven]
        if self._direct is not None:
            return self._spread(self._direct.reduce_in_graph(mine, kept))
        if self._plan is None:
            return reduced
        before: list[Any] = []
        for group in self._groups(mine):
            with tf.control_dependencies(before):  # buckets start in plan order on all ranks
                given = [mine[at] for at in group if mine[at] is not None]
                here = [mine[at] is not None for at in group]
                started = call_in_graph(self._starter(group, here, first=not before), given, [], "hvdkit_start")
            before = [started]
        dtypes = [tf.as_dtype(self._specs[self._dense[at]].dtype) for at in kept]
        with tf.control_dependencies(before):
            results = call_in_graph(self._finisher(kept), [], dtypes, "hvdkit_finish")
        for at, result in zip(kept, results if kept else [], strict=True):
            index = self._dense[at]
            result.set_shape(self._specs[index].shape)
            reduced[index] = result
        return reduced

    def _spread(self, dense: Sequence[Any]) -> list[Any]:
        """Dense results at the places of their variables."""
        reduced: list[Any] = [None] * len(self._specs)
        for index, one in zip(self._dense, dense, strict=True):
            reduced[index] = one
        return reduced

    def _groups(self, mine: Sequence[Any]) -> list[list[int]]:
        """Tensors that are given to one operation: those that a bucket needs and no earlier one did."""
        assert self._plan is not None
        groups: list[list[int]] = []
        waiting: list[int] = []
        for bucket in self._plan.buckets:
            waiting += [slot.tensor for slot in bucket.slots if not slot.offset]
            if any(mine[at] is not None for at in waiting):
                groups.append(waiting)
                waiting = []
        if waiting or not groups:
            groups.append(waiting)
        return groups

    def _starter(self, group: list[int], here: list[bool], *, first: bool) -> Callable[..., Any]:
        held = weakref.ref(self)

        def start(*arrays: Any) -> list[Any]:
            reducer = _still_there(held)
            if first:
                reducer._begin()
            given = iter(arrays)
            for at, present in zip(group, here, strict=True):
                reducer._plan.arrived(at, reducer._flat(at, next(given)) if present else None)
            return []

        return start

    def _finisher(self, kept: list[int]) -> Callable[..., Any]:
        held = weakref.ref(self)

        def finish() -> list[Any]:
            reducer = _still_there(held)
            unused = reducer._plan.finish()
            reducer._check_nothing_dropped(kept, unused)
            for at in set(kept) & set(unused):
                reducer._results.take(at)[...] = 0
            return [reducer._results.take(at) for at in kept]

        return finish

    def _begin(self) -> None:
        assert self._plan is not None
        if self._plan.under_way:
            raise BackwardInterruptedError(
                "A step ended with an exception on this rank after part of its gradients had been sent, and the other "
                "ranks wait for the rest. Let the exception end the job, or find out before the gradients are reduced "
                "(from the loss, say) and on all ranks that a batch is to be skipped."
            )
        self._results.begin()
        self._plan.begin(self._results)

    def _check_nothing_dropped(self, kept: Sequence[int], unused: Any) -> None:
        lost = sorted(set(range(len(self._dense))) - set(kept) - set(unused))
        if lost:
            names = [self._specs[self._dense[at]].name for at in lost]
            raise HorovodInternalError(
                f"Other ranks have gradients of {', '.join(names[:3])}{' and others' if lost[3:] else ''} in this "
                f"step, and this rank's tf.function was traced without. Give every rank a gradient of every variable: "
                f"tape.gradient(..., unconnected_gradients=tf.UnconnectedGradients.ZERO)."
            )

    def _flat(self, at: int, array: Any) -> Any:
        spec = self._specs[self._dense[at]]
        if array.shape != spec.shape:
            raise ValueError(f"The gradient of {spec.name} has the shape {array.shape}, the variable {spec.shape}.")
        return flat_storage(array, spec.dtype)

    def _reduce_sparse(self, at: int, gradient: Any) -> Any:
        """See reduce_slices; None if the graph has nothing to give and nothing to take."""
        wanted = tf.executing_eagerly() or gradient is not None or at in self._uneven
        return reduce_slices(
            self._process_set,
            f"{self._name}.{at}",
            gradient,
            self._specs[at],
            average=self._options.average,
            wanted=wanted,
            ready=functools.partial(_still_there, weakref.ref(self)),
        )

    def close(self) -> None:
        """Free the buckets; collective."""
        if self._plan is not None:
            self._plan.close()
        self._plan, self._direct, self._planned = None, None, False


def _still_there(held: weakref.ref[GradientSync]) -> Any:
    """The reducer of a graph that runs, with a plan of this world's."""
    reducer = held()
    if reducer is None:
        raise HorovodInternalError(
            "The reduction that this tf.function was traced with is gone: the wrapped optimizer was thrown away. Make "
            "a new tf.function."
        )
    if not reducer._planned:
        reducer._make_plan_again()
    return reducer


def _nothing() -> None:
    return None


def _outermost_graph() -> Callable[[], Any]:
    """A weak reference to the graph of the function that is being traced, which others may have called."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(getattr(graph, "outer_graph", None), type(graph)):
        graph = graph.outer_graph
    return weakref.ref(graph)


def _is_sparse(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _count(shape: Sequence[int]) -> int:
    count = 1
    for dimension in shape:
        count *= dimension
    return count


_reducers: weakref.WeakSet[GradientSync] = weakref.WeakSet()


def _close_all() -> None:
    for reducer in sorted(_reducers, key=lambda one: one.number):
        reducer.close()


engine.on_shutdown(_close_all)
