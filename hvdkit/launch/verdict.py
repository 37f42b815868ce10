"""What follows from what is known of the ranks: which one failed first, what to say, which exit code."""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.exit_codes import TRY_AGAIN
from hvdkit.launch.agent.wire import ENDED_BY_HVDRUN
from hvdkit.launch.ranks import Ranks, count_ranks, describe_loss, explain_exit


class How(enum.Enum):
    """How a job ended: would it come to the same if it were started again?"""

    WELL = "all ranks have ended well"
    SAVED = "saved, not finished"
    TOLD = "hvdrun was told to end it"
    REFUSED = "it was not let start"
    ABSENT = "not all ranks came"
    DIED = "a rank was killed or lost, or mpirun has ended, after which ranks may have saved"
    FAILED = "the program ended with an error"


@dataclass(frozen=True)
class Verdict:
    """How a job ended.

    lines: what to tell the user; () if all is well.
    show_launcher: what mpirun said is needed to understand it.
    how: in a word.
    """

    code: int
    lines: tuple[str, ...] = ()
    show_launcher: bool = False
    how: How = How.FAILED


def judge(
    ranks: Ranks,
    status: int,
    *,
    interrupted: int = 0,
    refused: str = "",
    late_s: float = 0.0,
    given_up: Sequence[str] = (),
    logs: str = "",
    together: bool = False,
) -> Verdict:
    """Draw the conclusion from the agents' reports and mpirun's exit status.

    status: negative for a signal, as subprocess has it.
    interrupted: the signal that hvdrun itself got; 0 for none.
    refused: why the job was not let start; "" if it was.
    late_s: how long was waited for ranks that did not come; 0 if all came.
    given_up: what was said of ranks that did not come to hvd.init(), where that ended the job.
    logs: the folder with a log for each rank; "" for none.
    together: what ranks write to stdout and to stderr goes to the same place.
    """
    code = 128 - status if status < 0 else status
    if ranks.saved:
        how = f"saved, not finished: ended with exit code {TRY_AGAIN}; the same command goes on from there."
        unasked = not interrupted and all(end.told == ENDED_BY_HVDRUN for end in ranks.ended.values())
        return Verdict(TRY_AGAIN, (how,), how=How.DIED if unasked else How.SAVED)
    if interrupted:
        name = "Ctrl-C" if interrupted == signal.SIGINT else signal.Signals(interrupted).name
        return Verdict(128 + interrupted, (f"{name}: ended {count_ranks(len(ranks.hosts))}.",), how=How.TOLD)
    if given_up:
        return Verdict(1, tuple(given_up))
    missing = sorted(ranks.expected - ranks.hosts.keys())
    if refused:
        return Verdict(2, (refused,), how=How.REFUSED)
    if late_s and missing:
        there = ", ".join(dict.fromkeys(ranks.hosts[rank] for rank in sorted(ranks.hosts))) or "none"
        what = f"{_name(missing)} of {ranks.size} had not started after {late_s:g} s; hosts with ranks: {there}."
        return Verdict(2, (what,), show_launcher=True, how=How.ABSENT)
    if ranks.suspected:
        lines = tuple(f"{describe_loss(ranks, rank)}." for rank in sorted(ranks.suspected))
        return Verdict(code or 1, lines, show_launcher=True, how=How.DIED)
    if ranks.cut_off and not missing:
        return Verdict(code or 1, (_tell_cut_off(ranks, logs),), show_launcher=True, how=How.DIED)
    only_lost = bool(ranks.lost) and not any(end.failed for end in ranks.ended.values())
    if only_lost and len(ranks.lost) > 1 and len(ranks.lost) + len(ranks.ended) == len(ranks.expected):
        what = f"mpirun ended all ranks, with status {code}."
        return Verdict(code or 1, (what,), show_launcher=True, how=How.DIED)
    if ranks.failures and not (only_lost and missing):
        return _blame(ranks, code, logs, together)
    if ranks.all_well:
        if code == 0 or ranks.outlived:
            return Verdict(0, how=How.WELL)
        return Verdict(code, (f"every rank ended well, but mpirun ended with status {code}.",), show_launcher=True)
    if missing:
        what = f"mpirun ended with status {code} before {_name(missing)} of {ranks.size} had started."
        return Verdict(code or 1, (what,), show_launcher=True, how=How.ABSENT)
    told = sorted(rank for rank, end in ranks.ended.items() if end.told)
    what = f"mpirun ended the job with status {code}; {_name(told)} had not finished."
    return Verdict(code or 1, (what,), show_launcher=True, how=How.DIED)


def _blame(ranks: Ranks, code: int, logs: str, together: bool) -> Verdict:
    first, *others = ranks.failures
    end = ranks.ended.get(first)
    rest = len(ranks.hosts) - len([rank for rank, end in ranks.ended.items() if not end.told])
    stopped = f"; stopped the other {rest}" if rest > 0 and end is not None else ""
    log = f" Log: {logs}/rank.{first}.log" if logs else ""
    if end is None:
        what = f"{describe_loss(ranks, first)}.{log}"
        return Verdict(code or 1, (what, *_also(ranks, others)), show_launcher=True, how=How.DIED)
    lines = [f"{describe_loss(ranks, first)}{stopped}.{log}"]
    if end.tail and not (together or end.tail_of_stderr):  # else they are there already, above this
        lines.append("its last lines:")
        lines += [f"    {line.rstrip()}" for line in end.tail]
    how = How.DIED if end.killed or end.aftermath else How.FAILED
    return Verdict(end.code, (*lines, *_also(ranks, others)), show_launcher=end.aftermath, how=how)


def _tell_cut_off(ranks: Ranks, logs: str) -> str:
    gone = ranks.cut_off
    hosts = ", ".join(dict.fromkeys(ranks.hosts[rank] for rank in gone))
    log = f" Log: {logs}/rank.{gone[0]}.log" if logs else ""
    if len(gone) == 1:
        return f"rank {gone[0]} on {hosts} was lost: its agent, its host or the way there is gone.{log}"
    return f"{_name(gone)} on {hosts} were lost: their agents, the host or the way there are gone.{log}"


def _also(ranks: Ranks, others: Sequence[int]) -> list[str]:
    ended = [(rank, ranks.ended[rank]) for rank in others if rank in ranks.ended]
    return [
        f"after it, rank {rank} on {ranks.hosts[rank]} {explain_exit(end.code, end.signal)}." for rank, end in ended
    ]


def _name(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
