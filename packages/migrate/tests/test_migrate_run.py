"""What hvdkit migrate writes runs: on two ranks, and alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("libcst", reason="libcst is not installed")

from hvdkit_migrate.plan import plan

pytestmark = pytest.mark.group("jobs")

TESTS = Path(__file__).parent
#: What one process needs to do what two ranks do with the batches and the rate of torch_no_shuffle.py.
ONE_FOR_TWO = {"BATCH": "16", "RATE": "0.1"}


def migrate(folder: Path, kind: str) -> tuple[list[str], list[str]]:
    """Write the scripts of the corpus that train with `kind`, migrated; their paths before and after."""
    before, after = [], []
    for script in sorted((TESTS / "scripts").glob("*.py")):
        made = plan(script.read_text(), script.name)
        if not made.of("break") and ("keras" in script.stem) is (kind == "keras"):
            (folder / script.name).write_text(made.after)
            before.append(str(script))
            after.append(str(folder / script.name))
    assert len(after) >= 5
    return before, after


def run(folder: Path, kind: str, scripts: list[str], *launcher: str, **variables: str) -> dict[str, Any]:
    folder.mkdir()
    command = [*launcher, sys.executable, str(TESTS / "migrated_scripts.py"), kind, "result.json", *scripts]
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    if launcher:
        said = [line for line in done.stdout.splitlines() if line.startswith("[1]")]
        assert not said, said  # rank 0 alone prints
    answer: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return answer


TWO = (sys.executable, "-m", "hvdkit.launch", "-np", "2")


@pytest.mark.slow
@pytest.mark.ranks
def test_torch_scripts_train_the_same_model_on_all_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    before, after = migrate(tmp_path, "torch")
    one_process = [path for path in before if Path(path).stem.startswith("torch_")]
    originals = run(tmp_path / "original", "torch", one_process, **ONE_FOR_TWO)
    together = run(tmp_path / "two", "torch", after, *TWO)
    alone = run(tmp_path / "one", "torch", after)
    for name, (first, second) in {name: one["weights"] for name, one in together.items()}.items():
        assert first == second, f"{name}: the ranks have different weights"
    for name, told in originals.items():
        for found in (together[name]["final"], alone[name]["final"]):
            assert found == pytest.approx([told["final"][0]] * len(found), abs=0.3), name
    exact, expected = together["torch_no_shuffle"]["final"], originals["torch_no_shuffle"]["final"]
    assert exact == pytest.approx(expected * 2, rel=1e-5)


@pytest.mark.slow
@pytest.mark.ranks
def test_keras_scripts_train_the_same_model_on_all_ranks(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow", reason="tensorflow is not installed")
    pytest.importorskip("keras", reason="keras is not installed")
    _, after = migrate(tmp_path, "keras")
    together = run(tmp_path / "two", "keras", after, *TWO, KERAS_BACKEND="tensorflow")
    for name, (first, second) in {name: one["weights"] for name, one in together.items()}.items():
        assert first == second, f"{name}: the ranks have different weights"
