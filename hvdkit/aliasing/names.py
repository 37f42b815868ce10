"""Map Horovod's modules to hvdkit's, and list those that hvdkit does not have. Names only; nothing is loaded."""

from __future__ import annotations

#: Horovod's version that scripts read.
VERSION = "0.28.1"

_SAME = """
common common.elastic common.exceptions common.process_sets common.util
keras keras.callbacks keras.elastic
tensorflow tensorflow.compression tensorflow.elastic tensorflow.functions tensorflow.mpi_ops tensorflow.sync_batch_norm
tensorflow.keras tensorflow.keras.callbacks tensorflow.keras.elastic
tensorflow.data tensorflow.data.compute_service tensorflow.data.compute_worker
torch torch.compression torch.elastic torch.elastic.sampler torch.elastic.state torch.functions torch.mpi_ops
torch.optimizer torch.sync_batch_norm
"""
#: Modules of Horovod's that are in other packages of this project: hvdkit_ray, hvdkit_spark.
_IN_PACKAGES = """
ray
spark spark.common spark.common.backend spark.common.store spark.runner
spark.keras spark.keras.estimator spark.torch spark.torch.estimator
"""

#: Horovod's module -> hvdkit's.
MODULES = {f"horovod.{name}": f"hvdkit.{name}" for name in _SAME.split()} | {
    **{f"horovod.{name}": f"hvdkit_{name}" for name in _IN_PACKAGES.split()},
    "horovod.runner": "hvdkit.launch.run_api",
    "horovod.ray.runner": "hvdkit_ray.executor",
    "horovod.ray.elastic": "hvdkit_ray.executor",
}

#: Module of Horovod's that hvdkit does not have -> the alternative. It applies to submodules too.
REFUSED = {
    "horovod.mxnet": "MXNet is retired. Port the model to PyTorch or Keras, which hvdkit supports",
    "horovod.ray.elastic_v2": "Use horovod.ray.RayExecutor(min_workers=..., max_workers=...)",
    "horovod.ray.ray_logger": "Return the values from the function, or send them to an actor of your own",
    "horovod.spark.lightning": "Call Lightning's Trainer in a function, and start it by horovod.spark.run()",
    "horovod.spark.tensorflow": "Use tf.data on each rank, with dataset.shard(hvd.size(), hvd.rank()) and prefetch()",
    "horovod.data": "Use torch's DataLoader with num_workers, or tf.data's prefetch; both also load in the background",
    "horovod.runner.launch": "Use the command hvdrun, or horovod.run(function, np=2)",
    "horovod.runner.elastic": "Start elastic jobs with hvdrun --elastic",
    "horovod._keras": "It is internal to Horovod; use the public names of horovod.keras or horovod.tensorflow.keras",
    "horovod.common.basics": "Use rank(), size(), init() and similar functions of horovod.torch or horovod.tensorflow",
}

_DERIVED = (
    "it is the class behind Horovod's DistributedOptimizer, and hvdkit has none whose methods could be replaced. Use "
    "DistributedOptimizer(optimizer, strategy=...) with a subclass of hvdkit.engine.api.Strategy"
)

#: (module, name) of Horovod's functions and classes that hvdkit does not have -> the error message of a call.
CALLS = {
    ("horovod.tensorflow", "_DistributedOptimizer"): _DERIVED,
    ("horovod.tensorflow", "_DistributedAdasumOptimizer"): _DERIVED,
    ("horovod.tensorflow", "LocalGradientAggregationHelper"): (
        "it is internal to Horovod; use DistributedOptimizer(optimizer, backward_passes_per_step=n)"
    ),
}


def refusal(name: str) -> str:
    """Return why a module of Horovod's cannot be imported, and the alternative; "" for a module that hvdkit has."""
    if name in MODULES or name in ("horovod", "horovod.run"):
        return ""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        way = REFUSED.get(".".join(parts[:end]))
        if way:
            return f"{name} is not in hvdkit, which replaces Horovod in this process. {way}."
    return (
        f"{name} is not in hvdkit, which replaces Horovod in this process. hvdkit has horovod.torch, "
        f"horovod.tensorflow, horovod.keras, horovod.tensorflow.keras, horovod.ray and horovod.spark."
    )
