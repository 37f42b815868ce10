"""Training on three hosts, started by one command on one of them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from cluster.jobs import EVERYWHERE, HVDRUN
from cluster.lab import ROOT, Lab

pytestmark = pytest.mark.cluster

DIGITS = ROOT / "examples" / "pytorch_digits.py"


def test_the_digits_are_learned_on_the_three_hosts_of_a_file(lab: Lab, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    hostfile = ROOT / "hostfiles" / "three-hosts"
    command = [*HVDRUN, "-np", "6", "--hostfile", str(hostfile), sys.executable, str(DIGITS)]
    command += ["--epochs", "6", "--min-accuracy", "0.8"]
    done = lab.run("node1", command, cwd=tmp_path, timeout=140)
    assert done.returncode == 0, done.stdout + done.stderr
    epochs = re.findall(r"^\[0 node1\] epoch (\d+)  loss ", done.stdout, re.MULTILINE)
    assert epochs == [str(epoch) for epoch in range(1, 7)]
    assert "6 ranks on 3 hosts (node1: 2, node2: 2, node3: 2), hierarchical transport" in done.stdout
    assert done.stderr == ""


def test_a_script_for_one_process_is_wrapped_on_three_hosts(lab: Lab) -> None:
    pytest.importorskip("torch")
    script = ROOT / "packages" / "wrap" / "tests" / "wrap_rates_script.py"
    done = lab.run("node1", [*HVDRUN, "-np", "3", "-H", EVERYWHERE, "--wrap", sys.executable, str(script)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["[0 node1] " + " ".join(["0.10000"] * 48), "[0 node1] 0.1"]
    assert "3 ranks on 3 hosts" in done.stderr


def test_horovods_name_is_given_to_hvdkit_on_three_hosts(lab: Lab) -> None:
    pytest.importorskip("torch")
    code = "import horovod.torch as hvd; hvd.init(); print(hvd.__name__, hvd.size(), hvd.local_rank())"
    command = ["-np", "3", "-H", EVERYWHERE, "--alias-horovod", sys.executable, "-c", code]
    done = lab.run("node1", [*HVDRUN, *command])
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank} node{rank + 1}] hvdkit.torch 3 0" for rank in range(3)]
