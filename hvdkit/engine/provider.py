"""Selection of the engine: hvdkit's own, or an engine that a package adds by an entry point of `hvdkit.engines`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from hvdkit.config import Config
from hvdkit.engine.named.api import Engine
from hvdkit.engine.startup import Opener
from hvdkit.errors import HvdkitError, MissingDependencyError
from hvdkit.transport.api import Transport
from hvdkit.transport.backend import Abort
from hvdkit.transport.rank_subset import RankSubset
from hvdkit.world import World

#: Group of entry points. Each maps an engine's name, as in HVDKIT_ENGINE, to a function without arguments that makes
#: its provider.
ENTRY_POINTS = "hvdkit.engines"

#: Launchers for whose ranks `auto` may select an engine of another package.
_FOREIGN_LAUNCHERS = ("horovodrun",)


class EngineProvider(ABC):
    """Opens the world of a process, and an Engine for each process set.

    name: the engine's name in HVDKIT_ENGINE.
    title: the engine's name in messages.
    native: Are hvdkit's own components used: buckets, reductions on devices, tuning, timeline, collectives in init()?
    may_change: May the next world have other ranks although no setting of hvdkit makes the job elastic?
    manager: the notification manager of elastic jobs, with Horovod's methods; None without.
    """

    name = ""
    title = ""
    native = False
    may_change = False
    manager: Any = None

    def offer(self, launcher: str, framework: str) -> tuple[bool, str]:
        """Return whether `auto` should select this engine for ranks of a launcher, and the reason.

        framework: the script's; "" for a framework that does not matter to the engine.
        """
        return False, f"the ranks were started by {launcher}"

    @abstractmethod
    def open(
        self, config: Config, framework: str, subset: RankSubset | None, opener: Opener
    ) -> tuple[World, Transport, Abort | None]:
        """Connect the ranks; collective. Returns the world, the transport of all ranks, and a function to end the job.

        config: the settings of this process.
        framework: the script's; "" for none in particular.
        subset: the processes of the job that make the world; None for all.
        opener: opens hvdkit's own transports.
        Raises MissingDependencyError, TransportError, WorldError.
        """

    @abstractmethod
    def open_engine(
        self, group: Transport, *, hosts: Sequence[str], ranks: Sequence[int], job_ranks: Sequence[int] | None
    ) -> Engine:
        """Make the engine of a process set. group: its transport. For the other arguments see Engine."""

    def close(self) -> None:  # noqa: B027  nothing, for engines that end with their transports
        """Release what open() acquired; called after the transports are closed."""

    def gradients_of(self, framework: str) -> Callable[..., Any] | None:
        """Return the class that reduces gradients of a framework one by one, without buckets; None for buckets.

        torch: takes group, parameters, options and statistics, and makes a GradientReducer.
        tensorflow: takes group, name, specs and options, and makes an object with the methods of ArrayGradients.
        """
        return None

    def start_timeline(self, path: str, mark_cycles: bool) -> bool:
        """Start the engine's own timeline. Returns False if hvdkit must write the timeline instead."""
        return False

    def stop_timeline(self) -> None:  # noqa: B027
        """Stop the engine's own timeline."""

    def nccl_version(self) -> int:
        """The version of NCCL that the engine was built with, for example 22203 for 2.22.3; 0 without."""
        return 0

    def set_world_number(self, number: int) -> None:  # noqa: B027
        """Set the number of this process's world, from 0, for engines that keep names of earlier worlds apart."""


def find_provider(
    wish: str, launcher: str, framework: str, native: Callable[[], EngineProvider]
) -> tuple[EngineProvider, str]:
    """Select the engine. Returns its provider and the reason.

    wish: the setting `engine`.
    launcher: see World.
    framework: the script's; "" for none in particular.
    native: makes the provider of hvdkit's own engine.
    Raises MissingDependencyError for an engine that no installed package has, or whose package cannot be loaded.
    """
    if wish == "native":
        return native(), "set by engine=native"
    if wish == "auto" and launcher not in _FOREIGN_LAUNCHERS:
        return native(), f"the ranks were not started by {' or '.join(_FOREIGN_LAUNCHERS)} --gloo"
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if wish != "auto":
        if wish not in found:
            raise MissingDependencyError(
                f"The engine is set to {wish} (HVDKIT_ENGINE={wish}), but no installed package has it. Run, in a "
                f"clone of hvdkit: pip install -c constraints.txt ./packages/{wish}; or use the native engine "
                "(HVDKIT_ENGINE=native)."
            )
        return _load(found[wish]), f"set by engine={wish}"
    reasons = [f"the ranks were started by {launcher} --gloo, but no package with another engine is installed"]
    for entry in found.values():
        provider = _load(entry)
        offered, why = provider.offer(launcher, framework)
        if offered:
            return provider, why
        reasons = [why]
    return native(), reasons[0]


def _load(entry: EntryPoint) -> EngineProvider:
    try:
        provider: EngineProvider = entry.load()()
    except HvdkitError:
        raise
    except (Exception, SystemExit) as error:  # whatever a package raises at its import
        package = entry.dist.name if entry.dist is not None else entry.value
        raise MissingDependencyError(
            f"The package {package}, which has the engine {entry.name}, cannot be loaded: {type(error).__name__}: "
            f"{error}. Update or remove this package, or use the native engine (HVDKIT_ENGINE=native)."
        ) from error
    return provider
