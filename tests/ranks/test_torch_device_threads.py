"""Hooks of one backward pass that run in several threads at the same time, as autograd has one a device."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from torch.autograd import Variable

from hvdkit.torch import autograd
from hvdkit.torch.sync import GradientSync

pytestmark = pytest.mark.native("no engine is asked")

PASS = 7  # the number of a backward pass


class _MeetsWhereItLooks:
    """What looks into a collection: each of two threads sees what is there before either of them goes on."""

    def __init__(self) -> None:
        self._meeting = threading.Barrier(2)
        self._met = threading.local()

    def wait(self) -> None:
        """Wait for the other thread, at the first look of each; not for long, as a lock may keep it from looking."""
        if not hasattr(self._met, "once"):
            self._met.once = True
            with contextlib.suppress(threading.BrokenBarrierError):
                self._meeting.wait(1.0)


class _Set(set[int]):
    looks = _MeetsWhereItLooks()

    def __contains__(self, task: object) -> bool:
        found = super().__contains__(task)
        self.looks.wait()
        return found


class _Dict(dict[int, Any]):
    looks = _MeetsWhereItLooks()

    def __contains__(self, task: object) -> bool:
        found = super().__contains__(task)
        self.looks.wait()
        return found


def _in_two_threads(first: Callable[[], object], second: Callable[[], object]) -> None:
    threads = [threading.Thread(target=body) for body in (first, second)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()


@pytest.fixture
def callbacks(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What autograd has been asked to call at the end of the pass, in which all hooks believe to be."""
    queued: list[Callable[[], None]] = []

    class Engine:
        queue_callback = staticmethod(queued.append)

    monkeypatch.setattr(Variable, "_execution_engine", Engine)
    monkeypatch.setattr(autograd, "current_task", lambda: PASS)
    return queued


def test_two_optimizers_are_told_once_of_a_pass_that_both_begin(
    callbacks: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autograd, "_callbacks", _Dict())
    told: list[int] = []
    _in_two_threads(
        *(
            lambda number=number: autograd.when_backward_ends(PASS, number, lambda _: told.append(number))
            for number in (1, 0)
        )
    )
    for ended in callbacks:
        ended()
    assert told == [0, 1] and len(callbacks) == 1


def test_a_pass_over_two_devices_is_one_pass_of_the_optimizer(
    callbacks: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reductions = []
    sync = GradientSync.__new__(GradientSync)
    for name, value in {"_tasks": _Set(), "_summed": set(), "_written": set(), "_position": {}, "number": 0}.items():
        setattr(sync, name, value)
    sync._done_passes, sync._passes = 0, 1
    sync._planned, sync.strategy = Mock(), Mock(repeatable=True)
    monkeypatch.setattr(sync, "_reduce_window", lambda: reductions.append(1))
    _in_two_threads(lambda: sync._on_gradient(0), lambda: sync._on_gradient(1))
    for ended in callbacks:
        ended()
    assert sync._written == {0, 1} and reductions == [1]
