"""How ranks connect a process group of torch: by a store that opens no port, and with an error that names the cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from device_world import TORCH
from hvdrun_job import environment
from ranks import RanksFailedError, run_ranks
from thread_ranks import on_threads
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.engine import runtime
from hvdkit.errors import RankLostError, TransportError
from hvdkit.torch.device import group as module
from hvdkit.torch.device.accelerator import Accelerator
from hvdkit.torch.device.backend import make_backend
from hvdkit.torch.device.group import TorchGroup
from hvdkit.torch.device.store import ExchangeStore

pytestmark = pytest.mark.native("device memory is reduced by hvdkit's own engine")

Connect = Callable[[ExchangeStore, int, int], Any]


def _make_group(transport: Any, timeout_s: float = 60.0) -> TorchGroup:
    where = f"rank {transport.rank}"
    accelerator = Accelerator(torch.device("cpu"))
    return TorchGroup(transport, accelerator, "gloo", where, "a plan", one_host=True, timeout_s=timeout_s)


def _connect(connect: Connect, body: Callable[[Any], Any] = _make_group) -> list[Any]:
    """What three ranks get from a group whose backend connects by `connect`: (store, rank, size) -> backend."""

    def make_backend(_: str, store: ExchangeStore, rank: int, size: int, *__: object, **___: object) -> Any:
        return connect(store, rank, size)

    with mock.patch.object(module, "make_backend", make_backend):
        return on_threads(3, body)


def _listening() -> set[str]:
    """The sockets of this process that listen."""
    own = {os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[9] for row in rows if row[3] == "0A" and any(one.endswith(f"socket:[{row[9]}]") for one in own)}


def test_every_rank_reads_what_any_rank_has_written_and_no_port_is_opened() -> None:
    before, seen = _listening(), [set[str]() for _ in range(3)]

    def connect(store: ExchangeStore, rank: int, size: int) -> Any:
        keys = [f"address/{other}" for other in range(size)]
        assert not store.check([*keys, "never"]) and not store.has_extended_api()
        late = threading.Thread(target=store.set, args=(keys[rank], bytes([rank, 0, 255])))
        late.start()  # a backend writes from threads of its own, too
        store.wait(keys, timedelta(seconds=30))
        assert store.check(keys)
        late.join()
        if rank == 1:
            store.set("name", "Grüße")
        seen[rank] = _listening()
        return [store.get(key) for key in keys], store.get("name")

    groups = _connect(connect)
    expected = [bytes([rank, 0, 255]) for rank in range(3)], "Grüße".encode()
    assert [group.backend.calls for group in groups] == [expected] * 3
    assert seen == [before] * 3


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_connect_is_named_on_all_ranks(failing: int) -> None:
    """The others wait for its address, which never comes."""
    freed = [threading.Event() for _ in range(3)]

    def connect(store: ExchangeStore, rank: int, size: int) -> Any:
        if rank == failing:
            raise OSError("no route to host\nat some line")
        try:
            return store.get(str(failing))
        except RuntimeError as error:
            assert f"rank {failing}" in str(error) and "no route to host" in str(error)
            freed[rank].set()
            raise

    for rank, error in enumerate(_connect(connect)):
        assert isinstance(error, TransportError)
        assert str(error) == (
            f"The ranks could not be connected for a plan by GLOO: on rank {failing} no route to host"
        )
        assert rank == failing or freed[rank].wait(60), "a thread waits for ever"


def test_a_backend_that_does_not_return_does_not_hide_the_rank_that_failed() -> None:
    """Rank 2 connects by itself to the rank that has failed; no error of the store can end that."""
    end = threading.Event()

    def connect(_: ExchangeStore, rank: int, __: int) -> Any:
        if rank == 1:
            raise RuntimeError("out of memory")
        if rank == 2:
            end.wait(120)

    errors = _connect(connect)
    end.set()
    assert all("on rank 1 out of memory" in str(error) for error in errors), errors


def test_a_rank_that_is_lost_while_the_others_connect_ends_their_wait() -> None:
    end = threading.Event()

    def make_group(transport: Any) -> Any:
        if transport.rank == 2:
            transport.lost.set()
            return "lost"
        return _make_group(transport)

    first, second, _ = _connect(lambda store, *_: store.get("2") or end.wait(120), make_group)
    end.set()
    for error in (first, second):
        assert isinstance(error, RankLostError) and "Rank 2 was lost" in str(error)


def test_the_time_to_connect_is_limited() -> None:
    end = threading.Event()
    errors = _connect(lambda _, rank, __: end.wait(120) if rank == 1 else None, lambda one: _make_group(one, 0.3))
    end.set()
    for rank, error in enumerate(errors):
        assert isinstance(error, TransportError)
        state = "not connected" if rank == 1 else "connected"
        assert f"did not connect within 0.3 s: rank {rank} has {state} and waits" in str(error)


def _make_backend(make: Callable[..., Any]) -> Any:
    """Within, rank 1 makes its backend by `make`."""
    return mock.patch.object(module, "make_backend", make if hvd.rank() == 1 else make_backend)


def _step() -> float:
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 0.1), [("weight", weight)])
    weight.sum().backward()
    optimizer.step()
    return float(weight)


def _die_while_the_others_connect() -> None:
    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with joined(**TORCH), _make_backend(die):
        _step()


@pytest.mark.slow
@pytest.mark.ranks
def test_a_rank_that_is_killed_while_it_connects_is_named() -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(3, _die_while_the_others_connect, fresh=True, grace=30)
    for rank in (0, 2):
        assert "RankLostError: Rank 1 " in failed.value.tracebacks.get(rank, ""), failed.value


def _fails_to_connect() -> tuple[str, float]:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such interface")

    with joined(**TORCH), _make_backend(fail), pytest.raises(TransportError) as failed:
        _step()
    runtime.shutdown(idle=False)  # as elastic.run() does then
    with joined(**TORCH):
        return str(failed.value), _step()


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_whose_backend_cannot_connect_are_a_world_again() -> None:
    """Gloo waits in the store for the address of rank 1."""
    for message, weight in run_ranks(3, _fails_to_connect, fresh=True):
        assert "on rank 1 no such interface" in message and weight == 0.9


STUCK = """
import threading, torch, weakref
from thread_ranks import on_threads
from hvdkit.errors import RankLostError, RanksDisagreeError, TransportError
from hvdkit.torch.device import calls
from test_device_store import _make_group

