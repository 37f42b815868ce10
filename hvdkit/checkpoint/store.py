"""Saves and loads checkpoints: rank 0 writes and reads the files, and broadcasts the loaded state."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdkit.checkpoint.checkpointable import Checkpointable
from hvdkit.checkpoint.directory import CheckpointDirectory
from hvdkit.checkpoint.files import open_regular
from hvdkit.checkpoint.randomness import read_random, set_random
from hvdkit.checkpoint.writer import Writer
from hvdkit.engine import runtime as engine
from hvdkit.engine.job_objects import allgather_object, broadcast_object
from hvdkit.errors import CheckpointError
from hvdkit.launcher_channel import CHECKPOINTED, notify_launcher
from hvdkit.log import logger

_VALUES = "values.json"


class Store:
    """Saves `state` and `values` to a directory of checkpoints, and loads them.

    directory: the directory of checkpoints.
    state: the objects to save.
    values: further values such as numbers and strings; they must be JSON and the same on all ranks.
    keep: see CheckpointDirectory.
    Raises ValueError for values that JSON would change, or a `keep` below 1.
    """

    def __init__(
        self, directory: str | os.PathLike[str], state: Checkpointable, values: Mapping[str, Any], *, keep: int
    ) -> None:
        self.values = dict(values)
        self._state, self._directory = state, CheckpointDirectory(directory, keep)
        self._writer = Writer()
        _as_json(self.values)

    def save(self) -> None:
        """Copy the state, and let a thread of rank 0 write it; every rank calls this, after an epoch.

        Raises CheckpointError on rank 0 if the previous checkpoint could not be written.
        """
        self._save(during_epoch=False)

    def _save(self, *, during_epoch: bool) -> None:
        engine.wait_for_devices()
        self._state.settle()
        randoms = allgather_object({**read_random(), "framework": self._state.read_random()}, "checkpoint")
        self._state.collect()
        if self._is_rank_zero():
            self._writer.wait()
            self._write(randoms, during_epoch)

    def _write(self, randoms: list[dict[str, Any]], during_epoch: bool) -> None:
        began_s = time.perf_counter()
        text = _as_json({"values": self.values, "random": randoms})
        about = {"framework": self._state.framework, "ranks": len(randoms), "unix_time": round(time.time(), 3)}
        what = f"saving a checkpoint to {self._directory.path}"
        try:
            folder = self._directory.begin()
            with self._directory.removing(folder):
                write = self._state.copy(folder, during_epoch=during_epoch)
        except OSError as error:
            raise CheckpointError(f"{what} failed: {error}") from error
        copied_s = time.perf_counter() - began_s
        channel = engine.runtime("a checkpoint").config.launcher_channel

        def finish() -> None:
            with self._directory.removing(folder):
                write()
                (folder / _VALUES).write_text(text)
                number = self._directory.commit(folder, about)
            notify_launcher(CHECKPOINTED, channel)
            written_s = time.perf_counter() - began_s
            logger.info(
                "%s: copied in %.2f s, on the disk after %.2f s", self._directory.folder(number), copied_s, written_s
            )

        self._writer.start(finish, what)

    def load(self) -> bool:
        """Load the newest undamaged checkpoint on all ranks; every rank calls this.

        The number of ranks may have changed since the checkpoint was saved. Damaged checkpoints are skipped with a
        warning. Random generators are restored on ranks that existed when the checkpoint was saved. Returns whether
        there was a checkpoint.
        Raises CheckpointError on every rank if the checkpoint does not match, or if the ranks differ after loading.
        """
        self._state.settle()
        loaded: tuple[str, str, dict[str, Any]] = ("", "", {})
        if self._is_rank_zero():
            self._writer.wait()
            loaded = self._read()
        place, problem, contents = broadcast_object(loaded, name="checkpoint")
        if problem:
            raise CheckpointError(problem)
        if not place:
            return False
        self._state.share()
        self.values.update(contents["values"])
        self._check_equal(place, self._set_random(contents["random"]))
        if self._is_rank_zero():
            logger.warning("continuing from %s", place)
        return True

    def _read(self) -> tuple[str, str, dict[str, Any]]:
        """Read the newest checkpoint on rank 0; return its path, the problem with it ("" for none), and its values."""
        place = ""
        try:
            number = self._directory.newest_whole([*self._state.files, _VALUES], _warn_of_skipped)
            if number is None:
                return "", "", {}
            folder = self._directory.folder(number)
            place = str(folder)
            with open_regular(folder / _VALUES) as file:
                contents = json.load(file)
            if not isinstance(contents["random"], list):
                raise ValueError(f"{_VALUES} has no list of random states")
            if different := sorted(self.values.keys() ^ contents["values"].keys()):
                raise ValueError(f"the checkpoint and this job have different values: {', '.join(different)}")
            self._state.read(folder)
        except Exception as error:  # of whatever kind: it is raised on all ranks
            return place, f"{place or self._directory.path} cannot be loaded: {type(error).__name__}: {error}", {}
        return place, "", contents

    def _set_random(self, states: list[Any]) -> str:
        """Set this rank's random generators; return the reason if that failed, else ""."""
        rank = engine.runtime("load()").world.rank
        try:
            if rank < len(states):
                self._state.set_random(states[rank]["framework"])
                set_random(states[rank])
        except Exception as error:  # of whatever kind: it is raised on all ranks
            return f"the random state of rank {rank} cannot be restored: {type(error).__name__}: {error}"
        return ""

    def _check_equal(self, place: str, problem: str) -> None:
        """Raise CheckpointError on all ranks if their states differ. problem: of this rank; "" for none."""
        mine = {**self._state.digests(), "values": hashlib.sha256(_as_json(self.values).encode()).hexdigest()}
        problems, digests = zip(*allgather_object((problem, mine), "checkpoint"), strict=True)
        if any(problems):
            raise CheckpointError(f"{place}: {next(filter(None, problems))}")
        for name in mine:
            different = [rank for rank, each in enumerate(digests) if each.get(name) != digests[0].get(name)]
            if different:
                raise CheckpointError(
                    f"{place}: after loading, {name!r} differs between rank 0 and rank "
                    f"{', '.join(map(str, different[:8]))}. Create it from the same configuration on every rank."
                )

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk. Raises CheckpointError on rank 0 if writing it failed."""
        self._writer.wait()

    def _is_rank_zero(self) -> bool:
        return engine.runtime("a checkpoint").world.rank == 0


def _warn_of_skipped(folder: Path, flaw: str) -> None:
    logger.warning("skipped a damaged checkpoint, %s: %s", folder, flaw)


def _as_json(values: Any) -> str:
    """Return values as JSON. Raises ValueError for values that JSON would change."""
    try:
        text = json.dumps(values)
        same = json.loads(text) == values
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ValueError(
            f"{values!r} cannot be saved. Values must be numbers, strings, None, or lists and dicts of these with "
            "strings as keys. Objects with a state_dict() method are saved by that method."
        )
    return text
