"""How ranks without MPI find each other: what launchers say, entries that are out of date, and who has not come."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hvdrun_job import ROOT
from key_value_server import serve_values

from hvdkit.errors import RankLostError, TransportError, WorldError
from hvdkit.transport.addresses import address_of, address_towards, is_loopback, list_addresses, read_interface
from hvdkit.transport.gloo import rendezvous
from hvdkit.transport.gloo.connect import connect_all, listen, wait_for_listener
from hvdkit.transport.gloo.library import host_store
from hvdkit.transport.gloo.rendezvous import (
    HttpRendezvousStore,
    RankInfo,
    Rendezvous,
    RendezvousStore,
    StoreLocation,
    TcpRendezvousStore,
    choose_address,
    find_peers,
    find_rendezvous_store,
)
from hvdkit.transport.gloo.transport import open_rendezvous_store
from hvdkit.transport.polling import watch_waits

TORCHRUN = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
HOROVODRUN = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711"}


class LocalRendezvousStore:
    """A RendezvousStore of ranks in one process."""

    private = True

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)


@pytest.mark.parametrize(
    "variables, launcher, place",
    [
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, "torchrun", StoreLocation("store", "node1", 29500)),
        (
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"},
            "torchrun",
            StoreLocation("store", "node1", 29500, True),
        ),
        (TORCHRUN, "slurm", StoreLocation("store", "node1", 29500, True)),
        (HOROVODRUN, "horovodrun", StoreLocation("http", "10.0.0.1", 4711)),
        ({**HOROVODRUN, **TORCHRUN}, "horovodrun", StoreLocation("http", "10.0.0.1", 4711)),
        ({"MASTER_ADDR": "node1"}, "openmpi", StoreLocation("mpi")),
    ],
)
def test_the_launcher_says_where_the_ranks_meet(variables: dict[str, str], launcher: str, place: StoreLocation) -> None:
    assert find_rendezvous_store(variables, launcher) == place


@pytest.mark.parametrize(
    "variables, launcher, named",
    [
        ({}, "torchrun", "MASTER_ADDR and MASTER_PORT"),
        ({**TORCHRUN, "MASTER_PORT": "often"}, "torchrun", "'node1' and 'often'"),
        ({**HOROVODRUN, "HOROVOD_GLOO_RENDEZVOUS_PORT": "0"}, "horovodrun", "'10.0.0.1' and '0'"),
        ({}, "horovodrun", "HOROVOD_GLOO_RENDEZVOUS_ADDR"),
    ],
)
def test_a_launcher_that_does_not_say_is_an_error(variables: dict[str, str], launcher: str, named: str) -> None:
    with pytest.raises(WorldError, match=f"{named}.*hvdrun"):
        find_rendezvous_store(variables, launcher)


def test_torchs_interface_comes_before_horovods() -> None:
    assert read_interface({}) == ""
    assert read_interface({"HOROVOD_GLOO_IFACE": "ib0"}) == "ib0"
    assert read_interface({"GLOO_SOCKET_IFNAME": "eth1,eth2", "HOROVOD_GLOO_IFACE": "ib0"}) == "eth1"


def test_addresses_of_this_host() -> None:
    assert address_of("lo") == "127.0.0.1"
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no.such.host.invalid") == "127.0.0.1"
    found = list_addresses("127.0.0.1")
    assert found[-1] == "127.0.0.1" and len(set(found)) == len(found)
    assert sorted(found, key=is_loopback) == found
    assert list_addresses("10.1.2.3")[0] == "10.1.2.3"
    with pytest.raises(TransportError, match=r"'nowhere'.*lo \(127.0.0.1\).*GLOO_SOCKET_IFNAME"):
        address_of("nowhere")


def attendance(machine: str, address: str, reached: str) -> RankInfo:
    return RankInfo(machine, machine, address, reached)


def test_ranks_of_one_host_use_the_loopback_and_others_what_rank_0_was_reached_by() -> None:
    here = [attendance("a", "", ""), attendance("a", "10.0.0.1", "10.0.0.1")]
    assert [choose_address(here, [0, 0], rank) for rank in range(2)] == ["127.0.0.1"] * 2
    apart = [*here, attendance("b", "10.0.0.2", "192.168.0.1")]
    assert [choose_address(apart, [0, 0, 1], rank) for rank in range(3)] == ["192.168.0.1", "10.0.0.1", "10.0.0.2"]
    named = [attendance("a", "172.16.0.1", ""), *apart[1:]]
    assert choose_address(named, [0, 0, 1], 0) == "172.16.0.1"
    with pytest.raises(
        TransportError, match=r"Rank 1 on a has published the address 127.0.0.1 only.*GLOO_SOCKET_IFNAME"
    ):
        choose_address([here[0], attendance("a", "127.0.0.1", "127.0.0.1"), apart[2]], [0, 0, 1], 1)


def gather(
    launcher_store: RendezvousStore, ranks: list[int], size: int, seconds: float = 20.0, secret: str = ""
) -> list[Any]:
    """What find_peers() returns or raises on these ranks, which are threads here."""
    answers: list[Any] = [None] * len(ranks)

    def run(at: int, rank: int) -> None:
        if rank == 0:
            time.sleep(0.3)  # the others look for it meanwhile
        try:
            answers[at] = find_peers(
                launcher_store,
                rank,
                size,
                name="test",
                host=f"host of {rank}",
                interface="",
                towards="127.0.0.1",
                secret=secret,
                deadline=time.monotonic() + seconds,
            )
        except TransportError as error:
            answers[at] = error

    threads = [threading.Thread(target=run, args=one) for one in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return answers


def expect_rendezvous(answers: list[Any]) -> None:
    for one in answers:
        assert isinstance(one, Rendezvous), one
        assert one.hosts == tuple(f"host of {rank}" for rank in range(len(answers)))
        assert (one.nodes, one.address) == ((0,) * len(answers), "127.0.0.1")
        assert len(one.secret) == 32 and one.secret == answers[0].secret


def test_ranks_meet_on_any_board() -> None:
    there = gather(LocalRendezvousStore(), [0, 1, 2], 3)
    expect_rendezvous(there)
    assert not there[0].store.check(["secret"])  # anybody could ask the store for it
    with serve_values() as port:
        expect_rendezvous(gather(HttpRendezvousStore("127.0.0.1", port), [0, 1, 2], 3))
    expect_rendezvous(gather(TcpRendezvousStore(host_store()), [0, 1, 2], 3))


def test_a_secret_that_the_ranks_have_already_is_in_no_store() -> None:
    outer = host_store()
    there = gather(TcpRendezvousStore(outer), [0, 1, 2], 3, secret="5e" * 32)
    expect_rendezvous(there)
    assert there[0].secret == bytes([0x5E] * 32) and not there[0].store.check(["secret"])
    assert b"5e5e" not in outer.get("hvdkit/test")


@pytest.mark.parametrize("answering", [False, True])
def test_word_of_ranks_that_are_no_more_is_not_believed(answering: bool) -> None:
    launcher_store, store = LocalRendezvousStore(), host_store()
    store.set("mark", "of an older job")
    port = store.port
    if not answering:
        del store
    launcher_store.put(
        "test", json.dumps({"addresses": ["127.0.0.1"], "port": port, "mark": "gone", "secret": ""}).encode()
    )
    expect_rendezvous(gather(launcher_store, [0, 1], 2))


def test_ranks_that_do_not_come_are_named() -> None:
    for error in gather(LocalRendezvousStore(), [0, 2], 4, seconds=2.0):
        assert "2 of 4 ranks have not arrived: 1, 3" in str(error)
    (error,) = gather(LocalRendezvousStore(), [1], 2, seconds=1.0)
    assert "Rank 1 cannot reach rank 0: rank 0 has not published the address of its store" in str(error)


def test_a_rendezvous_server_that_is_gone_is_told() -> None:
    with serve_values() as port:
        launcher_store = HttpRendezvousStore("127.0.0.1", port)
        assert launcher_store.get("nothing") is None
    with pytest.raises(TransportError, match=rf"127.0.0.1:{port} cannot be reached"):
        launcher_store.get("nothing")


def test_hosts_are_told_apart_by_name_and_boot() -> None:
    name, _, boot = rendezvous._machine().partition(" ")
    assert name and boot


def looks_for_a_store(deadline: float) -> None:
    find_alone(1, deadline)


def collects_the_ranks(deadline: float) -> None:
    find_alone(0, deadline)


def find_alone(rank: int, deadline: float) -> None:
    options = {"name": "test", "host": "here", "interface": "", "towards": "127.0.0.1"}
    find_peers(LocalRendezvousStore(), rank, 2, deadline=deadline, **options)


def is_connected_to(deadline: float) -> None:
    with listen("127.0.0.1", 2) as listener:
        connect_all(listener, 0, [("127.0.0.1", 1)] * 2, b"secret", deadline)


def connects(deadline: float) -> None:
    with listen("127.0.0.1", 2) as listener:
        connect_all(listener, 1, [("127.0.0.1", 1)] * 2, b"secret", deadline)


def connects_to_a_stopped_rank(deadline: float) -> None:
    with listen("127.0.0.1", 2) as stopped, listen("127.0.0.1", 2) as listener:
        places = [("127.0.0.1", each.getsockname()[1]) for each in (stopped, listener)]
        connect_all(listener, 1, places, b"secret", deadline)


def joins_a_store(deadline: float) -> None:
    wait_for_listener("127.0.0.1", 1, deadline)


@pytest.mark.parametrize(
    "waits",
    [
        looks_for_a_store,
        collects_the_ranks,
        is_connected_to,
        connects,
        connects_to_a_stopped_rank,
        joins_a_store,
    ],
)
def test_whoever_watches_the_waits_of_a_rank_can_end_its_connecting(waits: Callable[[float], None]) -> None:
    looks = iter([None, RankLostError("rank 1 is lost")])

    def check_wait() -> None:
        if (error := next(looks)) is not None:
            raise error

    before = watch_waits(check_wait)
    try:
        with pytest.raises(RankLostError, match="rank 1 is lost"):
            waits(time.monotonic() + 20)
    finally:
        watch_waits(before)


_SERVE = """
import sys
from hvdkit.transport.gloo.library import host_store
store = host_store()
store.set("mark", "of rank 0")
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("watched", "joined"),
    [
        pytest.param(True, True, id="watched-joined"),
        pytest.param(True, False, id="watched-before it was joined", marks=pytest.mark.slow),
        pytest.param(False, True, id="-joined", marks=pytest.mark.slow),
        pytest.param(False, False, id="-before it was joined", marks=pytest.mark.slow),
    ],
)
def test_a_rank_0_that_is_stopped_while_the_others_connect_is_named(watched: bool, joined: bool) -> None:
    looked = 0

    def check_wait() -> None:
        nonlocal looked
        looked += 1
        if looked == 1:
            rank_0.send_signal(signal.SIGSTOP)
        elif looked > 3 and watched:
            raise RankLostError("rank 0 is lost")

    command = [sys.executable, "-c", _SERVE]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank_0:
        assert rank_0.stdout is not None
        info = {"addresses": ["127.0.0.1"], "port": int(rank_0.stdout.readline()), "mark": "of rank 0", "secret": ""}
        launcher_store = LocalRendezvousStore()
        launcher_store.put("test", json.dumps(info).encode())
        if not joined:
            rank_0.send_signal(signal.SIGSTOP)
        before = watch_waits(check_wait)
        try:
            with pytest.raises(
                TransportError, match="rank 0 is lost" if watched else "Rank 0 does not answer.*SIGSTOP"
            ):
                find_peers(
                    launcher_store,
                    *(1, 2),
                    name="test",
                    host="here",
                    interface="",
                    towards="127.0.0.1",
                    secret="5e" * 32,
                    deadline=time.monotonic() + (60 if watched else 2),
                )
        finally:
            watch_waits(before)
            rank_0.kill()


