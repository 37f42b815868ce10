"""horovodrun's flags that hvdrun does not have of itself: what each means here, or what to write in its place."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdkit.config import read_config
from hvdkit.errors import HvdkitError


@dataclass(frozen=True)
class Flag:
    """A flag of horovodrun.

    sets: variables and their values; a function makes the value from the flag's own.
    refused: what to write in its place, as a sentence; "" if it is accepted.
    help: of one that is accepted.
    program: whose flag it is.
    """

    names: tuple[str, ...]
    sets: Mapping[str, str | Callable[[str], str]] = field(default_factory=dict)
    refused: str = ""
    help: str = ""
    program: str = "horovodrun"

    @property
    def has_value(self) -> bool:
        """Is an accepted flag followed by a value?"""
        return any(callable(value) for value in self.sets.values())


def _megabytes(text: str) -> str:
    return str(_number(text) * 1024 * 1024)


def _seconds(text: str) -> str:
    return str(_number(text))


def _count(text: str) -> str:
    return str(_number(text))


def _number(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise ValueError(f"{text!r} is not a number from 0 up")
    return number


def _accept(*names: str, help: str = "", **sets: str | Callable[[str], str]) -> Flag:
    return Flag(names, sets, help=help)


def _refuse(*names: str, instead: str, program: str = "horovodrun") -> Flag:
    return Flag(names, refused=instead, program=program)


_TUNE = "--autotune takes ten steps for each trial, and --autotune-steps says in how many steps to end. Leave it out."
_CYCLES = "hvdkit has no cycles: leave it out. With --engine horovod set HOROVOD_CYCLE_TIME, _TIMELINE_MARK_CYCLES."
_CLOCK = "Lines have no time. Leave it out; for times: hvdrun ... 2>&1 | ts."

FLAGS = (
    # What has a setting of the same meaning.
    _accept(
        "--fusion-threshold-mb",
        HVDKIT_FUSION_BYTES=_megabytes,
        help="--fusion-bytes in MiB; Horovod's usual 64 or 128 are slower here than the default",
    ),
    _accept("--hierarchical-allreduce", HVDKIT_TRANSPORT="hierarchical", help="--transport hierarchical"),
    _accept("--no-hierarchical-allreduce", HVDKIT_TRANSPORT="mpi", help="--transport mpi"),
    _accept(
        "--no-stall-check", HVDKIT_STALL_CHECK_S="0", HVDKIT_STALL_SHUTDOWN_S="0", help="--stall-check-s 0, and no end"
    ),
    _accept("--stall-check-warning-time-seconds", HVDKIT_STALL_CHECK_S=_seconds, help="--stall-check-s"),
    _accept("--stall-check-shutdown-time-seconds", HVDKIT_STALL_SHUTDOWN_S=_seconds, help="--stall-shutdown-s"),
    _accept("--gloo", HVDKIT_TRANSPORT="gloo", help="--transport gloo; ranks are started through MPI all the same"),
    _accept("--min-num-proc", HVDKIT_MIN_NP=_count, help="--min-np"),
    _accept("--max-num-proc", HVDKIT_MAX_NP=_count, help="--max-np"),
    _accept("--no-autotune", HVDKIT_AUTOTUNE="0", help="settings stay as they are"),
    # What asks for what is so anyway.
    _accept("--mpi", help="ranks are started through MPI: it is always so"),
    _accept("--disable-cache", help="everything is checked anew: it is always so"),
    _accept("--stall-check", help="stalls are told: it is so by default"),
    _accept("--no-torus-allreduce"),
    _accept("--no-timeline-mark-cycles"),
    _accept("--no-mpi-threads-disable"),
    _accept("--log-without-timestamp", "--log-hide-timestamp"),
    # What is not here.
    _refuse("-cb", "--check-build", instead="Nothing is built in. To see what works here: hvdkit doctor."),
    _refuse("--cycle-time-ms", "--timeline-mark-cycles", instead=_CYCLES),
    _refuse(
        "--cache-capacity",
        instead="hvdkit has no such limit: leave it out. With --engine horovod set HOROVOD_CACHE_CAPACITY.",
    ),
    _refuse(
        "--hierarchical-allgather",
        "--no-hierarchical-allgather",
        instead="One choice serves all operations: --transport hierarchical, or --transport mpi.",
    ),
    _refuse(
        "--torus-allreduce",
        instead="The nearest is --transport hierarchical; with --engine horovod set HOROVOD_TORUS_ALLREDUCE.",
    ),
    _refuse(
        *("--autotune-warmup-samples", "--autotune-steps-per-sample"),
        *("--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise"),
        instead=_TUNE,
    ),
    _refuse("--mpi-threads-disable", instead="hvdkit needs an MPI with threads. Leave it out."),
    _refuse("--num-nccl-streams", instead="Leave it out. With --engine horovod set HOROVOD_NUM_NCCL_STREAMS."),
    _refuse("--thread-affinity", instead="Use --bind. With --engine horovod set HOROVOD_THREAD_AFFINITY."),
    _refuse("--gloo-timeout-seconds", instead="To end a job in which a rank is missing: --stall-shutdown-s."),
    _refuse("--log-with-timestamp", "--no-log-hide-timestamp", instead=_CLOCK),
    _refuse("-prefix-timestamp", "--prefix-output-with-timestamp", instead=_CLOCK),
)

#: Flags of other launchers that argparse would take for the beginning of one of hvdrun's.
OTHERS = (
    _refuse("-ppn", program="mpiexec", instead="Use --slots-per-host N, or -H host1:N,host2:N."),
    _refuse(
        "-c", program="mpirun", instead="Use -np N for ranks. Python's -c comes after it: hvdrun -np 2 python -c ..."
    ),
)


class _Accept(argparse.Action):
    """Keeps what the flag means as the variables that carry it to the ranks."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        try:
            sets = {name: value(values) if callable(value) else value for name, value in self.flag.sets.items()}
            read_config(sets)
        except (ValueError, HvdkitError) as error:
            raise argparse.ArgumentError(self, str(error)) from None
        namespace.settings = {**namespace.settings, **sets}

    flag: Flag


class _Refuse(argparse.Action):
    """Says what to write in place of the flag, with or without a value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        refused = self.flag.refused.removesuffix(".")
        sentence = f"{option_string} is a flag of {self.flag.program}'s that hvdrun lacks. {refused}"
        raise argparse.ArgumentError(None, sentence)

    flag: Flag


def add_flags(parser: argparse.ArgumentParser, taken: Sequence[str]) -> None:
    """Add horovodrun's flags.

    taken: names that hvdrun has of itself, which go before.
    """
    group = parser.add_argument_group(
        "horovodrun's flags", "Under their names and with their meaning; one that has none here says what to write."
    )
    for flag in (*FLAGS, *OTHERS):
        names = [name for name in flag.names if name not in taken]
        if not names:
            continue
        action = group.add_argument(
            *names,
            action=_Refuse if flag.refused else _Accept,
            nargs="?" if flag.refused else None if flag.has_value else 0,
            dest=f"horovod{names[0]}",
            default=argparse.SUPPRESS,
            metavar="N",
            help=flag.help or argparse.SUPPRESS,
        )
        assert isinstance(action, _Accept | _Refuse)
        action.flag = flag
