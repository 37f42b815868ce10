"""hvdkit profile on jobs in which something is slow, as a user starts it, and hvd.profile() inside of one."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from array import array
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from profiled_script import train
from ranks import run_ranks
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.cli import main
from hvdkit.engine.observe import record_sender
from hvdkit.engine.observe.recording import PlanFacts, RankFacts
from hvdkit.errors import ProfileError
from hvdkit.profiling.recordings import read_recordings
from hvdkit.profiling.verdict import Verdict
from hvdkit.tools.profile.run import Collector, choose_addresses, forward
from hvdkit.transport.addresses import LOOPBACK, list_addresses

pytestmark = [pytest.mark.ranks, pytest.mark.native("rounds of buckets are recorded in hvdkit's own engine")]

HERE = Path(__file__).parents[1] / "support"


def hvdkit(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hvdkit", *arguments], capture_output=True, text=True, timeout=100)


def profile(*options: str, script: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return hvdkit("profile", *options, "-np", "2", "--", sys.executable, str(HERE / "profiled_script.py"), *script)


def test_a_slow_rank_of_a_job_that_dies(tmp_path: Path) -> None:
    """It is told of while it trains, and judged from what had come; the exit code is the job's."""
    report, trace, kept = (tmp_path / name for name in ("report.html", "trace.json", "run.npz"))
    written = "-o", str(report), "--trace", str(trace), "--save", str(kept)
    # A warning takes three whole windows of 50 steps: from 100 on.
    done = profile(*written, script=("900", "slow=1,80,0.02", "dies=1,260"))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "The other ranks wait for rank 1 (host" in done.stderr
    assert "Rank 1 on" in done.stdout and "is slow since step" in done.stdout
    assert done.stdout.count("[slow-rank, saves up to") == 1 and "2x the hosts (2)" in done.stdout
    assert {one["pid"] for one in json.loads(trace.read_text())["traceEvents"]} == {0, 1}
    assert "waited for rank 1" in report.read_text()
    again = hvdkit("profile", "--read", str(kept), "--json")
    found = json.loads(again.stdout)
    assert again.returncode == 0 and found["slow"]["ranks"] == [1] and found["slow"]["waited_s"] > 0


def test_a_launchers_own_command_and_a_job_without_a_profile() -> None:
    job = "-m", "hvdkit.launch", "-np", "1", sys.executable, "-c", "print('output'); raise SystemExit(5)"
    done = hvdkit("profile", "--json", "--", sys.executable, *job)
    assert done.returncode == 2 and "ended with exit code 5, and there is no profile." in done.stderr
    assert not done.stdout and "output" in done.stderr, "with --json only the document is on stdout"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "No script was given"),
        (["--read", "x.npz", "--", "hvdrun", "x"], "--read x.npz runs no job, so hvdrun has no effect"),
        (["--read", "x.npz", "-np", "2"], "--read x.npz runs no job, so -np has no effect"),
        (["-np", "2", "--", "mpirun", "-np", "2", "x"], "-np and mpirun both start ranks"),
        (["--save", "/no/such/folder/x", "-np", "2", "--", "x"], "The folder of /no/such/folder/x does not exist"),
    ],
)
def test_contradictions_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *words]) == 2
    assert message in capsys.readouterr().err


def _profiled(path: str, *asked: str) -> tuple[Verdict | None, str]:
    with joined():
        with hvd.profile(path, network="25gbit") as seen:
            train(80, *asked)
        train(3)  # not in it
    return seen.verdict, seen.text


