"""When the gradients of one optimizer are reduced: hooks, windows of backward passes, and what was missed."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from hvdkit.engine import runtime as engine
from hvdkit.engine.groups import ProcessSet
from hvdkit.engine.named.collective_step import collective_step
from hvdkit.engine.named.operation import Action
from hvdkit.engine.objects import allgather_object
from hvdkit.engine.planned.reducer import Statistics
from hvdkit.engine.replicate import ReplicaCheck
from hvdkit.engine.request import ReduceOptions, check_gradient
from hvdkit.errors import BackwardInterruptedError, HorovodInternalError
from hvdkit.torch import autograd
from hvdkit.torch.compiled import CompiledNotice
from hvdkit.torch.layout import Named
from hvdkit.torch.plans import Plan, open_plan
from hvdkit.torch.replicas import checksums
from hvdkit.torch.sparse import reduce_sparse
from hvdkit.torch.tensors import dtype_name
from hvdkit.transport.api import Transport

_numbers = itertools.count()


class GradientSync:
    """Keeps the gradients of one optimizer's parameters equal on all ranks.

    A window is `passes` backward passes. While the last one runs its gradients are reduced bucket by bucket, and they
    are whole when `backward()` returns, so that clipping, unscaling and step() all see the reduced ones. What that
    cannot see (a window cut short, a pass without any of the parameters, gradients set by hand) `synchronize` reduces.
    """

    def __init__(
        self,
        named: Named,
        process_set: ProcessSet,
        *,
        options: ReduceOptions,
        passes: int,
        sparse_as_dense: bool,
        groups: Mapping[int, int],
    ) -> None:
        self.number = next(_numbers)  # the same on all ranks, as optimizers are wrapped in the same order
        self.statistics = Statistics()
        self._process_set = process_set
        self.enter()
        self._options, self._passes, self._sparse_as_dense = options, passes, sparse_as_dense
        self._groups = groups
        self._named: list[tuple[str, torch.nn.Parameter]] = []
        self._unhooked: list[int] = []  # parameters that were not trained when last looked at
        self._hooks: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self._plan: Plan | None = None
        self._place: dict[int, int] = {}  # parameter -> its index in the plan
        self._sparse: list[int] = []  # parameters whose gradients are sparse on some rank
        self._touched: set[int] = set()  # parameters that autograd has written to since the last reduction
        self._touched_places: set[int] = set()  # the same as indices in the plan
        self._arrived: set[int] = set()  # of those, the ones announced to the plan
        self._reduced: set[int] = set()  # since the last step; a sum must not be taken twice
        self._tasks: set[int] = set()  # backward passes under way
        self._done_passes = 0
        self._flushed = False  # since the last step
        self._notice = CompiledNotice()
        self.add(named)

    def enter(self) -> None:
        """Take up the work among the ranks of the process set as it is now, after init()."""
        self._group = group = self._process_set.group("DistributedOptimizer()")
        self._size = group.transport.size
        self.name = f"optimizer.{group.engine.count('optimizer')}"  # on these ranks, and alike on all of them
        every = engine.runtime("DistributedOptimizer()").config.check_replicas
        self._replicas = ReplicaCheck(group.engine, self.name, every)
        for kind, method in (("plan", GradientSync._agree), ("sparse_gradients", GradientSync._look_on)):
            group.engine.joining.contributions[f"{kind}.{self.name}"] = _weakly(weakref.ref(self), method)

    def add(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """Take in more parameters; the next reduction makes a new plan, on all ranks alike.

        Raises TypeError for one to be trained that no gradients can be summed of.
        """
        check_parameters(named)
        self._unhooked.extend(range(len(self._named), len(self._named) + len(named)))
        self._named.extend(named)
        self._changed = True
        self._hook()

    def _hook(self) -> list[int]:
        """Hook the parameters that are trained and have no hook yet; returns which."""
        new = [index for index in self._unhooked if self._named[index][1].requires_grad]
        for index in new:
            self._hooks.append(self._named[index][1].register_post_accumulate_grad_hook(self._make_hook(index)))
        self._unhooked = sorted({*self._unhooked}.difference(new))
        return new

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # A parameter's hooks are hidden from Python's collector: what they held would stay as long as the process.
        held = weakref.ref(self)

        def on_gradient(parameter: torch.Tensor) -> None:
            reducer = held()
            if reducer is not None:
                reducer._on_gradient(index)

        return on_gradient

    def _on_gradient(self, index: int) -> None:
        task = autograd.current_task()
        if task not in self._tasks:
            self._begin_task(task)
        if index in self._reduced:
            raise HorovodInternalError(
                f"The gradient of {self._named[index][0]} was computed more than backward_passes_per_step="
                f"{self._passes} times before step(); with op=Sum the first part would be counted "
                f"{self._size} times. Raise backward_passes_per_step, or call step()."
            )
        self._touched.add(index)
        place = self._place.get(index)
        if place is not None:
            self._touched_places.add(place)
            if self._done_passes + 1 >= self._passes:
                self._announce(index, place)

    def _begin_task(self, task: int) -> None:
        """Take note of a backward pass, once, although hooks of several devices may come here at the same time."""
        with autograd.first_of_pass:
            if task not in self._tasks:
                self._tasks.add(task)
                autograd.when_backward_ends(self, task)

    def _announce(self, index: int, place: int) -> None:
        assert self._plan is not None
        if index not in self._arrived:
            self._arrived.add(index)
            self._plan.arrived(place)
        elif self._plan.started(place):
            raise HorovodInternalError(
                f"The gradient of {self._named[index][0]} was written again while it was being sent. If an earlier "
                f"backward() failed and the exception was caught, let it end the job; if the parameter is used inside "
                f"and outside of a re-entrant checkpoint, use torch.utils.checkpoint(..., use_reentrant=False)."
            )

    def backward_ended(self, task: int) -> bool:
        """See autograd.Reducer."""
        self._tasks.discard(task)
        if self._tasks:  # this was a checkpoint's pass inside the real one
            return False
        self._done_passes += 1
        return self._done_passes >= self._passes

    def set_passes(self, passes: int) -> None:
        """Windows are of so many backward passes from now on."""
        self._passes = passes

    def synchronize(self) -> None:
        """Reduce what has not been reduced since the last step; collective unless nothing is left to do."""
        self._check_interrupted()
        unseen = not self._touched and not self._done_passes
        if unseen and self._flushed:
            return
        if unseen:  # set by hand, or nothing here while other ranks have gradients
            for index, (_, parameter) in enumerate(self._named):
                if parameter.grad is not None:
                    self._touch(index)
        self.flush()

    def _touch(self, index: int) -> None:
        self._touched.add(index)
        if index in self._place:
            self._touched_places.add(self._place[index])

    def flush(self) -> None:
        """See autograd.Reducer."""
        unfrozen = [self._named[index] for index in self._unhooked if self._named[index][1].requires_grad]
        check_parameters(unfrozen)
        self._changed = self._changed or bool(unfrozen)
        if self._changed:
            self._make_plan()
        if self._plan is not None:
            self._plan.finish()
        made = engine.runtime("a reduction of gradients")
        if self._sparse:
            collective_step(self._group.engine, "sparse_gradients", self._gather_sparse, name=self.name)
        if not self._options.average:
            self._reduced |= self._touched
        self._notice.after_reduction(self.statistics, self._named, made.world.rank)
        self._reset()
        self._flushed = True

    def _gather_sparse(self, transport: Transport, _: Sequence[int]) -> None:
        for index in self._sparse:
            parameter = self._named[index][1]
            gradient = parameter.grad if index in self._touched else None
            reduced = reduce_sparse(transport, gradient, parameter, average=self._options.average)
            if reduced is not None:
                parameter.grad = reduced

    def _look_on(self, transport: Transport, _: Sequence[int]) -> None:
        """This rank's part in gathering sparse gradients when it has joined: none."""
        for index in self._sparse:
            reduce_sparse(transport, None, self._named[index][1], average=self._options.average)

    def _reset(self) -> None:
        self._touched.clear()
        self._touched_places.clear()
        self._arrived.clear()
        self._done_passes = 0

    def _make_plan(self) -> None:
        """Agree with the other ranks on what is sparse and on the buckets; collective."""
        if self._plan is not None:
            self._plan.finish()  # part of it may be under way on some ranks, so all of them do it
            self._touched = {index for index in self._touched if index not in self._place}
        collective_step(self._group.engine, "plan", self._agree, name=self.name)

    def _agree(self, transport: Transport, joined: Sequence[int]) -> None:
        """Make the plan, also where this rank has joined, and is in zero rounds of the old one; collective."""
        made = engine.runtime("a reduction of gradients")
        old, self._plan = self._plan, None
        if old is not None:
            old.drain_and_close() if joined else old.close()
        # What was unfrozen since the last reduction had no hook in this pass.
        self._touched |= {index for index in self._hook() if self._named[index][1].grad is not None}
        sparse = [index for index, (_, parameter) in enumerate(self._named) if self._is_sparse(parameter)]
        self._sparse = sorted(set().union(*allgather_object(transport, sparse)) | set(self._sparse))
        dense = [
            index
            for index, (_, parameter) in enumerate(self._named)
            if parameter.requires_grad and index not in self._sparse
        ]
        self._place = {index: place for place, index in enumerate(dense)}
        self._touched_places.clear()
        self._touched_places |= {self._place[index] for index in self._touched if index in self._place}
        if dense:
            self._plan = open_plan(
                made,
                self._group,
                self.name,
                [self._named[index] for index in dense],
                options=self._options,
                touched=self._touched_places,
                groups=self._groups,
                statistics=self.statistics,
            )
        self._changed = False

    def _is_sparse(self, parameter: torch.nn.Parameter) -> bool:
        return not self._sparse_as_dense and parameter.grad is not None and parameter.grad.is_sparse

    def zeroed(self) -> None:
        """The user has thrown the gradients away, and with them what was accumulated and not yet reduced."""
        self._check_interrupted()
        self._reset()
        self._reduced.clear()
        self._flushed = False

    def stepped(self) -> None:
        """The optimizer has used the gradients."""
        self._reduced.clear()
        self._flushed = False
        self._replicas.stepped(lambda: checksums(self._named))

    def _check_interrupted(self) -> None:
        if not self._tasks or autograd.current_task() != autograd.NO_TASK:
            return
        for task in self._tasks:
            autograd.forget(task)
        self._tasks.clear()
        if self._plan is not None and self._plan.under_way:
            raise BackwardInterruptedError(
                "A backward pass ended with an exception on this rank after part of its gradients had been sent, and "
                "the other ranks wait for the rest. Let the exception end the job, or find out before backward() (from "
                "the loss, say) and on all ranks that a batch is to be skipped."
            )
        self._arrived.clear()

    def close(self) -> None:
        """Free the buckets; collective."""
        if self._plan is not None:
            self._plan.close()
            self._plan = None
            self._place.clear()
        self._changed = True


def check_parameters(named: Sequence[tuple[str, torch.nn.Parameter]], *, adasum: bool = False) -> None:
    """Raise TypeError for a parameter to be trained that no gradients, or with Adasum steps, can be summed of."""
    horovod = engine.runtime("DistributedOptimizer()").horovod is not None
    for name, parameter in named:
        if parameter.requires_grad:
            check_gradient(f"the parameter {name}", dtype_name(parameter), horovod=horovod, adasum=adasum)


def _weakly(
    held: weakref.ref[GradientSync], method: Callable[[GradientSync, Transport, Sequence[int]], None]
) -> Callable[[], Action | None]:
    """Gives the method of the reducer, as long as that is there."""

    def find() -> Action | None:
        reducer = held()
        return None if reducer is None else functools.partial(method, reducer)

    return find


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
