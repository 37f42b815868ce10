"""Horovod's ranks as separate processes, which are stopped (SIGSTOP) while other peers are measured.

In hvdkit's processes two engines would share one MPI, and Horovod's thread, which polls for operations a thousand times
a second, would take time from all other threads.
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
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import hvdkit.torch as hvd
from hvdkit.errors import BenchError
from hvdkit.launch.agent.session_reaper import die_with_parent
from hvdkit.tools.bench.report import CPU

_START_S = 60.0
_LOOK_S = 0.2
_PAUSE = re.compile(rb"hvdrun: rank \d+ on \S+ (was stopped by SIGSTOP|continues)")


def why_not(device: str = CPU) -> str:
    """Return the reason for which Horovod cannot be compared on this device here; "" if it can."""
    build = f"hvdkit build-horovod{' --gpu-operations nccl' * (device != CPU)}"
    if importlib.util.find_spec("horovod") is None:
        return f"Horovod is not installed, so it is not compared: {build}."
    if hvd.cross_size() > 1:
        return "Horovod's ranks are started on one host only, so it is not compared."
    if device != CPU:
        try:
            import horovod.torch as horovod
        except ImportError as error:
            return f"Horovod is installed, but cannot be loaded ({error}), so it is not compared: {build}."
        if not horovod.nccl_built():
            return f"Horovod is built without NCCL, so it is not compared: {build}."
    return ""


@contextlib.contextmanager
def beside_horovod(threads: int, device: str = CPU) -> Iterator[tuple[HorovodJob | None, list[str]]]:
    """Start Horovod's ranks beside those of hvdkit; yields their job, or the reason for its absence. Collective.

    threads, device: see HorovodJob.
    """
    missing, job = why_not(device), None
    if not missing:
        try:
            job = HorovodJob(threads, device)
        except BenchError as error:
            missing = str(error)
    yield job, [missing] if missing else []
    if job is not None:
        job.close()


class HorovodJob:
    """One rank of Horovod beside each of hvdkit's; opened, called and closed by all of hvdkit's ranks together.

    A rank of Horovod runs only during a call. threads: number of its compute threads. device: "cpu" or "cuda"; it uses
    the GPUs that hvdkit's ranks use. Raises BenchError on all ranks if one of Horovod's does not start.
    """

    def __init__(self, threads: int = 1, device: str = CPU) -> None:
        directory = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else "")
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(Path(directory, str(hvd.rank()))))
            listener.listen()
            listener.settimeout(_LOOK_S)
            cores = set().union(*hvd.allgather_object(os.sched_getaffinity(0)))
            gpus = list(dict.fromkeys(hvd.allgather_object(_name_gpu()))) if device != CPU else []
            if hvd.rank() == 0:
                self._process = _start(directory, cores, gpus)
            accepted = self._accept(listener)
        missing = hvd.allgather_object(accepted is None).count(True)
        if hvd.rank() == 0:
            shutil.rmtree(directory)
            ended = None if self._process is None else self._process.poll()
            if missing and self._process is not None:
                self._process.terminate()
                self._process.wait()
        if missing:
            code = hvd.broadcast_object(ended if hvd.rank() == 0 else None)
            when = f"within {_START_S:g} s" if code is None else f"before their job ended with exit code {code}"
            raise BenchError(
                f"Horovod is not compared: {missing} of its {hvd.size()} ranks did not come up {when}. Its output is "
                "above."
            )
        assert accepted is not None
        self._rank: Connection[Any, Any] = Connection(accepted.detach())
        self._pid: int = self._rank.recv()
        self.call("torch:set_num_threads", threads)

    def _accept(self, listener: socket.socket) -> socket.socket | None:
        """Wait for Horovod's rank beside this one; None after its job has ended or after _START_S. Collective."""
        accepted, deadline = None, time.monotonic() + _START_S
        while True:
            if accepted is None:
                with contextlib.suppress(TimeoutError):
                    accepted = listener.accept()[0]
            over = self._process is not None and (self._process.poll() is not None or time.monotonic() > deadline)
            states = hvd.allgather_object((accepted is not None, over))
            if all(here for here, _ in states) or any(over for _, over in states):
                return accepted

    def call(self, function: str, *arguments: Any) -> Any:
        """Call "module:function" on Horovod's rank beside this one, which otherwise is stopped; collective.

        Raises RuntimeError with the error text of the call.
        """
        os.kill(self._pid, signal.SIGCONT)
        self._rank.send((function, arguments))
        ended = False
        try:
            result, failure = self._rank.recv()
        except EOFError:
            ended = True
            result, failure = None, f"Horovod's rank {hvd.rank()} has ended in {function}; see its output."
        hvd.barrier()  # a stopped rank forwards nothing (NCCL's proxy), and others may still wait for its data
        if not ended:
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
    """Name this rank's GPU in the form of CUDA_VISIBLE_DEVICES."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def _start(directory: str, cores: set[int], gpus: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start Horovod's ranks on the cores and GPUs of all hvdkit's ranks; hvdrun divides these among them."""
    end_with_this = die_with_parent(os.getpid(), signal.SIGTERM)

    def prepare() -> None:
        end_with_this()
        os.sched_setaffinity(0, cores)

    hvdrun = ["env", f"CUDA_VISIBLE_DEVICES={','.join(gpus)}"] if gpus else []
    hvdrun += [sys.executable, "-m", "hvdkit.launch", "-np", str(hvd.size())]
    hvdrun += ["--share-gpus"] if gpus and len(gpus) < hvd.size() else []
    process = subprocess.Popen(
        [*hvdrun, sys.executable, "-m", "hvdkit.tools.bench.horovod_rank", directory],
        stderr=subprocess.PIPE,
        preexec_fn=prepare,
    )
    threading.Thread(target=_pass_on, args=(process.stderr,), daemon=True).start()
    return process


def _pass_on(lines: Iterable[bytes]) -> None:
    """Copy hvdrun's lines to stderr, except those about stopped ranks, which are stopped on purpose."""
    for line in lines:
        if not _PAUSE.search(line):
            sys.stderr.buffer.write(line)
            sys.stderr.flush()
