"""hvd.AsynchronousOptimizer: staleness 0 is synchronous, all end alike, and no values get too old."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch_world import Case, Weights, assert_alike, joined, weights

import hvdkit.torch as hvd
from hvdkit.errors import RankLostError
from hvdkit.strategies import server
from hvdkit.strategies.asynchronous import ParameterShard, slices
from hvdkit.strategies.server import LOST, PUSH, STOP, ServerClient
from hvdkit.strategies.staleness import StalenessClock
from hvdkit.transport.buffer import Buffer
from hvdkit.transport.request import Request

SGD = Case("SGD", {"lr": 0.05})


def test_a_rank_waits_for_those_whose_values_get_too_old() -> None:
    clocks = StalenessClock(3, 2, scaled=False)
    for _ in range(2):
        clocks.push(0)
        assert clocks.pop_released({0}) == [0]
    clocks.push(0)
    assert clocks.pop_released({0}) == []
    clocks.push(1)
    assert clocks.pop_released({0, 1}) == [1]  # rank 2 is still in its first step
    clocks.finish(2)
    assert clocks.pop_released({0, 2}) == [0]
    clocks.finish(1)
    assert clocks.pop_released({1, 2}) == []
    clocks.finish(0)
    assert clocks.pop_released({0, 1, 2}) == [0, 1, 2]
    clocks.push(1)
    assert clocks.pop_released({1}) == [1]


def test_a_rank_of_a_third_of_the_speed_holds_nobody_back() -> None:
    clocks = StalenessClock(3, 3, scaled=False)
    for turn in range(1, 60):
        ranks = [0, 1] if turn % 3 else [0, 1, 2]
        for rank in ranks:
            clocks.push(rank)
            assert clocks.pop_released({rank}) == [rank]


def test_ranks_that_all_wait_go_on() -> None:
    clocks = StalenessClock(2, 0, scaled=False)
    clocks.push(0)
    assert clocks.pop_released({0}) == []
    clocks.push(1)
    assert clocks.pop_released({0, 1}) == [0, 1]


def test_changes_are_scaled_by_whole_rounds_that_they_missed() -> None:
    clocks = StalenessClock(3, 10, scaled=True)
    clocks.pop_released({0, 1, 2})
    factors = []
    for rank in (0, 1, 0, 1, 0, 1, 2):
        factors.append(clocks.push(rank))
        clocks.pop_released({rank})
    assert factors == [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1 / 3]


def test_servers_divide_all_elements() -> None:
    assert slices(10, 3) == [(0, 3), (3, 6), (6, 10)]


class _Never(Request):
    def done(self) -> bool:
        return False


class _Done(Request):
    def __init__(self, out: Buffer) -> None:
        self.out = out

    def done(self) -> bool:
        return True


class _Messages:
    """A transport whose ranks have sent one request each, or none; keeps what they are sent."""

    checks_ranks = True

    def __init__(self, rank: int, requests: dict[int, float]) -> None:
        self.rank, self.size, self._requests = rank, 4, requests
        self.told: dict[int, float] = {}
        self.idle: bool | None = None

    def ireceive(self, buffer: Buffer, peer: int, tag: int) -> Request:
        if peer not in self._requests:
            return _Never()
        buffer.array[0] = self._requests.pop(peer)
        return _Done(buffer)

    def isend(self, buffer: Buffer, peer: int, tag: int) -> Request:
        self.told[peer] = float(buffer.array[0])
        return _Done(buffer)

    def send(self, buffer: Buffer, peer: int, tag: int) -> None:
        raise RankLostError("The server has ended.")

    def check(self) -> None:
        pass

    def close(self, *, idle: bool = True) -> None:
        self.idle = idle


def test_a_server_that_ends_tells_also_ranks_that_compute() -> None:
    transport: Any = _Messages(0, {1: STOP, 2: PUSH})
    link = ServerClient(
        transport, 0, 2, "float32", ParameterShard(np.zeros(2, np.float32), StalenessClock(4, 0, scaled=False))
    )
    link.ask(PUSH)
    with pytest.raises(RankLostError, match="have shut hvdkit down"):
        link.answer()
        link.ask(PUSH)
        link.answer()
    link.close()
    assert transport.told.get(3) == LOST and 1 not in transport.told and transport.idle is False


class _AskedOften(_Done):
    """Done when it has been asked about a hundred times, which a server does every millisecond."""

    def __init__(self, out: Buffer) -> None:
        super().__init__(out)
        self._left = 100

    def done(self) -> bool:
        self._left -= 1
        return self._left < 0


class _OneLater(_Messages):
    """Rank 3 shuts down later than the others; or it is lost."""

    def __init__(self, *, lost: bool) -> None:
        super().__init__(0, {1: STOP, 2: STOP})
        self._lost = lost

    def ireceive(self, buffer: Buffer, peer: int, tag: int) -> Request:
        if peer != 3 or self._lost:
            return super().ireceive(buffer, peer, tag)
        buffer.array[0] = STOP
        return _AskedOften(buffer)

    def check(self) -> None:
        if self._lost:
            raise RankLostError("Rank 3 has ended.")


@pytest.mark.parametrize("lost", [False, True])
def test_a_server_waits_for_ranks_that_shut_down_later_but_not_for_lost_ones(
    lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_END_S", 0.02)
    transport: Any = _OneLater(lost=lost)
    clocks = StalenessClock(4, 0, scaled=False)
    ServerClient(transport, 0, 2, "float32", ParameterShard(np.zeros(2, np.float32), clocks)).close()
    assert transport.idle is not lost


def test_a_rank_whose_request_fails_does_not_wait_for_others_when_it_closes() -> None:
    transport: Any = _Messages(1, {})
    link = ServerClient(
        transport, 0, 2, "float32", ParameterShard(np.zeros(2, np.float32), StalenessClock(4, 0, scaled=False))
    )
    with pytest.raises(RankLostError):
        link.ask(PUSH)
    link.close()
    assert transport.idle is False


def _train(staleness: int, servers: int, steps: list[int], network: str) -> tuple[Weights, Weights, float]:
    with joined(network):
        model, plain = SGD.make()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(hvd.rank() if staleness else 0)  # all go on from rank 0's
        optimizer = hvd.AsynchronousOptimizer(plain, model.named_parameters(), staleness, servers)
        loss = 0.0
        for step in range(steps[hvd.rank()]):
            inputs, targets = SGD.batch(step, 0, hvd.size())
            mine = slice(hvd.rank() * SGD.rows, (hvd.rank() + 1) * SGD.rows)
            optimizer.zero_grad()
            error = torch.nn.functional.mse_loss(model(inputs[mine]), targets[mine])
            error.backward()
            optimizer.step()
            loss = float(error.detach())
        optimizer.finish()
        before = weights(model)
        optimizer.finish()
        return before, weights(model), loss


@pytest.mark.native("Horovod's core has no messages")
@pytest.mark.ranks
@pytest.mark.parametrize("network", ["auto", pytest.param("mpi", marks=pytest.mark.slow)])
@pytest.mark.parametrize("steps", [[20, 13, 25], [0, 13, 2]], ids=["uneven", "none_on_a_server"])
def test_ranks_with_uneven_steps_end_with_equal_parameters(network: str, steps: list[int]) -> None:
    results = run_ranks(3, _train, 4, 2, steps, network)
    assert_alike([end for before, after, _ in results for end in (before, after)], results[0][1], 1e-12)
    assert all(np.isfinite(loss) for _, _, loss in results)


@pytest.mark.native("Horovod's core has no messages")
@pytest.mark.ranks
def test_staleness_0_is_synchronous() -> None:
    case, size = SGD, 3
    model, optimizer = case.make()
    for step in range(20):
        inputs, targets = case.batch(step, 0, size)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    results = run_ranks(size, _train, 0, 1, [20] * 3, "auto")
    assert_alike([after for _, after, _ in results], weights(model), 1e-12)


def _refusals() -> list[str]:
    messages = []
    with joined():
        arguments: list[dict[str, Any]] = [
            {"staleness": -1},
            {"servers": 0},
            {"servers": hvd.size() + 1},
            {"staleness": 1.5},
            {"op": hvd.Sum, "compression": hvd.Compression.fp16},
        ]
        for each in arguments:
            _, plain = SGD.make()
            with pytest.raises((ValueError, TypeError)) as caught:
                hvd.AsynchronousOptimizer(plain, **each)
            messages.append(str(caught.value))
        model, plain = SGD.make()
        optimizer = hvd.AsynchronousOptimizer(plain, model.named_parameters())
        with pytest.raises(ValueError, match="finish"):
            hvd.join()  # before the first step too
        model(SGD.batch(0, 0, 1)[0]).sum().backward()
        optimizer.step()
        with pytest.raises(ValueError, match="finish") as caught:
            hvd.join()
        messages.append(str(caught.value))
        optimizer.finish()
    return messages


@pytest.mark.native("Horovod's core has no messages")
@pytest.mark.ranks
def test_what_cannot_be_used_is_refused() -> None:
    for messages in run_ranks(2, _refusals):
        assert "staleness is -1" in messages[0] and "servers is 0" in messages[1]
        assert "at most servers=2" in messages[2] and "integer" in messages[3]
        assert "no argument op, compression" in messages[4] and "hvd.LocalSGD" in messages[4]
        assert "hvd.join() was called on rank" in messages[5]


_VICTIM = """
import os, sys, time, torch
import hvdkit.torch as hvd
hvd.init()
model = torch.nn.Linear(4, 4)
optimizer = hvd.AsynchronousOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), staleness=4)
for step in range(100000):
    optimizer.zero_grad()
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    if step == 20 and hvd.rank() == int(sys.argv[1]):
        if sys.argv[2] == "kill":
            os.kill(os.getpid(), 9)
        sys.exit(0)
"""


@pytest.mark.native("Horovod's core has no messages")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "how", "network"), [(0, "kill", "auto"), (2, "kill", "auto"), (2, "end", "auto"), (0, "kill", "gloo")]
)
def test_a_lost_rank_ends_the_job(tmp_path: Path, rank: int, how: str, network: str) -> None:
    script = tmp_path / "victim.py"
    script.write_text(_VICTIM)
    command = [sys.executable, "-m", "hvdkit.launch", "-np", "3", "--transport", network]
    command += [sys.executable, str(script), str(rank), how]
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ["PYTHONPATH"]])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, check=False)
    assert done.returncode
    # hvdrun may end the other ranks before they say that one is lost.
    if how == "kill":
        assert f"rank {rank} on " in done.stderr and "was killed by SIGKILL" in done.stderr
    else:  # whether the server hears first that it left or that it stopped is left to chance
        said = done.stdout + done.stderr
        assert "shut hvdkit down" in said or "without optimizer.finish()" in said
