"""Saving and loading: rank 0 has to do with the disk, and all ranks end up with the same."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdkit.checkpoint.kept import Kept
from hvdkit.checkpoint.randomness import read_random, set_random
from hvdkit.checkpoint.shelf import Shelf
from hvdkit.checkpoint.writer import Writer
from hvdkit.engine import runtime as engine
from hvdkit.engine.job_objects import allgather_object, broadcast_object
from hvdkit.errors import CheckpointError
from hvdkit.launcher_channel import KEPT, notify_launcher
from hvdkit.log import logger

_VALUES = "values.json"


class Store:
    """Keeps things in a folder of checkpoints.

    values: plain ones beside what `kept` keeps; JSON, and the same on all ranks.
    Raises ValueError for values that JSON would change, or a `keep` below 1.
    """

    def __init__(self, directory: str | os.PathLike[str], kept: Kept, values: Mapping[str, Any], *, keep: int) -> None:
        self.values = dict(values)
        self._kept, self._shelf = kept, Shelf(directory, keep)
        self._writer = Writer()
        _as_json(self.values)

    def save(self) -> None:
        """Save a checkpoint: this returns when all is copied, and rank 0 writes it meanwhile; every rank calls it.

        For after an epoch. Raises CheckpointError on rank 0 if the one before could not be written.
        """
        self._save(during_epoch=False)

    def _save(self, *, during_epoch: bool) -> None:
        self._kept.settle()
        randoms = allgather_object({**read_random(), "framework": self._kept.read_random()}, "checkpoint")
        if self._is_rank_zero():
            self._writer.wait()
            self._write(randoms, during_epoch)

    def _write(self, randoms: list[dict[str, Any]], during_epoch: bool) -> None:
        began_s = time.perf_counter()
        text = _as_json({"values": self.values, "random": randoms})
        about = {"framework": self._kept.framework, "ranks": len(randoms), "unix_time": round(time.time(), 3)}
        what = f"saving a checkpoint to {self._shelf.path}"
        try:
            folder = self._shelf.begin()
            with self._shelf.removing(folder):
                write = self._kept.copy(folder, during_epoch=during_epoch)
        except OSError as error:
            raise CheckpointError(f"{what} failed: {error}") from error
        copied_s = time.perf_counter() - began_s
        news = engine.runtime("a checkpoint").config.news

        def finish() -> None:
            with self._shelf.removing(folder):
                write()
                (folder / _VALUES).write_text(text)
                number = self._shelf.commit(folder, about)
            notify_launcher(KEPT, news)
            took_s = time.perf_counter() - began_s
            logger.info("%s: copied in %.2f s, on the disk after %.2f s", self._shelf.folder(number), copied_s, took_s)

        self._writer.start(finish, what)

    def load(self) -> bool:
        """Take the newest checkpoint that is whole, on all ranks, whose number may be another; every rank calls it.

        Those that are damaged are passed over with a warning. Random numbers go on where they were on ranks that there
        were when it was saved. Returns whether there was one.
        Raises CheckpointError on every rank if it does not fit, or if the ranks do not hold the same afterwards.
        """
        self._kept.settle()
        found: tuple[str, str, dict[str, Any]] = ("", "", {})
        if self._is_rank_zero():
            self._writer.wait()
            found = self._read()
        place, problem, told = broadcast_object(found, name="checkpoint")
        if problem:
            raise CheckpointError(problem)
        if not place:
            return False
        self._kept.share()
        self.values.update(told["values"])
        rank = engine.runtime("load()").world.rank
        if rank < len(told["random"]):
            mine = told["random"][rank]
            self._kept.set_random(mine["framework"])
            set_random(mine)
        self._check_equal(place)
        if rank == 0:
            logger.warning("going on from %s", place)
        return True

    def _read(self) -> tuple[str, str, dict[str, Any]]:
        """On rank 0: which checkpoint, what is wrong, and its values."""
        place = ""
        try:
            number = self._shelf.newest_whole([*self._kept.files, _VALUES], _tell_skipped)
            if number is None:
                return "", "", {}
            folder = self._shelf.folder(number)
            place = str(folder)
            told = json.loads((folder / _VALUES).read_text())
            if different := sorted(self.values.keys() ^ told["values"].keys()):
                raise ValueError(f"{', '.join(different)} is in one only of the checkpoint and what is to be kept")
            self._kept.read(folder)
        except Exception as error:  # of whatever kind, all ranks have to hear of it
            return place, f"{place or self._shelf.path} cannot be loaded: {type(error).__name__}: {error}", {}
        return place, "", told

    def _check_equal(self, place: str) -> None:
        mine = {**self._kept.digests(), "values": hashlib.sha256(_as_json(self.values).encode()).hexdigest()}
        seen = allgather_object(mine, "checkpoint")
        for name in mine:
            different = [rank for rank, one in enumerate(seen) if one.get(name) != seen[0].get(name)]
            if different:
                raise CheckpointError(
                    f"{place}: after loading, {name!r} is not the same on rank 0 and on rank "
                    f"{', '.join(map(str, different[:8]))}. Make it from the same configuration on every rank."
                )

    def wait(self) -> None:
        """Return when what was saved is on the disk. Raises CheckpointError, on rank 0, if it could not be written."""
        self._writer.wait()

    def _is_rank_zero(self) -> bool:
        return engine.runtime("a checkpoint").world.rank == 0


def _tell_skipped(folder: Path, flaw: str) -> None:
    logger.warning("%s is damaged and passed over: %s", folder, flaw)


def _as_json(values: Any) -> str:
    """JSON of values that it does not change; ValueError for others."""
    try:
        text = json.dumps(values)
        same = json.loads(text) == values
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ValueError(
            f"{values!r} cannot be kept: values are numbers, texts, None, and lists and dicts of these with texts as "
            f"keys. What has state_dict() is kept by that."
        )
    return text
