"""Defines all errors that a user can catch. Each message names the problem, the values found and the cure."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.exit_codes import TRY_AGAIN


def describing_command(kind: type[BaseException]) -> str:
    """Return the command that prints the description of an error of hvdkit's; "" for any other error.

    It needs no network and no clone. A subclass in another module is described by its base here.
    """
    for base in kind.__mro__:
        if base.__module__ == __name__:
            return f"python -m pydoc {__name__}.{base.__name__}"
    return ""


class HvdkitError(Exception):
    """Base of every error that hvdkit raises on purpose."""


class HorovodInternalError(HvdkitError, RuntimeError):
    """A collective operation failed: a rank has ended, or the ranks disagree.

    Named as in Horovod, so that scripts which catch it work unchanged.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of the job have changed. Named as in Horovod; raised inside elastic.run.

    skip_sync: the state is already the same on all ranks.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("The hosts of the job have changed.")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(HvdkitError, ImportError):
    """The version of a framework differs from the one that an engine was built for. Named as in Horovod.

    hvdkit's native engine is not built, and does not raise it.
    name: the framework's name.
    version: the installed version.
    installed_version: the version that the engine was built for.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(
            f"The engine was built for {name} {installed_version}, but {name} {version} is installed. Build the "
            "engine again."
        )
        self.name, self.version, self.installed_version = name, version, installed_version


class NotInitializedError(HvdkitError, ValueError):
    """A call that needs init() was made before init() or after shutdown().

    Also a ValueError, which is what Horovod raises.
    """

    def __init__(self, call: str) -> None:
        super().__init__(f"{call} was called before hvd.init() (or after hvd.shutdown()). Call hvd.init() first.")
        self._call = call

    def __reduce__(self) -> tuple[type[NotInitializedError], tuple[str]]:
        return NotInitializedError, (self._call,)  # Ray and Spark send it to the driver


class ConfigError(HvdkitError, ValueError):
    """A setting has an invalid value, or two settings contradict each other."""


class MissingDependencyError(HvdkitError, ImportError):
    """A package that this call needs is not installed."""


class AliasError(HvdkitError, ImportError):
    """`import horovod` cannot give hvdkit, because Horovod itself has been imported."""


class WorldError(HvdkitError, RuntimeError):
    """The launcher and the MPI library disagree about the number of ranks, or the launcher's variables are invalid."""


class LocalFailureError(HorovodInternalError):
    """An exception was raised on this rank inside a collective, for example by a signal handler; it is the cause.

    elastic.run raises the cause: this rank ends, and the others continue without it.
    """


class TransportError(HorovodInternalError):
    """Data could not be sent between ranks."""


class SharedMemoryError(TransportError):
    """Shared memory cannot be created, is too small, or is not shared between the ranks of a host."""


class RankLostError(TransportError):
    """Another rank has ended while this rank was waiting for it."""


class TooFewRanksError(HvdkitError, RuntimeError):
    """Fewer ranks are left than --min-np, so training ends. Not a HorovodInternalError, so elastic.run does not retry.

    size: number of ranks that are left. least: number of ranks that are needed.
    """

    def __init__(self, size: int, least: int) -> None:
        super().__init__(
            f"{size} rank{'s are' if size != 1 else ' is'} left, but training needs at least {least} (--min-np). Set "
            "--elastic-checkpoints DIR to save the last commit in this case."
        )
        self.size, self.least = size, least


class StateLostError(HvdkitError, RuntimeError):
    """All ranks that had the last commit have died. Not a HorovodInternalError, so elastic.run does not retry."""

    def __init__(self) -> None:
        super().__init__(
            "All ranks that had the last commit have died before the replacement ranks received it. Start the job "
            "again, from a checkpoint if there is one. With --elastic-checkpoints DIR, training continues from the "
            "last commit saved there."
        )


class RanksDisagreeError(HorovodInternalError):
    """The ranks called different operations under one name; raised on all of them. elastic.run does not retry."""


class PlanMismatchError(RanksDisagreeError):
    """The ranks train different parameters, so their gradient buckets do not match."""


class ReplicasDifferError(HvdkitError, RuntimeError):
    """The parameters differ between ranks. Not a HorovodInternalError, so elastic.run does not hide it."""


class DuplicateNameError(HorovodInternalError, ValueError):
    """An operation was started with the name of another operation that is still running.

    Also a ValueError, as in Horovod.
    """


class BackwardInterruptedError(HorovodInternalError):
    """backward() raised an exception after some of its gradient buckets had been sent."""


class XlaError(HvdkitError, RuntimeError):
    """A collective of hvdkit was called inside a function that XLA compiles."""


class BuildError(HvdkitError, RuntimeError):
    """Horovod could not be built, or does not work after the build."""


class WrapError(HvdkitError, RuntimeError):
    """hvdrun --wrap found code in the script that it cannot adapt to several ranks."""


class LaunchError(HvdkitError, ValueError):
    """A job cannot be started as it was requested, by hvdrun or on Ray; nothing is left of it.

    code: a short name of the problem that stays the same when the message changes, as "not-enough-slots"; "" for none.
    """

    def __init__(self, *message: object, code: str = "") -> None:
        super().__init__(*message)
        self.code = code


class LaunchTimeoutError(LaunchError, TimeoutError):
    """Ranks on Ray or Spark had no room, or did not start, in time. Also a TimeoutError, as Horovod raises on Ray."""


class CheckpointError(HvdkitError, RuntimeError):
    """A checkpoint could not be written or loaded, or the ranks differ after loading it."""


class Preempted(SystemExit):
    """The job must end: training is saved but not finished. If not caught, it ends the process with code 75."""

    def __init__(self) -> None:
        super().__init__(TRY_AGAIN)


class ParallelError(HvdkitError, ValueError):
    """A mesh, plan, pipeline or sharded checkpoint does not fit the world or the model; nothing was trained."""


class CompareError(HvdkitError, ValueError):
    """Two runs of a script could not be compared."""


class BenchError(HvdkitError, ValueError):
    """hvdkit bench cannot measure what was requested, or cannot read or write a file."""


class ProfileError(HvdkitError, ValueError):
    """hvdkit profile has no data about the training, or cannot collect it."""


class TrackError(HvdkitError, ValueError):
    """hvd.track() cannot write to the requested destination, or was given a value that cannot be averaged."""


class SubmitError(HvdkitError, ValueError):
    """A batch job cannot be written, was refused by the scheduler, or has failed."""


class HostfileError(LaunchError):
    """A hostfile is invalid.

    problems: every problem found, as "N: problem and remedy" with the line's number, or " problem and remedy"; without
    a full stop, which the message has.
    """

    def __init__(self, path: str, problems: Sequence[str]) -> None:
        self.path = path
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{path}:{problem}." for problem in problems), code="hostfile-invalid")