def reduce(group, numbers):
    return group.begin(calls.allreduce(group.backend, [numbers], "sum"))

def lose(transport):
    group = _make_group(transport)
    if transport.rank == 2:
        return group  # it takes no part, and is lost
    work = reduce(group, torch.ones(1000))
    transport.lost.set()
    try:
        group.join(work)
    except RankLostError as error:
        assert "Rank 2 was lost. The operations of GLOO on rank" in str(error), error
        group.close()
        return "lost"

def go_on(transport):
    group, numbers = _make_group(transport), torch.ones(1000)
    group.join(reduce(group, numbers))
    group.close()
    return numbers.sum().item()

def end_wait(transport):
    group = _make_group(transport)
    if transport.rank == 2:
        return group
    ends = RanksDisagreeError("as the engine says")
    def watch():
        raise ends
    work = reduce(group, torch.ones(1000))
    for error in (ends, TransportError("A wait for a plan was ended by RanksDisagreeError")):
        try:
            group.join(work, watch)
        except TransportError as later:
            assert str(error) in str(later) and error is not ends, later
        except RanksDisagreeError as first:
            assert first is error, first
    group.close()
    return "ended"

assert on_threads(3, end_wait)[:2] == ["ended", "ended"]
first, second, _ = on_threads(3, lose)
assert first == second == "lost", (first, second)
assert on_threads(2, go_on) == [2000.0, 2000.0]
print("ends", flush=True)
"""


def test_a_process_with_a_stuck_group_makes_another_and_ends() -> None:
    """Gloo's own destructor would wait for the operation for ever."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
    variables = environment()
    variables["PYTHONPATH"] = os.pathsep.join([*paths, variables["PYTHONPATH"]])
    done = subprocess.run([sys.executable, "-c", STUCK], env=variables, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr
