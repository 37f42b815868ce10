"""tf.data service whose workers are on other hosts than the training."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cluster.jobs import HVDRUN
from cluster.lab import ROOT, Lab, environment

pytestmark = pytest.mark.cluster


def test_the_digits_come_from_workers_on_other_hosts(lab: Lab, tmp_path: Path) -> None:
    """All hosts have a docker0 with the same address, which leads nowhere."""
    pytest.importorskip("tensorflow")
    found = environment(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="2")
    worker = [sys.executable, "-m", "hvdkit.tensorflow.data.compute_worker", "service.json"]
    compute = lab.start("node1", [*HVDRUN, "-H", "node1:1,node2:1", *worker], env=found, cwd=tmp_path)
    try:
        script = str(ROOT / "examples" / "tensorflow2_data_service.py")
        options = ["--service", "service.json", "--epochs", "1"]
        done = lab.run("node3", [sys.executable, script, *options], env=found, cwd=tmp_path, timeout=150)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "epoch 1  loss " in done.stdout
        _, errors = compute.communicate(timeout=60)
        assert compute.returncode == 0, errors
    finally:
        compute.kill()
        compute.communicate()
