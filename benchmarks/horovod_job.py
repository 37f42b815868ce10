"""Horovod in processes of its own, which stand still while others have their turn.

In hvdkit's processes two engines would share one MPI, and Horovod's thread, which looks for work a thousand times a
second, would take time from everyone else.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import hvdkit.torch as hvd
from hvdkit.launch.agent.session_reaper import die_with_parent
from hvdkit.tools.bench.plan import CPU
from hvdkit.tools.bench.worker import joined

_START_S = 60.0
_PAUSE = re.compile(rb"hvdrun: rank \d+ on \S+ (was stopped by SIGSTOP|continues)")


def why_not(device: str = CPU) -> str:
    """What keeps Horovod out of a comparison on this device here; "" if nothing does."""
    if importlib.util.find_spec("horovod") is None:
        return "Horovod is not installed, so it is not compared."
    if hvd.cross_size() > 1:
        return "Horovod's ranks are started on one host only, so it is not compared."
    if device != CPU:
        import horovod.torch as horovod

        if not horovod.nccl_built():
            return "Horovod is built without NCCL, so it is not compared: hvdkit build-horovod --gpu-operations nccl."
    return ""


@contextlib.contextmanager
def joined_with_horovod(threads: int, device: str = CPU) -> Iterator[tuple[HorovodJob | None, list[str]]]:
    """hvdkit, torch.distributed and Horovod's ranks, started and ended; yields the latter, or why there are none."""
    with joined(threads, device=device):
        missing = why_not(device)
        job = None if missing else HorovodJob(threads, device)
        yield job, [missing] if missing else []
        if job is not None:
            job.close()


class HorovodJob:
    """One rank of Horovod beside each of hvdkit's; opened, called and closed by all of these together.

    A rank of Horovod runs only during a call. threads: that it computes with. device: on which; of GPUs, those that
    hvdkit's ranks use.
    """

    def __init__(self, threads: int = 1, device: str = CPU) -> None:
        directory = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else "")
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(Path(directory, str(hvd.rank()))))
            listener.listen()
            listener.settimeout(_START_S)
            cores = set().union(*hvd.allgather_object(os.sched_getaffinity(0)))
            gpus = list(dict.fromkeys(hvd.allgather_object(_name_gpu()))) if device != CPU else []
            if hvd.rank() == 0:
                self._process = _start(directory, cores, gpus)
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                raise RuntimeError(f"No rank of Horovod has come up within {_START_S:g} s; see its output.") from None
        self._rank: Connection[Any, Any] = Connection(accepted.detach())
        self._pid: int = self._rank.recv()
        hvd.barrier()
        if hvd.rank() == 0:
            shutil.rmtree(directory)
        self.call("torch:set_num_threads", threads)

    def call(self, function: str, *arguments: Any) -> Any:
        """What "module:function" returns on Horovod's rank beside this one, which otherwise sleeps.

        Raises RuntimeError for what went wrong there.
        """
        os.kill(self._pid, signal.SIGCONT)
        self._rank.send((function, arguments))
        try:
            result, failure = self._rank.recv()
        except EOFError:
            raise RuntimeError(f"Horovod's rank {hvd.rank()} has ended in {function}; see its output.") from None
        os.kill(self._pid, signal.SIGSTOP)
        if failure:
            raise RuntimeError(failure)
        return result

    def close(self) -> None:
        """End Horovod's ranks."""
        os.kill(self._pid, signal.SIGCONT)
        self._rank.send(None)
        self._rank.close()
        if self._process is not None:
            self._process.wait()


def _name_gpu() -> str:
    """This rank's GPU, as CUDA_VISIBLE_DEVICES may name it."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def _start(directory: str, cores: set[int], gpus: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start Horovod's ranks on the cores and GPUs that hvdkit's ranks have among them: each has some of its own."""
    end_with_this = die_with_parent(os.getpid(), signal.SIGTERM)

    def prepare() -> None:
        end_with_this()
        os.sched_setaffinity(0, cores)

    hvdrun = [sys.executable, "-m", "hvdkit.launch", "-np", str(hvd.size())]
    hvdrun += ["--share-gpus"] if gpus and len(gpus) < hvd.size() else []
    process = subprocess.Popen(
        [*hvdrun, sys.executable, "-m", "benchmarks.horovod_rank", directory],
        env={**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})},
        stderr=subprocess.PIPE,
        preexec_fn=prepare,
    )
    threading.Thread(target=_pass_on, args=(process.stderr,), daemon=True).start()
    return process


def _pass_on(lines: Iterable[bytes]) -> None:
    """Write what hvdrun says to stderr, but for the ranks standing still, which is meant to be."""
    for line in lines:
        if not _PAUSE.search(line):
            sys.stderr.buffer.write(line)
            sys.stderr.flush()
