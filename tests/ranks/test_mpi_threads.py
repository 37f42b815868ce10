"""MPI started by the script, with fewer threads than hvdkit would ask for."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.engine.groups import global_process_set
from hvdkit.errors import TransportError

SETS = 40


def _start_mpi(level: str) -> str:
    import mpi4py

    mpi4py.rc.thread_level = level
    from mpi4py import MPI

    return {MPI.THREAD_SINGLE: "single", MPI.THREAD_SERIALIZED: "serialized"}.get(MPI.Query_thread(), "other")


def _everything(level: str, transport: str) -> str:
    """All that uses several threads at the same time: named operations, gradients, sets, and waits among them."""
    granted = _start_mpi(level)
    hvd.init(transport=transport, progress="thread", small_bytes=0)
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 5))
    hvd.broadcast_parameters(model.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for turn in range(20):
                made = hvd.allreduce(torch.ones(1000 * turn + 1), name=f"{thread}.{turn}", op=hvd.Sum)
                assert (made == size).all()
                assert hvd.allgather(torch.tensor([rank]), name=f"{thread}.{turn}").tolist() == list(range(size))
        except BaseException as error:
            failures.append(error)

    pair = hvd.add_process_set([0, 1])
    for _ in range(2):
        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(2)]
        for one in threads:
            one.start()
        for step in range(5 + rank):
            optimizer.zero_grad()
            model(torch.full((3, 20), float(step))).sum().backward()
            optimizer.step()
            if pair.included() and step < 5:
                assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair) == 2
            if step == 4:
                for one in threads:
                    one.join()
        hvd.join()
    assert not failures, failures
    time.sleep(0.1)
    hvd.shutdown()
    return granted


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["mpi", "shared_memory"])
def test_calls_take_turns_where_mpi_wants_that(transport: str) -> None:
    assert run_ranks(3, _everything, "serialized", transport, fresh=True, timeout=60) == ["serialized"] * 3


def _sets_beside_operations(transport: str) -> int:
    """One thread sums, and the main one makes process sets, plans on them, and removes them."""
    assert _start_mpi("serialized") == "serialized"
    done, failures = threading.Event(), []
    with joined(transport=transport, small_bytes=0):
        size = hvd.size()

        def work() -> None:
            try:
                turn = 0
                while hvd.allreduce(torch.tensor(float(done.is_set())), name=f"ends.{turn}", op=hvd.Min) < 1:
                    assert (hvd.allreduce(torch.ones(1000), name=f"sum.{turn}", op=hvd.Sum) == size).all()
                    turn += 1
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        for turn in range(SETS):
            some = hvd.add_process_set([[0, 1], [0, 2], [1, 2]][turn % 3])
            if some.included():
                weight = torch.nn.Parameter(torch.ones(3))
                optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 0.1), process_set=some)
                (weight * (1 + some.rank())).sum().backward()
                assert weight.grad is not None and weight.grad.tolist() == [1.5] * 3
                del optimizer
            assert hvd.remove_process_set(some)
        done.set()
        thread.join()
    assert not failures, failures
    return SETS


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["mpi", "hierarchical_pairs"])
def test_process_sets_are_made_beside_operations_where_calls_take_turns(transport: str) -> None:
    assert run_ranks(3, _sets_beside_operations, transport, fresh=True, timeout=60) == [SETS] * 3


class _SeesUse:
    """A mailbox that sees whether a thread sends while another one receives, for which it gives it time."""

    def __init__(self, mail: Any) -> None:
        self._mail, self._receiving = mail, False
        self.began, self._sent = threading.Event(), threading.Event()
        self.overlaps = 0

    def receive(self) -> Any:
        """See Mailbox.receive."""
        self._receiving = True
        self.began.set()
        self._sent.wait(0.3)
        messages = self._mail.receive()
        self._receiving = False
        return messages

    def send(self, rank: int, message: bytes) -> None:
        """See Mailbox.send."""
        self.overlaps += self._receiving
        self._mail.send(rank, message)
        self._sent.set()

    def close(self, *, idle: bool) -> None:
        """See Mailbox.close."""
        self._mail.close(idle=idle)


def _leaves_while_messages_are_read() -> int:
    with joined("mpi"):
        engine: Any = global_process_set.group("the test").engine
        mail = engine._negotiator._mail = _SeesUse(engine._negotiator._mail)
        thread = threading.Thread(target=engine.drive)
        thread.start()
        assert mail.began.wait(10)
        engine.leave("has left")
        thread.join()
    return mail.overlaps


@pytest.mark.ranks
@pytest.mark.native("Horovod has no mailbox")
def test_who_leaves_uses_the_mailbox_alone() -> None:
    assert run_ranks(2, _leaves_while_messages_are_read) == [0, 0]


def _refused() -> Any:
    assert _start_mpi("single") == "single"
    with pytest.raises(TransportError, match=r"MPI_THREAD_SINGLE.*MPI_THREAD_MULTIPLE") as caught:
        hvd.init()
    return str(caught.value)


@pytest.mark.ranks
def test_one_thread_is_too_few_and_the_error_says_what_to_do() -> None:
    for message in run_ranks(2, _refused, fresh=True):
        assert "hvd.init() first" in message
