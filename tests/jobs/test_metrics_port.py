"""hvdrun --metrics-port: what Prometheus reads, from whom, and the dashboard that shows it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import math
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from hvdrun_job import started
from refused import refused

from hvdkit.launch.agent.rank import Agent
from hvdkit.launch.introspect import metrics
from hvdkit.launch.introspect.metrics import METRICS, MetricsServer, format_metrics
from hvdkit.launch.state.ranks import Ranks, Start
from hvdkit.launcher_channel import Totals, announce_totals, announce_value, parse_totals, parse_value

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "examples" / "grafana" / "hvdkit.json"


def two_ranks() -> Ranks:
    ranks = Ranks(2)
    for rank in range(2):
        ranks.register(rank, f"node{rank}")
        ranks.start(rank, Start(1, "1", "0", bound=True))
    ranks.hear(0, [announce_totals(Totals(30, 1.25, 4096, 960.0)), announce_value('lo"ss\n', 0.5)])
    ranks.hear(1, [announce_totals(Totals(30, math.nan, 4096, 0.0))])
    return ranks


def parse(text: str) -> dict[str, float]:
    """The samples of an exposition: 'name{labels}' -> value."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r'([a-z_]+\{(?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*\}) (\S+)', line)
            assert match, line
            found[match[1]] = float(match[2])
    return found


def test_the_text_has_what_the_ranks_have_told() -> None:
    text = format_metrics(two_ranks(), "job1", 1000.0)
    found = parse(text)
    one = '{job_name="job1",rank="0",host="node0"}'
    other = '{job_name="job1",rank="1",host="node1"}'
    assert found["hvdkit_gradient_reductions_total" + one] == 30
    assert found["hvdkit_gradient_wait_seconds_total" + one] == 1.25
    assert "hvdkit_gradient_wait_seconds_total" + other not in found, "a GPU's stream waits there"
    assert found["hvdkit_samples_total" + one] == 960
    assert found["hvdkit_rank_running" + other] == 1
    assert found[r'hvdkit_logged{job_name="job1",key="lo\"ss\n"}'] == 0.5
    assert found['hvdkit_ranks{job_name="job1"}'] == 2
    named = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    assert named == [(name, kind) for name, (kind, _) in METRICS.items()]
    for name, (kind, _) in METRICS.items():
        assert name.endswith("_total") == (kind == "counter")


@pytest.mark.integrations
def test_prometheus_own_parser_reads_the_text() -> None:
    parser = importlib.import_module("prometheus_client.parser")
    text = format_metrics(two_ranks(), 'jo"b', 1000.0)
    samples = {
        (one.name, one.labels.get("rank")): one.value
        for family in parser.text_string_to_metric_families(text)
        for one in family.samples
    }
    assert samples["hvdkit_reduced_bytes_total", "1"] == 4096 and samples["hvdkit_ranks", None] == 2


@pytest.mark.parametrize("word", ["totals:1:2:3", "totals:1:2:3:x", "totals:", "value:1", "value:x:loss", "other"])
def test_words_that_are_cut_off_are_ignored(word: str) -> None:
    assert parse_totals(word) is None and parse_value(word) is None
    ranks = two_ranks()
    ranks.hear(0, [word])
    assert ranks.states[0].totals == Totals(30, 1.25, 4096, 960.0)


def test_messages_that_come_in_a_burst_reach_hvdrun_whole() -> None:
    words = [announce_value(f"loss/{number}", number / 7) for number in range(300)]
    identity: Any = None
    agent = Agent(identity, None, None)
    agent.channel, rank = socket.socketpair()
    with agent.channel, rank:
        rank.sendall("".join(f"{word}\n" for word in words).encode() + b"totals:1:0.5:4096:9")
        rank.shutdown(socket.SHUT_WR)
        frames = []
        while (payload := agent._read_events()) is not None:
            frames.append(payload.decode().split())
    assert len(frames) > 1 and [word for frame in frames for word in frame] == words


def test_keys_do_not_fill_the_memory_of_hvdrun() -> None:
    ranks = two_ranks()
    for number in range(3000):
        ranks.hear(0, [announce_value(f"loss/{number}", 1.0)])
    assert len(ranks.logged) == 1000


