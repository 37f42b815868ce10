"""DistributedOptimizer with op=Adasum: each rank takes its own step, and the steps are combined, not the gradients."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvdkit.engine.groups import ProcessSet
from hvdkit.engine.reduce_op import Adasum
from hvdkit.torch.asynchronous import grouped_allreduce_async_
from hvdkit.torch.compression import Compressor
from hvdkit.torch.handles import synchronize
from hvdkit.torch.plain_copies import PlainCopies

_numbers = itertools.count()


class AdasumSteps(PlainCopies):
    """What a wrapped optimizer has beside its own class; mixed in before it.

    Every rank steps by its own gradients; what that changes in each parameter is combined by Adasum (S. Maleki et al.,
    "Scaling Distributed Training with Adaptive Summation", 2020) over all ranks, and all go on from there.
    """

    _hvdkit_set: ProcessSet | None = None  # of an instance that a script makes of the class: it is a plain optimizer
    _hvdkit_compression: type[Compressor]
    _hvdkit_name: str

    def synchronize(self) -> None:
        """Nothing: gradients stay the rank's own, and step() combines what they lead to."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Refused with AssertionError, as in Horovod: without the combination ranks would drift apart."""
        raise AssertionError("skip_synchronize() cannot be used with op=hvd.Adasum: step() combines the ranks' steps.")
        yield

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own step on the rank's own gradients, and the Adasum of all ranks' steps."""
        if self._hvdkit_set is None:
            return super().step(closure, *args, **kwargs)  # type: ignore[misc]
        groups = self.param_groups  # type: ignore[attr-defined]
        trained = [one for group in groups for one in group["params"] if one.requires_grad]
        before = [one.detach().clone() for one in trained]
        result = super().step(closure, *args, **kwargs)  # type: ignore[misc]
        changes = [one.detach() - start for one, start in zip(trained, before, strict=True)]
        for one, start, change in zip(trained, before, self._combine(changes, self._hvdkit_set), strict=True):
            one.copy_(start.add_(change))
        return result

    def _combine(self, changes: list[torch.Tensor], process_set: ProcessSet) -> list[torch.Tensor]:
        pairs = [self._hvdkit_compression.compress(one) for one in changes]
        handles = []
        for dtype in dict.fromkeys(small.dtype for small, _ in pairs):
            name = f"{self._hvdkit_name}.{dtype}"
            some = [small for small, _ in pairs if small.dtype == dtype]
            handles.append(grouped_allreduce_async_(some, name=name, op=Adasum, process_set=process_set))
        for handle in handles:
            synchronize(handle)
        return [self._hvdkit_compression.decompress(small, context) for small, context in pairs]


# torch puts its step hooks around step() of each class that it does not find this mark on; the wrapped class has them.
AdasumSteps.step.hooked = True  # type: ignore[attr-defined]


def adasum_attributes(compression: Any, process_set: ProcessSet) -> dict[str, Any]:
    """The attributes that AdasumSteps needs."""
    return {
        "_hvdkit_set": process_set,
        "_hvdkit_compression": compression,
        "_hvdkit_name": f"adasum.{next(_numbers)}",  # the same on all ranks, as they wrap in the same order
    }
