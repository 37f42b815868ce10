"""Checkpoints of a training with torch: `hvd.checkpoint`."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvdkit.checkpoint.checkpoints import TrainingCheckpoints, refuse_options
from hvdkit.checkpoint.files import check_archive, open_regular
from hvdkit.checkpoint.randomness import decode, encode
from hvdkit.checkpoint.store import Store
from hvdkit.errors import CheckpointError, Preempted
from hvdkit.torch.data import ShardedSampler
from hvdkit.torch.local_shards import find_part
from hvdkit.torch.state import map_nested, share_state
from hvdkit.torch.tensors import as_array

__all__ = ["Checkpoints", "Preempted", "load", "save"]

_FILE = "state.pt"


class Checkpoints(TrainingCheckpoints):
    """Checkpoints of a training: `checkpoints = Checkpoints("checkpoints", model=model, optimizer=optimizer)`.

    Call `checkpoints.load()` before the training, `checkpoints.step(len(batch))` after each optimizer step, and
    `checkpoints.close()` at the end. save() writes a further checkpoint at once. While the object exists, SIGTERM,
    SIGUSR1 and SIGUSR2 make the next step save a checkpoint and end the training with exit code 75.

    directory: used by this training only, on a disk that outlives the job; only rank 0 needs access.
    every_s: seconds between checkpoints.
    keep: number of the newest checkpoints to keep.
    things: objects with state_dict() and load_state_dict(), under names of your choice: modules, optimizers,
    schedulers, GradScaler, ShardedSampler, BalancedSampler, ElasticSampler (do not call its record_batch(): step()
    does). Also numbers and strings, which are then in `values`: `checkpoints.values["best"] = 0.97`.

    Raises CheckpointError if each rank has only its own shard of a model or an optimizer: use hvdkit.parallel.save().
    Raises TypeError for a number or string whose name is a misspelt option, such as every=60.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, every_s: float = 600.0, keep: int = 3, **things: Any
    ) -> None:
        kept, values = _sort(things)
        super().__init__(directory, kept, values, every_s=every_s, keep=keep)


def save(directory: str | os.PathLike[str], *, keep: int = 3, **things: Any) -> None:
    """Save a checkpoint and return when it is on disk; a collective call. Arguments: as for Checkpoints.

    Raises CheckpointError, on rank 0, if it could not be written.
    """
    store = open_store(directory, things, keep=keep)
    refuse_options(store.values)
    store.save()
    store.wait()


def load(directory: str | os.PathLike[str], **things: Any) -> dict[str, Any] | None:
    """Load the newest complete checkpoint on all ranks; a collective call. things: as for Checkpoints.

    Returns the numbers and strings among them, as they were saved; None if there is no checkpoint. Raises what
    Checkpoints.load() raises.
    """
    store = open_store(directory, things)
    return store.values if store.load() else None


def open_store(directory: str | os.PathLike[str], things: Mapping[str, Any], *, keep: int = 3) -> Store:
    """Open a store of named objects with state_dict() and load_state_dict(), and of numbers and strings."""
    kept, values = _sort(things)
    return Store(directory, kept, values, keep=keep)


def _sort(things: Mapping[str, Any]) -> tuple[TorchKept, dict[str, Any]]:
    for name, one in things.items():
        if find_part(one):
            raise CheckpointError(
                f"hvd.checkpoint keeps what is alike on all ranks, but of {name!r} each rank has a part only (shard(), "
                "tensor_parallel(), pipeline() or torch's own). Save it with hvdkit.parallel.save(directory, model, "
                "optimizer), and load it with hvdkit.parallel.load()."
            )
    with_state = {name: one for name, one in things.items() if _has_state(one)}
    return TorchKept(with_state), {name: one for name, one in things.items() if name not in with_state}


