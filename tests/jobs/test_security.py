"""What others could do to a job: who may connect, what is executed, what can be read, on one host.

tests/cluster/test_private.py looks at several hosts.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cases import product
from hvdrun_job import HVDRUN, SLEEP, descendants, environment, read_pids, started

from hvdkit.handshake import Session, connect
from hvdkit.launch.agent import wire
from hvdkit.launch.state.control import ControlServer
from hvdkit.launch.state.ranks import Ranks
from hvdkit.launch.state.runtime_dir import find_jobs

ROOT = Path(__file__).parents[2]
FILES = [*sorted((ROOT / "hvdkit").rglob("*.py")), *sorted(ROOT.glob("packages/*/hvdkit_*/**/*.py"))]

#: What opens a socket that others can connect to; with a dot: as a method only.
LISTENING = {
    *("create_server", "start_server", "start_unix_server", "create_unix_server", ".listen", ".bind"),
    *(
        "DispatchServer",
        "WorkerServer",
        "Listener",
        "TCPStore",
        "ProcessGroupGloo",
        "HTTPServer",
        "TCPServer",
        "ThreadingHTTPServer",
    ),
}
#: What has a call of such a name, and opens nothing that others can connect to.
NOT_LISTENING = {
    "launch/detect/hosts.py": "binds a UDP socket to an address, to see whether it is this machine's",
    "launch/state/accept_loop.py": "listens at sockets that others have bound, which are in the table",
    "tools/doctor/collect/host.py": "binds a port to see whether it is free, and does not listen at it",
    "launch/agent/host_info.py": "binds ports to see whether they are free, and does not listen at them",
    "packages/wrap/hvdkit_wrap/keras_fit.py": "binds arguments to a signature",
    "keras/validation.py": "the same",
    "tools/compare/recorder/keras_fit.py": "the same",
}
#: What executes data, or could. By file: who has made the data.
EXECUTING = {
    "engine/named/negotiator.py": "ranks of the job: by MPI, shared memory or connections that proved the job's secret",
    "transport/small_collectives.py": "the same",
    "transport/between/hierarchical.py": "the same",
    "launch/function_outcome.py": "ranks, through Ray, through Spark or in a folder of this user alone",
    "packages/spark/hvdkit_spark/job.py": "the driver, for its executors",
    "packages/spark/hvdkit_spark/rank.py": "the driver, for its ranks",
    "packages/spark/hvdkit_spark/reports.py": "ranks of run(), through Spark",
    "packages/spark/hvdkit_spark/common/persistence.py": "who saved an estimator; whoever loads it must trust them",
    "packages/spark/hvdkit_spark/keras/models.py": "the same, and the driver, for its executors",
    "packages/spark/hvdkit_spark/keras/training.py": "the driver, for its ranks",
    "packages/spark/hvdkit_spark/torch/estimator.py": "the driver, for its executors",
    "packages/spark/hvdkit_spark/torch/training.py": "the driver, for its ranks",
    "launch/run_worker.py": "launch(), in a folder of this user alone",
    "launch/run_launcher.py": "the same",
    "launch/run_api.py": "its run_launcher, in a folder of this user alone",
    "launch/function_results.py": "ranks of launch(), in a folder of this user alone",
    "tools/compare/recorder/keras_fit.py": "ranks of hvdkit compare, in a folder of this user alone",
    "tools/compare/recorder/session.py": "the same",
    "tools/compare/recorder/torch_steps.py": "the same",
    "tools/compare/records.py": "the same",
}


def name_of(path: Path) -> str:
    """The path below hvdkit/, or below the repository for a package."""
    return path.relative_to(ROOT).as_posix().removeprefix("hvdkit/")


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """What a file calls: the last word, and the call."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_every_socket_that_listens_is_in_the_table_of_contributing() -> None:
    table = set(re.findall(r"^\| `hvdkit/([^`]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
    found = set()
    for path in FILES:
        for name, _ in calls(path):
            _, dot, last = name.rpartition(".")
            if last in LISTENING or dot + last in LISTENING or name == "gloo":
                found.add(name_of(path))
    assert found - set(NOT_LISTENING) == table
    assert set(NOT_LISTENING) <= found


def test_data_is_executed_only_where_the_job_itself_has_made_it() -> None:
    found = set()
    for path in FILES:
        for name, call in calls(path):
            options = {word.arg: ast.unparse(word.value) for word in call.keywords}
            if (
                name in ("eval", "exec", "os.system", "os.popen", "yaml.load", "marshal.loads")
                or name in ("pickle.loads", "pickle.load")
                or (name in ("torch.load", "load") and options.get("weights_only") == "False")
                or (name == "np.load" and options.get("allow_pickle") == "True")
                or options.get("shell") == "True"
            ):
                found.add(name_of(path))
    assert found == set(EXECUTING)


HOSTILE = [
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned #",
    "it's",
    '"',
    "a\nb",
    "-oProxyCommand=touch pwned",
    "\\",
    "*",
    "",
]


@pytest.mark.ranks
@pytest.mark.timeout(120)
def test_arguments_and_variables_reach_the_ranks_as_they_are(tmp_path: Path) -> None:
    code = "import os, sys, json; n = len(sys.argv) - 1; "
    code += "print(json.dumps([sys.argv[1:], [os.environ[f'H{i}'] for i in range(n)]]))"
    variables = {f"H{at}": value for at, value in enumerate(HOSTILE)}
    done = subprocess.run(
        [*HVDRUN, "-np", "2", sys.executable, "-c", code, *HOSTILE],
        env={**environment(), **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line[4:]) for line in done.stdout.splitlines()] == [[HOSTILE, HOSTILE]] * 2
    assert not list(tmp_path.iterdir())


@pytest.mark.ranks
@pytest.mark.timeout(120)
def test_variables_that_are_kept_back_reach_no_rank() -> None:
    code = "import os; print(os.environ.get('API_KEY'), os.environ.get('MY_TOKEN'), os.environ['TOKENIZERS'])"
    variables = {"API_KEY": "1", "MY_TOKEN": "2", "TOKENIZERS": "3"}
    options = ["--no-forward-env", "*_TOKEN", "--no-forward-env", "API_*"]
    done = subprocess.run(
        [*HVDRUN, *options, "-np", "2", sys.executable, "-c", code],
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert sorted(done.stdout.splitlines()) == ["[0] None None 3", "[1] None None 3"], done.stderr
    shown = subprocess.run(
        [*HVDRUN, *options, "--dry-run", "-np", "2", "true"],
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert "-u API_KEY -u MY_TOKEN" in shown.stdout and "TOKENIZERS" not in shown.stdout


_NO_NAMES = ["-oProxyCommand=x", "a b", "a;b", "$(id)", "`id`", "a\nb", "a|b", "@", "root@-x", "[::1;id]"]
_WAYS = ["-H", "--hostfile", "--host-discovery-script"]


# Each name, which all ways check alike, and each way with names of different kinds.
@pytest.mark.parametrize(
    ("way", "name"),
    product(
        _WAYS,
        _NO_NAMES,
        quick=lambda way, name: _WAYS.index(way) == _NO_NAMES.index(name) % len(_WAYS),
    ),
)
def test_a_host_that_is_no_name_reaches_no_command_line(name: str, way: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"node1 slots=1\n{name}\n")
    given = f"node1:1,{name}" if way == "-H" else str(tmp_path / "hosts")
    if way == "--host-discovery-script":
        (tmp_path / "hosts").write_text(f"node1:1\n{name}\n")
        given = f"cat {tmp_path / 'hosts'}"
    done = subprocess.run(
        [*HVDRUN, "--dry-run", "-np", "2", f"{way}={given}" if way != "-H" else f"-H{given}", "true"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if name == "a\nb" and way != "-H":  # these are two lines of a hostfile
        return
    assert done.returncode == 2 and not done.stdout, done


@pytest.mark.parametrize("words", [["-x", "A=b=c"], ["-xA=b=c"], ["--env=A=b=c"], ["-x", "B=", "-x", "A=b=c"]])
def test_values_are_overwritten_in_the_command_line_however_they_are_given(words: list[str]) -> None:
    code = "import sys; from hvdkit.launch.run.own_arguments import hide_values as hide; hide(['A=b=c', 'B=', 'C']); "
    code += "print(open('/proc/self/cmdline').read().split(chr(0))[3:]); print(sys.argv[1:])"
    shown, own = subprocess.check_output([sys.executable, "-c", code, *words, "C", "d=b=c"], text=True).splitlines()
    assert shown == str([*(word.replace("A=b=c", "A=***") for word in words), "C", "d=b=c", ""])
    assert own == str([*words, "C", "d=b=c"])


def test_commands_that_start_hvdrun_overwrite_values_in_their_own_command_line() -> None:
    code = "import argparse; from hvdkit.tools.training_command import add_hvdrun_options as add; "
    code += "parser = argparse.ArgumentParser(); add(parser); print(parser.parse_args().hvdrun[0].words); "
    code += "print(open('/proc/self/cmdline').read().split(chr(0))[3:])"
    words, shown = subprocess.check_output([sys.executable, "-c", code, "-x", "A=7h15"], text=True).splitlines()
    assert (words, shown) == ("('-x', 'A=7h15')", "['-x', 'A=****', '']")


def listening_sockets() -> set[str]:
    """Inodes of the TCP sockets of this machine that listen."""
    rows = [line.split() for file in ("tcp", "tcp6") for line in Path("/proc/net", file).read_text().splitlines()[1:]]
    return {row[9] for row in rows if row[3] == "0A"}


def sockets_of(pid: int) -> set[str]:
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            match = re.match(r"socket:\[(\d+)\]", os.readlink(link))
            found |= {match[1]} if match else set()
    return found


@pytest.mark.ranks
@pytest.mark.timeout(120)
def test_on_one_host_nothing_of_ours_listens_on_a_network_and_files_are_private() -> None:
    before = os.umask(0)
    try:
        with started(2, "import hvdkit.torch as hvd; hvd.init(); " + SLEEP, "-x", "A_TOKEN=7h15") as hvdrun:
            pids = read_pids(hvdrun, 2)
            everything = {hvdrun.pid, *descendants(hvdrun.pid)}
            lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in everything}
            ours = [pid for pid, words in lines.items() if b"prterun" not in words[0] and b"mpirun" not in words[0]]
            assert len(ours) >= 5  # hvdrun, two agents, two ranks
            assert not [words for words in lines.values() if any(b"7h15" in word for word in words)]
            assert b"A_TOKEN=****" in lines[hvdrun.pid], "the value of -x is overwritten"
            for pid in pids.values():
                assert b"A_TOKEN=7h15" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            listening = listening_sockets()
            # What ranks listen with is MPI's: hvdkit has started none of it (--transport auto on one host).
            for pid in ours:
                if any(b"launch" in word for word in lines[pid]):
                    assert not sockets_of(pid) & listening, lines[pid]
            folder = Path(find_jobs()[str(hvdrun.pid)])
            assert {path.stat().st_mode & 0o077 for path in (folder.parent, folder, folder / "secret")} == {0}
            secret = (folder / "secret").read_bytes()  # which mpirun and what it starts are not told
            assert not [pid for pid in everything if secret in Path(f"/proc/{pid}/environ").read_bytes()]
    finally:
        os.umask(before)


Frames = Callable[[Session], bytes]


async def _shown(build: Frames, *, secret: bytes = b"") -> tuple[bytes, dict[int, str]]:
    """What hvdrun answers to rank 0 that shakes hands with a secret and sends frames; and the ranks that it knows.

    secret: the job's if left out. The answer is without the handshake's.
    """
    ranks = Ranks(2)
    control = ControlServer(ranks, lambda *_: None)
    await control.open(["127.0.0.1"], "")
    port = int(control.variables["HVDKIT_CONTROL"].split(":")[1])
    secret = secret or control.variables["HVDKIT_CONTROL_SECRET"].encode()

    def speak() -> bytes:
        answer = b""
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection, contextlib.suppress(OSError):
            connection.sendall(build(connect(connection, secret, wire.PURPOSE)))
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1 << 16):
                answer += piece
        return answer

    answer = await asyncio.to_thread(speak)
    known = dict(ranks.hosts)
    await control.close()
    return answer, known


HELLO = json.dumps({"rank": 0, "size": 2, "host": "n1"}).encode()


def test_only_who_knows_the_secret_is_heard() -> None:
    assert asyncio.run(_shown(lambda session: session.seal(wire.HELLO, HELLO))) == (b"", {0: "n1"})
    stranger = asyncio.run(_shown(lambda session: session.seal(wire.HELLO, HELLO), secret=b"another"))
    assert stranger == (b"", {})


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (wire.HELLO, b"[" * 100_000),
        (wire.HELLO, b"[1]"),
        (wire.HELLO, b'{"rank": [], "size": 2, "host": "x"}'),
        (wire.HELLO, b'{"rank": -1, "size": 2, "host": "x"}'),
        (wire.HELLO, b'{"rank": 1, "size": 2, "host": "x"}'),  # whose handshake was rank 0's
        (wire.HELLO, b"\xff"),
        (wire.HEARTBEAT, b"x"),
        (b"?", b""),
    ],
)
def test_what_no_agent_sends_ends_the_connection_and_nothing_else(
    kind: bytes, payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    _, known = asyncio.run(_shown(lambda session: session.seal(kind, payload)))
    assert known == {}
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize(
    "sent", [b"\n", b"[]\n", b'{"ask": []}\n', b"{" * 70_000 + b"\n", b"[" * 50_000 + b"\n", b"no line"]
)
def test_a_question_that_is_none_gets_no_answer(sent: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from hvdkit.launch.introspect.query_server import QueryServer

    async def ask() -> bytes:
        inquiries = QueryServer(dict, lambda: asyncio.sleep(0, {}))
        await inquiries.open(str(tmp_path))
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / wire.QUERY))
        writer.write(sent)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(reader.read(), 5)
        return b""

    answer = asyncio.run(ask())
    assert answer == b"" or json.loads(answer) == {"job": {}}
    assert "never retrieved" not in caplog.text
