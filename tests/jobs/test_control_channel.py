"""The connection between hvdrun and its agents, with somebody in the middle who does not know the job's secret."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from cases import quick_ones

from hvdkit.exit_codes import TRY_AGAIN
from hvdkit.handshake import ANSWER_BYTES, MAC_BYTES, NONCE_BYTES, AuthenticationError, Challenge, Mac, Session, connect
from hvdkit.launch.agent import rank, wire
from hvdkit.launch.plan.job import AGENT, Job, Launch
from hvdkit.launch.run.output import Interruption, Output
from hvdkit.launch.run.runner import Runner
from hvdkit.launch.state.control import ControlServer
from hvdkit.launch.state.outcome import JobResult
from hvdkit.launch.state.ranks import End, Ranks
from hvdkit.launch.state.runtime_dir import RuntimeDirectory

pytestmark = pytest.mark.timeout(60)
SECRET = b"the job's"
OVERHEAD = 5 + 2 * MAC_BYTES
SENT = [(b"O", b"first"), (b"O", b"second"), (b"Z", b""), (b"O", bytes(300)), (b"X", b"last")]


def test_the_code_is_hmac_sha256() -> None:
    for length in (0, 1, 32, 63, 64, 65, 200):
        key = bytes(range(length))
        assert Mac(key).sign(b"one", b"", b"two") == hmac.digest(key, b"onetwo", "sha256")


def sessions(secret: bytes = SECRET) -> tuple[Session, Session]:
    """Of the side that connects and of the one that accepts."""
    here, there = socket.socketpair()
    with here, there:
        challenge = Challenge(SECRET, b"test")
        here.sendall(challenge.nonce)
        connected: list[Session] = []
        thread = threading.Thread(target=lambda: connected.append(connect(there, secret, b"test", 3)))
        thread.start()
        proven = challenge.check(here.recv(ANSWER_BYTES, socket.MSG_WAITALL))
        assert proven is not None and proven.rank == 3
        here.sendall(proven.proof)
        thread.join()
    return connected[0], proven.session


def received(session: Session, data: bytes, dice: random.Random) -> tuple[list[tuple[bytes, bytes]], bool]:
    """The frames that come through, cut into pieces anywhere, and whether that ended in an error."""
    frames: list[tuple[bytes, bytes]] = []
    try:
        while data:
            cut = dice.randint(1, len(data))
            frames.extend(session.receive(data[:cut]))
            data = data[cut:]
    except AuthenticationError:
        return frames, True
    return frames, False


TAMPERING: dict[str, Callable[[list[bytes], list[bytes], random.Random], list[bytes]]] = {
    "replay": lambda frames, _, dice: [*frames[: (at := dice.randint(1, 5))], frames[at - 1], *frames[at:]],
    "drop": lambda frames, _, dice: [*frames[: (at := dice.randrange(4))], *frames[at + 1 :]],
    "swap": lambda frames, _, dice: [
        *frames[: (at := dice.randrange(4))],
        frames[at + 1],
        frames[at],
        *frames[at + 2 :],
    ],
    "inject": lambda frames, _, dice: [*frames[: (at := dice.randrange(5))], bytes(OVERHEAD), *frames[at:]],
    "reflect": lambda frames, others, dice: [*frames[: (at := dice.randrange(5))], others[at], *frames[at:]],
}


@pytest.mark.parametrize("what", TAMPERING)
@pytest.mark.parametrize("accepted", [False, True])
def test_frames_that_are_not_those_sent_end_the_connection(what: str, accepted: bool) -> None:
    for seed in range(20):
        dice = random.Random(seed)
        ends = sessions()
        sender, receiver = ends if accepted else ends[::-1]
        frames = [sender.seal(*frame) for frame in SENT]
        others = [receiver.seal(*frame) for frame in SENT]
        found, ended = received(receiver, b"".join(TAMPERING[what](frames, others, dice)), dice)
        assert ended and found == SENT[: len(found)], seed


def test_every_flipped_bit_is_noticed_with_its_own_frame() -> None:
    dice = random.Random(1)
    for at in range(OVERHEAD + 5):
        sender, receiver = sessions()
        frames = [bytearray(sender.seal(*frame)) for frame in SENT]
        frames[0][at] ^= 1 << dice.randrange(8)
        assert received(receiver, bytes(frames[0]), dice) == ([], True), at


def test_frames_of_another_connection_are_not_taken() -> None:
    (sender, _), (_, receiver) = sessions(), sessions()
    with pytest.raises(AuthenticationError, match="frame 0 on the connection"):
        list(receiver.receive(sender.seal(b"O", b"text")))


def test_frames_come_through_as_they_were_sent() -> None:
    dice = random.Random(2)
    sender, receiver = sessions()
    assert received(receiver, b"".join(sender.seal(*frame) for frame in SENT), dice) == (SENT, False)


class Relay:
    """Passes connections on to a port, the handshakes as they are, and what comes after them as it is asked to.

    change: is given (from hvdrun?, all bytes of a piece) and returns what is passed on.
    """

    def __init__(self, port: int, change: Callable[[bool, bytes], bytes]) -> None:
        self._port, self._change = port, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                agent, _ = self._listener.accept()
                hvdrun = socket.create_connection(("127.0.0.1", self._port))
                threading.Thread(target=self._pump, args=(hvdrun, agent, True), daemon=True).start()
                threading.Thread(target=self._pump, args=(agent, hvdrun, False), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, down: bool) -> None:
        untouched = NONCE_BYTES + MAC_BYTES if down else ANSWER_BYTES
        with contextlib.suppress(OSError):
            while data := source.recv(min(untouched, 1 << 16) or 1 << 16):
                target.sendall(data if untouched else self._change(down, data))
                untouched -= min(untouched, len(data))
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def run_through(change: Callable[[bool, bytes], bytes], *command: str) -> JobResult:
    """Run one rank whose agent reaches hvdrun through a relay."""
    relays = []

    def build(control: Mapping[str, str], _: str) -> Launch:
        kind, port, address = control["HVDKIT_CONTROL"].split(":")
        relays.append(Relay(int(port), change))
        variables = {**control, "HVDKIT_CONTROL": f"{kind}:{relays[0].port}:{address}"}
        return Launch((sys.executable, "-I", "-S", AGENT, "--", *command), variables)

    output, job = Output(), Job(command=(), ranks=1, environ=dict(os.environ), addresses=("127.0.0.1",))
    runner = Runner(build, job, output, Interruption(output))
    try:
        return asyncio.run(runner.run_once())
    finally:
        for relay in relays:
            relay.close()


def test_a_relay_that_changes_nothing_is_no_harm(tmp_path: Path) -> None:
    assert run_through(lambda _, data: data, "touch", str(tmp_path / "begun")).code == 0
    assert (tmp_path / "begun").exists()


def test_an_order_that_was_changed_on_the_way_starts_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    changed = []

    def change(down: bool, data: bytes) -> bytes:
        if down and b'"local_size": 1' in data:
            changed.append(data)
            return data.replace(b'"local_size": 1', b'"local_size": 9')
        return data

    verdict = run_through(change, "touch", str(tmp_path / "begun"))
    assert changed and verdict.code != 0 and verdict.show_launcher
    assert not (tmp_path / "begun").exists()
    assert "has no valid code of the job's secret" in capfd.readouterr().err


@pytest.mark.parametrize("what", quick_ones(["flip", "replay", "drop", "inject"], "flip", "replay"))
def test_what_was_changed_on_the_way_to_hvdrun_ends_the_job(what: str) -> None:
    def change(down: bool, data: bytes) -> bytes:
        at = data.find(b"a line")
        if down or at < 0:
            return data
        frame = data[at - 5 - MAC_BYTES :]
        return {
            "flip": data[:at] + b"A" + data[at + 1 :],
            "replay": data + frame,
            "drop": data[: at - 5 - MAC_BYTES],
            "inject": bytes(OVERHEAD) + data,
        }[what]

    verdict = run_through(change, "sh", "-c", "sleep 0.3; echo a line; sleep 0.3; echo more; sleep 60")
    assert verdict.code != 0
    (line,) = verdict.lines
    assert "rank 0 on" in line and "has no valid code of the job's secret" in line


def close_at_end(connection: socket.socket) -> None:
    """Read what an agent sends, and close the connection after that, as hvdrun does."""
    with connection:
        while connection.recv(1 << 16):
            pass


@contextlib.contextmanager
def agent_that_is_sent(
    orders: object,
    *command: str,
    before: Sequence[tuple[bytes, bytes]] = (),
    behind: Sequence[tuple[bytes, bytes]] = (),
) -> Iterator[subprocess.Popen[str]]:
    """An agent whose hvdrun, which knows the secret, sends these orders.

    before, behind: frames beside them, which come at once with them.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = {
            "HVDKIT_CONTROL": f"tcp:{listener.getsockname()[1]}:127.0.0.1",
            "HVDKIT_CONTROL_SECRET": SECRET.decode(),
        }
        agent = subprocess.Popen(
            [sys.executable, "-I", "-S", AGENT, "--", *command],
            env={**os.environ, **place},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            connections = []
            for _ in range(2):  # the second one is the pulse
                connection, _ = listener.accept()
                challenge = Challenge(SECRET, wire.PURPOSE)
                connection.sendall(challenge.nonce)
                proven = challenge.check(connection.recv(ANSWER_BYTES, socket.MSG_WAITALL))
                assert proven is not None
                connection.sendall(proven.proof)
                connections.append((connection, proven.session))
            connection, session = connections[0]
            frames = [*before, (wire.GO, json.dumps(orders).encode()), *behind]
            connection.sendall(b"".join(session.seal(*frame) for frame in frames))
            threading.Thread(target=close_at_end, args=(connection,), daemon=True).start()
            yield agent
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.wait(10)


@pytest.mark.parametrize(
    "variables",
    [{"LD_PRELOAD": "/x.so"}, {"BASH_ENV": "x"}, {"HVDKIT_HOST_SLOTS": 4}, {"OMPI_MCA_plm": "x"}, None, ["x"]],
)
def test_an_agent_takes_no_variables_but_those_that_hvdrun_plans(variables: object, tmp_path: Path) -> None:
    with agent_that_is_sent({"variables": variables}, "touch", str(tmp_path / "begun")) as agent:
        assert agent.wait(20) == 1
        assert agent.stderr is not None
        said = agent.stderr.read()
    assert not (tmp_path / "begun").exists()
    if isinstance(variables, dict):
        assert any(name in said for name in (*variables, "a value that is not a string"))
    assert "was not started: the start order" in said


def test_a_question_while_ranks_are_on_their_way_does_not_end_them(tmp_path: Path) -> None:
    """`hvdkit stacks` asks a job that does not begin. News of lost ranks and the size of the terminal come as well."""
    with agent_that_is_sent({"variables": {}}, "touch", str(tmp_path / "begun"), before=[(wire.ASK, b"1")]) as agent:
        assert agent.wait(20) == 0
    assert (tmp_path / "begun").exists()


def test_an_end_that_comes_with_the_orders_is_heard() -> None:
    with agent_that_is_sent({"variables": {}}, "sleep", "60", behind=[(wire.STOP, b"")]) as agent:
        assert agent.wait(20) != 0


async def _end_of_a_rank_read_late() -> End:
    """Return how a rank has ended whose agent's last frames are read after a frame was sent to it."""
    server = ControlServer(Ranks(1), lambda *_: None)
    with RuntimeDirectory() as folder:
        await server.open((), folder)
        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", AGENT, "--", "true"), env={**os.environ, **server.variables}
        )
        await server.changed.wait_until(lambda: bool(server.connected), 20)
        server.release({0: {"variables": {}}})
        time.sleep(1)  # the loop stands still: the agent sends all its frames, and would end
        server.send(0, wire.PROBE)
        await server.changed.wait_until(lambda: not server.connected, 20)
        assert await agent.wait() == 0
        await server.close()
    return server.ranks.ended[0]


def test_a_frame_that_meets_the_end_of_an_agent_loses_no_report() -> None:
    assert asyncio.run(_end_of_a_rank_read_late()).code == 0


class _Hvdrun:
    """Stands in for an agent's connection to hvdrun, which says BYE when it is asked for the third time."""

    def __init__(self, source: int) -> None:
        self.sources, self.request = [source], 0

    def receive(self) -> list[tuple[bytes, bytes]]:
        self.request += 1
        return [(wire.BYE, b"")] if self.request == 3 else []


@pytest.mark.parametrize(("code", "asked"), [(1, 0), (TRY_AGAIN, 3)])
def test_where_a_rank_has_saved_its_agent_waits_for_those_that_still_save(
    code: int, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that ends has mpirun end all other ranks."""
    seconds = itertools.count(step=100)
    monkeypatch.setattr(rank, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    readable, writable = os.pipe()
    os.write(writable, b"x")
    agent, hvdrun = rank.Agent.__new__(rank.Agent), _Hvdrun(readable)
    agent.control = hvdrun  # type: ignore[assignment]
    agent._await_bye(code)
    assert hvdrun.request == asked
    os.close(readable)
    os.close(writable)
