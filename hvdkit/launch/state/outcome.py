"""Conclude how a job ended from the states of its ranks: the rank that failed first, the report, the exit code."""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdkit.exit_codes import TRY_AGAIN
from hvdkit.launch.agent.wire import ENDED_BY_HVDRUN
from hvdkit.launch.state.ranks import End, Ranks, count_ranks, describe_loss, name_rank

_FILES, _FILES_OF_A_RANK = 64, 8  # files that a launcher opens, with a reserve
_NO_HOROVOD = re.compile(r"ModuleNotFoundError: No module named 'horovod\b")


class Outcome(enum.Enum):
    """How a job ended, as far as it matters for a restart."""

    SUCCEEDED = "every rank ended with exit code 0"
    SAVED = "ranks saved and ended before the training was finished"
    INTERRUPTED = "hvdrun received a signal"
    REFUSED = "the ranks that registered are not the job that was asked for"
    MISSING_RANKS = "not all ranks started"
    RANK_DIED = "a rank was killed or lost, or the launcher ended; the other ranks may have saved"
    FAILED = "the program ended with an error"


@dataclass(frozen=True)
class JobResult:
    """The result of a job."""

    code: int
    lines: tuple[str, ...] = ()  # for the user
    show_launcher: bool = False  # the launcher's output is needed to understand the result
    outcome: Outcome = Outcome.FAILED


def advise(ranks: int, *, local: bool, files: int) -> str:
    """Advise what to check if ranks have not started.

    ranks: their number. local: all on this machine. files: this process's limit of open files.
    """
    wanted = _FILES + _FILES_OF_A_RANK * ranks
    if local and files < wanted:
        return f"Only {files} files may be open at once here; allow {wanted} or more: ulimit -n {max(1024, wanted)}"
    if local:
        return "Check this machine: run `hvdkit doctor`"
    return "Check the hosts: run `hvdkit doctor` with hvdrun's options for hosts, if any (-H, --hostfile, -p)"


def conclude(
    ranks: Ranks,
    status: int,
    *,
    launcher: str = "mpirun",
    advice: str = "Run `hvdkit doctor`",
    elastic: bool = False,
    interrupted: int = 0,
    refused: str = "",
    late_s: float = 0.0,
    given_up: Sequence[str] = (),
    logs: str = "",
    together: bool = False,
    shows: Callable[[int], bool] = lambda rank: True,
) -> JobResult:
    """Conclude how a job ended from the agents' reports and the launcher's exit status.

    ranks: the states of the ranks.
    status: the launcher's; negative for a signal, as in subprocess.
    launcher: its program.
    advice: see advise().
    elastic: ranks were to continue when others die, by hvd.elastic.run.
    interrupted: the signal that hvdrun received; 0 for none.
    refused: why the job was not started; "" if it was.
    late_s: the time limit for ranks to start, in seconds, if it has passed; else 0.
    given_up: the report on ranks that did not call hvd.init(), if that ended the job.
    logs: the folder with a log for each rank; "" for none.
    together: the ranks' stdout and stderr go to the same place.
    shows: is the output of a rank shown?
    """
    code = 128 - status if status < 0 else status
    if ranks.saved:
        line = f"saved, not finished: ended with exit code {TRY_AGAIN}. Run the same command again to continue."
        unasked = not interrupted and all(end.ended_by == ENDED_BY_HVDRUN for end in ranks.ended.values())
        return JobResult(TRY_AGAIN, (line,), outcome=Outcome.RANK_DIED if unasked else Outcome.SAVED)
    if interrupted:
        name = "Ctrl-C" if interrupted == signal.SIGINT else signal.Signals(interrupted).name
        line = f"{name}: ended {count_ranks(len(ranks.hosts))}."
        return JobResult(128 + interrupted, (line,), outcome=Outcome.INTERRUPTED)
    if given_up:
        return JobResult(1, tuple(given_up))
    if refused:
        return JobResult(2, (refused,), outcome=Outcome.REFUSED)
    missing = sorted(ranks.expected - ranks.hosts.keys())
    if late_s and missing:
        started = ", ".join(dict.fromkeys(host for _, host in sorted(ranks.hosts.items()))) or "none"
        line = (
            f"{_name(missing)} of {ranks.size} had not started after {late_s:g} s; hosts on which ranks started: "
            f"{started}. {advice}, or give them more time (--start-timeout)."
        )
        return JobResult(2, (line,), show_launcher=True, outcome=Outcome.MISSING_RANKS)
    closed = sorted(rank for rank, state in ranks.states.items() if state.tampering or state.unanswered_s)
    if closed:
        lines = tuple(f"{describe_loss(ranks, rank)}." for rank in closed)
        return _died(code, *lines)
    if ranks.partitioned and not missing:
        return _died(code, _describe_partition(ranks, logs))
    lost, failures = ranks.lost, ranks.failures
    only_lost = bool(lost) and not any(end.failed for end in ranks.ended.values())
    if only_lost and len(lost) > 1 and len(lost) + len(ranks.ended) == len(ranks.expected):
        return _died(code, f"{launcher} ended all ranks, with status {code}.")
    if failures and not (only_lost and missing):
        return _blame(ranks, failures, code, logs, lambda rank, end: shows(rank) and (together or end.tail_of_stderr))
    if ranks.succeeded:
        if code == 0 or ranks.left_behind:
            unused = elastic and bool(ranks.joined | ranks.lone) and not ranks.training_ended
            lines = (*_describe_lone(ranks), *([_NOT_ELASTIC] if unused else []))
            return JobResult(0, lines, outcome=Outcome.SUCCEEDED)
        line = f"every rank ended with exit code 0, but {launcher} ended with status {code}."
        return JobResult(code, (line,), show_launcher=True)
    if missing:
        line = f"{launcher} ended with status {code} before {_name(missing)} of {ranks.size} had started. {advice}."
        return JobResult(code or 1, (line,), show_launcher=True, outcome=Outcome.MISSING_RANKS)
    unfinished = sorted(rank for rank, end in ranks.ended.items() if end.ended_by)
    return _died(code, f"{launcher} ended the job with status {code}; {_name(unfinished)} had not finished.")


