"""The runtime of a process between init() and shutdown(): its world, settings, transport and process sets."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdkit.config import Config, read_config, read_environment
from hvdkit.engine.child_processes import mark_rank_process, refuse_child_of_rank, unmark_rank_process
from hvdkit.engine.cores import count_cores, fair_share, look_at_cores, warn_of_crowding
from hvdkit.engine.groups import ProcessSet
from hvdkit.engine.named.api import Engine
from hvdkit.engine.native import NativeProvider
from hvdkit.engine.observe.recording import RECORDER, RankFacts, read_node
from hvdkit.engine.observe.timeline import Timeline
from hvdkit.engine.observe.totals import send_totals
from hvdkit.engine.planned.progress import end_progress
from hvdkit.engine.process_sets import ProcessSets
from hvdkit.engine.provider import EngineProvider, find_provider
from hvdkit.engine.startup import Opener, arriving, enter_world
from hvdkit.errors import ConfigError, HvdkitError, NotInitializedError
from hvdkit.hook import install_exception_hook, uninstall_exception_hook
from hvdkit.log import configure_logging, logger
from hvdkit.setting import find_misspelt, read_arguments
from hvdkit.stacks import offer_all_stacks
from hvdkit.startup.garbage import freeze_objects
from hvdkit.startup.malloc import keep_freed_memory
from hvdkit.transport.api import Transport
from hvdkit.transport.arithmetic import Arithmetic
from hvdkit.transport.polling import refuse_calls
from hvdkit.transport.rank_subset import RankSubset
from hvdkit.transport.select import end_process, open_transport
from hvdkit.transport.small_collectives import allgather_object
from hvdkit.world import World, read_world, under_agent


@dataclass
class Runtime:
    """The state of an initialized process."""

    world: World
    config: Config
    transport: Transport
    sets: ProcessSets
    timeline: Timeline
    #: Number of cores that this rank has; see fair_share().
    cores: float
    provider: EngineProvider
    process: int = field(default_factory=os.getpid)
    #: Number of gradient plans that have been opened so far.
    plans: int = 0

    @property
    def may_change(self) -> bool:
        """May the world have other ranks after a restart?"""
        return self.config.elastic or self.provider.may_change

    def facts(self) -> RankFacts:
        """Return the facts about this rank for a recording."""
        world = self.world
        between = self.transport.between
        link = between.measured.link if between is not None and between.measured is not None else None
        return RankFacts(
            rank=world.rank,
            size=world.size,
            host=world.host,
            node=read_node(world.host),
            transport=self.transport.name,
            cores=self.cores,
            fusion_bytes=self.config.fusion_bytes,
            link=None if link is None else (link.latency_s, link.byte_s, link.message_s),
        )


_runtime: Runtime | None = None
#: See stay().
_stays = False
#: Calls init() with the arguments of the last call.
_again: Callable[[], Runtime] | None = None


def init(
    process_sets: Sequence[ProcessSet] = (),
    *,
    arithmetic: Arithmetic | None = None,
    framework: str = "",
    opener: Opener = open_transport,
    subset: RankSubset | None = None,
    **settings: Any,
) -> Runtime:
    """Enter the world that the launcher made. If that is done already, add process sets and warn of other settings.

    process_sets: sets to add at the start, besides the set of all ranks.
    arithmetic: adds and casts numbers; a framework's own is faster for narrow types. None for numpy's.
    framework: the framework that the engine must work with; "" for none in particular.
    opener: opens the transport of hvdkit's own engine; see open_world().
    subset: the processes of the job that make the world; only they call this. None for all.
    settings: fields of Config, which take precedence over the environment.
    Raises WorldError if the launcher and MPI disagree or a rank has started this process, ConfigError for a
    bad setting or a subset that cannot be a world, TransportError if the ranks cannot reach each other,
    MissingDependencyError if the engine is not installed, ValueError for process sets that cannot be made, see
    ProcessSets.add: this process is initialized then, as with Horovod, and none of the sets is added.
    """
    global _again
    if _runtime is not None:
        if subset is not None and subset.ranks != _runtime.world.job_ranks:
            job_ranks = _runtime.world.job_ranks
            raise ConfigError(
                f"init() was called with the ranks {list(subset.ranks)} of the job, but hvdkit is already initialized "
                f"with {f'the ranks {list(job_ranks)}' if job_ranks else 'all ranks'}. Call hvd.shutdown() first, or "
                "use a process set."
            )
        _warn_of_ignored(settings, _runtime.config)
        known = _runtime.sets.ids_and_ranks().values()
        _add_sets(_runtime, [one for one in process_sets if one.ranks is not None and one.ranks not in known])
        return _runtime
    config = read_config(**settings)
    if subset is not None and config.elastic:
        raise ConfigError(
            f"init(comm=...) selects the ranks {list(subset.ranks)} of the job, but elastic training needs the whole "
            "job, because any rank may be replaced. Leave out comm, or the options that select elastic training "
            "(--elastic, --min-np, --max-np)."
        )
    again = functools.partial(
        init, arithmetic=arithmetic, framework=framework, opener=opener, subset=subset, **settings
    )
    _again = functools.partial(again, process_sets)
    refused: ValueError | None = None
    keep_freed_memory(config.malloc_keep_bytes)
    if config.gc_freeze:
        freeze_objects()
    offer_all_stacks()

    def join() -> Runtime:
        nonlocal refused
        launched = read_world()
        refuse_child_of_rank(launched)
        if config.elastic:  # the ranks that have admitted this rank would wait for it
            install_exception_hook(launched.rank, launched.host, None)
        with arriving(config, launched, subset=subset.ranks if subset is not None else ()):
            joined = _join(config, launched.launcher, arithmetic, framework, opener, subset)
            try:
                _add_sets(joined, process_sets)
            except ValueError as error:  # the same on all ranks, because all ranks pass the same sets
                refused = error
            return joined

    made = enter_world(join, functools.partial(shutdown, idle=False))
    mark_rank_process(made.world)
    if config.profile and not RECORDER.on:
        from hvdkit.engine.observe.record_sender import RecordSender

        RECORDER.start()
        RecordSender(RECORDER, config.profile, made.facts)
    if config.metrics_s and config.launcher_channel:
        send_totals(config.launcher_channel, config.metrics_s)
    if refused is not None:
        _again = again
        raise refused
    return made


def _add_sets(joined: Runtime, process_sets: Sequence[ProcessSet]) -> None:
    """Add process sets; collective. Raises ValueError, with none of them added, if one cannot be made."""
    added: list[ProcessSet] = []
    try:
        for process_set in sorted(process_sets, key=lambda one: one.mpi_comm is None):  # numbered as in Horovod
            joined.sets.add(process_set)
            added.append(process_set)
    except ValueError:
        for process_set in added:
            joined.sets.remove(process_set)
        raise


def _warn_of_ignored(settings: Mapping[str, Any], config: Config) -> None:
    """Warn of settings in a repeated init() that differ from those of the first."""
    for name, value in read_arguments(settings, vars(config)).items():
        if value != getattr(config, name):
            logger.warning(
                "init(%s=%r) is ignored: hvdkit is already initialized, with %s=%r. Give it to the first init(), or "
                "call hvd.shutdown() before.",
                *(name, value, name, getattr(config, name)),
            )


def _join(
    config: Config,
    launcher: str,
    arithmetic: Arithmetic | None,
    framework: str,
    opener: Opener,
    subset: RankSubset | None,
) -> Runtime:
    """Connect to the other ranks and make the Runtime that init() returns; collective."""
    global _runtime
    timeline = Timeline()
    provider, why = find_provider(config.engine, launcher, framework, lambda: NativeProvider(config, timeline))
    world, transport, abort = provider.open(config, framework, subset, opener)
    if arithmetic is not None:
        transport.arithmetic = arithmetic
    configure_logging(config.log_level, world.label)
    install_exception_hook(world.label, world.host, abort)
    logger.info("%d ranks on %d hosts, transport %s", world.size, world.cross_size or 1, transport.name)
    logger.info("engine %s: %s", provider.name, why)
    if world.rank == 0:
        for variable, setting in find_misspelt(read_environment(), vars(config)).items():
            logger.warning("%s is not a setting of hvdkit and is ignored. Did you mean %s?", variable, setting)
    if not provider.native and (config.tuned or config.autotune_save):
        logger.warning(
            "%s, the engine of this job, neither reads nor writes tuned settings: tuned and autotune_save are ignored.",
            provider.title,
        )
    if provider.native and config.timeline not in ("", "DYNAMIC") and world.rank == 0:
        timeline.start(config.timeline)  # DYNAMIC is Horovod's word for "start_timeline() will be called"
    # Other engines gather nothing yet: a script may set TensorFlow's GPU until Horovod's core has done an operation.
    if provider.native:
        try:
            seen = allgather_object(transport, look_at_cores(world.host))
        except BaseException:
            transport.close(idle=False)
            raise
        cores = fair_share(seen, world.rank)
        if not under_agent():  # hvdrun checks this before it starts the ranks
            warn_of_crowding(seen, world.rank)
    else:
        seen, cores = [look_at_cores("")] * world.size, count_cores() / (world.local_size or 1)

    def open_engine(group: Transport, ranks: Sequence[int]) -> Engine:
        hosts = [seen[rank].host for rank in ranks]
        job_ranks = [world.job_ranks[rank] for rank in ranks] if world.job_ranks else None
        return provider.open_engine(group, hosts=hosts, ranks=ranks, job_ranks=job_ranks)

    sets = ProcessSets(transport, open_engine, world.job_ranks, eager=not provider.native)
    _runtime = Runtime(world, config, transport, sets, timeline, cores, provider)
    sets.open_world()
    for enter in _entering:
        enter()
    return _runtime


def restart(change: Callable[[], object] | None = None, *, idle: bool = True) -> None:
    """Leave the world and enter the next world, which may have other ranks; all ranks of the next world do so.

    change: called after leaving and before entering. idle: see shutdown().
    """
    if _again is None:
        raise NotInitializedError("restart()")
    place = _runtime.world if _runtime is not None else None
    shutdown(idle=idle)
    if place is not None:
        install_exception_hook(place.label, place.host, None)  # the other ranks wait for this rank, wherever it fails
    if change is not None:
        change()
    _again()


def shutdown(*, idle: bool = True) -> None:
    """Leave the world; collective. init() may be called again.

    Does nothing in a process that is not initialized, or in a forked child of an initialized process.

    idle: False if ranks are lost and no message can reach the others; the call is not collective then.
    """
    global _runtime
    if _runtime is None or _stays or _runtime.process != os.getpid():
        return
    runtime, _runtime = _runtime, None
    unmark_rank_process()
    _say_if_untuned(runtime)
    uninstall_exception_hook()
    if not idle:  # notify the ranks that wait for this rank
        runtime.sets.leave_transports()
        runtime.transport.leave()
    for leave in _leaving:
        leave()
    runtime.timeline.stop()
    idle = runtime.sets.close(idle=idle)
    runtime.transport.close(idle=idle)
    runtime.provider.close()


@contextlib.contextmanager
def stay() -> Iterator[None]:
    """Make shutdown() do nothing inside this context, because the world of this process is new."""
    global _stays
    _stays = True
    try:
        yield
    finally:
        _stays = False


def _say_if_untuned(runtime: Runtime) -> None:
    config = runtime.config
    if (config.searches or config.tuned) and not runtime.plans and runtime.provider.native and not runtime.world.rank:
        logger.warning(
            "autotune: nothing was tuned, because no gradients were reduced in buckets. Autotuning needs several "
            "ranks, and an optimizer or gradient tape with op=Average or op=Sum. It does not work with Adasum, "
            "asynchronous training, or direct calls of allreduce()."
        )


def is_initialized() -> bool:
    """Is this process initialized?"""
    return _runtime is not None


def runtime(call: str) -> Runtime:
    """Return the Runtime that init() made. call: the user's call, named in the NotInitializedError before init()."""
    if _runtime is None:
        raise NotInitializedError(call)
    return _runtime


