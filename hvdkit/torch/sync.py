"""GradientSync calls the strategy of one optimizer: gradient hooks, accumulation windows, gradients without hooks."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hvdkit.engine import runtime as engine
from hvdkit.engine.groups import Group, ProcessSet
from hvdkit.engine.named.operation import Action
from hvdkit.engine.named.submit import collective_step
from hvdkit.engine.replicate import ReplicaCheck
from hvdkit.engine.strategy import Strategy
from hvdkit.torch import autograd
from hvdkit.torch.cleared import ClearedGradients, reduced_already
from hvdkit.torch.closures import reduce_loss
from hvdkit.torch.compiled import CompiledNotice
from hvdkit.torch.conversions import PlannedMetadata
from hvdkit.torch.layout import Named
from hvdkit.torch.replicas import checksums
from hvdkit.torch.source import TorchSource
from hvdkit.torch.sparse import SparseGradients
from hvdkit.torch.tensor_hook import TensorHook, hook_gradients
from hvdkit.torch.tensors import dtype_name
from hvdkit.torch.uncompiled import uncompiled
from hvdkit.torch.weakly import weakly
from hvdkit.transport.api import Transport

_numbers = itertools.count()


class GradientSync:
    """Drives the strategy of one optimizer.

    An accumulation window is `passes` backward passes. During the last one GradientSync announces each complete
    gradient to the strategy. before_step() returns before `backward()` does, so that clipping, unscaling and step() all
    see the result. synchronize() gives the strategy the gradients that hooks cannot see: of a window cut short, of a
    pass without any of the parameters, and those set by hand. begin_step() calls a strategy that does not overlap
    backward.

    named: (name, parameter) pairs.
    process_set: the ranks that train together.
    strategy: of this optimizer.
    passes: backward passes per window.
    groups: see number_groups.
    sparse: reduces the sparse gradients, which the strategy then does not get; None to give them to the strategy as
    dense ones.
    hooks: use gradient hooks; without them begin_step() takes all gradients from `parameter.grad`, also those of frozen
    parameters.
    """

    def __init__(
        self,
        named: Named,
        process_set: ProcessSet,
        strategy: Strategy,
        *,
        passes: int = 1,
        groups: Mapping[int, int] | None = None,
        sparse: SparseGradients | None = None,
        hooks: bool = True,
    ) -> None:
        self.number = next(_numbers)  # the same on all ranks, which wrap optimizers in the same order
        self.strategy = strategy
        self.gradient_hook: TensorHook | None = None
        #: Weights a closure's loss by this rank's number of rows before it is averaged (hvdrun --wrap).
        self.weigh_loss: Callable[[Any], Any] | None = None
        self.process_set, self._passes, self._sparse = process_set, passes, sparse
        self._hooked = hooks and strategy.overlaps_backward
        self._with_frozen = not hooks
        self._groups = groups if groups is not None else {}
        self.enter()
        self._named: list[tuple[str, torch.nn.Parameter]] = []
        self._frozen: list[int] = []  # parameters that were not trained at the last check
        self._hooks: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self._attached = False
        self._source = TorchSource((), {})  # of the parameters to which the strategy is attached
        self._planned = PlannedMetadata(())  # of these, and of those with sparse gradients
        self._position: dict[int, int] = {}  # parameter -> its index in the source
        self._written: set[int] = set()  # parameters whose gradient was written since the last reduction
        self._summed: set[int] = set()  # reduced since the last step, if the strategy is not repeatable
        self._cleared = ClearedGradients(self._named, self._summed, self._hooks)
        self._tasks: set[int] = set()  # backward passes under way
        self._done_passes = 0
        self._postponed = False  # a complete window waits for synchronize()
        self._reduced = False  # whether a window was reduced since the last step
        self._notice = CompiledNotice()
        self.add(named)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """All parameters that were added."""
        return [parameter for _, parameter in self._named]

    @property
    def group(self) -> Group:
        """The ranks that train together, as a group."""
        return self._group

    def set_gradient_hook(self, hook: TensorHook) -> None:
        """Set the object that takes part in each gradient and step, in place of an earlier one."""
        if self.gradient_hook is None:
            hook_gradients(weakref.ref(self), self.parameters)
        self.gradient_hook = hook

    def enter(self) -> None:
        """Enter the group that the process set now has, after init()."""
        self._group = group = self.process_set.group("DistributedOptimizer()")
        self.strategy.enter(group)
        self.name = f"optimizer.{group.engine.count('optimizer')}"  # unique in the group, and the same on all its ranks
        every = engine.runtime("DistributedOptimizer()").config.check_replicas
        self._replicas = ReplicaCheck(group.engine, self.name, every if self.strategy.equal_replicas else 0)
        for kind, method in (("plan", GradientSync._attach), ("sparse_gradients", GradientSync._look_on)):
            group.engine.joining.contributions[f"{kind}.{self.name}"] = weakly(weakref.ref(self), method)

    def add(self, named: Named) -> None:
        """Add parameters; all ranks attach the strategy to them before the next step.

        Raises TypeError for a trained parameter that the strategy cannot train.
        """
        self._check(named)
        self._frozen.extend(range(len(self._named), len(self._named) + len(named)))
        self._named.extend(named)
        if self.gradient_hook is not None:
            hook_gradients(weakref.ref(self), [parameter for _, parameter in named])
        self._changed = True
        self._hook()

    def _check(self, named: Named) -> None:
        for name, parameter in named:
            if self._is_trained(parameter):
                self.strategy.check(f"the parameter {name}", dtype_name(parameter))

    def _is_trained(self, parameter: torch.nn.Parameter) -> bool:
        return self._with_frozen or parameter.requires_grad

    def _unfrozen(self) -> list[int]:
        """Return the trained parameters without a hook."""
        return [index for index in self._frozen if self._is_trained(self._named[index][1])]

    def _hook(self) -> list[int]:
        """Hook the trained parameters without a hook; returns their indices."""
        new = self._unfrozen()
        if self._hooked:
            for index in new:
                self._hooks.append(self._named[index][1].register_post_accumulate_grad_hook(self._make_hook(index)))
        self._frozen = sorted({*self._frozen}.difference(new))
        return new

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # Python's collector cannot see a parameter's hooks: objects that they hold would live as long as the process.
        held = weakref.ref(self)

        def on_gradient(parameter: torch.Tensor) -> None:
            sync = held()
            if sync is not None:
                sync._on_gradient(index)

        return uncompiled(on_gradient)

    def _on_gradient(self, index: int) -> None:
        task = autograd.current_task()
        if task not in self._tasks:
            self._begin_task(task, index)
        if index in self._summed:
            raise reduced_already(self._named[index][0], self._passes)
        self._written.add(index)
        position = self._position.get(index)
        if position is not None:
            self._source.written.add(position)
            if self._done_passes + 1 >= self._passes:
                self.strategy.arrived(position)

    def _begin_task(self, task: int, arrived: int) -> None:
        """Record a new backward pass once, although hooks of several devices may call this at the same time.

        arrived: the parameter with the first gradient.
        Raises ValueError for parameters whose dtype was converted since the plan was made.
        """
        with autograd.first_of_pass:
            if task not in self._tasks:
                if not self._tasks:  # not in a checkpoint's pass inside another pass
                    self._planned.check_dtypes()
                    self._drop_cleared(arrived)
                self._tasks.add(task)
                autograd.when_backward_ends(task, self.number, functools.partial(self._backward_ended, task))

    def _drop_cleared(self, arrived: int) -> None:
        """Restart the window if its gradients were cleared without zeroed()."""
        if (self._done_passes or self._written or self._summed) and self._cleared.all_of(
            self._summed or self._written, arrived
        ):
            self._drop_window()
        if self._passes > 1 or not self.strategy.repeatable:
            self._cleared.watch(arrived)

    def _backward_ended(self, task: int, reduce: bool) -> None:
        self._tasks.discard(task)
        if self._tasks:  # this was a checkpoint's pass inside the real one
            return
        self._done_passes += 1
        if self._done_passes >= self._passes:
            if reduce:
                self._reduce_window()
            else:  # another optimizer's reduction has failed: the window is complete, and step() reduces it
                self._postponed = True

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes of a window."""
        self._passes = passes

    def synchronize(self) -> None:
        """Reduce the gradients that were not reduced since the last step; collective unless all were.

        Does nothing for a strategy that does not overlap backward.
        """
        if not self.strategy.overlaps_backward:
            return
        self._check_interrupted()
        unseen = not self._written and not self._done_passes
        if unseen and self._reduced:
            return
        if not self._postponed:  # gradients of a window cut short may have been cleared since
            self._count_as_written(index for index in self._written if self._named[index][1].grad is not None)
        if unseen:  # set by hand, or only other ranks have gradients
            self._find_gradients()
        self._reduce_window()

    def _find_gradients(self) -> None:
        """Count all existing gradients as written. Raises ValueError as _begin_task() does."""
        self._planned.check()
        self._count_as_written(index for index, (_, parameter) in enumerate(self._named) if parameter.grad is not None)

    def _count_as_written(self, indices: Iterable[int]) -> None:
        self._written = set(indices)
        self._source.written = {self._position[index] for index in self._written if index in self._position}

    def _reduce_window(self) -> None:
        """Run the strategy on the gradients of the window; collective."""
        self._attach_if_changed()
        self._before_step()
        if self._sparse is not None and self._sparse.indices:
            collective_step(self._group.engine, "sparse_gradients", self._reduce_sparse, name=self.name)
        if not self.strategy.repeatable:
            self._summed |= self._written
        rank = engine.runtime("The reduction of gradients").world.rank
        self._notice.after_reduction(self.strategy.statistics, self._named, rank)
        self._begin_window()
        self._reduced = True

    def _before_step(self) -> None:
        self.strategy.before_step()
        self._source.restore_sparse()

    def _begin_window(self, written: Iterable[int] = ()) -> None:
        self._count_as_written(written)
        self._done_passes, self._postponed = 0, False

    def _attach_if_changed(self) -> None:
        """Attach the strategy anew if parameters were added or unfrozen, on all ranks alike; collective."""
        unfrozen = self._unfrozen()
        self._check([self._named[index] for index in unfrozen])
        if not (self._changed or unfrozen):
            return
        if self._attached and self.strategy.overlaps_backward:
            self._before_step()  # some ranks may have started buckets, so all ranks finish
            self._written.difference_update(self._position)
        collective_step(self._group.engine, "plan", self._attach, name=self.name)

    def attach(self) -> None:
        """Attach the strategy unless a step has done so; collective then. Raises ValueError as _begin_task() does."""
        if not self._attached:
            self._attach_if_changed()
        self._planned.check()

    def _attach(self, transport: Transport, _: Sequence[int]) -> None:
        """Agree on the sparse gradients and attach the strategy to the others, also on joined ranks; collective."""
        # Parameters unfrozen since the last reduction had no hook in this pass.
        self._written |= {index for index in self._hook() if self._named[index][1].grad is not None}
        # Also those that are frozen now and have a hook: unfrozen again they are not among _unfrozen().
        trained = sorted({*range(len(self._named))}.difference(self._frozen))
        planned = PlannedMetadata([self._named[index] for index in trained])
        if self._sparse is not None:
            self._sparse.agree(transport, self._named)
            trained = [index for index in trained if index not in self._sparse.indices]
        positions = {index: position for position, index in enumerate(trained)}
        source = TorchSource([self._named[index] for index in trained], self._groups)
        source.written |= {positions[index] for index in self._written if index in positions}
        owner = None if self.strategy.driver is None else self.strategy.driver()
        if owner is not None:
            owner._leave_strategy()  # if attach() raises, later gradients are not announced
        self.strategy.attach(source.describe(self.name), self._group)
        self._position, self._source, self._planned = positions, source, planned
        self._attached, self._changed = True, False
        self.strategy.driver = weakref.ref(self)

    def _reduce_sparse(self, transport: Transport, _: Sequence[int]) -> None:
        assert self._sparse is not None
        self._sparse.reduce(transport, self._named, self._written)

    def _look_on(self, transport: Transport, _: Sequence[int]) -> None:
        """Take part in the reduction of sparse gradients as a joined rank, without gradients."""
        assert self._sparse is not None
        self._sparse.contribute_nothing(transport, self._named)

    def zeroed(self) -> None:
        """Drop the accumulated gradients, because the user has cleared the gradients."""
        self._check_interrupted()
        zeros = {index for index in self._written if self._named[index][1].grad is not None}
        self._drop_window(zeros)  # ranks that had no gradient in this window get zeros too

    def _drop_window(self, written: Iterable[int] = ()) -> None:
        if self._postponed:
            self.strategy.cancel()
        self._begin_window(written)
        self._summed.clear()
        self._reduced = False

    def begin_step(self, closure: Callable[[], Any] | None, *, skip: bool) -> Callable[[], Any] | None:
        """Reduce gradients before the optimizer steps; collective. Returns the closure to call instead of this one.

        skip: take the gradients as they are.
        """
        if closure is not None and (self.strategy.overlaps_backward or self.strategy.loss_op is not None):
            return functools.partial(self._evaluate, closure)
        if not self.strategy.overlaps_backward:
            self._reduce_found()
        elif not skip:
            self.synchronize()
        return closure

    def _reduce_found(self) -> None:
        self._attach_if_changed()
        self._find_gradients()
        self._before_step()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        loss, op = closure(), self.strategy.loss_op
        self.synchronize() if self.strategy.overlaps_backward else self._reduce_found()
        if op is None or not self._named:
            return loss
        if self.weigh_loss is not None:
            loss = self.weigh_loss(loss)
        weight = 1.0 if self.gradient_hook is None else self.gradient_hook.weight
        return reduce_loss(loss, op, weight, self._named[0][1].device, f"{self.name}.loss", self.process_set)

    def end_window(self) -> None:
        """Assign later gradients to the next step, because the optimizer takes the present gradients now."""
        self._summed.clear()
        self._reduced = False

    def end_step(self) -> None:
        """Finish the step after the optimizer's own; collective if the strategy's end or a check of replicas is."""
        self.end_window()
        self.strategy.after_step()
        self._replicas.stepped(lambda: checksums(self._named))
        if self.gradient_hook is not None:
            self.gradient_hook.stepped(self)

    def together(self, kind: str, action: Action, options: Sequence[tuple[str, str]] = ()) -> Any:
        """Run an action on all ranks of this optimizer; collective. kind, options: see collective_step()."""
        return collective_step(self._group.engine, kind, action, name=self.name, options=options)

    def _check_interrupted(self) -> None:
        if not self._tasks or autograd.current_task() != autograd.NO_TASK:
            return
        for task in self._tasks:
            autograd.forget(task)
        self._tasks.clear()
        self.strategy.cancel()

    def unhook(self) -> None:
        """Stop reducing in backward(), on all ranks: another optimizer trains the parameters."""
        _remove(self._hooks)
        self._hooks.clear()
        self._hooked = False

    def close(self) -> None:
        """Free the memory that the strategy has allocated; collective."""
        if self._attached:
            self.strategy.detach()
        self._leave_strategy()

    def _leave_strategy(self) -> None:
        """Record that the strategy is attached to other or no parameters, so that the next use attaches it again."""
        self._position.clear()
        self._planned = PlannedMetadata(())
        self._attached, self._changed = False, True


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
