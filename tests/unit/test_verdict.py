"""Which rank is named as the first that failed, and what hvdrun returns."""

from __future__ import annotations

import signal

from hvdkit.launch.state.outcome import advise, conclude
from hvdkit.launch.state.ranks import End, Ranks

DOCTOR = " Run `hvdkit doctor`."
LOST_PEER = ("Traceback", "hvdkit.errors.RankLostError: rank 1 is gone")


def job(*ends: End | None, hosts: tuple[str, ...] = ("a",), size: int = 0) -> Ranks:
    """Ranks that reported these ends in this order; None: no report, the agent went away. size: if there are more."""
    ranks = Ranks(size or len(ends))
    for rank, end in enumerate(ends):
        ranks.register(rank, hosts[rank % len(hosts)])
        if end is None:
            ranks.lose(rank)
        else:
            ranks.end(rank, end)
    return ranks


def test_all_well_is_all_ranks_with_0_and_says_nothing() -> None:
    verdict = conclude(job(End(0), End(0)), 0)
    assert (verdict.code, verdict.lines) == (0, ())


def test_status_0_of_mpirun_is_no_success_if_a_rank_is_missing() -> None:
    ranks = job(End(0), End(0), size=4)
    verdict = conclude(ranks, 0)
    assert verdict.code == 1
    assert verdict.lines == ("mpirun ended with status 0 before ranks 2, 3 of 4 had started." + DOCTOR,)
    assert verdict.show_launcher
    assert conclude(ranks, 213).code == 213


def test_the_launcher_that_failed_is_named_and_the_advice_fits_the_job() -> None:
    ends = (
        (job(End(0), End(0)), 1),
        (job(None, None), 1),
        (job(None, size=2), 1),
        (job(End(1, ended_by="x"), End(0)), 1),
    )
    for ranks, status in ends:
        text = " ".join(conclude(ranks, status, launcher="srun", advice="Do this").lines)
        assert "srun ended" in text and "mpirun" not in text
    assert conclude(job(size=2), 1, launcher="srun", advice="Do this").lines[0].endswith("had started. Do this.")
    assert advise(2, local=True, files=1024) == "Check this machine: run `hvdkit doctor`"
    assert "ulimit -n 1024" in advise(2, local=True, files=20)
    assert "-H, --hostfile" in advise(2, local=False, files=20)


def test_a_rank_that_never_started_explains_those_that_were_lost() -> None:
    ranks = job(None, None, size=3)
    assert conclude(ranks, 255).lines == ("mpirun ended with status 255 before rank 2 of 3 had started." + DOCTOR,)


def test_a_bad_status_of_mpirun_is_no_success_if_all_ranks_ended_well() -> None:
    verdict = conclude(job(End(0), End(0)), 1)
    assert verdict.code == 1
    assert "every rank ended with exit code 0, but mpirun ended with status 1" in verdict.lines[0]


def test_ranks_that_were_told_to_end_are_not_to_blame() -> None:
    ranks = job(End(143, 15, ended_by="hvdrun ended the job"), End(3, tail=("why",)), End(143, 15, ended_by="x"))
    verdict = conclude(ranks, 3, logs="logs")
    assert verdict.code == 3
    assert verdict.lines == (
        "rank 1 on a failed with exit code 3; stopped the other 2 ranks. Log: logs/rank.1.log",
        "its last lines:",
        "    why",
    )
    assert conclude(ranks, 3, logs="logs", together=True).lines == verdict.lines[:1]


def test_last_lines_of_stderr_are_not_said_again() -> None:
    ranks = job(End(3, tail=("why",), tail_of_stderr=True), End(143, 15, ended_by="x"))
    assert conclude(ranks, 3).lines == ("rank 0 on a failed with exit code 3; stopped the other rank.",)


