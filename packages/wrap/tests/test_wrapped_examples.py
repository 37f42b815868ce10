"""The plain twins of the examples, which know nothing of hvdkit, on two ranks with `hvdrun --wrap`."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from gallery import EXAMPLES, REACHED, check_reached, start
from plain_scripts import MARK

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.group("jobs"),
]  # beside other tests five trainings in one job take 100 s
TWINS = sorted(path.name for path in (EXAMPLES / "plain").glob("*.py"))


WITH_TORCH = [name for name in TWINS if name in REACHED and not name.startswith("keras")]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the plain scripts for PyTorch print, by name; one job runs them all, as torch takes seconds to import."""
    folder = tmp_path_factory.mktemp("plain")
    scripts = [str(EXAMPLES / "plain" / name) for name in WITH_TORCH]
    done = start(folder, str(Path(__file__).with_name("plain_scripts.py")), ["-np", "2", "--wrap"], scripts, 250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[1]" not in done.stdout, "only rank 0 prints"
    assert list(folder.iterdir()) == []
    *parts, rest = re.split(rf"^\[0\] {MARK}(.*)\n", done.stdout, flags=re.MULTILINE)
    assert parts[1::2] == WITH_TORCH and not rest
    return dict(zip(WITH_TORCH, parts[::2], strict=True))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", WITH_TORCH)
def test_a_plain_script_learns_what_its_twin_does(outputs: dict[str, str], name: str) -> None:
    check_reached(name, outputs[name])


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", [name for name in TWINS if name in REACHED and name.startswith("keras")])
def test_a_plain_script_for_keras_learns_what_its_twin_does(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("jax") is not None:  # of Keras's backends the fastest to import
        monkeypatch.setenv("KERAS_BACKEND", "jax")
    done = start(tmp_path, f"plain/{name}", ["-np", "2", "--wrap"])
    assert done.returncode == 0, done.stdout + done.stderr
    check_reached(name, done.stdout)
    assert "[1]" not in done.stdout, "only rank 0 prints"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", [name for name in TWINS if name not in REACHED])
def test_a_plain_script_writes_one_checkpoint(tmp_path: Path, name: str) -> None:
    file = "digits.keras" if name.startswith("keras") else "digits.pt"
    done = start(tmp_path, f"plain/{name}", ["-np", "2", "--wrap"], ["--epochs", "1", "--checkpoint", file])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test accuracy" in done.stdout
    assert "[1]" not in done.stdout, "only rank 0 prints"
    assert [path.name for path in tmp_path.iterdir()] == [file]


def test_every_example_has_a_plain_twin_unless_it_has_a_loop_of_tensorflow_or_shows_nothing_new_without_ranks() -> None:
    without = {
        "federated_digits.py",
        "keras_asynchronous.py",
        "keras_uneven.py",
        "keras_distribution.py",
        "keras_elastic_digits.py",
        "keras_zero.py",
        "lightning_digits.py",
        "pytorch_elastic_digits.py",
        "pytorch_mesh.py",
        "pytorch_parallel.py",
        "pytorch_resumable_digits.py",
        "pytorch_simulation.py",
        "pytorch_diloco.py",
        "pytorch_asynchronous.py",
        "pytorch_backup_steps.py",
        "pytorch_tracking.py",
        "pytorch_uneven.py",
        "pytorch_zero.py",
        "ray_digits.py",
        "spark_digits.py",
        "tensorflow2_data_service.py",
        "tensorflow2_digits.py",
    }
    assert {path.name for path in EXAMPLES.glob("*.py")} - set(TWINS) == without
