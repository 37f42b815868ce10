"""Bodies for ranks that train with Keras and divide the optimizer's state."""

from __future__ import annotations

from typing import Any

import numpy as np
from keras_training import (
    ROWS,
    assert_alike,
    fit,
    fit_alone,
    joined,
    make_data,
    make_model,
    make_optimizer,
    mine,
)

import hvdkit.keras as hvd

#: With the options that go through norms, names and shared numbers.
SPECS: list[dict[str, Any]] = [
    {"name": "SGD", "learning_rate": 0.05, "momentum": 0.9, "nesterov": True, "clipnorm": 0.05},
    {"name": "Adam", "learning_rate": 0.01, "amsgrad": True, "global_clipnorm": 0.05},
    {"name": "AdamW", "learning_rate": 0.01, "weight_decay": 0.1},
    {"name": "Adagrad", "learning_rate": 0.05, "clipvalue": 0.01},
    {"name": "RMSprop", "learning_rate": 0.01, "momentum": 0.5, "centered": True},
    {"name": "Lion", "learning_rate": 0.001},
    {"name": "Nadam", "learning_rate": 0.01, "loss_scale_factor": 16.0},
    {"name": "Adamax", "learning_rate": 0.01},
    {"name": "Adadelta", "learning_rate": 0.5},
    {"name": "Ftrl", "learning_rate": 0.1},
    {"name": "AdamW", "learning_rate": 0.01, "gradient_accumulation_steps": 2, "global_clipnorm": 0.05},
]


def train(specs: list[int], shard: str = "optimizer", fusion_bytes: int = 600) -> None:
    """Several ranks do what one process does. fusion_bytes: several buckets, whose shards cut variables."""
    with joined(fusion_bytes=fusion_bytes, check_replicas=2):
        for number in specs:
            spec = SPECS[number]
            data, alone, model = make_data(batches=4), make_optimizer(spec), make_model(kernel_constraint="max_norm")
            reference = make_model(kernel_constraint="max_norm")
            wrapped = make_optimizer(spec)
            for optimizer in (alone, wrapped):
                if spec["name"] == "AdamW":
                    optimizer.exclude_from_weight_decay(var_names=["bias"])
            fit_alone(reference, alone, data)
            if hvd.rank() > 0:
                model.set_weights([3 * weight for weight in model.get_weights()])
            optimizer = hvd.DistributedOptimizer(wrapped, shard=shard)
            start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
            fit(model, optimizer, mine(data), rows=ROWS, callbacks=[start])
            assert_alike(model, reference, 1e-6 if spec["name"] != "Lion" else 1e-5)
            assert int(optimizer.iterations) == int(alone.iterations)
            _assert_divided(optimizer, alone)


def _assert_divided(optimizer: Any, alone: Any) -> None:
    held = sum(int(np.prod(one.shape)) for one in optimizer.variables)
    whole = sum(int(np.prod(one.shape)) for one in alone.variables)
    slots = len({one.name.split("_")[-1] for one in alone.variables}) + 4
    assert held <= whole / hvd.size() + slots + 0.05 * whole, (held, whole)
    assert sum(hvd.allgather_object(held)) >= whole
