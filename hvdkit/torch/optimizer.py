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
                f"skip_synchronize() cannot be used with op=hvd.Adasum, nor with any strategy that works in step(), as "
                f"{type(self._hvdkit.strategy).__name__} does. Leave it out."
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
                "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(). Horovod "
                "would reduce the gradients twice; hvdkit does not, and needs neither call.",
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
            raise ValueError(f"backward_passes_per_step is {passes}; it must be 1 or more.")
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
    if any(not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) for pair in pairs):
        raise ValueError(
            f"named_parameters must be (name, parameter) pairs as model.named_parameters() gives them; "
            f"it holds {type(pairs[0]).__name__}."
        )
    repeated = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if repeated:
        raise ValueError(
            f"named_parameters repeats {', '.join(repeated)}. Give the parameters of several models distinct names, "
            f"e.g. (f'encoder.{{name}}', parameter)."
        )
    ids = {id(parameter) for _, parameter in pairs}
    missing = [name for name, parameter in numbered if id(parameter) not in ids]
    if missing:
        raise ValueError(
            f"named_parameters leaves out {len(missing)} of the optimizer's {len(numbered)} parameters ({missing[0]} "
            f"is the first). Pass the named_parameters() of every model that the optimizer trains, or leave it out."
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
) -> Any:
    """Make an optimizer step on the gradients of all ranks.

    The optimizer itself is returned, now of a subclass of its own class and under the same name: its state, parameter
    groups, hooks and the schedulers that hold it stay what they were.

    named_parameters: model.named_parameters(); gives names to errors and the model's order to the buckets.
    compression: what is sent between hosts instead of float32; sums are taken in float32. A coding, such as
    Compression.TopK(0.01), or a mapping from patterns of parameters' names to such, the first that fits.
    backward_passes_per_step: gradients of so many backward passes are added up before they are reduced; step() may come
    earlier (the last window of an epoch), and then reduces what is there. As in Horovod they are not divided by it.
    op: Average or Sum; or Adasum, and then each rank steps by its own gradients and the steps are combined (on the
    wire in `compression`), so GradScaler, which may skip the step of one rank, does not go with it, and
    skip_synchronize() is refused. gradient_predivide_factor: the part of the average's division that is done before
    sending.
    sparse_as_dense: reduce sparse gradients as dense ones rather than by gathering their rows.
    groups: parameters whose gradients are reduced together, none before all of the group are there: a list of lists of
    them (those in no list are sent as without groups), or how many groups to make of them all, in their order. Seldom
    of use, since buckets are full without. num_groups: the same number under its older name.
    process_set: ranks that train together; on others the optimizer is left to itself.
    strategy: what is done instead of `op`, on the wire and beside the optimizer's step: an object of a subclass of
    hvdkit.engine.strategy.Strategy, on each rank one for each optimizer; not together with op, compression or
    gradient_predivide_factor. Sparse gradients come to it as dense ones. Its state is saved with its own state_dict().

    Right without further ado, unlike Horovod: clipping and GradScaler see reduced gradients as soon as backward() has
    returned, so synchronize() and skip_synchronize() work and are not needed. A parameter that no rank used keeps
    `grad` None. Every rank calls backward() and step() equally often.
    Gradients are reduced as long as the optimizer is there: drop it on all ranks at the same point, if at all.
    A copy (copy.deepcopy, also together with the model) and what pickle or torch.save write is a plain optimizer of its
    own class: wrap it on all ranks to train it on them.

    Parameters are of any floating-point dtype or complex; those to be trained in float8 are refused with TypeError.

    Raises NotInitializedError before init(), ValueError or TypeError for arguments that cannot be used; backward() and
    step() raise PlanMismatchError if the ranks hold different parameters, RankLostError if a rank has died.
    """
    named = name_parameters(optimizer, named_parameters)
    runtime = engine.runtime("DistributedOptimizer()")
    if is_wrapped(optimizer):
        raise ValueError("This optimizer is a DistributedOptimizer already; wrap it once.")
    if strategy is None:
        strategy = choose_strategy(op, gradient_predivide_factor, compression, process_set)
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
            raise ValueError(f"This {type(strategy).__name__} serves another optimizer; make one for each.")
        alone = False
    if isinstance(strategy, AllReduce):
        strategy.options.check_names([name for name, _ in named])
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step is {backward_passes_per_step}; it must be 1 or more.")
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
