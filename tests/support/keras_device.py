"""Bodies for ranks that train with Keras on PyTorch, with process groups of torch on the CPU."""

from __future__ import annotations

from unittest import mock

from device_recording import check_records
from device_world import TORCH
from keras_training import ROWS, assert_alike, fit, fit_alone, joined, make_data, make_model, make_optimizer, mine

import hvdkit.keras as hvd
from hvdkit.torch.device.buckets import TorchBuckets

SGD = {"name": "SGD", "learning_rate": 0.05, "momentum": 0.9}


def train() -> None:
    """Through fit: several ranks do what one process does, with buckets that a process group has reduced."""
    with (
        joined(**TORCH, fusion_bytes=256),
        mock.patch.object(TorchBuckets, "begin", autospec=True, side_effect=TorchBuckets.begin) as begun,
    ):
        data, reference, model = make_data(), make_model(), make_model()
        fit_alone(reference, make_optimizer(SGD), data)
        fit(model, hvd.DistributedOptimizer(make_optimizer(SGD)), mine(data), rows=ROWS)
        assert_alike(model, reference, 1e-5)
        assert begun.call_count > 12


def record(folder: str) -> None:
    """Profile and timeline have the times of every step."""
    with joined(**TORCH):
        optimizer = hvd.DistributedOptimizer(make_optimizer(SGD))
        check_records(lambda: fit(make_model(), optimizer, mine(make_data()), rows=ROWS), 12, folder)