def test_a_script_for_horovod_is_named_the_option_that_runs_it() -> None:
    missing = ("Traceback", "ModuleNotFoundError: No module named 'horovod'")
    ranks = job(End(1, tail=missing, tail_of_stderr=True), End(1, tail=missing, tail_of_stderr=True), End(143, 15, "x"))
    lines = conclude(ranks, 1).lines
    assert sum(line.count("start it with hvdrun --alias-horovod") for line in lines) == 1
    assert conclude(ranks, 1, logs="logs").lines[0].endswith("--alias-horovod. Log: logs/rank.0.log")
    other = ("ModuleNotFoundError: No module named 'horovodish'",)
    assert "alias" not in "".join(conclude(job(End(1, tail=other, tail_of_stderr=True)), 1).lines)


def test_on_one_host_the_earliest_of_one_moment_is_first() -> None:
    assert conclude(job(End(5, time=2.0), End(6, time=1.0)), 1).code == 6


def test_on_several_hosts_clocks_are_not_compared() -> None:
    assert conclude(job(End(5, time=2.0), End(6, time=1.0), hosts=("a", "b")), 1).code == 5


def test_a_rank_that_only_lost_its_peer_is_blamed_last() -> None:
    ranks = job(End(1, tail=LOST_PEER), End(137, signal.SIGKILL))
    assert ranks.cause_is_certain
    verdict = conclude(ranks, 1)
    assert verdict.code == 137
    assert "killed by SIGKILL" in verdict.lines[0]
    alone = job(End(1, tail=LOST_PEER), End(0))
    assert not alone.cause_is_certain
    assert conclude(alone, 1).code == 1


def test_a_lost_rank_is_the_cause_unless_another_failed_at_that_moment() -> None:
    verdict = conclude(job(None, End(0), End(143, ended_by="x")), 0)
    assert verdict.code == 1
    assert "rank 0 on a was lost" in verdict.lines[0]
    assert conclude(job(None, End(9), None), 9).lines == (
        "rank 1 on a failed with exit code 9; stopped the other 2 ranks.",
    )


def test_ranks_that_mpirun_ended_are_its_own_matter() -> None:
    assert conclude(job(None, None), 7).lines == ("mpirun ended all ranks, with status 7.",)
    verdict = conclude(job(End(0), End(143, ended_by="the launcher sent SIGTERM")), 1)
    assert verdict.lines == ("mpirun ended the job with status 1; rank 1 had not finished.",)
    assert verdict.show_launcher


def test_an_interrupted_job_has_the_signals_code() -> None:
    ranks = job(End(143, 15, ended_by="x"), End(1))
    assert conclude(ranks, 0, interrupted=signal.SIGINT).code == 130
    assert conclude(ranks, 0, interrupted=signal.SIGTERM).lines == ("SIGTERM: ended 2 ranks.",)


def test_ranks_that_a_host_took_with_it_are_told_by_host() -> None:
    ended_by = End(143, 15, ended_by="the launcher sent SIGTERM")
    ranks = job(ended_by, ended_by, None, hosts=("a", "a", "b"))
    assert conclude(ranks, 0).lines == ("rank 2 on b was lost: its agent, the host or the network has failed.",)
    ranks = job(ended_by, None, ended_by, None, hosts=("a", "b"))
    assert conclude(ranks, 0).code == 1
    assert conclude(ranks, 0).lines == ("ranks 1, 3 on b were lost: their agents, the host or the network has failed.",)


def test_what_the_launcher_killed_after_a_host_was_lost_is_not_blamed() -> None:
    ranks = job(None, None, hosts=("a", "b", "c"), size=3)
    ranks.register(2, "c")
    ranks.mark_unreachable(2)
    assert conclude(ranks, 255).lines == ("rank 2 on c was lost: its agent, the host or the network has failed.",)


def test_ranks_that_say_nothing_more_are_the_cause_before_those_that_noticed() -> None:
    noticed = End(14, tail=("[a:00000] *** An error occurred in Socket closed",))
    ranks = job(noticed, End(143, 15, ended_by="x"), hosts=("a", "b"), size=3)
    ranks.register(2, "c")
    ranks.mark_unreachable(2)
    assert conclude(ranks, 255).lines == ("rank 2 on c was lost: its agent, the host or the network has failed.",)
    assert conclude(ranks, 255).show_launcher


