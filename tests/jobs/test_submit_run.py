"""What a batch script does when it runs, and what hvdkit submit does with the scheduler: both with stand-ins."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hvdkit import cli
from hvdkit.errors import SubmitError
from hvdkit.tools.submit.command import KINDS, SCHEDULERS
from hvdkit.tools.submit.follow import Follower, State, submit_script
from hvdkit.tools.submit.job import BatchJob, Warning

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]
JOB = BatchJob(command=("train",), nodes=1, tasks_per_node=1, seconds=7200, output="log", warning=Warning("USR1", 60))

# Ends when told to, as hvdrun does; takes a moment for it, as hvdrun does.
HVDRUN = """\
#!/bin/bash
trap 'echo got USR1 >>seen; sleep 0.3; exit "${AFTER_USR1:-0}"' USR1
trap 'echo got TERM >>seen; sleep 0.3; exit 143' TERM
echo started >>seen
[ -z "$AT_ONCE" ] || kill -s "$AT_ONCE" "$PPID"
for ((i = 0; i < ${FOR:-200}; i++)); do sleep 0.05; done
exit "${STATUS:-0}"
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make(tmp_path, "hvdrun", HVDRUN)
    make(tmp_path, "scontrol", '#!/bin/sh\necho "scontrol $*" >>seen\n')
    return tmp_path


def make(place: Path, name: str, text: str) -> None:
    (place / "bin").mkdir(exist_ok=True)
    (place / "bin" / name).write_text(text)
    (place / "bin" / name).chmod(0o755)


def start(place: Path, scheduler: str, job: BatchJob, text: str = "", **variables: str) -> subprocess.Popen[bytes]:
    (place / "job.sh").write_text(text or SCHEDULERS[scheduler].write(job))
    environ = {"PATH": f"{place}/bin:/usr/bin:/bin", "PBS_O_WORKDIR": str(place), "PBS_JOBID": "7.x", "LSB_JOBID": "7"}
    environ |= {"SLURM_JOB_ID": "7", **variables}
    return subprocess.Popen(["bash", "job.sh"], cwd=place, env=environ, stdin=subprocess.DEVNULL)


