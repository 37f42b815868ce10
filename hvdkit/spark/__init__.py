"""hvdkit on Spark: `hvdkit.spark.run(function, num_proc=4)` runs a function on ranks that are tasks of a barrier stage.

hvdkit.spark.keras and hvdkit.spark.torch have the estimators, hvdkit.spark.common.store their Store.
"""

from __future__ import annotations

from hvdkit.optional_import import optional_import

optional_import("cloudpickle", "spark")

from hvdkit.spark.elastic import run_elastic
from hvdkit.spark.runner import run

__all__ = ["run", "run_elastic"]
