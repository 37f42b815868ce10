"""Checkpoints of a run in a store: one folder an epoch, whose last file makes it complete."""

from __future__ import annotations

import json
from typing import NamedTuple

from hvdkit_spark.common.store import Store

_STATE, _HISTORY = "state", "history.json"

History = dict[str, list[float]]


class Checkpoint(NamedTuple):
    """A model with its optimizer after some epochs, as its framework writes it. history: a number for each epoch."""

    state: bytes
    history: History
    epochs: int


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store, self._path = store, store.get_checkpoint_path(run_id)

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then remove older ones."""
        name = f"epoch-{checkpoint.epochs:06d}"
        self._store.write(f"{self._path}/{name}/{_STATE}", checkpoint.state)
        about = {"epochs": checkpoint.epochs, "history": checkpoint.history}
        self._store.write_text(f"{self._path}/{name}/{_HISTORY}", json.dumps(about))
        for other in self._store.list(self._path):
            if other < name:
                self._store.remove(f"{self._path}/{other}")

    def load(self) -> Checkpoint | None:
        """Load the newest complete checkpoint; None if the run has none."""
        for name in reversed(self._store.list(self._path)):
            if self._store.exists(f"{self._path}/{name}/{_HISTORY}"):
                about = json.loads(self._store.read(f"{self._path}/{name}/{_HISTORY}"))
                state = self._store.read(f"{self._path}/{name}/{_STATE}")
                return Checkpoint(state, about["history"], about["epochs"])
        return None
