"""What must be run on a real GPU: `pytest -m gpu tests/gpu/test_gpu.py`, with one GPU that the ranks share, or more.

The same functions run on the CPU in the slow tier, which shows that they work, and nothing about GPUs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu_job import RANKS, command, placement, run, variables  # noqa: E402
from gpu_training import TRAININGS  # noqa: E402

_NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch sees none")
_CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, _NO_GPU])
on_a_gpu = pytest.mark.parametrize("device", [_CUDA])
on_each_device = pytest.mark.parametrize("device", [_CUDA, pytest.param("cpu", marks=pytest.mark.slow)])
OPTIONS: list[dict[str, Any]] = [{}, {"static_graph": True}]
pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("options", OPTIONS, ids=["", "static_graph"])
@on_each_device
def test_ranks_train_as_one_process_with_the_whole_batch(device: str, options: dict[str, Any], tmp_path: Path) -> None:
    ranks = run(tmp_path, "gpu_training:train_all", device, **options)
    for name in ranks[0]:
        case, results = TRAININGS[name], [rank[name] for rank in ranks]
        assert len({digest for _, digest in results}) == 1, f"{name}: the ranks have different parameters"
        assert max(difference for difference, _ in results) <= case.tolerance, name


@pytest.mark.parametrize("options", OPTIONS, ids=["", "static_graph"])
@on_each_device
def test_the_host_waits_for_nothing_in_a_step(device: str, options: dict[str, Any], tmp_path: Path) -> None:
    assert run(tmp_path, "gpu_checks:count_waits", device, **options) == [{}] * RANKS


@on_each_device
def test_a_recording_has_the_times_of_the_device_and_costs_no_wait(device: str, tmp_path: Path) -> None:
    assert run(tmp_path, "gpu_checks:record_steps", device) == [[{}, []]] * RANKS


@on_each_device
def test_named_collectives_stay_on_the_device(device: str, tmp_path: Path) -> None:
    assert run(tmp_path, "gpu_checks:reduce_by_name", device) == [[]] * RANKS


@on_each_device
def test_no_gradient_visits_the_host(device: str, tmp_path: Path) -> None:
    for seen in run(tmp_path, "gpu_checks:count_copies", device):
        assert {"DtoH": 0, "HtoD": 0, **seen}.items() >= {"DtoH": 0, "HtoD": 0}.items(), seen
        assert (seen["nccl"] > 0) == (device == "cuda"), "the profile has NCCL's kernels, so it has the copies too"


@on_a_gpu
def test_a_cuda_graph_replays_a_step_or_is_refused_with_the_reason(device: str, tmp_path: Path) -> None:
    for result in run(tmp_path, "gpu_checks:capture", device):
        if "refused" in result:
            assert "CUDA graph" in result["refused"]
        else:
            assert result["replay"] <= 1e-6 < result["step"]


@on_each_device
@pytest.mark.parametrize("place", ["allreduce", "backward"])
def test_a_killed_rank_ends_the_others_within_ten_seconds(place: str, device: str, tmp_path: Path) -> None:
    marker = tmp_path / "killed"
    job = subprocess.Popen(
        command(tmp_path, f"gpu_checks:die_in_{place}", device, marker=str(marker)),
        env=variables(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 100
        while not marker.exists() and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert marker.exists(), "no rank has come as far as to be killed"
        said, _ = job.communicate(timeout=10)
    finally:
        job.kill()
        job.communicate()
    assert job.returncode != 0
    assert "rank 1" in said


def _bench(folder: Path, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "hvdkit", "bench", *words, "--device", "cuda", "--rounds", "2", "--output", "run.json"],
        cwd=folder,
        env=variables(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return document


@pytest.mark.gpu
@_NO_GPU
def test_bench_measures_an_allreduce_beside_nccl(tmp_path: Path) -> None:
    rows = _bench(tmp_path, "allreduce", *placement("cuda"), "--sizes", "4K,1M", "--seconds", "0.05")["rows"]
    assert [(row["work"], row["peer"]) for row in rows] == [
        (size, peer) for size in ("4 KiB", "1 MiB") for peer in ("hvdkit", "NCCL")
    ]
    assert all(row["bus_bytes_s"] > 0 for row in rows)


@pytest.mark.gpu
@_NO_GPU
def test_bench_measures_steps_beside_ddp_on_one_gpu(tmp_path: Path) -> None:
    document = _bench(tmp_path, "step", "-np", "1")
    rows = [row for row in document["rows"] if row["peer"] != "Horovod"]
    assert [(row["work"].partition(",")[0], row["peer"]) for row in rows] == [
        (model, peer) for model in ("ResNet-50", "GPT-2 small") for peer in ("no communication", "hvdkit", "DDP (NCCL)")
    ]
    assert all(row["memory_bytes"] > 0 for row in rows)
    assert len(document["rows"]) > len(rows) or any("Horovod" in note for note in document["notes"])