def _has_state(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


class TorchKept:
    """Named objects with state_dict() and load_state_dict(), as checkpoints keep them; see Checkpointable."""

    files: Sequence[str] = (_FILE,)
    framework = f"torch {torch.__version__}"

    def __init__(self, things: Mapping[str, Any]) -> None:
        self._things = dict(things)
        self._collected: dict[str, Any] = {}

    def collect(self) -> None:
        """See Checkpointable.collect. Gathers the state of sharded optimizers on rank 0."""
        divided = {name: one._hvdkit_state for name, one in self._things.items() if hasattr(one, "_hvdkit_state")}
        self._collected = {name: read(0) for name, read in divided.items()}

    def copy(self, folder: Path, *, during_epoch: bool) -> Callable[[], None]:
        """See Checkpointable.copy. Raises ValueError for a state that cannot be loaded without executing code."""
        whole, self._collected = self._collected, {}
        states = {name: whole.get(name) or _state_of(one, during_epoch) for name, one in self._things.items()}
        for name, state in states.items():
            _check_plain(name, state)
        copied = map_nested(states, torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))

        def write() -> None:
            with (folder / _FILE).open("xb") as file:
                torch.save(copied, file)

        return write

    def read(self, folder: Path) -> None:
        with open_regular(folder / _FILE) as file:
            check_archive(file, _FILE)
            states = torch.load(file, map_location="cpu", weights_only=True)
        map_nested(states, torch.Tensor, _check_dense)
        if different := sorted(states.keys() ^ self._things.keys()):
            raise ValueError(
                f"the checkpoint holds {', '.join(sorted(states)) or 'nothing'}, but the script passes "
                f"{', '.join(sorted(self._things)) or 'nothing'}; only one of the two has {', '.join(different)}. Pass "
                f"the same names as the run that saved it, or use another directory"
            )
        for name, one in self._things.items():
            one.load_state_dict(states[name])

    def share(self) -> None:
        for one in self._things.values():
            share_state(one)

    def digests(self) -> dict[str, str]:
        return {name: _digest(one.state_dict()) for name, one in self._things.items()}

    def record(self, samples: int | None) -> None:
        for name, one in self._things.items():
            if not hasattr(one, "record_batch"):
                continue
            if samples is None:
                raise ValueError(
                    f"Checkpoints.step(): the sampler {name!r} needs the number of samples that this rank trained on, "
                    f"to resume at the same sample. Call step(len(batch))."
                )
            one.record_batch(0, samples)

    def read_random(self) -> dict[str, Any]:
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return {"torch": encode(torch.get_rng_state().numpy()), "cuda": [encode(one.numpy()) for one in devices]}

    def set_random(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(torch.from_numpy(decode(state["torch"], np.uint8)))
        if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([torch.from_numpy(decode(one, np.uint8)) for one in state["cuda"]])

    def settle(self) -> None:
        """See Checkpointable.settle. Does nothing: a step has ended when step() returns."""


def _state_of(thing: Any, during_epoch: bool) -> Any:
    # The epoch is over when all samples are trained on; only the caller knows whether all work on them is done.
    if during_epoch and isinstance(thing, ShardedSampler):
        return thing.state_dict(given=thing.trained)
    return thing.state_dict()


def _check_plain(name: str, state: Any) -> None:
    skeleton = io.BytesIO()
    torch.save(map_nested(state, torch.Tensor, lambda tensor: torch.empty(0)), skeleton)
    skeleton.seek(0)
    try:
        torch.load(skeleton, weights_only=True)
    except pickle.UnpicklingError as error:
        why = str(error).partition("\n")[0]
        raise ValueError(
            f"{name!r} cannot be saved: its state_dict() must hold only tensors, numbers, strings, lists and dicts, "
            f"because torch.load(weights_only=True) refuses other objects: {why}"
        ) from None


def _check_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Raise ValueError for a tensor that copy() does not write: of another layout, or larger than its data."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise ValueError(f"{_FILE} has a tensor of layout {tensor.layout} on device {tensor.device}")
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise ValueError(f"{_FILE} has a tensor of shape {list(tensor.shape)} with less data than that (expand())")
    return tensor


def _digest(state: Any) -> str:
    sha = hashlib.sha256()
    _feed(sha.update, state)
    return sha.hexdigest()


def _feed(update: Callable[[Any], None], value: Any) -> None:
    if isinstance(value, torch.Tensor):
        update(f"{value.dtype} {list(value.shape)}".encode())
        update(as_array(value.detach().cpu().contiguous().view(-1).view(torch.uint8), "uint8"))
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            update(repr(key).encode())
            _feed(update, value[key])
    elif isinstance(value, (list, tuple)):
        update(f"{len(value)}".encode())
        for one in value:
            _feed(update, one)
    else:
        update(repr(value).encode())