async def _ask(request: bytes) -> bytes:
    server = MetricsServer(two_ranks(), lambda: {"name": "job", "since": 1.0})
    notes: list[str] = []
    await server.open(0, notes.append)
    assert notes == [f"metrics for Prometheus at http://127.0.0.1:{server.port}/metrics"]
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request)
        writer.write_eof()
        try:
            return await asyncio.wait_for(reader.read(), 20)
        except ConnectionResetError:  # not all was read of a request that is too long
            return b""
        finally:
            writer.close()
    finally:
        server.close()


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /metrics HTTP/1.1", b"HTTP/1.1 200 OK"),
        (b"HEAD /metrics?x=1 HTTP/1.0", b"HTTP/1.1 200 OK"),
        (b"GET / HTTP/1.1", b"HTTP/1.1 404"),
        (b"POST /metrics HTTP/1.1", b"HTTP/1.1 405"),
        (b"", b"HTTP/1.1 404"),
        (b"x" * 40_000, b""),
    ],
)
def test_only_metrics_are_given(request_line: bytes, status: bytes) -> None:
    answer = asyncio.run(_ask(request_line + b"\r\nHost: x\r\n\r\n"))
    assert answer.startswith(status) if status else not answer
    head, _, body = answer.partition(b"\r\n\r\n")
    if request_line.startswith(b"GET /metrics"):
        assert parse(body.decode())['hvdkit_ranks{job_name="job"}'] == 2
        assert f"Content-Length: {len(body)}".encode() in head
    elif request_line.startswith(b"HEAD"):
        assert not body


def test_who_does_not_read_the_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_REQUEST_S", 0.05)
    ranks = two_ranks()
    ranks.logged = {f"{number}".ljust(10_000, "x"): 1.0 for number in range(1000)}

    async def ask() -> None:
        server, served = MetricsServer(ranks, lambda: {"name": "job", "since": 1.0}), asyncio.Event()
        serve = server._serve

        async def serve_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await serve(reader, writer)
            served.set()

        monkeypatch.setattr(server, "_serve", serve_once)
        await server.open(0, lambda line: None)
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            await asyncio.wait_for(served.wait(), 20)
        server.close()

    asyncio.run(ask())


#: A server in a process of its own, which may have 64 files open. It writes how many it has when the test asks.
_SERVER = """
import asyncio, os, resource, sys
from hvdkit.launch.introspect.metrics import MetricsServer
from hvdkit.launch.state.ranks import Ranks

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    server = MetricsServer(Ranks(1), lambda: {"name": "job", "since": 1.0})
    await server.open(0, lambda note: None)
    print(server.port, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print(len(os.listdir("/proc/self/fd")), flush=True)
    await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


def test_connections_of_others_take_a_few_descriptors_and_write_nothing() -> None:
    pipe = subprocess.PIPE
    hvdrun = subprocess.Popen([sys.executable, "-c", _SERVER], text=True, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        assert hvdrun.stdin is not None and hvdrun.stdout is not None and hvdrun.stderr is not None
        port = int(hvdrun.stdout.readline())
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                assert b"hvdkit_ranks" in answer.read()
            hvdrun.stdin.write("\n")
            hvdrun.stdin.flush()
            assert int(hvdrun.stdout.readline()) < 40
        assert (hvdrun.communicate("\n", 20)[1], hvdrun.returncode) == ("", 0)
    finally:
        hvdrun.kill()
        hvdrun.wait()


def test_a_port_that_is_taken_is_told() -> None:
    async def open_it(port: int) -> None:
        await MetricsServer(Ranks(1), dict).open(port, print)

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with refused("metrics-port-in-use", names=[f"--metrics-port {port}: ", "in use"]):
            asyncio.run(open_it(port))


def test_the_dashboard_shows_all_metrics_and_no_others() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    asked = " ".join(target["expr"] for panel in panels for target in panel.get("targets", ()))
    asked += " ".join(variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query")
    assert set(re.findall(r"hvdkit_\w+", asked)) == set(METRICS)
    assert len({panel["id"] for panel in panels}) == len(panels)


SCRIPT = """
import torch, hvdkit.torch as hvd
hvd.init()
with hvd.track(csv=os.devnull, every=1) as tracker:
    tracker.log({"loss": float(hvd.rank())}, samples=3)
    tracker.flush()
print("logged", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_a_job_answers_on_this_hosts_loopback_address() -> None:
    with started(2, SCRIPT, "--metrics-port", "0") as job:
        assert job.stderr is not None and job.stdout is not None
        match = re.search(rb"http://127\.0\.0\.1:(\d+)/metrics", job.stderr.readline())
        assert match
        for _ in range(2):
            assert b"logged" in job.stdout.readline()
        found: dict[str, float] = {}
        for _ in range(100):
            with urllib.request.urlopen(match[0].decode(), timeout=20) as answer:
                found = {
                    re.sub(r'(job_name|host)="[^"]*",?', "", name): value
                    for name, value in parse(answer.read().decode()).items()
                }
            if found.get('hvdkit_samples_total{rank="1",}') == 3 and 'hvdkit_logged{key="loss"}' in found:
                break
            time.sleep(0.2)
        assert found['hvdkit_samples_total{rank="1",}'] == 3
        assert found['hvdkit_logged{key="loss"}'] == 0.5
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(match[0].decode() + "/x", timeout=20)
