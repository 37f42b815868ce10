"""Selects the first settings of a plan: the user's, those in a file of tuned settings, or a search's first point."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from hvdkit.config import Config
from hvdkit.engine.groups import Group
from hvdkit.engine.planned.agreement import check_tensors
from hvdkit.engine.planned.plan import TensorSpec, describe_plan, plan_digest
from hvdkit.engine.planned.reducer import BucketReducer
from hvdkit.engine.planned.settings import PlanSettings, settings_of
from hvdkit.engine.request import ReduceOptions
from hvdkit.engine.runtime import Runtime
from hvdkit.engine.tuning.saved import Entry, Key, find_entry, read_entries, save_entry
from hvdkit.engine.tuning.search import Outcome, fixed_fields, plan_axes
from hvdkit.engine.tuning.tuner import STEPS_A_TRIAL, Record, Tuner
from hvdkit.errors import ConfigError
from hvdkit.log import logger
from hvdkit.transport.small_collectives import allgather_object


def choose_settings(
    current: Runtime, group: Group, name: str, tensors: Sequence[TensorSpec], options: ReduceOptions
) -> tuple[PlanSettings, Key | None]:
    """Select the settings to open a plan with; collective. Returns them, and the key for saving a search's outcome.

    The key is None if no search follows.
    current: the runtime.
    group: the ranks of the plan.
    name: of the plan.
    tensors: of the plan.
    options: of the reduction.
    Raises PlanMismatchError if the ranks' tensors differ, ConfigError for a file of settings that cannot be read.
    """
    config = current.config
    first = settings_of(config)
    if not (config.searches or config.tuned) or not current.provider.native or group.transport.size == 1:
        return first, None
    how = f"autotune {config.searches} in {config.autotune_steps} steps, tuned {bool(config.tuned)}, {options}"
    check_tensors(group.transport, tensors, how, first.fusion_bytes)
    if any(not isinstance(options.wire_for_tensor(tensor), str) for tensor in tensors):
        if group.transport.rank == 0:
            logger.warning(
                "autotune: %s is not tuned, because its compression keeps what it has not sent yet for each bucket.",
                name,
            )
        return first, None
    hosts = allgather_object(group.transport, current.world.host)
    plan = plan_digest(describe_plan(tensors, 0, str(options))).hex()
    counts = tuple(hosts.count(host) for host in dict.fromkeys(hosts))
    key = Key(plan, counts, group.transport.name, current.cores)
    saved = _read_saved(group, config, key) if config.tuned else None
    if saved is not None:
        return dataclasses.replace(saved, **{field: getattr(config, field) for field in fixed_fields(config)}), None
    return first, key if config.searches else None


def start_tuner(reducer: BucketReducer, config: Config, first: PlanSettings, key: Key, options: ReduceOptions) -> None:
    """Begin to search the settings of a plan from its next round on; collective.

    reducer: of the plan.
    config: the settings of this process.
    first: the settings with which the plan is open.
    key: for saving the outcome.
    options: of the reduction.
    """
    transport = reducer.context.transport
    threads = allgather_object(transport, first.threaded(reducer.context.spare_core))
    if all(threads) or not any(threads):
        first = dataclasses.replace(first, progress="thread" if all(threads) else "inline")
    record: Record | None = None
    if transport.rank == 0:
        record = Record(reducer.context.name, config.autotune_log, functools.partial(_save, config.autotune_save, key))
    Tuner(
        reducer,
        first,
        plan_axes(first, config, _algorithms(reducer, first, options)),
        trials=max(1, config.autotune_steps // STEPS_A_TRIAL),
        directory=config.shared_directory,
        record=record,
    )


def _algorithms(reducer: BucketReducer, settings: PlanSettings, options: ReduceOptions) -> Sequence[str]:
    """Return the algorithms between hosts to try; collective. Uses rank 0's, as ranks without a shard send nothing."""
    transport = reducer.context.transport
    between = transport.between
    wires = {(options.wire_for_tensor(tensor), tensor.dtype) for tensor in reducer.plan.tensors}
    dtypes = [dtype if wire == "none" else str(wire) for wire, dtype in wires]
    sent = settings.fusion_bytes // transport.shards
    mine = ["auto"] if between is None else between.find_candidates(dtypes, sent)
    algorithms: list[str] = allgather_object(transport, mine)[0]
    return algorithms


def _read_saved(group: Group, config: Config, key: Key) -> PlanSettings | None:
    """Return this plan's settings in rank 0's file, on all ranks, which may have no access to the file. Collective."""
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


def _save(path: str, key: Key, outcome: Outcome) -> None:
    if not path:
        return
    try:
        save_entry(path, Entry(key, outcome.best.point, outcome.first.median_s, outcome.best.median_s))
    except (OSError, ConfigError) as error:
        logger.warning("The tuned settings cannot be saved in %s: %s", path, error)
    else:
        logger.warning("Tuned settings were saved in %s. Use them with hvdrun --tuned %s.", path, path)
