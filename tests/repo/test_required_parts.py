from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiers import group_of

TESTS = Path(__file__).parents[1] / "support"


def run_pytest(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(f"import pytest\n{code}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "required_parts", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "code",
    [
        "def test_it():\n    pytest.skip('no mpirun')\n",
        "@pytest.mark.skipif(True, reason='no mpirun')\ndef test_it():\n    pass\n",
        "pytest.importorskip('no_mpirun')\ndef test_it():\n    pass\n",
    ],
)
def test_a_skipped_test_fails_ci(tmp_path: Path, code: str) -> None:
    done = run_pytest(tmp_path, code)
    assert done.returncode != 0
    assert "CI must run it" in done.stdout
    assert "no_mpirun" in done.stdout or "no mpirun" in done.stdout


def test_a_missing_gpu_and_a_known_bug_do_not_fail_ci(tmp_path: Path) -> None:
    code = "def test_gpu():\n    pytest.skip('no GPU here')\n@pytest.mark.xfail\ndef test_bug():\n    assert 0\n"
    done = run_pytest(tmp_path, code)
    assert done.returncode == 0
    assert "1 skipped, 1 xfailed" in done.stdout


def test_tests_stay_with_their_group(request: pytest.FixtureRequest) -> None:
    """Each process of pytest-xdist writes the group behind a test's name, for the scheduler, where the suite is run."""
    config, test = request.config, request.node
    in_parallel = hasattr(config, "workerinput") and config.workerinput["hvdkit_loadgroup"]
    assert test.nodeid.endswith(f"@{group_of(test)}") == in_parallel
