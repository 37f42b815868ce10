"""How many files and Python calls one allreduce passes: who reads it has to follow all of them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch_world import joined

import hvdkit
import hvdkit.torch as hvd
from hvdkit.engine.named.negotiator import Negotiator
from hvdkit.engine.named.step_runner import StepRunner
from hvdkit.transport.polling import Backoff

pytestmark = [pytest.mark.ranks, pytest.mark.native("Horovod's core is not Python")]

_ROOT = str(Path(hvdkit.__file__).parent)
_EXECUTION = "/engine/named/execution.py"
_REPEATS = 200
_WATCHES = {one.__code__ for one in (Backoff.pause, Negotiator.check, StepRunner.check)}


def _count() -> tuple[list[str], int]:
    """The files of hvdkit's that the calling thread passes, and its Python calls, in the shortest of many allreduces.

    A rank that waits for the others polls; the shortest one is that for which the others have been there before. Those
    that the engine's own thread has executed do not count, and neither do looks after the other ranks: they are due by
    the clock, and take a rank through other files, in each of the allreduces where the machine is busy.
    """
    tensor, best = torch.ones(300_000), ([""], sys.maxsize)
    with joined("shared_memory"):
        for repeat in range(_REPEATS):
            codes: list[str] = []
            pauses: list[FrameType] = []

            def note(
                frame: FrameType, event: str, _: Any, codes: list[str] = codes, pauses: list[FrameType] = pauses
            ) -> None:
                if event == "call":
                    if not pauses and frame.f_code not in _WATCHES:
                        codes.append(frame.f_code.co_filename)
                    if frame.f_code in _WATCHES:
                        pauses.append(frame)
                elif event == "return" and pauses and pauses[-1] is frame:
                    pauses.pop()

            sys.setprofile(note)
            try:
                hvd.allreduce(tensor, name="measured", op=hvd.Sum)
            finally:
                sys.setprofile(None)
            files = sorted({code.removeprefix(_ROOT) for code in codes if code.startswith(_ROOT)})
            if repeat > 20 and _EXECUTION in files and len(codes) < best[1]:
                best = files, len(codes)
    return best


def test_one_allreduce_passes_few_files_and_calls() -> None:
    for files, calls in run_ranks(2, _count):
        assert calls <= 130, calls  # about 100; a rank that is early polls
        assert len(files) <= 15, files
