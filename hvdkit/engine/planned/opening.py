"""Opening what reduces the gradients of some tensors: with the settings asked for, found before, or to be found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from hvdkit.config import Config
from hvdkit.engine.groups import MemberGroup
from hvdkit.engine.objects import allgather_object
from hvdkit.engine.planned.agreement import check_agreement
from hvdkit.engine.planned.plan import Bucket, TensorSpec, describe_plan, plan_digest
from hvdkit.engine.planned.progress import wants_thread
from hvdkit.engine.planned.reducer import BucketReducer, GradientSource, Statistics
from hvdkit.engine.planned.settings import PlanSettings, settings_of
from hvdkit.engine.request import ReduceOptions
from hvdkit.engine.runtime import Runtime
from hvdkit.engine.tuning.axes import fixed_fields, plan_axes
from hvdkit.engine.tuning.record import Record
from hvdkit.engine.tuning.saved import Entry, Key, find_entry, read_entries, save_entry
from hvdkit.engine.tuning.search import Outcome
from hvdkit.engine.tuning.tuned import STEPS_A_TRIAL, TunedReducer
from hvdkit.errors import ConfigError
from hvdkit.log import logger


class Reduction(Protocol):
    """A plan that is gone through again and again; see BucketReducer."""

    @property
    def arrived(self) -> Callable[[int], None]: ...  # noqa: D102
    @property
    def started(self) -> Callable[[int], bool]: ...  # noqa: D102
    def drain_and_close(self) -> None: ...  # noqa: D102
    @property
    def buckets(self) -> tuple[Bucket, ...]: ...  # noqa: D102
    @property
    def under_way(self) -> bool: ...  # noqa: D102
    def finish(self) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


def open_reduction(
    made: Runtime,
    group: MemberGroup,
    name: str,
    tensors: Sequence[TensorSpec],
    gradients: GradientSource,
    *,
    options: ReduceOptions,
    compute_threads: int,
    statistics: Statistics,
) -> Reduction:
    """Open the plan of these tensors on all ranks of the group, together; see BucketReducer.

    compute_threads: that this rank computes with; 0 for as many as it has cores.
    Raises ConfigError for a file of tuned settings that cannot be read.
    """
    config = made.config

    def reopen(settings: PlanSettings) -> BucketReducer:
        gradients.on_replan()
        return BucketReducer(
            group.transport,
            tensors,
            gradients,
            options=options,
            limit_bytes=settings.fusion_bytes,
            depth=settings.buckets_in_flight,
            chunk_bytes=settings.chunk_bytes,
            algorithm=settings.algorithm,
            threaded=wants_thread(settings.progress, made.cores, compute_threads),
            statistics=statistics,
            engine=group.engine,
            name=name,
        )

    made.plans += 1
    first = settings_of(config)
    if not (config.searches or config.tuned) or made.horovod is not None or group.transport.size == 1:
        return reopen(first)
    how = f"autotune {config.searches} in {config.autotune_steps} steps, tuned {bool(config.tuned)}, {options}"
    check_agreement(group.transport, describe_plan(tensors, first.fusion_bytes, how))
    if any(not isinstance(options.wire_for_tensor(tensor), str) for tensor in tensors):
        _tell(group, "%s keeps its settings: what a coding has not sent yet belongs to a bucket.", name)
        return reopen(first)
    key = Key(
        plan_digest(describe_plan(tensors, 0, str(options))).hex(),
        _ranks_of_hosts(group, made.world.host),
        group.transport.name,
        made.cores,
    )
    known = _look_up(group, config, key)
    if known is not None:
        return reopen(_keep_asked_for(known, config))
    if not config.searches:
        return reopen(first)
    threads = allgather_object(group.transport, wants_thread(config.progress, made.cores, compute_threads))
    if all(threads) or not any(threads):
        first = dataclasses.replace(first, progress="thread" if all(threads) else "inline")
    leads = group.transport.rank == 0

    def found(outcome: Outcome) -> None:
        if leads and config.autotune_save:
            _save(config.autotune_save, key, outcome)

    return TunedReducer(
        group,
        name,
        reopen,
        first,
        plan_axes(first, config, _algorithms(group, first, tensors, options)),
        trials=max(1, config.autotune_steps // STEPS_A_TRIAL),
        directory=config.shared_directory,
        record=Record(name, config.autotune_log) if leads else None,
        found=found,
    )


def _algorithms(
    group: MemberGroup, settings: PlanSettings, tensors: Sequence[TensorSpec], options: ReduceOptions
) -> Sequence[str]:
    """What may be tried between hosts; rank 0's word, since ranks that reduce no shard know of no wire. Collective."""
    between = group.transport.between
    wires = {(options.wire_for_tensor(tensor), tensor.dtype) for tensor in tensors}
    dtypes = [dtype if wire == "none" else str(wire) for wire, dtype in wires]
    sent = settings.fusion_bytes // group.transport.local_ranks
    mine = ["auto"] if between is None else between.worth_trying(dtypes, sent)
    found: list[str] = allgather_object(group.transport, mine)[0]
    return found


def _tell(group: MemberGroup, text: str, *values: object) -> None:
    if group.transport.rank == 0:
        logger.warning("autotune: " + text, *values)


def _ranks_of_hosts(group: MemberGroup, host: str) -> tuple[int, ...]:
    hosts = allgather_object(group.transport, host)
    return tuple(hosts.count(one) for one in dict.fromkeys(hosts))


def _look_up(group: MemberGroup, config: Config, key: Key) -> PlanSettings | None:
    """What the first rank's file says of this plan, on all ranks, which may not see it. Collective."""
    if not config.tuned:
        return None
    settings: PlanSettings | None = None
    problem = ""
    if group.transport.rank == 0:
        try:
            entry, why = find_entry(read_entries(config.tuned), key)
        except ConfigError as error:
            problem = str(error)
        else:
            settings = entry.settings if entry is not None else None
            if entry is None:
                logger.warning("The tuned settings in %s are not used: %s.", config.tuned, why)
            else:
                logger.info("Tuned settings from %s: %s.", config.tuned, settings)
    settings, problem = allgather_object(group.transport, (settings, problem))[0]
    if problem:
        raise ConfigError(problem)
    return settings


def _keep_asked_for(tuned: PlanSettings, config: Config) -> PlanSettings:
    """Tuned settings, but for those that the user has set."""
    return dataclasses.replace(tuned, **{name: getattr(config, name) for name in fixed_fields(config)})


def _save(path: str, key: Key, outcome: Outcome) -> None:
    try:
        save_entry(path, Entry(key, outcome.best.point, outcome.first.median_s, outcome.best.median_s))
    except (OSError, ConfigError) as error:
        logger.warning("The tuned settings cannot be saved in %s: %s", path, error)
    else:
        logger.warning("The tuned settings are in %s: hvdrun --tuned %s takes them.", path, path)
