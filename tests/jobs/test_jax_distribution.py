"""Keras' own distribution, and JAX's, among ranks: they find each other, and train as one process on whole batches."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hvdrun_job import HVDRUN, environment
from rank_job import find_mpirun

from hvdkit.engine.coordinator_address import choose_common, find_proxy
from hvdkit.errors import TransportError

HERE = Path(__file__).parents[1] / "support"
SCRIPT = str(HERE / "keras_distribution_script.py")
EXAMPLE = str(HERE.parents[1] / "examples" / "keras_distribution.py")
#: No proxy listens there.
PROXY = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
HIDDEN = (64, 128)


def test_the_first_address_that_all_ranks_reach_is_taken() -> None:
    assert choose_common(["a", "b", "c"], [["a", "b", "c"], ["b", "c"], ["a", "b"]], ["x", "y", "z"]) == "b"
    with pytest.raises(TransportError, match=r"host x .* a not from y, z; b not from y\. Set GLOO"):
        choose_common(["a", "b"], [["a", "b"], [], ["b"]], ["x", "y", "z"])


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, ""),
        ({"http_proxy": "p"}, "http_proxy=p"),
        ({"http_proxy": "p", "https_proxy": "s"}, "https_proxy=s"),
        ({"HTTPS_PROXY": "s"}, ""),  # gRPC reads the small ones only
        ({"http_proxy": "p", "no_proxy": "localhost, 10.0.0.1"}, ""),
        ({"http_proxy": "p", "no_proxy": "10.0.0.0/24"}, ""),
        ({"http_proxy": "p", "no_proxy": "10.1.0.0/24,.site"}, "http_proxy=p"),
        ({"http_proxy": "p", "no_proxy": "10.0.0.1", "no_grpc_proxy": "node2"}, "http_proxy=p"),
    ],
)
def test_a_proxy_counts_unless_the_address_is_exempt(environ: Mapping[str, str], found: str) -> None:
    assert find_proxy(environ, "10.0.0.1:20001") == found


def run(launcher: Sequence[str], *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a Python script or `-c` code; TensorFlow, which Keras imports only to seed it, is hidden from scripts."""
    for package in ("keras", "jax"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    hide = [] if command[0] == "-c" else [str(HERE / "without_tensorflow.py")]
    return subprocess.run(
        [*launcher, sys.executable, *hide, *command],
        env={**environment(), "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def on(ranks: int) -> list[str]:
    return [*HVDRUN, "-np", str(ranks)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights that one process gets on whole batches."""
    folder = tmp_path_factory.mktemp("alone")
    done = run([], SCRIPT, str(folder), "1")
    assert done.returncode == 0, done.stdout + done.stderr
    return read(folder, 0, 1)


def read(folder: Path, rank: int, parts: int) -> dict[str, Any]:
    with np.load(folder / f"{rank}-{parts}.npz") as file:
        return dict(file)


def check_weights(folder: Path, ranks: int, parts: int, alone: Mapping[str, Any]) -> None:
    for rank in range(ranks):
        weights = read(folder, rank, parts)
        assert tuple(weights.pop("held")) == (HIDDEN[0], HIDDEN[1] // parts)
        assert len(weights) == 4
        for name, weight in weights.items():
            np.testing.assert_allclose(weight, alone[name], rtol=0, atol=1e-6)


pytestmark = [pytest.mark.timeout(320), pytest.mark.group("jobs")]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "parts"), [(2, (1, 2)), (4, (2,))])
def test_ranks_of_hvdrun_train_as_one_process_does(
    tmp_path: Path, alone: Mapping[str, Any], ranks: int, parts: tuple[int, ...]
) -> None:
    done = run(on(ranks), SCRIPT, str(tmp_path), *map(str, parts), **PROXY)
    assert done.returncode == 0, done.stdout + done.stderr
    for each in parts:
        check_weights(tmp_path, ranks, each, alone)


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_of_mpirun_agree_on_an_address(tmp_path: Path, alone: Mapping[str, Any]) -> None:
    done = run([*find_mpirun(), "-n", "2"], SCRIPT, str(tmp_path), "1")
    assert done.returncode == 0, done.stdout + done.stderr
    check_weights(tmp_path, 2, 1, alone)


@pytest.mark.slow
@pytest.mark.ranks
def test_the_example_learns() -> None:
    done = run(on(2), EXAMPLE, "--epochs", "6", "--min-accuracy", "0.9", "--parts", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held as (64, 64)" in done.stdout and "[1] test" not in done.stdout


REFUSED = """
import json, os, keras, hvdkit.keras as hvd
from hvdkit.errors import ConfigError

hvd.init()
def refusal():
    try:
        hvd.distribution.initialize()
    except ConfigError as error:
        return str(error)

said = []
os.environ["grpc_proxy"], os.environ["no_grpc_proxy"] = ("p", "node9") if hvd.rank() == 1 else ("", "")
said.append(refusal())
if keras.backend.backend() == "jax" and hvd.rank() == 1:
    keras.ops.zeros(1)
said.append(refusal())
print(json.dumps(said))
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_what_one_rank_has_done_is_refused_on_all() -> None:
    done = run(on(2), "-c", REFUSED)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads(line[line.index("[", 1) :]) for line in done.stdout.splitlines() if '"' in line]
    assert len(reports) == 2 and reports[0] == reports[1]
    proxy, used = reports[0]
    assert proxy.startswith("grpc_proxy=p would send") and "export no_grpc_proxy=127.0.0.1" in proxy
    assert used.startswith("JAX has been used before hvd.distribution.initialize() on rank 1:")


@pytest.mark.slow
@pytest.mark.ranks
def test_another_backend_is_refused() -> None:
    done = run([], "-c", REFUSED, KERAS_BACKEND="torch")
    assert "needs Keras on JAX, and the backend is 'torch'" in done.stdout, done.stderr


LAYOUT = """
import keras, hvdkit.keras as hvd
from keras.distribution import DeviceMesh, LayoutMap, ModelParallel, list_devices, set_distribution

layout = LayoutMap(DeviceMesh((1, 1), ["batch", "model"], list_devices()))
layout["dense/kernel"] = (None, "model")
layout[".*/bias"] = ("model",)
set_distribution(ModelParallel(layout_map=layout))
hvd.distribution.check_layout(keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="dense")]))
"""


@pytest.mark.slow
def test_a_name_of_a_layout_map_that_matches_nothing_is_refused() -> None:
    done = run([], "-c", LAYOUT)
    assert "names that match no variable: 'dense/kernel'. The variables are sequential/dense/kernel" in done.stderr


JAX = """
import jax
jax.distributed.initialize(initialization_timeout=30)
print("rank", jax.process_index(), "of", jax.process_count(), "sees", len(jax.devices()))
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_jax_by_itself_needs_no_arguments_under_hvdrun() -> None:
    done = run(on(2), "-c", JAX, **PROXY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.split("\n"))[-2:] == ["[0] rank 0 of 2 sees 2", "[1] rank 1 of 2 sees 2"]
