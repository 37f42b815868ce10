"""Keras's own distribution, `keras.distribution`, among the ranks of a job: Keras 3 on JAX."""

from __future__ import annotations

import importlib
import re
from typing import Any

import keras

from hvdkit.config import read_environment
from hvdkit.engine import runtime as engine
from hvdkit.engine.coordinator_address import agree_on_address, find_proxy
from hvdkit.engine.job_objects import allgather_object
from hvdkit.errors import ConfigError
from hvdkit.keras.basics import init

_ADDRESSES = "KERAS_DISTRIBUTION_JOB_ADDRESSES"
_SHOWN = 20


def initialize() -> None:
    """Start Keras's distribution, so that `keras.distribution` sees the devices of all ranks; collective.

    Calls hvd.init() if necessary, and `keras.distribution.initialize` with rank 0's address, the number of ranks and
    this rank. The address is that of KERAS_DISTRIBUTION_JOB_ADDRESSES, which hvdrun sets; else the ranks agree on one.
    Call it before any computation with JAX. With one rank it starts nothing.
    Raises ConfigError, on all ranks, for another backend than JAX, an initialized JAX, an elastic job, and a proxy
    between the ranks; TransportError if no address of rank 0 is reachable from all hosts.
    """
    backend = keras.backend.backend()
    if backend != "jax":
        raise ConfigError(
            f"hvd.distribution.initialize() needs Keras on JAX, and the backend is {backend!r}, for which Keras has no "
            "distribution of several processes. Set KERAS_BACKEND=jax before keras is imported, or train with "
            "hvd.DistributedOptimizer, which works on every backend."
        )
    if not engine.is_initialized():
        init()
    runtime = engine.runtime("distribution.initialize()")
    world, environ = runtime.world, read_environment()
    if runtime.config.elastic:
        raise ConfigError(
            "hvd.distribution.initialize() cannot be used in an elastic job: JAX's processes cannot be replaced. Start "
            "the job without --min-np, --max-np and host discovery, and save checkpoints."
        )
    _refuse_a_jax_at_work()
    if world.size == 1:
        return
    # hvdrun's address is that of the whole job's rank 0; it does not know worlds that are a part of the job.
    address = environ.get(_ADDRESSES, "") if not world.job_ranks else ""
    address = address or agree_on_address(world.rank, environ)
    proxies = allgather_object(find_proxy(environ, address.partition(",")[0]))
    if any(proxies):
        host = address.rpartition(":")[0].strip("[]")
        raise ConfigError(
            f"{next(filter(None, proxies))} would send the connection to JAX's coordinator at {address} through a "
            f"proxy, where JAX hangs or aborts. Run: export no_grpc_proxy={host}  (or start the ranks with hvdrun, "
            "which sets it)"
        )
    keras.distribution.initialize(address, world.size, world.rank)


def check_layout(model: Any) -> None:
    """Check that each name in the LayoutMap of the current ModelParallel matches a variable of the model.

    model: built. Keras treats a name as a regular expression for the whole path of a variable, and silently ignores a
    name without a match: every rank would then hold all of that variable.
    Raises ConfigError for such names, with the existing paths, and if the current distribution has no LayoutMap.
    """
    current = keras.distribution.distribution()
    if not isinstance(current, keras.distribution.ModelParallel):
        raise ConfigError(
            f"check_layout() looks at the LayoutMap of a ModelParallel, and the current distribution is {current!r}. "
            "Call keras.distribution.set_distribution(ModelParallel(layout_map=...)) before the model is made."
        )
    paths = [variable.path for variable in model.variables]
    names = list(current._layout_map)
    unused = [name for name in names if not any(name == path or re.fullmatch(name, path) for path in paths)]
    if unused:
        raise ConfigError(
            f"The LayoutMap has names that match no variable: {', '.join(map(repr, unused))}. The variables are "
            f"{', '.join(paths[:_SHOWN])}{', ...' * (len(paths) > _SHOWN)}. A name has to match the whole path: "
            f"write {'.*' + unused[0]!r}, for example."
        )


def _refuse_a_jax_at_work() -> None:
    """Raise ConfigError on all ranks if one has used JAX: the others would wait minutes for it. Collective."""
    # JAX raises an error only on the rank that has used it, and has no public function to query it.
    at_work = importlib.import_module("jax._src.xla_bridge").backends_are_initialized()
    ranks = [rank for rank, used in enumerate(allgather_object(at_work)) if used]
    if ranks:
        raise ConfigError(
            f"JAX has been used before hvd.distribution.initialize() on rank{'s' * (len(ranks) > 1)} "
            f"{', '.join(map(str, ranks))}: its devices are those of one process from then on. Call it right after the "
            "imports, before a model, a random seed, jax.devices() or any computation; and call it once."
        )