def seen(place: Path, words: str, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not ((place / "seen").exists() and words in (place / "seen").read_text()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("scheduler", ["slurm", "pbs", "lsf"])
@pytest.mark.parametrize("status", [0, 3])
def test_the_scripts_status_is_hvdruns(scheduler: str, status: int, place: Path) -> None:
    assert start(place, scheduler, JOB, FOR="1", STATUS=str(status)).wait(20) == status


@pytest.mark.parametrize("scheduler", ["slurm", "pbs", "lsf"])
def test_a_warning_is_passed_on_and_the_script_waits_for_what_follows(scheduler: str, place: Path) -> None:
    process = start(place, scheduler, JOB, AFTER_USR1="9")
    assert seen(place, "started")
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGCONT)  # Slurm sends one with each signal
    assert process.wait(20) == 9
    assert "got USR1" in (place / "seen").read_text()


def test_a_warning_that_comes_twice_does_no_harm(place: Path) -> None:
    process = start(place, "slurm", JOB, AFTER_USR1="9")
    assert seen(place, "started")
    for _ in range(2):
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
    assert process.wait(20) == 9


@pytest.mark.parametrize("scheduler", ["slurm", "pbs", "lsf"])
def test_the_end_is_passed_on_and_waited_for(scheduler: str, place: Path) -> None:
    process = start(place, scheduler, JOB)
    assert seen(place, "started")
    process.terminate()
    assert process.wait(20) == 143
    assert "got TERM" in (place / "seen").read_text()


@pytest.mark.parametrize(
    ("scheduler", "name", "status"),
    [
        pytest.param(scheduler, name, status, marks=[] if scheduler == quick else [pytest.mark.slow])
        for name, status, quick in (("TERM", 143, "pbs"), ("USR1", 9, "lsf"))
        for scheduler in ("slurm", "pbs", "lsf")
    ],
)
def test_a_signal_that_comes_while_hvdrun_is_being_started_is_passed_on(
    scheduler: str, name: str, status: int, place: Path
) -> None:
    text = SCHEDULERS[scheduler].write(JOB).replace("\njob=$!\n", "\nsleep 0.5\njob=$!\n")  # a busy node
    assert "sleep 0.5" in text
    assert start(place, scheduler, JOB, text, AT_ONCE=name, AFTER_USR1="9").wait(20) == status
    assert f"got {name}" in (place / "seen").read_text()


def test_lsf_ends_a_job_with_usr2_at_its_time_limit(place: Path) -> None:
    process = start(place, "lsf", JOB)
    assert seen(place, "started")
    process.send_signal(signal.SIGUSR2)
    assert process.wait(20) == 143
    assert "got TERM" in (place / "seen").read_text()


def test_pbs_script_warns_itself(place: Path) -> None:
    process = start(place, "pbs", replace(JOB, seconds=62), AFTER_USR1="4")
    assert process.wait(20) == 4
    assert "got USR1" in (place / "seen").read_text()


def test_pbs_clock_does_not_outlive_the_script(place: Path) -> None:
    process = start(place, "pbs", replace(JOB, seconds=7277), FOR="1")
    assert process.wait(20) == 0
    time.sleep(0.2)
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    assert b"sleep\x007217\x00" not in commands


def test_slurm_requeues_what_is_saved_but_not_finished_and_nothing_else(place: Path) -> None:
    job = replace(JOB, requeue=True)
    assert start(place, "slurm", job, FOR="1", STATUS="75").wait(20) == 75
    assert "scontrol requeue 7" in (place / "seen").read_text()
    for number, (again, status) in enumerate(((job, "0"), (job, "1"), (JOB, "75"))):
        (place / "seen").unlink()
        assert start(place, "slurm", again, FOR="1", STATUS=status).wait(20) == int(status), number
        assert "scontrol" not in (place / "seen").read_text()


def test_slurm_does_not_requeue_what_it_has_ended_itself(place: Path) -> None:
    make(place, "hvdrun", HVDRUN.replace("exit 143", "exit 75"))
    process = start(place, "slurm", replace(JOB, requeue=True))
    assert seen(place, "started")
    process.terminate()
    assert process.wait(20) == 75
    assert "scontrol" not in (place / "seen").read_text()


def test_a_node_without_hvdrun_says_so(place: Path) -> None:
    (place / "bin" / "hvdrun").unlink()
    process = start(place, "pbs", JOB)
    assert process.wait(20) == 127
    assert "hvdrun is not on PATH" in (place / "log").read_text()


def test_a_log_is_added_to_when_the_job_runs_again(place: Path) -> None:
    make(place, "hvdrun", '#!/bin/sh\necho "run $1"\n')
    for scheduler in ("pbs", "lsf"):
        for _ in range(2):
            assert start(place, scheduler, replace(JOB, output=f"{scheduler}-%j.log")).wait(20) == 0
        assert (place / f"{scheduler}-7.log").read_text() == "run train\nrun train\n"


SBATCH = """\
#!/bin/bash
cat >submitted
echo 42
(exec >/dev/null 2>&1; sleep 0.3; echo running >state; for i in 1 2 3; do echo "line $i" >>train-42.log; sleep 0.2
done; sleep "${HOLD:-0}"; echo "${END:-COMPLETED}" >state) &
"""
SCONTROL = """\
#!/bin/bash
state=$(cat state 2>/dev/null || echo PENDING)
code=0:0; [ "$state" = FAILED ] && code=5:0
echo "JobId=42 JobState=${state^^} Reason=None ExitCode=$code"
"""


def submit(place: Path, *options: str, hold: str = "0", end: str = "COMPLETED") -> subprocess.Popen[bytes]:
    make(place, "sbatch", SBATCH)
    make(place, "scontrol", SCONTROL)
    (place / "train.py").touch()
    environ = {"PATH": f"{place}/bin:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOLD": hold, "END": end}
    program = "import functools, sys; from hvdkit.tools.submit import command; from hvdkit import cli; "
    program += "command.Follower = functools.partial(command.Follower, ask_every_s=0.2, lag_s=0.2); "
    program += "sys.exit(cli.main(sys.argv[1:]))"
    command = ["submit", "--nodes", "1", "--tasks-per-node", "2", "--time", "1h", *options, "--", "python", "train.py"]
    return subprocess.Popen(
        [sys.executable, "-c", program, *command],
        cwd=place,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_submit_says_how_to_see_and_to_end_the_job(place: Path) -> None:
    process = submit(place)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, b"")
    assert err == b"hvdkit submit: Slurm job 42 is submitted; log: train-42.log; cancel it with: scancel 42\n"
    assert (place / "submitted").read_text().startswith("#!/bin/bash\n# Written by hvdkit submit")


@pytest.mark.parametrize(("end", "code"), [("COMPLETED", 0), ("FAILED", 5)])
def test_following_shows_the_log_and_ends_with_the_jobs_code(end: str, code: int, place: Path) -> None:
    process = submit(place, "--follow", end=end)
    out, err = process.communicate(timeout=40)
    assert out == b"line 1\nline 2\nline 3\n"
    assert process.returncode == code
    assert f"job 42 has ended: {end.lower()}, exit code {code}." in err.decode()


def test_ctrl_c_stops_following_and_says_that_the_job_goes_on(place: Path) -> None:
    process = submit(place, "--follow", hold="30")
    assert process.stdout is not None
    assert process.stdout.readline() == b"line 1\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert err.decode().splitlines()[-1] == (
        "hvdkit submit: job 42 is still running; follow its log with: tail -f train-42.log"
    )


