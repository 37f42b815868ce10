"""Opening a bucket reducer for the gradients of an optimizer, with the settings that this job has for them."""

from __future__ import annotations

from hvdkit.engine import runtime
from hvdkit.engine.groups import Group
from hvdkit.engine.planned.progress import has_spare_core
from hvdkit.engine.planned.reducer import BucketReducer, Context, Statistics
from hvdkit.engine.request import ReduceOptions
from hvdkit.engine.strategy import Parameters
from hvdkit.engine.tuning.start import choose_settings, start_tuner


def open_reducer(
    group: Group, parameters: Parameters, *, options: ReduceOptions, statistics: Statistics
) -> BucketReducer:
    """Open the plan of the parameters' gradients on all ranks of the group, together; see BucketReducer.

    statistics: added to. Raises PlanMismatchError where the ranks' tensors differ, ConfigError for a file of tuned
    settings that cannot be read.
    """
    current, name, tensors = runtime.runtime("a reduction of gradients"), parameters.name, parameters.tensors
    current.plans += 1
    settings, key = choose_settings(current, group, name, tensors, options)
    spare_core = has_spare_core(current.cores, parameters.compute_threads)
    context = Context(group.transport, name, group.engine, current.timeline, spare_core)
    source = parameters.gradients
    reducer = BucketReducer(context, tensors, source, options=options, settings=settings, statistics=statistics)
    if key is not None:
        start_tuner(reducer, current.config, settings, key, options)
    return reducer
