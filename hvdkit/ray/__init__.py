"""hvdkit on Ray: `hvdkit.ray.run(fn, num_workers=4)`, or `RayExecutor` in place of horovod.ray's.

Each rank is one actor. The ranks communicate over Gloo, and over shared memory inside a host. MPI is not used.
"""

from __future__ import annotations

from hvdkit.ray.executor import ElasticRayExecutor, RayExecutor, run
from hvdkit.ray.settings import Settings

__all__ = ["ElasticRayExecutor", "RayExecutor", "Settings", "run"]
