"""hvdrun with real processes: output, logs, exit codes, and that nothing is left behind."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from cases import product
from hvdrun_job import (
    HVDRUN,
    RANK,
    SLEEP,
    alive,
    command,
    descendants,
    environment,
    hvdrun,
    lines,
    read_pids,
    started,
    wait_until,
)

from hvdkit.launch.agent.rank import KILL_AFTER_S
from hvdkit.launch.state.runtime_dir import find_jobs

pytestmark = pytest.mark.ranks


def wait_for_end_of(first: int, folder: Path, ending: str) -> str:
    """A script by which one rank ends so, and the others go on when its process has ended."""
    return (
        f"link = {str(folder / 'process')!r}\n"
        f"if rank == {first}:\n"
        "    os.symlink(f'/proc/{os.getpid()}', link)  # it leads nowhere once this process has ended\n"
        f"    {ending}\n"
        "while not os.path.lexists(link) or os.path.exists(link): time.sleep(0.01)\n"
    )


def test_each_line_bears_its_rank_and_its_stream() -> None:
    done = hvdrun(3, "print('out', rank); print(); print('err', rank, file=sys.stderr); print('open', end='')")
    assert done.returncode == 0
    out = lines(done.stdout)
    assert [line for line in out if line.startswith("[1]")] == ["[1] out 1", "[1] ", "[1] open"]
    assert len(out) == 9
    assert sorted(lines(done.stderr)) == ["[0] err 0", "[1] err 1", "[2] err 2"]


def test_each_rank_has_a_full_log_and_the_folder_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "logs of today"
    done = hvdrun(2, "print('out', rank); print('err', file=sys.stderr)", "--output-filename", str(folder))
    assert done.returncode == 0
    for rank in range(2):
        assert sorted(lines((folder / f"rank.{rank}.log").read_bytes())) == ["err", f"out {rank}"]


@pytest.mark.parametrize("code", [3, pytest.param(255, marks=pytest.mark.slow)])
def test_the_exit_code_is_that_of_the_rank_that_failed(code: int) -> None:
    done = hvdrun(3, f"if rank == 1: print('why', file=sys.stderr); sys.exit({code})\ntime.sleep(60)")
    assert done.returncode == code, done.stderr.decode()
    assert f"failed with exit code {code}; stopped the other 2 ranks." in done.stderr.decode()
    assert re.search(r"hvdrun: rank 1 on \S+ failed", done.stderr.decode())
    assert any(line.endswith("why") for line in lines(done.stderr))


@pytest.mark.parametrize("own", ["", "environment", "file", "option"])
def test_no_session_of_a_killed_mpirun_is_met(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI 5 ends a job if an mpirun of the same process number was killed, and both have their session in /tmp."""
    options = ["--mpi-args", f"--prtemca prte_tmpdir_base {tmp_path}"] if own == "option" else []
    if own == "environment":
        monkeypatch.setenv("PRTE_MCA_prte_tmpdir_base", str(tmp_path))
    elif own == "file":
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / ".prte").mkdir()
        (tmp_path / ".prte" / "mca-params.conf").write_text(f"# of the site\nprte_tmpdir_base = {tmp_path}\n")
    code = "import os; print(os.environ['PMIX_SERVER_TMPDIR'])"
    done = subprocess.run(
        [*HVDRUN, "-np", "1", "-q", *options, sys.executable, "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.split()[-1]).parent
    if own:
        assert folder == tmp_path
    else:
        assert folder.parent.name.startswith(f"hvdkit-{os.getuid()}-") and not folder.exists()


def test_a_job_starts_without_HOME_which_open_mpi_requires() -> None:
    environ = {name: value for name, value in environment().items() if name != "HOME"}
    script = "from mpi4py import MPI; print(MPI.COMM_WORLD.Get_size(), os.environ['HOME'] == os.path.expanduser('~'))"
    done = subprocess.run(
        command(2, script), env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100
    )
    assert sorted(done.stdout.splitlines()) == ["[0] 2 True", "[1] 2 True"], done.stderr


def test_a_killed_rank_is_named() -> None:
    with started(3, SLEEP) as process:
        pids = read_pids(process, 3)
        os.kill(pids[2], signal.SIGKILL)
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 137
        assert re.search(r"rank 2 on \S+ was killed by SIGKILL, often because .* out of memory", errors.decode())
        assert not any(alive(pid) for pid in pids.values())


def test_a_rank_that_ignores_sigterm_is_ended_too(tmp_path: Path) -> None:
    script = (
        f"ignores = {str(tmp_path / 'ignores')!r}\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if rank == 1: open(ignores, 'w').close(); time.sleep(60)\n"
        "while not os.path.exists(ignores): time.sleep(0.01)\n"
        "sys.exit(4)"
    )
    done = hvdrun(2, script)
    assert done.returncode == 4


def test_the_first_of_two_failures_is_named(tmp_path: Path) -> None:
    script = wait_for_end_of(2, tmp_path, "sys.exit(12)") + "if rank == 1: sys.exit(11)\ntime.sleep(60)"
    done = hvdrun(3, script)
    assert done.returncode == 12
    assert "rank 2 on" in next(line for line in lines(done.stderr) if line.startswith("hvdrun: "))


@pytest.mark.parametrize("starts_mpi", [False, True], ids=["before MPI starts", "after MPI starts, by mpi4py's runner"])
def test_a_rank_that_raises_before_init_ends_those_that_wait_in_it(starts_mpi: bool) -> None:
    script = RANK + (
        "if len(sys.argv) > 1: from mpi4py import MPI\n"
        "if rank == 1: raise ValueError('no such data set')\n"
        "from hvdkit.config import read_config\n"
        "from hvdkit.engine.startup import open_world\n"
        "open_world(read_config())[1].barrier()\n"
        "raise SystemExit('rank 1 was there')"
    )
    # mpi4py ends MPI when Python ends, which waits for the others: so who starts MPI himself needs mpi4py's runner.
    python = [sys.executable, *(["-m", "mpi4py"] if starts_mpi else []), "-c", script, *(["x"] if starts_mpi else [])]
    done = subprocess.run(
        [*HVDRUN, "-np", "3", *python], env=environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=40
    )
    assert done.returncode == 1, done.stderr
    assert b"hvdrun: rank 1 on" in done.stderr and b"ValueError: no such data set" in done.stderr
    assert b"rank 1 was there" not in done.stderr


@pytest.mark.parametrize(
    ("stream", "together"),
    product(
        ["stdout", "stderr"],
        [False, True],
        quick=lambda stream, together: (stream == "stderr") == together,
    ),
)
def test_the_last_lines_of_a_failed_rank_are_shown_once(stream: str, together: bool) -> None:
    """Where the verdict is: beside it, or above where they came by."""
    script = f"if rank == 1: print('why it failed', file=sys.{stream}); sys.exit(3)\ntime.sleep(60)"
    done = subprocess.run(
        command(2, script),
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if together else subprocess.PIPE,
        timeout=100,
    )
    shown = done.stdout if together else done.stderr
    assert shown.count(b"why it failed") == 1
    assert (b"its last lines:" in shown) is (stream == "stdout" and not together)


def test_a_rank_that_only_lost_its_peer_is_not_the_cause(tmp_path: Path) -> None:
    fails = "print('hvdkit.errors.RankLostError: rank 1 is gone', file=sys.stderr); sys.exit(1)"
    script = wait_for_end_of(0, tmp_path, fails) + "if rank == 1: os.kill(os.getpid(), 11)\ntime.sleep(60)"
    done = hvdrun(3, script)
    assert done.returncode == 139
    assert "hvdrun: rank 1 on" in done.stderr.decode()
    assert "after it, rank 0 on" in done.stderr.decode()


def test_a_rank_that_cannot_join_is_named_and_ends_the_job() -> None:
    script = """
from hvdkit.engine.startup import open_world
from hvdkit.config import read_config
def fail(*args, **options):
    if rank == 1:
        raise OSError("no room here")
    time.sleep(30)
import hvdkit.transport.shared.transport as shared_memory
shared_memory.SharedMemoryTransport = fail
open_world(read_config())
"""
    done = hvdrun(2, script)
    assert done.returncode == 1
    assert b"hvdkit: rank 1 on " in done.stderr and b"no room here" in done.stderr


def test_a_rank_that_is_done_early_does_not_end_the_others(tmp_path: Path) -> None:
    done = hvdrun(2, wait_for_end_of(0, tmp_path, "print('done 0'); sys.exit(0)") + "print('done', rank)")
    assert done.returncode == 0
    assert lines(done.stdout) == ["[0] done 0", "[1] done 1"]
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("transport", "sets"),
    [
        ("auto", ""),
        pytest.param("gloo", "", marks=pytest.mark.slow),
        pytest.param("mpi", "", marks=pytest.mark.slow),
        pytest.param("auto", "[[1, 2]]", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_ends_its_script_while_the_others_shut_down_keeps_none_of_them(transport: str, sets: str) -> None:
    init = f"hvd.init(process_sets={sets})" if sets else "hvd.init()"
    script = f"import hvdkit.torch as hvd; {init}; rank == 0 and sys.exit(0); hvd.shutdown(); print('done')"
    done = hvdrun(3, script, "--transport", transport)
    assert (done.returncode, sorted(lines(done.stdout))) == (0, ["[1] done", "[2] done"]), done.stderr


@pytest.mark.parametrize("transport", [pytest.param("auto", marks=pytest.mark.slow), "mpi"])
def test_no_thread_is_in_mpi_when_a_script_has_ended(transport: str) -> None:
    path = str(Path(__file__).parents[1] / "support" / "ending_script.py")
    done = hvdrun(2, f"import runpy; runpy.run_path({path!r})", "--transport", transport)
    assert (done.returncode, sorted(lines(done.stdout))) == (0, ["[0] left []", "[1] left []"]), done.stderr


def test_a_dead_agent_is_a_lost_rank() -> None:
    with started(2, SLEEP) as process:
        pids = read_pids(process, 2)
        agent = int(Path(f"/proc/{pids[1]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(agent, signal.SIGKILL)
        _, errors = process.communicate(timeout=100)
        assert process.returncode not in (0, None)
        assert "rank 1 on" in errors.decode()
        assert "was lost" in errors.decode()
        assert wait_until(lambda: not any(alive(pid) for pid in pids.values()))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_hvdrun_leaves_no_process(number: signal.Signals, code: int) -> None:
    with started(3, SLEEP) as process:
        read_pids(process, 3)
        all_of_them = descendants(process.pid)
        assert len(all_of_them) >= 7  # mpirun, three agents, three ranks
        process.send_signal(number)
        _, errors = process.communicate(timeout=100)
        assert process.returncode == code
        assert not any("Traceback" in line for line in lines(errors) if not line.startswith("["))  # hvdrun's own
        assert wait_until(lambda: not any(map(alive, all_of_them)))


def test_killing_hvdrun_leaves_nothing() -> None:
    script = "import subprocess; child = subprocess.Popen(['sleep', '61']); " + SLEEP
    with started(2, script) as process:
        read_pids(process, 2)
        folder = Path(find_jobs()[str(process.pid)])
        all_of_them = descendants(process.pid)
        assert len(all_of_them) >= 7  # mpirun, two agents, two ranks, a child of each
        process.kill()
        assert wait_until(lambda: not any(map(alive, all_of_them)))
        assert not folder.exists()


def test_what_a_rank_leaves_running_is_ended_with_it() -> None:
    done = hvdrun(2, "import subprocess; print(subprocess.Popen(['sleep', '62'], stdout=subprocess.DEVNULL).pid)")
    assert done.returncode == 0
    pids = [int(line.split()[1]) for line in lines(done.stdout)]
    assert wait_until(lambda: not any(map(alive, pids)))


def test_no_line_of_much_output_is_lost_or_mixed() -> None:
    script = "sys.stdout.writelines(f'{rank} {i} {\"x\" * (i % 300)}\\n' for i in range(20000))"
    done = hvdrun(3, script)
    assert done.returncode == 0
    out = lines(done.stdout)
    for rank in range(3):
        mine = [line for line in out if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] {rank} {i} {'x' * (i % 300)}" for i in range(20000)]
    assert len(out) == 60000


def test_output_passes_whatever_its_bytes(tmp_path: Path) -> None:
    script = "sys.stdout.buffer.write(b'\\xff\\x00\\xfe' + 'äöü 漢字 🦀'.encode() + b'\\nlast')"
    done = hvdrun(2, script, "--output-filename", str(tmp_path))
    assert done.returncode == 0
    expected = b"\xff\x00\xfe" + "äöü 漢字 🦀".encode() + b"\n"
    assert b"[1] " + expected in done.stdout
    assert (tmp_path / "rank.1.log").read_bytes() == expected + b"last"


def test_a_program_that_only_the_ranks_cannot_start_is_named(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    done = subprocess.run(
        [*HVDRUN, "-np", "2", str(program)], env=environment(), capture_output=True, timeout=30, check=False
    )
    assert done.returncode == 127
    assert "cannot be started" in done.stderr.decode()


def test_a_line_of_dry_run_does_the_same_when_pasted(tmp_path: Path) -> None:
    logs = tmp_path / "it's logs"
    script = "print('rank', rank, 'of', os.environ['HVDKIT_LOG_LEVEL'])"
    done = hvdrun(2, script, "--dry-run", "--log-level", "info", "--output-filename", str(logs))
    assert done.returncode == 0
    assert done.stdout.decode().count("\n") == 1 + (RANK + script).count("\n")
    assert "HVDKIT_CONTROL" not in done.stdout.decode()
    assert not logs.exists()
    pasted = subprocess.run(
        ["sh", "-c", done.stdout.decode()], env=environment(), capture_output=True, timeout=30, check=False
    )
    assert pasted.returncode == 0, pasted.stderr.decode()
    assert sorted(lines(pasted.stdout)) == ["[0] rank 0 of info", "[1] rank 1 of info"]
    assert (logs / "rank.1.log").read_text() == "rank 1 of info\n"


def test_verbose_tells_which_mpirun_and_where_each_rank_is() -> None:
    done = hvdrun(2, "print('x')", "--verbose")
    errors = done.stderr.decode()
    assert re.search(r"hvdrun: (Open MPI|MPICH|Intel MPI) \d", errors)
    for rank in range(2):
        assert re.search(
            rf"hvdrun: rank {rank} on \S+: pid \d+, (bound to|may use) CPUs [\d,-]+, OMP_NUM_THREADS=\d+", errors
        )
    assert "hvdrun: all 2 ranks ended with exit code 0." in lines(done.stderr)


def test_signals_for_the_ranks_are_passed_on() -> None:
    script = (
        "signal.signal(signal.SIGUSR1, lambda *_: (print('usr1', flush=True), os._exit(0)))\n"
        "print('pid', os.getpid(), flush=True); time.sleep(60)"
    )
    with started(2, script) as process:
        read_pids(process, 2)
        process.send_signal(signal.SIGUSR1)
        out, _ = process.communicate(timeout=100)
        assert process.returncode == 0
        assert sorted(lines(out)) == ["[0] usr1", "[1] usr1"]


#: Saves for longer than a rank without a handler is left; what it has started must go on for that time.
SAVER = """
import subprocess
child = subprocess.Popen(["sleep", "63"])
def save(number, frame):
    time.sleep(LONG + rank / 5)
    print("child", child.poll(), flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print('pid', os.getpid(), flush=True); time.sleep(60)
""".replace("LONG", str(KILL_AFTER_S + 0.2))


def test_ranks_that_save_at_sigterm_are_waited_for_and_are_no_failure() -> None:
    with started(2, SAVER) as process:
        pids = read_pids(process, 2)
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=100)
        assert sorted(lines(out)) == ["[0] child None", "[1] child None"]
        expected = "hvdrun: saved, not finished: ended with exit code 75. Run the same command again to continue."
        assert lines(errors) == [expected]
        assert process.returncode == 75
        assert not any(map(alive, pids.values()))


def test_ranks_that_save_for_too_long_are_ended() -> None:
    script = "signal.signal(signal.SIGTERM, lambda *_: None)\nprint('pid', os.getpid(), flush=True)\n"
    with started(2, script + "while True: time.sleep(1)", "--save-timeout", "0.5") as process:
        pids = read_pids(process, 2)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, lines(errors)) == (143, ["hvdrun: SIGTERM: ended 2 ranks."])
        assert not any(map(alive, pids.values()))


def test_a_reader_that_leaves_ends_the_job() -> None:
    with started(2, "print('pid', os.getpid(), flush=True)\nwhile True: print('x' * 1000)") as process:
        assert process.stdout is not None
        process.stdout.read(100)
        process.stdout.close()
        process.stdout = None
        assert process.wait(timeout=100) == 141


def test_an_hvdrun_inside_a_rank_is_a_job_of_its_own() -> None:
    inner = repr(command(2, "print('inner', rank)"))
    done = hvdrun(1, f"import subprocess; sys.exit(subprocess.run({inner}).returncode)")
    assert done.returncode == 0, done.stderr.decode()
    assert sorted(lines(done.stdout)) == ["[0] [0] inner 0", "[0] [1] inner 1"]


def run_on_terminal(argv: Sequence[str], **variables: str) -> tuple[int, bytes]:
    """Run a command whose stdout and stderr are a terminal of 30 rows and 100 columns."""
    outer, inner = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    environ = {**environment(), "TERM": "dumb", **variables}
    process = subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, stdout=inner, stderr=inner)
    os.close(inner)
    seen = b""
    try:
        while process.poll() is None or select.select([outer], [], [], 0.2)[0]:
            if select.select([outer], [], [], 0.2)[0]:
                try:
                    seen += os.read(outer, 1 << 16)
                except OSError:
                    break
        return process.wait(timeout=20), seen
    finally:
        process.kill()
        process.wait()
        os.close(outer)


def test_rank_0_has_a_terminal_when_hvdrun_has_one() -> None:
    script = (
        "print(rank, sys.stdout.isatty(), os.get_terminal_size(1) if sys.stdout.isatty() else None)\n"
        "if rank == 0: sys.stdout.write('\\r\\x1b[2K10 %\\r\\x1b[2K20 %\\n')"
    )
    code, seen = run_on_terminal(command(2, script))
    assert code == 0
    assert b"[0] 0 True os.terminal_size(columns=96, lines=30)\r\n" in seen
    assert b"[1] 1 False None\r\n" in seen
    assert b"\r\x1b[2K[0] 10 %\r\x1b[2K[0] 20 %\r\n" in seen


@pytest.mark.parametrize(
    ("no_color", "words"),
    [
        ("", [b"\x1b[36m[0]\x1b[0m out 0\r\n", b"\x1b[32m[1]\x1b[0m out 1\r\n"]),
        ("1", [b"[0] out 0\r\n", b"[1] out 1\r\n"]),
    ],
)
def test_a_terminal_shows_the_ranks_in_colours_unless_NO_COLOR_is_set(no_color: str, words: list[bytes]) -> None:
    code, seen = run_on_terminal(command(2, "print('out', rank)"), TERM="xterm", NO_COLOR=no_color)
    assert code == 0
    assert sorted(seen.splitlines(keepends=True)) == sorted(words)


def test_ranks_and_prefixes_are_shown_as_asked_and_a_hidden_rank_that_fails_is_quoted() -> None:
    script = "print('out', rank, os.environ['WHO']); print('err', rank, file=sys.stderr)"
    done = hvdrun(3, script, "--no-prefix", "--show-ranks", "1-2", "-x", "WHO=me")
    assert (done.returncode, sorted(lines(done.stdout))) == (0, ["out 1 me", "out 2 me"])
    assert sorted(lines(done.stderr)) == ["err 1", "err 2"]
    done = hvdrun(2, "if rank == 1: sys.exit('why it failed')\ntime.sleep(60)", "--show-ranks", "0", "-q")
    assert done.returncode == 1
    assert "hvdrun:     why it failed" in lines(done.stderr)
