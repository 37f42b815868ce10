"""DistributedOptimizer: the user's own optimizer, which steps on the gradients of all ranks."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hvdkit.engine import runtime as engine
from hvdkit.engine.allreduce import AllReduce
from hvdkit.engine.compression import Coded
from hvdkit.engine.groups import ProcessSet, check_process_set, global_process_set
from hvdkit.engine.reduce_op import Adasum, Average, ReduceOp
from hvdkit.engine.sharding.strategy import check_shard
from hvdkit.engine.strategy import Strategy, refuse_contradictions
from hvdkit.strategies.periodic import PeriodicAverage
from hvdkit.torch.compression import Compression, Compressor
from hvdkit.torch.groups import number_groups
from hvdkit.torch.layout import Named
from hvdkit.torch.local_sgd_mixin import LocalSGDMixin
from hvdkit.torch.local_shards import check_not_sharded
from hvdkit.torch.optimizer_mixin import DistributedOptimizerMixin, KnownGroups, number_parameters
from hvdkit.torch.picklable_as_plain import change_class, is_wrapped
from hvdkit.torch.sharding.optimizer import ZeroOptimizerMixin, open_shards, sharded_strategy
from hvdkit.torch.sparse import SparseGradients
from hvdkit.torch.strategies import choose_strategy
from hvdkit.torch.sync import GradientSync

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


def name_parameters(optimizer: torch.optim.Optimizer, named_parameters: NamedParameters | None) -> Named:
    """Return (name, parameter) for each parameter of the optimizer, in the order of the model if that is known.

    Raises ValueError if named_parameters is no sequence of pairs, repeats a name, or misses a parameter.
    """
    numbered = [pair for group in number_parameters(optimizer.param_groups) for pair in group]
    pairs = list(named_parameters) if named_parameters is not None else []
    if not pairs:
        return numbered
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ValueError(
                f"named_parameters must hold (name, parameter) pairs, as "
                f"model.named_parameters() returns them; it holds a {type(pair).__name__}."
            )
    repeated = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if repeated:
        raise ValueError(
            f"named_parameters repeats the name {', '.join(repeated)}. If the optimizer trains "
            f"several models, make the names distinct, e.g. (f'encoder.{{name}}', parameter)."
        )
    ids = {id(parameter) for _, parameter in pairs}
    missing = [name for name, parameter in numbered if id(parameter) not in ids]
    if missing:
        raise ValueError(
            f"named_parameters lacks {len(missing)} of the optimizer's {len(numbered)} "
            f"parameters; the first is {missing[0]}. Pass the named_parameters() of every model that the optimizer "
            f"trains, or omit the argument."
        )
    trained = {id(parameter) for _, parameter in numbered}
    return [(name, parameter) for name, parameter in pairs if id(parameter) in trained]


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
    shard: str | None = None,
    master_weights: bool = False,
) -> Any:
    """Make an optimizer step on the gradients of all ranks, averaged by default.

    Returns the same object, whose class is now a subclass of its own class with the same name. Its state, parameter
    groups, hooks and the schedulers that refer to it are not changed.

    named_parameters: model.named_parameters(). Errors then use these names, and buckets the order of the model.
    compression: the dtype that is sent between hosts instead of float32; sums are computed in float32. Or a coding,
    such as Compression.TopK(0.01). Or a mapping from patterns of parameter names to these; the first match counts.
    backward_passes_per_step: number of backward passes whose gradients are summed before they are reduced. An earlier
    step() (for example at the end of an epoch) reduces the sum so far. As in Horovod the sum is not divided.
    op: Average, Sum or Adasum. With Adasum each rank steps on its own gradients, then the steps are combined (sent with
    `compression`). Neither GradScaler, which may skip the step of one rank, nor skip_synchronize() works with Adasum.
    gradient_predivide_factor: divisor that is applied before sending; the rest of an average's division follows it.
    num_groups: older name for an integer in `groups`.
    groups: parameters whose gradients are reduced together, when all gradients of the group are ready: a list of lists
    of parameters (the others are reduced without groups), or the number of groups to form in the order of the
    parameters. Rarely useful, since buckets are filled without groups.
    sparse_as_dense: reduce sparse gradients as dense tensors, instead of gathering their rows.
    process_set: the ranks that train together; on other ranks the optimizer steps on its own gradients.
    strategy: an object of a subclass of hvdkit.engine.api.Strategy that replaces `op`; one object for each
    optimizer, and not together with op, compression or gradient_predivide_factor. It gets sparse gradients as dense
    tensors. Save its state with its own state_dict().
    static_graph: every step uses the same parameters. On GPUs the ranks then find out in the first step only which
    parameters no rank uses; without it a rank that misses a gradient waits for its GPU in every step.
    shard: "optimizer" (ZeRO-1): each of n ranks keeps 1/n of the optimizer's state and updates that part of the
    parameters, all ranks gather the result, and the gradients that a program can read are as without shard.
    "gradients" (ZeRO-2): as "optimizer", but gradients may be reduce-scattered and freed while backward runs, and a
    program cannot read them whole. Here "optimizer" allreduces the gradients, since `grad` is a whole average after
    backward(), and a step sends 1.5 times the bytes of one without shard; "gradients" sends as many as without, and
    `grad` is a ShardedGradient, with which torch's clipping (collective) and GradScaler work; call zero_grad() after
    each step. For optimizers that update each element independently. state_dict() is then collective, and returns the
    whole state.
    master_weights: with shard, each rank keeps float32 values of its shards of float16 and bfloat16 parameters, and
    steps on those.

    Unlike in Horovod, the gradients are reduced when backward() returns, so clipping and GradScaler see them, and
    synchronize() and skip_synchronize() are accepted but not needed. The `grad` of a parameter that no rank used stays
    None. All ranks must call backward() and step() equally often.
    The loss that a closure returns is averaged (op=Sum: summed) like its gradients, before the optimizer decides by it;
    except with Adasum, BackupSteps, and strategies whose ranks step on their own gradients, such as local steps.
    Gradients are reduced as long as the optimizer exists; if you delete it, delete it at the same point on all ranks.
    A copy (copy.deepcopy, pickle, torch.save) is a plain optimizer of its own class: wrap it on all ranks to train it.

    Parameters may have any floating-point or complex dtype except float8, which raises TypeError.

    Raises NotInitializedError before init(), ValueError or TypeError for invalid arguments. backward() and step() raise
    PlanMismatchError if the ranks have different parameters, RankLostError if a rank has died.
    """
    check_process_set(process_set, "DistributedOptimizer()")
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"hvdkit takes an optimizer of torch.optim, not a {type(optimizer).__name__}. Pass the optimizer first, "
            "and model.named_parameters() as named_parameters."
        )
    named = name_parameters(optimizer, named_parameters)
    runtime = engine.runtime("DistributedOptimizer()")
    if is_wrapped(optimizer):
        raise ValueError(
            "DistributedOptimizer(): this optimizer is already a DistributedOptimizer. Wrap each optimizer only once."
        )
    shards = None
    if shard is not None:
        check_shard(shard, strategy=strategy is not None, adasum=op is Adasum)
        shards = open_shards(optimizer, named, shard, master_weights=master_weights)
    elif master_weights:
        raise ValueError('DistributedOptimizer(): master_weights=True needs shard="optimizer" or "gradients".')
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
    alike = strategy.overlaps_backward and strategy.equal_replicas
    if isinstance(optimizer, torch.optim.LBFGS) and alike and strategy.loss_op is None:
        raise ValueError(
            f"DistributedOptimizer(): LBFGS decides by the loss, which is another one on each rank, as "
            f"{type(strategy).__name__} does not average it. Leave out the strategy, or use another optimizer."
        )
    if isinstance(strategy, AllReduce):
        strategy.options.check_names([name for name, _ in named])
    if backward_passes_per_step < 1:
        raise ValueError(
            f"DistributedOptimizer(): backward_passes_per_step is {backward_passes_per_step}; it must be 1 or more."
        )
    check_not_sharded(named, process_set.ranks or ())
    group_numbers = number_groups(named, groups, num_groups)
    sync = None
    if process_set.included() and not alone:
        sparse = None
        if isinstance(strategy, AllReduce) and not sparse_as_dense:
            sparse = SparseGradients(average=strategy.options.average)
        if shards is not None:
            assert isinstance(strategy, AllReduce)
            strategy, sparse = sharded_strategy(strategy, shards, named), None
        sync = GradientSync(
            named, process_set, strategy, passes=backward_passes_per_step, groups=group_numbers, sparse=sparse
        )
        _syncs.add(sync)
    state: dict[str, Any] = {"_hvdkit": sync, "_hvdkit_skip": False, "_hvdkit_synchronized": False}
    state["_hvdkit_known"] = KnownGroups()
    mixin: type[DistributedOptimizerMixin] = DistributedOptimizerMixin
    if sync is not None and shards is not None:
        mixin, state["_hvdkit_shards"] = ZeroOptimizerMixin, shards
    elif isinstance(strategy, PeriodicAverage):
        mixin = LocalSGDMixin
    _wrap(optimizer, mixin, {parameter: name for name, parameter in named}, state)
    return optimizer


def _wrap(
    optimizer: torch.optim.Optimizer,
    mixin: type[DistributedOptimizerMixin],
    names: Mapping[torch.nn.Parameter, str],
    attributes: Mapping[str, Any],
) -> None:
    step = optimizer.__dict__.pop("step", None)
    change_class(optimizer, mixin, names, attributes)
    if hasattr(step, "_wrapped_by_lr_sched"):
        optimizer.step = _make_step_for_scheduler(optimizer)  # type: ignore[method-assign]


def _make_step_for_scheduler(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    # A scheduler made before the wrapping had replaced step() on the instance, to detect calls of step().
    held = weakref.ref(optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        wrapped = held()
        assert wrapped is not None
        wrapped._opt_called = True  # type: ignore[attr-defined]
        return type(wrapped).step(wrapped, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


_syncs: weakref.WeakSet[GradientSync] = weakref.WeakSet()
engine.follow(_syncs)


_NO_BASE = (
    "_DistributedOptimizer is the class behind Horovod's DistributedOptimizer; hvdkit has none whose methods could be "
    "overridden. Use hvd.DistributedOptimizer(optimizer, strategy=...) with a subclass of "
    "hvdkit.engine.api.Strategy, which gets the gradients of each step."
)


class _DistributedOptimizer:
    """Stand for the class behind Horovod's DistributedOptimizer; refuse to be called or derived from.

    hvdkit would not call the methods that a subclass overrides.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(_NO_BASE)

    def __init_subclass__(cls, **_: Any) -> None:
        raise NotImplementedError(_NO_BASE)
