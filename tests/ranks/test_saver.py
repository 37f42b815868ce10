"""Commits that are kept on a disk: which of them, and what happens where the disk does not take them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.checkpoint.directory import CheckpointDirectory
from hvdkit.elastic.saver import Saver
from hvdkit.errors import Preempted


@contextmanager
def saved(directory: Path, every_s: float = 0.0) -> Iterator[tuple[hvd.elastic.TorchState, Saver]]:
    """A state of one rank, and what keeps its commits."""
    with joined():
        state = hvd.elastic.TorchState(torch.nn.Linear(2, 1), step=0)
        saver = Saver(state, str(directory), every_s)
        try:
            yield state, saver
        finally:
            saver.close(well=False)


def commit(state: hvd.elastic.TorchState, times: int) -> None:
    for _ in range(times):
        state.step += 1
        state.commit()


def test_commits_are_saved_no_more_often_than_asked_and_the_newest_is_taken_up(tmp_path: Path) -> None:
    with saved(tmp_path / "often") as (state, saver):
        commit(state, 40)
        saver.save_now()
        weights = state.model.weight.detach().clone()
        with torch.no_grad():
            state.model.weight.zero_()
        state.step = 0
        state.load_from(str(tmp_path / "often"))
        assert state.step == 40 and torch.equal(state.model.weight, weights)
        assert len(CheckpointDirectory(tmp_path / "often").numbers()) >= 2
    with saved(tmp_path / "seldom", every_s=1e6) as (state, _):
        commit(state, 100)
    assert not (tmp_path / "seldom").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_training_at_a_commit_with_that_commit_saved(number: signal.Signals, tmp_path: Path) -> None:
    with saved(tmp_path, every_s=1e6) as (state, _):
        commit(state, 3)
        signal.raise_signal(number)
        with pytest.raises(Preempted) as end:
            commit(state, 100)
        assert end.value.code == 75
        reached, state.step = state.step, 0
        state.load_from(str(tmp_path))
        assert state.step == reached


def test_a_disk_that_takes_nothing_is_told_and_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    with saved(tmp_path / "file" / "kept") as (state, _):
        commit(state, 100)
    assert "saving a checkpoint" in caplog.text
