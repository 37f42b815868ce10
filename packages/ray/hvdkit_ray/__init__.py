"""hvdkit on Ray: `hvdkit_ray.run(fn, num_workers=4)`, or `RayExecutor` in place of horovod.ray's.

Each rank is one actor. The ranks communicate over Gloo, and over shared memory inside a host. MPI is not used.
"""

from __future__ import annotations

from hvdkit_ray.executor import ElasticRayExecutor, RayExecutor, run
from hvdkit_ray.settings import RaySettings

__version__ = "0.1.0"

__all__ = ["ElasticRayExecutor", "RayExecutor", "RaySettings", "run"]
