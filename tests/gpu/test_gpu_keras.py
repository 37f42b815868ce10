"""Keras on a real GPU, on each backend that computes on one here: `pytest -m gpu tests/gpu/test_gpu_keras.py`.

PyTorch and TensorFlow for CUDA rarely go into one environment, so this asks nothing of torch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_copies import check_no_gradient_is_copied
from gpu_job import count_gpus_here, run

pytestmark = pytest.mark.ranks
_NO_GPU = pytest.mark.skipif(not count_gpus_here(), reason="no GPU: neither nvidia-smi nor the driver shows one")
_CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, _NO_GPU])
#: On the CPU the same functions run in the slow tier, which shows that they work, and nothing about GPUs.
on_each_device = pytest.mark.parametrize("device", [_CUDA, pytest.param("cpu", marks=pytest.mark.slow)])


@on_each_device
@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_keras_trains_as_one_process(backend: str, device: str, tmp_path: Path) -> None:
    pytest.importorskip("keras", reason="no GPU for Keras, which is not installed")
    pytest.importorskip(backend, reason=f"no GPU for {backend}, which is not installed")
    places = run(tmp_path, "gpu_keras:train", device, backend=backend)
    if device == "cuda" and "cpu" in places:
        pytest.skip(f"no GPU for {backend}: this build of it computes on the CPU")


@pytest.mark.gpu
@_NO_GPU
@pytest.mark.parametrize(
    "backend, way",
    [
        *(("torch", "fit"), ("jax", "fit")),
        *(("tensorflow", way) for way in ("fit", "eagerly", "tape", "tape in a graph")),
    ],
)
def test_no_gradient_visits_the_host(backend: str, way: str, tmp_path: Path) -> None:
    pytest.importorskip("keras", reason="no GPU for Keras, which is not installed")
    pytest.importorskip(backend, reason=f"no GPU for {backend}, which is not installed")
    ranks = run(tmp_path, "gpu_keras:count_copies", "cuda", backend=backend, traces=str(tmp_path), way=way)
    if any(found["place"] == "cpu" for found in ranks):
        pytest.skip(f"no GPU for {backend}: this build of it computes on the CPU")
    for found in ranks:
        check_no_gradient_is_copied(found)
