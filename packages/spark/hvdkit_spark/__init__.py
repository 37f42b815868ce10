"""hvdkit on Spark: `hvdkit_spark.run(function, num_proc=4)` runs a function on ranks that are tasks of a barrier stage.

hvdkit_spark.keras and hvdkit_spark.torch have the estimators, hvdkit_spark.common.store their Store.
"""

from __future__ import annotations

from hvdkit.optional_import import optional_import

optional_import("cloudpickle")

from hvdkit_spark.elastic import run_elastic
from hvdkit_spark.runner import run

__version__ = "0.1.0"

__all__ = ["run", "run_elastic"]
