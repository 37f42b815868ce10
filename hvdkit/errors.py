"""Everything a user can catch. Each message says what happened, what was seen and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.exit_codes import TRY_AGAIN


class HvdkitError(Exception):
    """Base of every error that hvdkit raises on purpose."""


class HorovodInternalError(HvdkitError, RuntimeError):
    """A collective could not be completed: a rank is gone, or the ranks disagree.

    Bears Horovod's name, so that scripts which catch it go on working.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of the job have changed. Horovod's name; raised where worlds change, see elastic.run.

    skip_sync: is the state the same on all ranks already?
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("The hosts of the job have changed.")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(HvdkitError, ImportError):
    """A framework's version is not the one that an engine was built for. Horovod's name; hvdkit's engine is not built.

    name: of the framework. version: found. installed_version: built for.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(
            f"The engine was built for {name} {installed_version}, and {name} {version} is installed. Build it again."
        )
        self.name, self.version, self.installed_version = name, version, installed_version


class NotInitializedError(HvdkitError, ValueError):
    """A call that needs `init()` came before it, or after `shutdown()`.

    A ValueError as well, because that is what Horovod raises.
    """

    def __init__(self, call: str) -> None:
        super().__init__(f"{call} was called before hvd.init() (or after hvd.shutdown()). Call hvd.init() first.")


class ConfigError(HvdkitError, ValueError):
    """A setting has a value that cannot be used."""


class MissingDependencyError(HvdkitError, ImportError):
    """An optional package is needed here and is not installed."""


class AliasError(HvdkitError, ImportError):
    """Horovod's name cannot be given to hvdkit, because Horovod itself has been imported."""


class WorldError(HvdkitError, RuntimeError):
    """The launcher and the MPI library disagree about how many ranks there are."""


class TransportError(HorovodInternalError):
    """Bytes could not be moved between ranks."""


class SharedMemoryError(TransportError):
    """Node-shared memory could not be had, is too small, or is not really shared."""


class RankLostError(TransportError):
    """Another rank has ended while this one was waiting for it."""


class TooFewRanksError(HvdkitError, RuntimeError):
    """So many ranks have died that training is to end. No HorovodInternalError: elastic.run does not go on.

    size: ranks that are left. least: that were asked for.
    """

    def __init__(self, size: int, least: int) -> None:
        super().__init__(
            f"{size} rank{'s are' if size != 1 else ' is'} left, and training is to go on with {least} at least "
            f"(--min-np). With --elastic-checkpoints FOLDER the last commit would have been saved."
        )
        self.size, self.least = size, least


class StateLostError(HvdkitError, RuntimeError):
    """All ranks that had the last commit have died. No HorovodInternalError: elastic.run cannot go on."""

    def __init__(self) -> None:
        super().__init__(
            "All ranks that had the last commit have died, before those that came in their place were given it. Start "
            "again, from a checkpoint if there is one. With --elastic-checkpoints FOLDER training would go on from the "
            "last commit saved there."
        )


class RanksDisagreeError(HorovodInternalError):
    """The ranks have begun different things under one name, which all are told. elastic.run ends, as it comes again."""


class PlanMismatchError(RanksDisagreeError):
    """The ranks do not hold the same parameters, so their buckets do not match."""


class ReplicasDifferError(HvdkitError, RuntimeError):
    """The ranks' parameters are not equal any more. No HorovodInternalError: elastic.run must not hide it."""


class DuplicateNameError(HorovodInternalError, ValueError):
    """An operation was begun under a name that another one still has. A ValueError as well, as in Horovod."""


class BackwardInterruptedError(HorovodInternalError):
    """A backward pass ended with an exception after some of its buckets were already on their way."""


class XlaError(HvdkitError, RuntimeError):
    """Communication between ranks was called for in a function that XLA is to compile."""


class BuildError(HvdkitError, RuntimeError):
    """Horovod could not be built here, or does not work after it was."""


class WrapError(HvdkitError, RuntimeError):
    """hvdrun --wrap has come upon something in the script that it cannot make right for several ranks."""


class LaunchError(HvdkitError, ValueError):
    """hvdrun was asked for something that cannot be started; nothing has been."""


class CheckpointError(HvdkitError, RuntimeError):
    """A checkpoint could not be written, cannot be loaded, or has not made all ranks equal."""


class Preempted(SystemExit):
    """The job was asked to end; the training is saved and not finished. Uncaught it ends the process, with code 75."""

    def __init__(self) -> None:
        super().__init__(TRY_AGAIN)


class CompareError(HvdkitError, ValueError):
    """Two runs of a script could not be compared."""


class BenchError(HvdkitError, ValueError):
    """hvdkit bench cannot measure what was asked for, or has no such file to read or write."""


class ProfileError(HvdkitError, ValueError):
    """There is nothing to say about where the time of training goes, or no way to find out."""


class SubmitError(HvdkitError, ValueError):
    """A batch job cannot be written, was refused by its scheduler, or has failed."""


class MigrateError(HvdkitError, ValueError):
    """A script cannot be read, is not of a kind that is known, or cannot be written."""


class HostfileError(LaunchError):
    """A hostfile that cannot be used, with every problem found in it.

    problems: "line N: what is wrong and how to mend it", or the same without a line.
    """

    def __init__(self, path: str, problems: Sequence[str]) -> None:
        self.path = path
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{path}:{problem}" for problem in problems))