def test_steps_inside_of_a_script(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    (verdict, text), (other, said) = run_ranks(2, _profiled, str(path), "slow=0,30,0.05")
    assert verdict is not None and other is None and not said
    assert verdict.slow is not None and verdict.slow.ranks == (0,)
    assert verdict.slow.since in range(25, 36) and verdict.slow.waited_s > 0
    assert verdict.slow.loading_s < verdict.slow.waited_s / 2 and "[slow-rank" in text and "25 Gbit/s" in text
    assert [one.facts.rank for one in read_recordings(path)] == [0, 1]


def test_data_that_all_ranks_wait_for(tmp_path: Path) -> None:
    (verdict, _), _ = run_ranks(2, _profiled, str(tmp_path / "run.npz"), "loading=0.04")
    assert verdict is not None and verdict.parts.loading_s >= 0.04 and verdict.loaders == 0
    assert verdict.advice[0].name == "data-loading" and verdict.last < 80


def _not_profiled() -> str:
    with joined():
        with pytest.raises(ProfileError, match="is not a network"), hvd.profile(network="fast"):
            pass
        with pytest.raises(ZeroDivisionError), hvd.profile():
            raise ZeroDivisionError
        with hvd.profile() as nothing:
            pass
    assert nothing.verdict is None
    return nothing.text


def test_a_block_without_steps_or_with_an_error() -> None:
    first, other = run_ranks(2, _not_profiled)
    assert "reduced no gradients" in first and not other


def _fit() -> Any:
    import keras
    import numpy as np

    import hvdkit.keras as hvd

    def batches() -> Any:
        import time

        while True:
            time.sleep(0.04)  # much, as it is loaded ahead
            yield np.ones((4, 8), np.float32), np.zeros((4, 2), np.float32)

    hvd.init()
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with hvd.profile() as seen:
        model.fit(batches(), steps_per_epoch=15, epochs=2, verbose=0)
    hvd.shutdown()
    return seen.verdict


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_data_that_fit_waits_for(backend: str) -> None:
    verdict, _ = run_ranks(2, _fit, backend=backend, timeout=90)
    assert verdict.parts.loading_s > verdict.parts.compute_s
    assert verdict.advice[0].name == "data-loading"


def test_it_listens_where_the_ranks_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdkit.launch.detect.hosts.resolve", lambda name: {"far": ("192.0.2.7",)}.get(name, ()))
    monkeypatch.setattr("hvdkit.launch.detect.hosts._address_towards", {"192.0.2.7": "192.0.2.1"}.get)
    python = [sys.executable, "-m", "hvdkit.launch"]
    assert choose_addresses(["hvdrun", "-np", "2", "python", "x.py"], {}) == (LOOPBACK,)
    assert choose_addresses([*python, "-np", "2", "-H", "localhost:2", "x"], {}) == (LOOPBACK,)
    assert choose_addresses(["/opt/hvdrun", "-H", "localhost:1,far:1", "x"], {}) == ("192.0.2.1",)
    for unknown in (["mpirun", "x"], ["hvdrun", "--no-such-flag"], ["hvdrun", "--host-discovery-script", "x", "y"]):
        addresses = choose_addresses(unknown, {})
        assert addresses[0] == LOOPBACK and set(addresses) >= {one for one in list_addresses(LOOPBACK) if one}


def test_strangers_who_say_nothing_keep_no_rank_out() -> None:
    collector = Collector([LOOPBACK])
    _, port, _ = collector.place.split("@")
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection((LOOPBACK, int(port)), timeout=5))
        facts = RankFacts(5, 8, "n1", "n1", "mpi", 1.0, 4)
        plan = PlanFacts("plan", (5,), (4,), (4,), ("weight",), threaded=False)
        connection, session = record_sender.connect(collector.place)
        connection.sendall(session.seal(record_sender.ABOUT, json.dumps(asdict(facts)).encode()))
        connection.sendall(session.seal(record_sender.PLAN, json.dumps(asdict(plan)).encode()))
        connection.sendall(session.seal(record_sender.ROWS, bytes(4) + array("d", range(2 * plan.row)).tobytes()))
        connection.close()
        (found,) = collector.close()
    assert found.facts == facts
    assert found.plans[0][1].tolist() == [list(range(plan.row)), list(range(plan.row, 2 * plan.row))]


def test_only_mpirun_of_open_mpi_has_to_be_told_of_the_variable(tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    for said, words in (
        ("mpirun (Open MPI) 5.0.8", ["-x", "HVDKIT_PROFILE"]),
        ("HYDRA build details:\n Version: 4.2", []),
    ):
        mpirun.write_text(f"#!/bin/sh\nprintf '%s\\n' '{said}'\n")
        mpirun.chmod(0o755)
        assert forward([str(mpirun), "-np", "2", "x"], {}) == [str(mpirun), *words, "-np", "2", "x"]
    assert forward(["srun", "x"], {}) == ["srun", "x"]