def test_a_rank_that_failed_by_itself_is_the_cause_before_a_silent_one() -> None:
    ranks = job(End(3), hosts=("a", "b"), size=2)
    ranks.register(1, "b")
    ranks.mark_unreachable(1)
    assert conclude(ranks, 3).code == 3


def test_a_job_that_was_not_let_start_has_code_2() -> None:
    assert conclude(job(None), 1, refused="why").lines == ("why",)
    assert conclude(job(None), 1, refused="why").code == 2
    late = Ranks(3)
    late.register(0, "a")
    line = "ranks 1, 2 of 3 had not started after 60 s; hosts on which ranks started: a. Run `hvdkit doctor`"
    assert conclude(late, -9, late_s=60).lines[0].startswith(line)
    assert conclude(late, -9, late_s=60).code == 2


def test_what_is_saved_is_to_be_started_again_whatever_became_of_the_others() -> None:
    ended_by = End(137, signal.SIGKILL, ended_by="hvdrun ended the job")
    for ends in (
        (End(75), End(75)),
        (End(75), ended_by),
        (End(0), End(75, ended_by="the launcher sent SIGTERM"), None),
    ):
        for interrupted in (0, signal.SIGTERM):
            verdict = conclude(job(*ends), 1, interrupted=interrupted)
            assert verdict.code == 75
            assert verdict.lines[0].startswith("saved, not finished")
    assert conclude(job(End(75), End(3)), 1).code == 3
    assert conclude(job(ended_by, ended_by), 1, interrupted=signal.SIGTERM).code == 143


def test_what_is_heard_of_an_outlived_rank_changes_nothing() -> None:
    ranks = job(End(1), End(0))
    ranks.continue_without(0)
    ranks.end(0, End(1))
    ranks.hear(0, ["ready"])
    assert ranks.succeeded and not ranks.failures and 0 not in ranks.joined
    assert conclude(ranks, 137).code == 0


def test_those_that_save_are_waited_for_though_one_ends_that_was_not_taken_in() -> None:
    ranks = Ranks(2)
    for rank in range(3):
        ranks.register(rank, "a", replaces=rank == 2)
    for rank in range(2):
        ranks.hear(rank, ["ready"])
    ranks.admit(2)
    ranks.end(2, End(143, signal.SIGTERM, ended_by="hvdrun ended the job"))
    ranks.end(0, End(75))
    assert not ranks.finished
    ranks.end(1, End(75))
    assert ranks.finished and conclude(ranks, 1, interrupted=signal.SIGTERM).code == 75


def test_failures_of_one_kind_after_the_first_are_one_line() -> None:
    ends = [End(1, time=1), End(1, time=2), End(3, time=3), End(1, time=4), End(1, time=5)]
    first, *later = conclude(job(*ends, hosts=("a", "b")), 1).lines
    assert first.startswith("rank 0 on a failed with exit code 1")
    assert later == [
        "after it, ranks 1, 3, 4 failed with exit code 1.",
        "after it, rank 2 on a failed with exit code 3.",
    ]
    ends = [End(1, time=1), *(End(137, signal.SIGKILL, time=2) for _ in range(2))]
    assert conclude(job(*ends), 1).lines[1].startswith("after it, ranks 1, 2 were killed by SIGKILL")


def test_the_handler_of_faults_is_recommended_only_where_it_was_not_at_work() -> None:
    hint = "(PYTHONFAULTHANDLER=1 shows where)"
    dump = ("Current thread 0x1 (most recent call first):", '  File "a.py", line 3 in f')
    traceback = ('  File "a.py", line 3, in f', "ValueError")
    assert hint in conclude(job(End(139, 11)), 139).lines[0]
    assert hint in conclude(job(End(139, 11, tail=traceback)), 139).lines[0]
    assert hint not in conclude(job(End(139, 11, tail=dump)), 139).lines[0]