_EXIT_S = 30.0  # for the other ranks to take part in reductions that this rank's devices are doing when its script ends

_device_waits: list[Callable[[float], None]] = []
#: Register a function that every settle() calls with its time limit in seconds.
on_wait_for_devices = _device_waits.append


def wait_for_devices(timeout_s: float = math.inf) -> None:
    """Wait for asynchronous reductions on devices, before their results are kept; not collective.

    Raises RankLostError or TransportError if a reduction has failed: the results are invalid then.
    """
    for wait in _device_waits:
        wait(timeout_s)


_entering: list[Callable[[], None]] = []
#: Register a function that every init() calls at its end, for objects that outlive shutdown(). It must make no
#: collective calls.
on_init = _entering.append
_leaving: list[Callable[[], None]] = []
#: Register a function that every shutdown() calls at its beginning; it may make collective calls.
on_shutdown = _leaving.append


def follow(objects: weakref.WeakSet[Any], *, enter: bool = True) -> None:
    """Have every shutdown() call close() of these objects and, with `enter`, every init() call their enter().

    They are called in the order of their `number`, which is the same on all ranks for the same object.
    """

    def in_use() -> list[Any]:
        # An unreachable object that is not collected yet on some ranks would make those ranks wait for the others.
        if objects:
            gc.collect()
        return sorted(objects, key=lambda each: each.number)

    def close_all() -> None:
        for each in in_use():
            each.close()

    def enter_all() -> None:
        for each in in_use():
            each.enter()

    on_shutdown(close_all)
    if enter:
        on_init(enter_all)


def _at_exit() -> None:
    # Not shutdown(): that is collective, and a rank that ends early must not wait for the others here.
    if _runtime is not None and _runtime.process == os.getpid():
        _say_if_untuned(_runtime)
        with contextlib.suppress(HvdkitError):  # the other ranks need this rank in these reductions
            wait_for_devices(_EXIT_S)
        _runtime.timeline.stop()
        end_progress()
        _runtime.sets.leave("has reached the end of its script")
        _runtime.transport.leave()
    end_process()


atexit.register(_at_exit)


def _refuse_fork() -> None:
    """Refuse collectives in a forked child of a rank: it would change the rank's memory and read its connections."""
    if _runtime is not None and _runtime.world.size > 1:
        refuse_calls(
            f"Process {os.getpid()} was forked from rank {_runtime.world.rank} (process {_runtime.process}) after "
            "init(), and cannot communicate with other ranks. Call collectives, and train, in the rank itself."
        )


os.register_at_fork(after_in_child=_refuse_fork)
