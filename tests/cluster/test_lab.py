"""The lab itself: what the other tests take for granted."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster.lab import ROOT, Lab, wait_until
from cluster.slurm import Slurm

pytestmark = pytest.mark.cluster


def test_every_host_reaches_every_other_by_ssh_without_a_question(lab: Lab) -> None:
    for here in lab.names:
        for there in lab.names:
            done = lab.run(here, ["ssh", "-o", "BatchMode=yes", there, "hostname"])
            assert (done.returncode, done.stdout) == (0, f"{there}\n"), done.stderr


def test_a_command_ends_as_it_would_anywhere(lab: Lab) -> None:
    assert lab.run("node1", ["sh", "-c", "exit 7"]).returncode == 7
    process = lab.start("node2", ["sh", "-c", "trap 'exit 9' TERM; sleep 100 & echo up; wait"])
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.terminate()
    assert process.wait(10) == 9
    assert [line for lines in lab.restore().values() for line in lines] == ["sleep 100 [S]"]


def test_only_the_wire_has_the_same_subnet_and_is_fast(lab: Lab) -> None:
    seen = [lab.run(name, ["ip", "-br", "-4", "addr"]).stdout for name in lab.names]
    assert ["eth0" in seen[0], "ens5" in seen[1], "enp7s0" in seen[2]] == [True] * 3
    assert all("eth1" in each and "172.17.0.1/16" in each and "10.77.0.1" in each for each in seen)
    assert lab.run("node1", ["ping", "-c1", "-W1", "192.168.102.10"]).returncode != 0


def test_a_host_has_its_own_tmp_and_memory_files_and_shares_the_rest(lab: Lab, tmp_path: Path) -> None:
    lab.run("node1", ["touch", "/tmp/mine", "/dev/shm/mine", tmp_path / "ours"])
    assert lab.run("node2", ["ls", "/tmp/mine"]).returncode != 0
    assert lab.run("node2", ["ls", "/dev/shm/mine"]).returncode != 0
    assert lab.run("node2", ["ls", tmp_path / "ours"]).returncode == 0


def test_a_cut_host_is_silent_and_a_halted_one_closes_its_connections(lab: Lab) -> None:
    def listen() -> subprocess.Popen[str]:
        process = lab.start("node1", ["ssh", "node3", "echo up; exec sleep 60"])
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        return process

    first = listen()
    lab.cut("node3")
    time.sleep(0.5)
    assert first.poll() is None
    first.kill()
    first.communicate()
    lab.mend("node3")
    second = listen()
    lab.halt("node3")
    second.communicate(timeout=5)
    assert second.returncode == 255
    lab.boot("node3")
    assert lab.run("node1", ["ssh", "node3", "true"]).returncode == 0


# On the host that is copied to: the seconds from the first byte to the last one.
RECEIVE = """
import sys, time
sys.stdin.buffer.read(1)
began = time.monotonic()
while sys.stdin.buffer.read(1 << 16):
    pass
print(time.monotonic() - began)
"""


def test_a_limited_wire_is_slow(lab: Lab) -> None:
    receive = shlex.quote(shlex.join([sys.executable, "-c", RECEIVE]))
    copy = ["bash", "-c", f"dd if=/dev/zero bs=1M count=10 2>/dev/null | ssh node2 {receive}"]

    def took() -> tuple[float, float]:
        began = time.monotonic()
        done = lab.run("node1", copy)
        assert done.returncode == 0, done.stderr
        return time.monotonic() - began, float(done.stdout)

    # Others may have work for this machine too, so the start of ssh may take long. Some is copied meanwhile.
    free = min(copying for _, copying in (took() for _ in range(3)))
    lab.limit("node2", "100mbit")
    whole, _ = took()
    assert whole > 0.8 > free


def test_slurm_starts_a_task_on_each_host(slurm: Slurm, tmp_path: Path) -> None:
    code, output = slurm.batch(tmp_path, "srun hostname | sort; exit 4", "--nodes=3", "--ntasks-per-node=1")
    assert (code, output.split()) == (4, ["node1", "node2", "node3"])


def test_slurm_sees_a_host_again_that_was_halted(slurm: Slurm, tmp_path: Path) -> None:
    slurm.lab.halt("node2")
    slurm.lab.boot("node2")
    slurm.up()
    code, output = slurm.batch(tmp_path, "srun hostname", "--nodelist=node2")
    assert (code, output) == (0, "node2\n")


def test_a_lab_ends_with_the_process_that_made_it(lab: Lab, tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time; from cluster.lab import Lab\n"
        f"lab = Lab(pathlib.Path({str(tmp_path)!r}), count=1); lab.up()\n"
        "print(*lab.hosts['node1'].processes(), lab.switch, flush=True); time.sleep(60)"
    )
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "support")))
    other = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        pids = other.stdout.readline().split()
        other.kill()
    assert len(pids) >= 3
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 5)
