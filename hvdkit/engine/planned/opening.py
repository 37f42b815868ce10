"""Opening what reduces the gradients of some tensors: a reducer with the settings that this job has for them."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.engine.groups import Group
from hvdkit.engine.planned.plan import TensorSpec
from hvdkit.engine.planned.progress import has_spare_core
from hvdkit.engine.planned.reducer import BucketReducer, Context, Statistics
from hvdkit.engine.planned.source import GradientSource
from hvdkit.engine.request import ReduceOptions
from hvdkit.engine.runtime import Runtime
from hvdkit.engine.tuning.start import choose_settings, start_tuner


def open_reducer(
    made: Runtime,
    group: Group,
    name: str,
    tensors: Sequence[TensorSpec],
    source: GradientSource,
    *,
    options: ReduceOptions,
    compute_threads: int,
    statistics: Statistics,
) -> BucketReducer:
    """Open the plan of these tensors on all ranks of the group, together; see BucketReducer.

    compute_threads: that this rank computes with; 0 for as many as it has cores.
    Raises PlanMismatchError where the ranks' tensors differ, ConfigError for a file of tuned settings that cannot be
    read.
    """
    made.plans += 1
    settings, key = choose_settings(made, group, name, tensors, options)
    spare_core = has_spare_core(made.cores, compute_threads)
    context = Context(group.transport, name, group.engine, made.timeline, spare_core)
    reducer = BucketReducer(context, tensors, source, options=options, settings=settings, statistics=statistics)
    if key is not None:
        start_tuner(reducer, made.config, settings, key, options)
    return reducer
