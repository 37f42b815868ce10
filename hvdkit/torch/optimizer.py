"""DistributedOptimizer: the user's own optimizer, whose gradients are those of all ranks."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hvdkit.engine import runtime as engine
from hvdkit.engine.allreduce import AllReduce
from hvdkit.engine.compression import Coded
from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.engine.named.submit import check_process_set
from hvdkit.engine.planned.reducer import Statistics
from hvdkit.engine.reduce_op import Adasum, Average, ReduceOp
from hvdkit.engine.strategy import Strategy, refuse_contradictions
from hvdkit.torch.compression import Compression, Compressor
from hvdkit.torch.groups import number_groups
from hvdkit.torch.layout import Named
from hvdkit.torch.plain_copies import PlainCopies, change_class, is_wrapped
from hvdkit.torch.sparse import SparseGradients
from hvdkit.torch.strategies import choose_strategy
from hvdkit.torch.sync import GradientSync

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


class _Distributed(PlainCopies):
    """What a wrapped optimizer has beside its own class; mixed in before it."""

    # The defaults are for an instance that a script makes of the class itself: it is a plain optimizer.
    _hvdkit: GradientSync | None = None
    _hvdkit_skip = False
    _hvdkit_synchronized = False

    def synchronize(self) -> None:
        """Reduce gradients that have not been reduced yet. backward() has done so, unless a window was cut short.

        Does nothing with op=Adasum or another strategy that works in step().
        """
        sync = self._hvdkit
        if sync is not None:
            sync.synchronize()
        self._hvdkit_synchronized = sync is None or sync.strategy.overlaps_backward

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let step() take the gradients as they are; for after synchronize(), which also makes it needless.

        Refused with AssertionError, as in Horovod, with op=Adasum or another strategy that works in step(): without it
        the ranks would drift apart.
        """
        if self._hvdkit is not None and not self._hvdkit.strategy.overlaps_backward:
            raise AssertionError(
                f"skip_synchronize() cannot be used with op=hvd.Adasum or another strategy that communicates inside "
                f"step(); this optimizer has the strategy {type(self._hvdkit.strategy).__name__}. Remove the call."
            )
        self._hvdkit_skip = True
        try:
            yield
        finally:
            self._hvdkit_skip = False

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own step, between the two halves of its strategy's."""
        sync, synchronized = self._hvdkit, self._hvdkit_synchronized
        self._hvdkit_synchronized = False
        if synchronized and not self._hvdkit_skip and closure is None:
            warnings.warn(
                "optimizer.step() was called after optimizer.synchronize() without optimizer.skip_synchronize(). "
                "Horovod would reduce the gradients twice. hvdkit reduces them once and needs neither call.",
                stacklevel=2,
            )
        if sync is None:
            return super().step(closure, *args, **kwargs)  # type: ignore[misc]
        closure = sync.begin_step(closure, skip=self._hvdkit_skip)
        result = super().step(closure, *args, **kwargs)  # type: ignore[misc]
        sync.end_step()
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer's own zero_grad; gradients that were accumulated and not reduced are dropped with it."""
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
        if self._hvdkit is not None:
            self._hvdkit.zeroed()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The optimizer's own; all ranks add the same parameters, before the same step."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if self._hvdkit is not None:
            self._hvdkit.add(_number_parameters(self.param_groups)[-1])  # type: ignore[attr-defined]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce after so many backward passes from the next window on, as Horovod's; every rank says the same.

        Raises ValueError for less than 1.
        """
        if passes < 1:
            raise ValueError(f"set_backward_passes_per_step(): the number of passes is {passes}; it must be 1 or more.")
        if self._hvdkit is not None:
            self._hvdkit.set_passes(passes)

    def reduction_statistics(self) -> Statistics:
        """How much was reduced, how long that took, and how much of it training had to wait for."""
        return Statistics() if self._hvdkit is None else self._hvdkit.strategy.statistics


def name_parameters(optimizer: torch.optim.Optimizer, named_parameters: NamedParameters | None) -> Named:
    """(name, parameter) for each parameter of the optimizer, in the order of the model where that is known.

    Raises ValueError if named_parameters is no sequence of pairs, repeats a name, or misses a parameter.
    """
    numbered = [pair for group in _number_parameters(optimizer.param_groups) for pair in group]
    pairs = list(named_parameters) if named_parameters is not None else []
    if not pairs:
        return numbered
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ValueError(
                f"DistributedOptimizer(): named_parameters must hold (name, parameter) pairs, as "
                f"model.named_parameters() returns them; it holds a {type(pair).__name__}."
            )
    repeated = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if repeated:
        raise ValueError(
            f"DistributedOptimizer(): named_parameters repeats the name {', '.join(repeated)}. If the optimizer trains "
            f"several models, make the names distinct, e.g. (f'encoder.{{name}}', parameter)."
        )
    ids = {id(parameter) for _, parameter in pairs}
    missing = [name for name, parameter in numbered if id(parameter) not in ids]
    if missing:
        raise ValueError(
            f"DistributedOptimizer(): named_parameters lacks {len(missing)} of the optimizer's {len(numbered)} "
            f"parameters; the first is {missing[0]}. Pass the named_parameters() of every model that the optimizer "
            f"trains, or omit the argument."
        )
    trained = {id(parameter) for _, parameter in numbered}
    return [(name, parameter) for name, parameter in pairs if id(parameter) in trained]


def _number_parameters(param_groups: Sequence[Mapping[str, Any]]) -> list[list[tuple[str, torch.nn.Parameter]]]:
    """(name, parameter) for each parameter of each group; the name says where it is."""
    return [
        [(f"group.{at}.{index}", parameter) for index, parameter in enumerate(group["params"])]
        for at, group in enumerate(param_groups)
    ]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None = None,
    compression: type[Compressor] | Coded = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    strategy: Strategy | None = None,
    static_graph: bool = False,
) -> Any:
    """Make an optimizer step on the gradients of all ranks, averaged by default.

    Returns the same object, whose class is now a subclass of its own class with the same name. Its state, parameter
    groups, hooks and the schedulers that refer to it are not changed.

    named_parameters: model.named_parameters(). Errors then use these names, and buckets the order of the model.
    compression: the dtype that is sent between hosts instead of float32; sums are computed in float32. Or a coding,
    such as Compression.TopK(0.01). Or a mapping from patterns of parameter names to these; the first match counts.
    backward_passes_per_step: the gradients of so many backward passes are summed before they are reduced. An earlier
    step() (for example at the end of an epoch) reduces the sum so far. As in Horovod the sum is not divided.
    op: Average, Sum or Adasum. With Adasum each rank steps on its own gradients, then the steps are combined (sent with
    `compression`). Neither GradScaler, which may skip the step of one rank, nor skip_synchronize() works with Adasum.
    gradient_predivide_factor: the part of the division of an average that is done before sending.
    num_groups: older name for an integer in `groups`.
    groups: parameters whose gradients are reduced together, when all gradients of the group are ready: a list of lists
    of parameters (the others are reduced without groups), or the number of groups to form in the order of the
    parameters. Rarely useful, since buckets are filled without groups.
    sparse_as_dense: reduce sparse gradients as dense tensors, instead of gathering their rows.
    process_set: the ranks that train together; on other ranks the optimizer steps on its own gradients.
    strategy: an object of a subclass of hvdkit.engine.strategy.Strategy that replaces `op`; one object for each
    optimizer, and not together with op, compression or gradient_predivide_factor. It gets sparse gradients as dense
    tensors. Save its state with its own state_dict().
    static_graph: every step uses the same parameters. On GPUs the ranks then find out in the first step only which
    parameters no rank uses; without it a rank that misses a gradient waits for its GPU in every step.

    Unlike in Horovod, the gradients are reduced when backward() returns, so clipping and GradScaler see them, and
    synchronize() and skip_synchronize() are accepted but not needed. The `grad` of a parameter that no rank used stays
    None. All ranks must call backward() and step() equally often.
    Gradients are reduced as long as the optimizer exists; if you delete it, delete it at the same point on all ranks.
    A copy (copy.deepcopy, pickle, torch.save) is a plain optimizer of its own class: wrap it on all ranks to train it.

    Parameters may have any floating-point or complex dtype except float8, which raises TypeError.

    Raises NotInitializedError before init(), ValueError or TypeError for invalid arguments. backward() and step() raise
    PlanMismatchError if the ranks have different parameters, RankLostError if a rank has died.
    """
    check_process_set(process_set, "DistributedOptimizer()")
    named = name_parameters(optimizer, named_parameters)
    runtime = engine.runtime("DistributedOptimizer()")
    if is_wrapped(optimizer):
        raise ValueError(
            "DistributedOptimizer(): this optimizer is already a DistributedOptimizer. Wrap each optimizer only once."
        )
    if strategy is None:
        strategy = choose_strategy(op, gradient_predivide_factor, compression, process_set, static_graph=static_graph)
        # A process set of one rank stays so, but for elastic jobs; its optimizer is left to itself.
        alone = process_set.included() and process_set.size() == 1
        alone = alone and (op is Adasum or not runtime.may_change)
    else:
        others = {
            "op": op is not Average,
            "gradient_predivide_factor": gradient_predivide_factor != 1.0,
            "compression": compression is not Compression.none,
        }
        refuse_contradictions(strategy, others)
        if any(sync.strategy is strategy for sync in _syncs):
            raise ValueError(
                f"DistributedOptimizer(): this {type(strategy).__name__} object is already the strategy of another "
                f"optimizer. Create one strategy object for each optimizer."
            )
        alone = False
    if isinstance(strategy, AllReduce):
        strategy.options.check_names([name for name, _ in named])
    if backward_passes_per_step < 1:
        raise ValueError(
            f"DistributedOptimizer(): backward_passes_per_step is {backward_passes_per_step}; it must be 1 or more."
        )
    group_numbers = number_groups(named, groups, num_groups)
    sync = None
    if process_set.included() and not alone:
        sparse = None
        if isinstance(strategy, AllReduce) and not sparse_as_dense:
            sparse = SparseGradients(average=strategy.options.average)
        sync = GradientSync(
            named, process_set, strategy, passes=backward_passes_per_step, groups=group_numbers, sparse=sparse
        )
        _syncs.add(sync)
    state = {"_hvdkit": sync, "_hvdkit_skip": False, "_hvdkit_synchronized": False}
    _wrap(optimizer, {parameter: name for name, parameter in named}, state)
    return optimizer


def _wrap(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.nn.Parameter, str],
    attributes: Mapping[str, Any],
) -> None:
    step = optimizer.__dict__.pop("step", None)
    change_class(optimizer, _Distributed, names, attributes)
    if hasattr(step, "_wrapped_by_lr_sched"):
        optimizer.step = _make_step_for_scheduler(optimizer)  # type: ignore[method-assign]


def _make_step_for_scheduler(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    # A scheduler made before the wrapping had put its own step() over the class's, to know whether step() was called.
    held = weakref.ref(optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        wrapped = held()
        assert wrapped is not None
        wrapped._opt_called = True  # type: ignore[attr-defined]
        return type(wrapped).step(wrapped, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


# torch puts its step hooks around step() of each class that it does not find this mark on; the wrapped class has them.
_Distributed.step.hooked = True  # type: ignore[attr-defined]

_syncs: weakref.WeakSet[GradientSync] = weakref.WeakSet()


def _close_all() -> None:
    for sync in sorted(_syncs, key=lambda sync: sync.number):
        sync.close()


def _enter_all() -> None:
    # One that only waits to be collected would be counted on some ranks and not on others, which wait for it then.
    if _syncs:
        gc.collect()
    for sync in sorted(_syncs, key=lambda sync: sync.number):
        sync.enter()


engine.on_shutdown(_close_all)
engine.on_init(_enter_all)