def test_a_job_with_the_runtime_of_an_earlier_one_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    created = "echo 'AlreadyExists' >&2; echo trainjob.trainer.kubeflow.org/digits; exit 1"
    make(place, "kubectl", f"#!/bin/sh\n{created}\n")
    monkeypatch.setenv("PATH", f"{place}/bin:/usr/bin:/bin")
    with pytest.raises(SubmitError, match=r"Job digits exists.*: kubectl delete trainjob/digits clustertrainingrun"):
        submit_script(KINDS["trainjob"], "text")


def test_a_refusal_is_repeated_with_its_reason(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(place, "sbatch", "#!/bin/sh\necho 'error: invalid partition' >&2; exit 1\n")
    monkeypatch.setenv("PATH", f"{place}/bin:/usr/bin:/bin")
    with pytest.raises(SubmitError, match="sbatch --parsable refused the job, with status 1: error: invalid partition"):
        submit_script(SCHEDULERS["slurm"], "#!/bin/sh\n")
    make(place, "sbatch", "#!/bin/sh\necho welcome\n")
    with pytest.raises(SubmitError, match="printed no job id: 'welcome'"):
        submit_script(SCHEDULERS["slurm"], "#!/bin/sh\n")


def test_an_older_log_is_not_shown_and_one_begun_anew_is(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("old\n")
    states = iter([State("waiting", "pending"), State("running", "running"), State("running", "running"), None])
    shown: list[bytes] = []
    said: list[str] = []

    def ask() -> State | None:
        state = next(states, State("ended", "completed", 0))
        if len(said) == 2:
            log.write_text("new")
        return state

    follower = Follower(ask, shown.append, said.append, log, offset=4, ask_every_s=0.05, lag_s=0.05)
    assert follower.follow() == State("ended", "completed", 0)
    assert said == ["pending", "running"]
    assert b"".join(shown) == b"new"


def test_a_job_that_its_scheduler_forgets_ends_the_following(tmp_path: Path) -> None:
    follower = Follower(lambda: None, print, print, tmp_path / "none", ask_every_s=0.01, lag_s=0.01)
    assert follower.follow().code is None


def test_a_log_that_only_a_command_can_show_is_shown(tmp_path: Path) -> None:
    states = iter([State("waiting", "created"), State("running", "running")])
    shown: list[bytes] = []
    follower = Follower(
        lambda: next(states, State("ended", "succeeded", 0)),
        shown.append,
        lambda line: None,
        None,
        read_log=("echo", "from the pod"),
        ask_every_s=0.01,
        lag_s=0.01,
    )
    assert follower.follow().code == 0
    assert shown == [b"from the pod\n"]


def test_on_a_terminal_the_log_is_followed_without_asking(place: Path) -> None:
    outer, inner = pty.openpty()
    try:
        make(place, "sbatch", SBATCH)
        make(place, "scontrol", SCONTROL)
        (place / "train.py").touch()
        environ = {"PATH": f"{place}/bin:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOLD": "30"}
        command = "submit --nodes 1 --tasks-per-node 2 --time 1h -- python train.py".split()
        process = subprocess.Popen(
            [sys.executable, "-m", "hvdkit", *command], cwd=place, env=environ, stdin=inner, stdout=inner, stderr=inner
        )
        seen_there = b""
        while b"line 1" not in seen_there:
            seen_there += os.read(outer, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
    finally:
        os.close(outer)
        os.close(inner)


def test_hvdkit_knows_the_command() -> None:
    assert "submit" in cli.build_parser().format_help()
