"""What the command line becomes: the ranks' command, their number, their variables, and a shell's completion."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tty
from collections.abc import Mapping
from pathlib import Path

import pytest
from planned_job import plan_job
from refused import refused

from hvdkit import cli as hvdkit_cli
from hvdkit.errors import MissingDependencyError
from hvdkit.launch.cli import parser
from hvdkit.launch.cli.options import build_parser, parse_arguments
from hvdkit.launch.detect.command import plan_command
from hvdkit.launch.detect.gpus import choose_ranks, count_gpus
from hvdkit.launch.detect.hosts import count_cores
from hvdkit.launch.hostfiles import Host
from hvdkit.launch.launchers import build_launch
from hvdkit.launch.plan.environment import select_forwarded
from hvdkit.launch.plan.job import Job
from hvdkit.launch.plan.mpi import Mpi
from hvdkit.launch.plan.selected_launcher import SelectedLauncher
from hvdkit.launch.run.output import Output
from hvdkit.visible_gpus import read_visible

PATH = "/usr/bin:/bin"


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_script_and_a_module_run_with_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "train.py").touch()
    environ = {"PATH": PATH}
    job = plan_job(parse_arguments(["-np", "1", "train.py", "--lr", "-1"]), environ)
    assert job.command == (sys.executable, "train.py", "--lr", "-1")
    job = plan_job(parse_arguments(["-m", "-np", "1", "pack.train", "-m", "x"]), environ)
    assert job.command == (sys.executable, "-m", "pack.train", "-m", "x")
    assert plan_job(parse_arguments(["-np", "1", "-m", "json.tool"]), environ).command[2] == "json.tool"


def test_a_backend_that_keras_does_not_have_is_noted_with_the_nearest() -> None:
    def notes(backend: str) -> str:
        return "".join(plan_job(parse_arguments(["-np", "1", "true"]), {"PATH": PATH, "KERAS_BACKEND": backend}).notes)

    assert "KERAS_BACKEND=pytorch is not a backend of Keras" in notes("pytorch")
    assert "Did you mean torch?" in notes("pytorch") and not notes("torch") and not notes("")


def test_a_number_of_ranks_after_the_command_is_noted_where_hosts_give_another() -> None:
    job = plan_job(parse_arguments(["-H", "localhost:3", "true", "-np", "2"]), {"PATH": PATH})
    assert job.ranks == 3 and "-np stands after true: it is an argument of that" in "".join(job.notes)
    assert not plan_job(parse_arguments(["-H", "localhost:3", "true", "-n", "2"]), {"PATH": PATH}).notes


def test_what_is_not_a_script_of_this_python_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tool = program(tmp_path / "bin.py", "#!/bin/sh\n")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for words in (["python", "train.py"], ["sh", "-c", "x"], ["bin.py"]):
        assert plan_command(words, module=False, path=str(tmp_path)) == words
    assert plan_command([str(tool)], module=False, path="", python="p") == ["p", str(tool)]


def test_a_script_that_cannot_be_read_is_refused_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)  # root may read anything
    with refused("command-unreadable", names=[str(tmp_path / "train.py"), "Permission denied"]):
        plan_job(parse_arguments(["-np", "1", str(tmp_path / "train.py")]), {"PATH": PATH})


@pytest.mark.parametrize(
    ("visible", "present", "number"),
    [
        ("0,1", 4, 2), ("", 4, 0), ("-1", 4, 0), ("0,-1,1", 4, 1), ("0,9", 4, 1), ("GPU-12ab, MIG-34", 1, 2),
        ("NoDevFiles", 4, 0), ("0", 0, 0), ("0,1,0", 4, 0), ("0,0", 2, 0), ("0,9,1", 2, 1), ("7", 2, 0), ("1x,0", 2, 2),
        ("GPU-12ab,GPU-12ab", 2, 0), ("0,", 2, 1),
    ],
)  # fmt: skip
def test_visible_gpus_are_counted_as_cuda_does(visible: str, present: int, number: int) -> None:
    assert len(read_visible(visible, [""] * present).gpus) == number


def test_gpus_are_visible_by_number_or_by_the_beginning_of_their_uuid() -> None:
    uuids = ["GPU-aa1", "GPU-aa2", "GPU-b"]
    assert [gpu.number for gpu in read_visible(None, uuids).gpus] == [0, 1, 2]
    assert [gpu.number for gpu in read_visible("GPU-b, 0,MIG-7", uuids).gpus] == [2, 0, None]
    assert read_visible("2,GPU-c,0", uuids) == ((("2", 2),), "GPU-c", None)
    assert read_visible("2,GPU-b", uuids) == ((), None, "GPU-b"), "one GPU under two names"
    assert [gpu.word for gpu in read_visible("5,GPU-x", None).gpus] == ["5", "GPU-x"], "of unknown GPUs"


@pytest.mark.slow
@pytest.mark.parametrize(
    "visible", ["0,1", "", "-1", "0,-1,1", "1x,0", "0,0", "GPU-a,GPU-b", "GPU-a,GPU-a", "+1,0", "a"]
)
def test_visible_gpus_are_those_of_torch(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.cuda

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert len(torch.cuda._parse_visible_devices()) == len(read_visible(visible, ["GPU-a", "GPU-b"]).gpus)


def test_gpus_are_those_of_nvidia_smi_else_of_the_driver(tmp_path: Path) -> None:
    listing = "GPU 0: H200 (UUID: GPU-1)\n  MIG 1g.18gb Device 0: (UUID: MIG-2)\nGPU 1: H200 (UUID: GPU-3)"
    program(tmp_path / "nvidia-smi", f"#!/bin/sh\n[ -z \"$CUDA_VISIBLE_DEVICES\" ] && cat <<'END'\n{listing}\nEND\n")
    environ = {"PATH": f"{tmp_path}:{PATH}"}
    assert count_gpus(environ) == 2
    assert count_gpus({**environ, "CUDA_VISIBLE_DEVICES": "1"}) == 1
    proc = tmp_path / "gpus"
    for name in ("a", "b", "c"):
        (proc / name).mkdir(parents=True)
    assert count_gpus({"PATH": ""}, proc) == 3
    program(tmp_path / "nvidia-smi", "#!/bin/sh\nexit 9\n")
    assert count_gpus(environ, proc) == 3


def test_without_a_gpu_the_error_says_what_was_inspected(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0"}
    names = ["nvidia-smi", f"no {tmp_path / 'none'};", "CUDA_VISIBLE_DEVICES='0'", "-np N"]
    with refused("gpu-missing", names=names):
        count_gpus(environ, tmp_path / "none")


def test_auto_is_the_slots_of_the_hosts_else_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"PATH": PATH}
    assert plan_job(parse_arguments(["-np", "auto", "true"]), environ).ranks == count_cores()
    assert plan_job(parse_arguments(["-np", "auto", "-H", "localhost:3", "true"]), environ).ranks == 3
    with refused("np-gpu-on-hosts", names=["-np gpu", "node1, node2", "--slots-per-host"]):
        choose_ranks("gpu", (Host("node1", 4), Host("node2", 4)), local=False, cores=2, environ={})


def test_variables_reach_the_ranks_by_the_environment_only() -> None:
    environ = {"PATH": PATH, "TOKEN": "secret1", "TMPDIR": "/scratch", "AWS_KEY": "a", "AWS_REGION": "b"}
    words = ["-x", "TOKEN", "--env", "LEVEL=secret2", "-xTMPDIR", "-x", "AWS_KEY", "--no-forward-env", "AWS_*"]
    job = plan_job(parse_arguments([*words, "-np", "1", "true"]), environ)
    assert {name: job.environ.get(name) for name in ("TOKEN", "LEVEL", "AWS_KEY", "AWS_REGION")} == {
        "TOKEN": "secret1",
        "LEVEL": "secret2",
        "AWS_KEY": "a",
        "AWS_REGION": None,
    }
    away = Job(**{**vars(job), "hosts": (Host("node1", 1),), "local": False})
    for kind, name in (("open_mpi", "Open MPI"), ("mpich", "MPICH"), ("intel_mpi", "Intel MPI")):
        launch = build_launch(away, SelectedLauncher("mpirun", "", mpi=Mpi(kind, name, "5.0.1", "/bin/mpirun")))
        assert not any("secret" in word for word in launch.argv)
        sent = {word for words in launch.argv for word in words.split(",")}
        assert {"TOKEN", "LEVEL", "TMPDIR", "AWS_KEY"} <= sent
        assert launch.variables["LEVEL"] == "secret2"
    assert select_forwarded({"OMPI_MCA_pml": "ob1"}, ["OMPI_MCA_pml"]) == ()


@pytest.mark.parametrize(
    "word", ["PMIX_RANK=1", "HVDKIT_CONTROL=x", "RANK=1", "HOROVOD_RANK=1", "JAX_PROCESS_ID=0", "WORLD_SIZE=1"]
)
def test_variables_that_each_rank_gets_are_refused(word: str) -> None:
    with refused("variable-of-launcher", names=[f"-x {word.partition('=')[0]}: "]):
        plan_job(parse_arguments(["-np", "1", "-x", word, "true"]), {"PATH": PATH})


def read(pipe: int) -> bytes:
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, 1000)
    except BlockingIOError:
        return b""


def test_notes_wait_for_a_problem_if_hvdrun_is_quiet_and_other_ranks_are_not_shown() -> None:
    reader, writer = os.pipe()
    output = Output(writer, writer, quiet=True, shown={0, 2})
    output.note("2 ranks on node1.")
    for rank in range(3):
        output.write(rank, False, b"[%d]\n" % rank)
    assert read(reader) == b"[0]\n[2]\n"
    output.say("rank 1 failed.")
    assert read(reader) == b"hvdrun: 2 ranks on node1.\nhvdrun: rank 1 failed.\n"


@pytest.mark.parametrize(
    ("text", "after"),
    [
        (b"\x1b[36m[0]\x1b[0m loss", b"\n[1]\n"),
        (b"[0] 10 %\r", b"\r\x1b[K[1]\n"),
        (b"[0] \x1b[2K10 %", b"\r\x1b[K[1]\n"),
    ],
)
def test_only_a_line_that_is_drawn_again_is_wiped_for_another_ranks_line(text: bytes, after: bytes) -> None:
    outer, inner = os.openpty()
    tty.setraw(inner)
    output = Output(inner, inner)
    output.write(0, False, text)
    output.write(1, False, b"[1]\n")
    seen = b""
    while (
        len(seen) < len(text + after) and select.select([outer], [], [], 10)[0]
    ):  # a terminal passes on piece by piece
        seen += os.read(outer, 1000)
    assert seen == text + after
    os.close(inner)
    os.close(outer)


def test_the_rest_of_a_line_that_another_rank_has_cut_bears_its_rank_too() -> None:
    reader, writer = os.pipe()
    output = Output(writer, writer)
    output.prefix_of = lambda rank: b"[%d] " % rank
    pieces = [(0, b"[0] a"), (1, b"[1] b"), (0, b"c"), (0, b"d"), (1, b"\n"), (0, b"e\n"), (1, b"[1] f\n")]
    for rank, data in pieces:
        output.write(rank, False, data)
    assert read(reader) == b"[0] a\n[1] b\n[0] cde\n[1] f\n"
    output.write(0, False, b"[0] out")
    output.write(1, False, b"[1] g\n")
    output.write(0, True, b"[0] err\n")  # a line of its own
    output.write(0, False, b" put\n")
    assert read(reader) == b"[0] out\n[1] g\n[0] err\n[0]  put\n"


@pytest.mark.parametrize("shell", parser.SHELLS)
def test_completion_knows_options_and_choices(shell: str) -> None:
    pytest.importorskip("shtab", reason="shtab is not installed")
    script = parser.write_completion(build_parser(everything=True), shell)
    assert "slots-per-host" in script and "hierarchical" in script
    assert "doctor" in parser.write_completion(hvdkit_cli.build_parser(), shell)
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=30)


def test_completion_without_shtab_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr("hvdkit.optional_import.importlib.import_module", missing)
    with pytest.raises(MissingDependencyError, match=r"pip install 'hvdkit\[completion\]'"):
        parse_arguments(["--print-completion", "bash"])


def test_a_configuration_file_yields_to_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    (tmp_path / "c.yaml").write_text("autotune: {enabled: true}\nlogging: {level: INFO}\n")
    words = ["--config-file", str(tmp_path / "c.yaml"), "--no-autotune", "-np", "1", "true"]
    expected: Mapping[str, str] = {"HVDKIT_AUTOTUNE": "0", "HVDKIT_LOG_LEVEL": "INFO"}
    assert parse_arguments(words).settings == expected