@pytest.mark.parametrize("serves", ["rank 0", "launcher"])
def test_a_store_of_the_launchers_kind_whose_process_is_stopped_is_not_waited_for_for_ever(serves: str) -> None:
    """The store is joined, and its process is stopped before it is asked."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVE],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:
        assert server.stdout is not None
        place = StoreLocation("store", "127.0.0.1", int(server.stdout.readline()), hosted=serves == "rank 0")
        store, _ = open_rendezvous_store(place, 1)
        store.put("key", b"value")
        assert store.get("key") == b"value" and store.get("other") is None
        server.send_signal(signal.SIGSTOP)
        before = watch_waits(raise_loss)
        try:
            with pytest.raises(RankLostError, match="rank 0 is lost"):
                store.get("key")
        finally:
            watch_waits(before)
            server.kill()


def raise_loss() -> None:
    raise RankLostError("rank 0 is lost")


_LEAVES = """
import sys, time
from hvdkit.errors import TransportError
from hvdkit.transport.gloo import store_timeout
from hvdkit.transport.gloo.library import join_store
store_timeout._ANSWER_S = 0.1
try:
    join_store("127.0.0.1", int(sys.argv[1]), 0.2)
except TransportError as error:
    print(error, flush=True)
sys.stdin.readline()  # until the store's process is to be killed, while this one ends
"""


def test_a_process_whose_store_was_silent_ends_without_a_signal() -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"env": environ, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", _SERVE], **pipes) as rank_0:
        assert rank_0.stdout is not None
        port = rank_0.stdout.readline().strip()
        rank_0.send_signal(signal.SIGSTOP)
        with subprocess.Popen([sys.executable, "-c", _LEAVES, port], **pipes) as rank:
            assert rank.stdin is not None and rank.stdout is not None
            assert "Rank 0 does not answer" in rank.stdout.readline()
            rank.stdin.write("\n")
            rank.stdin.flush()
            rank_0.kill()
            assert rank.wait(60) == 0
