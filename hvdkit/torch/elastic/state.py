"""The state of an elastic training with torch: models, optimizers and other objects."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hvdkit.checkpoint.store import Store
from hvdkit.elastic.state import Handler, ObjectState
from hvdkit.engine.job_objects import broadcast_object
from hvdkit.torch import checkpoint
from hvdkit.torch.state import share_state


class TorchState(ObjectState):
    """The state of an elastic training: `state = hvd.elastic.TorchState(model, optimizer, epoch=0)`.

    Each argument is an attribute: `state.model`, `state.epoch += 1`. `commit` saves all of them in memory, `restore`
    returns to the last commit, `sync` broadcasts those of rank 0 and commits them. For modules, optimizers and other
    objects with state_dict and load_state_dict (ElasticSampler, ShardedSampler, learning rate schedulers, GradScaler)
    only their state is saved and sent; other values are copied and pickled as a whole.

    It differs from Horovod in two points: `restore` after `sync` returns to the synchronized values, and a list or dict
    that was changed in place is restored, too.

    model, optimizer: may be None; pass further ones under names of your choice.
    `sync` is collective and raises what broadcast_parameters() and broadcast_optimizer_state() raise.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        super().__init__(broadcast_object, model=model, optimizer=optimizer, **kwargs)

    def open_store(self, directory: str) -> Store:
        """See State.open_store. ValueError for a value that is not a number, not a string, and has no state_dict."""
        return checkpoint.open_store(directory, self.present())

    def handler_for(self, value: Any) -> Handler | None:
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            return _StateDictHandler(value)
        return None


def _copy_over(old: Any, new: Any) -> Any:
    """Copy a state, into the memory of an old one if it fits: new memory costs more than copying."""
    kept: list[torch.Tensor] = []
    given: list[torch.Tensor] = []

    def copied(old: Any, new: Any) -> Any:
        if isinstance(new, torch.Tensor):
            if isinstance(old, torch.Tensor) and _fits(old, new):
                kept.append(old)
                given.append(new)
                return old
            return new.detach().clone()
        if isinstance(new, dict):
            had = old if isinstance(old, dict) else {}
            made = copy.copy(new)  # a module's state has further attributes
            made.update({name: copied(had.get(name), value) for name, value in new.items()})
            return made
        return copy.deepcopy(new)

    made = copied(old, new)
    if kept:
        with torch.no_grad():
            # In one call: with hundreds of small tensors the calls cost more than the bytes.
            torch._foreach_copy_(kept, given)
    return made


def _fits(old: torch.Tensor, new: torch.Tensor) -> bool:
    return old.shape == new.shape and old.dtype == new.dtype and old.device == new.device


class _StateDictHandler:
    """Saves and restores an object by its state_dict."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._saved: Any = None
        self._present: Any = None
        self.gather()
        self.save()

    def gather(self) -> None:
        """See GatheringHandler.gather. An optimizer with shard=... has a collective state_dict()."""
        self._present = self._value.state_dict()

    def save(self) -> None:
        self._saved, self._present = _copy_over(self._saved, self._present), None

    def restore(self) -> None:
        self._value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        share_state(self._value)