def conclude_without_output(error: OSError, ranks: int) -> JobResult:
    """Conclude how a job ended whose output could not be written; no message if its reader has ended (| head)."""
    if isinstance(error, BrokenPipeError):
        return JobResult(128 + signal.SIGPIPE, outcome=Outcome.INTERRUPTED)
    line = f"the output cannot be written: {error.strerror}; ended {count_ranks(ranks)}."
    return JobResult(1, (line,), outcome=Outcome.INTERRUPTED)


def _died(code: int, *lines: str) -> JobResult:
    return JobResult(code or 1, lines, show_launcher=True, outcome=Outcome.RANK_DIED)


def _blame(
    ranks: Ranks, failures: Sequence[int], code: int, logs: str, is_shown: Callable[[int, End], bool]
) -> JobResult:
    first, *others = failures
    end = ranks.states[first].end
    log = f" Log: {logs}/rank.{first}.log" if logs else ""
    later = _describe_later(ranks, [rank for rank in others if ranks.states[rank].end is not None])
    if end is not None and any(_NO_HOROVOD.match(line) for line in end.tail):
        log = f" To run a script for Horovod unchanged, start it with hvdrun --alias-horovod.{log}"
    if end is None:
        return _died(code, f"{describe_loss(ranks, first)}.{log}", *later)
    rest = len(ranks.hosts) - len([rank for rank, other in ranks.ended.items() if not other.ended_by])
    stopped = f"; stopped the other {'rank' if rest == 1 else count_ranks(rest)}" if rest > 0 else ""
    lines = [f"{describe_loss(ranks, first)}{stopped}.{log}"]
    if end.tail and not is_shown(first, end):  # otherwise the lines are on the screen already
        lines += ["its last lines:", *(f"    {line.rstrip()}" for line in end.tail)]
    outcome = Outcome.RANK_DIED if end.killed or end.secondary_failure else Outcome.FAILED
    return JobResult(end.code, (*lines, *later), show_launcher=end.secondary_failure, outcome=outcome)


def _describe_later(ranks: Ranks, failures: Sequence[int]) -> list[str]:
    """Describe failures after the first, with one line for each kind."""
    kinds: dict[str, list[int]] = {}
    for rank in failures:
        kinds.setdefault(describe_loss(ranks, rank).removeprefix(name_rank(ranks, rank)), []).append(rank)
    return [
        f"after it, {name_rank(ranks, same[0])}{how}."
        if len(same) == 1
        else f"after it, {_name(sorted(same))}{how.replace(' was ', ' were ', 1)}."
        for how, same in kinds.items()
    ]


_NOT_ELASTIC = (
    "--elastic had no effect: no rank ran its training by hvd.elastic.run, so the end of any rank would have ended the "
    "job."
)
_MEETING = "hvd.init(), init_process_group() or MPI"
_CURE = "Call hvd.init() in the script, or start it with --wrap; for Lightning set devices."


def _describe_lone(ranks: Ranks) -> list[str]:
    """Describe ranks that trained alone. If no rank joined, all ranks must have: they may share work in files."""
    lone = ranks.lone
    if ranks.size > 1 and lone == ranks.expected:
        return [f"no rank called {_MEETING}: these were {len(lone)} separate runs of the whole script. {_CURE}"]
    if lone and ranks.joined:
        return [f"{_name(sorted(lone))} did not call {_MEETING}, as other ranks did: each ran the script by itself."]
    return []


def _describe_partition(ranks: Ranks, logs: str) -> str:
    gone = ranks.partitioned
    hosts = ", ".join(dict.fromkeys(ranks.states[rank].host for rank in gone))
    log = f" Log: {logs}/rank.{gone[0]}.log" if logs else ""
    were, its = ("was", "its agent") if len(gone) == 1 else ("were", "their agents")
    return f"{_name(gone)} on {hosts} {were} lost: {its}, the host or the network has failed.{log}"


def _name(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
