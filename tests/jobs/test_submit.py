"""Batch scripts: against recorded ones, with hostile input, and what a shell makes of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit import cli
from hvdkit.errors import SubmitError
from hvdkit.tools.submit.command import KINDS, SCHEDULERS, find_defaults
from hvdkit.tools.submit.follow import State
from hvdkit.tools.submit.job import (
    BatchJob,
    Warning,
    format_clock,
    format_minutes,
    parse_time,
    parse_variable,
    parse_warning,
)
from hvdkit.tools.submit.kubernetes import read_state
from hvdkit.tools.submit.scripts import read_lsf_state, read_pbs_state, read_slurm_state

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
EXAMPLES = Path(__file__).parents[2] / "examples" / "kubernetes"
SCHEMAS = json.loads((Path(__file__).parents[1] / "data" / "kubernetes_schemas.json").read_text())
DIRECTIVES = {"slurm": "#SBATCH", "pbs": "#PBS", "lsf": "#BSUB"}

PLAIN = BatchJob(command=("python", "train.py"), nodes=4, tasks_per_node=8, seconds=7200)
FULL = BatchJob(
    command=("python", "train.py", "--name", "two words"),
    nodes=2,
    tasks_per_node=4,
    seconds=129600,
    name="digits",
    gpus=4,
    cpus=7,
    memory="64GB",
    account="lab",
    queue="gpu",
    output="logs/%x.%j",
    requeue=True,
    warning=Warning("USR1", 300),
    environ={"NCCL_DEBUG": "INFO", "TITLE": "it's $HOME"},
    modules=("gcc/12", "cuda"),
    venv="/home/me/my venv",
    mail="me@site.org",
)
KUBERNETES = replace(
    FULL, output=BatchJob.output, warning=None, modules=(), venv="", mail="", account="", image="site/x:1"
)


def jobs() -> dict[str, tuple[str, BatchJob]]:
    found = {}
    for name, directive in DIRECTIVES.items():
        found[f"submit_{name}_plain.sh"] = (name, PLAIN)
        found[f"submit_{name}_full.sh"] = (name, replace(FULL, extra=(f"{directive} -x y",)))
    for name, prefix in (("mpijob", "submit_k8s"), ("trainjob", "submit_trainjob")):
        found[f"{prefix}_plain.yaml"] = (name, replace(PLAIN, image="site/x:1"))
        found[f"{prefix}_full.yaml"] = (name, KUBERNETES)
    return found


WRITERS = {**SCHEDULERS, **KINDS}


@pytest.mark.parametrize("name", jobs())
def test_the_script_is_the_recorded_one(name: str) -> None:
    scheduler, job = jobs()[name]
    script = WRITERS[scheduler].write(job)
    path = GOLDEN / name
    if os.environ.get("HVDKIT_TEST_RECORD") == "1":
        path.write_text(script)
    assert script == path.read_text(), "if this is meant: HVDKIT_TEST_RECORD=1 pytest tests/jobs/test_submit.py"


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.glob("submit_*.sh")))
def test_a_shell_finds_no_fault_with_the_script(name: str) -> None:
    check_syntax((GOLDEN / name).read_text())
    shellcheck = shutil.which("shellcheck")
    if shellcheck:  # an aid where it is installed; bash itself has read the script above
        done = subprocess.run(
            [shellcheck, "-S", "warning", "-e", "SC1091", GOLDEN / name], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.glob("submit_*.sh")))
def test_a_script_sets_one_trap_for_a_signal(name: str) -> None:
    traps = re.findall(r"^trap (?:'[^']*'|\S+) (.*)$", (GOLDEN / name).read_text(), re.MULTILINE)
    signals = " ".join(traps).split()
    assert "TERM" in signals and len(signals) == len(set(signals))


def check_syntax(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=os.fsencode(script), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def read_manifest(text: str) -> list[dict[str, Any]]:
    """The objects of a manifest, each valid by the schema of its operator."""
    yaml = pytest.importorskip("yaml")
    objects: list[dict[str, Any]] = list(yaml.safe_load_all(text))
    for each in objects:
        jsonschema.validate(each, {"$ref": f"#/definitions/{each['kind']}", "definitions": SCHEMAS["definitions"]})
    return objects


def find_launcher(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """The container that hvdrun runs in."""
    spec = objects[0]["spec"]
    if objects[0]["kind"] == "MPIJob":
        return cast(dict[str, Any], spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0])
    jobs = {job["name"]: job for job in spec["template"]["spec"]["replicatedJobs"]}
    return cast(dict[str, Any], jobs["launcher"]["template"]["spec"]["template"]["spec"]["containers"][0])


@pytest.mark.parametrize(
    "name", [path.name for path in sorted([*GOLDEN.glob("submit_*.yaml"), *EXAMPLES.glob("*job.yaml")])]
)
def test_a_manifest_is_valid_by_the_schemas_of_the_operators(name: str) -> None:
    path = GOLDEN / name
    objects = read_manifest((path if path.exists() else EXAMPLES / name).read_text())
    assert find_launcher(objects)["command"][:3] == ["hvdrun", "--hostfile", "/etc/mpi/hostfile"]
    if objects[0]["kind"] == "MPIJob":
        assert objects[0]["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] in (2, 4)
        assert objects[0]["spec"]["slotsPerWorker"] in (2, 4, 8)
    else:
        runtime, job = objects
        assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
        assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
        assert job["spec"]["trainer"]["numNodes"] in (2, 4)
        assert job["spec"]["trainer"]["numProcPerNode"] == runtime["spec"]["mlPolicy"]["mpi"]["numProcPerNode"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_schemas_find_a_field_that_no_operator_has(kind: str) -> None:
    jsonschema_errors = pytest.importorskip("jsonschema.exceptions")
    text = KINDS[kind].write(replace(PLAIN, image="x"))
    for wrong in (("replicas:", "replica:"), ("mpiImplementation: OpenMPI", "mpiImplementation: Open MPI")):
        if wrong[0] in text:
            with pytest.raises(jsonschema_errors.ValidationError):
                read_manifest(text.replace(*wrong))


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_is_what_the_command_in_it_writes(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first lines of examples/kubernetes/KIND.yaml say how it was written."""
    text = (EXAMPLES / f"{kind}.yaml").read_text()
    command = re.findall(r"^# (hvdkit submit .*?[^\\])$", text, re.MULTILINE | re.DOTALL)[0].replace("\\\n#", "")
    assert cli.main(shlex.split(command)[1:]) == 0
    assert text.endswith(capsys.readouterr().out)


HOSTILE = [
    "a;b",
    "$(touch x)",
    "`id`",
    "a b",
    "a\nb",
    "-x",
    "a'b",
    'a"b',
    "a&b",
    "a|b",
    "a>b",
    "a\\b",
    "a#b",
    "ä",
    "a*",
    "\x00",
]
WORDS = ("name", "account", "queue", "output", "mail", "memory", "image")


@pytest.mark.parametrize("scheduler", DIRECTIVES)
@pytest.mark.parametrize("field", WORDS)
def test_what_goes_into_directives_is_refused_unless_harmless(scheduler: str, field: str) -> None:
    for text in HOSTILE:
        with pytest.raises(SubmitError, match="is not allowed"):
            SCHEDULERS[scheduler].write(replace(PLAIN, **{field: text}))  # type: ignore[arg-type]
    for text in HOSTILE:
        with pytest.raises(SubmitError, match="--module"):
            SCHEDULERS[scheduler].write(replace(PLAIN, modules=(text,)))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_control_characters_are_refused_everywhere(scheduler: str) -> None:
    job = replace(PLAIN, image="x")
    for text in ("a\nb", "a\n#BSUB -q other", "\x1b[2J", "a\rb", "\x85"):
        for field in ({"command": ("python", text)}, {"environ": {"A": text}}, {"venv": text}, {"extra": (text,)}):
            with pytest.raises(SubmitError, match="control character"):
                SCHEDULERS[scheduler].write(replace(job, **field))


@pytest.mark.parametrize("scheduler", DIRECTIVES)
@given(
    words=st.lists(st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Zl", "Zp"))), min_size=1, max_size=3)
)
def test_the_command_and_variables_reach_the_shell_as_they_are(scheduler: str, words: list[str]) -> None:
    """bash reads each line as the words that went in; no letter of theirs means anything to it."""
    script = SCHEDULERS[scheduler].write(replace(PLAIN, command=("run", *words), environ={"A": words[0]}, venv="/v"))
    lines = script.splitlines() if len(script.splitlines()) == script.count("\n") else script.split("\n")
    run = next(line for line in lines if line.startswith("hvdrun run"))
    assert shlex.split(run.removesuffix(" &")) == ["hvdrun", "run", *words]
    assert shlex.split(next(line for line in lines if line.startswith("export A="))) == ["export", f"A={words[0]}"]


@pytest.mark.parametrize("scheduler", DIRECTIVES)
def test_a_shell_agrees_that_quoted_words_are_inert(scheduler: str, tmp_path: Path) -> None:
    words = [
        "$(touch pwned)",
        "`touch pwned`",
        "; touch pwned",
        "& touch pwned",
        "' ; touch pwned ; '",
        "\\",
        "*",
        "!x",
        "~",
    ]
    job = replace(PLAIN, command=("show", *words), environ={"A": words[0], "B": words[4]}, output="log")
    script = SCHEDULERS[scheduler].write(job)
    hvdrun = tmp_path / "bin" / "hvdrun"
    hvdrun.parent.mkdir()
    hvdrun.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "$A" "$B" > seen\n')
    hvdrun.chmod(0o755)
    environ = {
        "PATH": f"{hvdrun.parent}:/usr/bin:/bin",
        "PBS_O_WORKDIR": str(tmp_path),
        "LSB_JOBID": "1",
        "PBS_JOBID": "1",
    }
    subprocess.run(["bash"], input=os.fsencode(script), env=environ, cwd=tmp_path, timeout=20, check=True)
    assert (tmp_path / "seen").read_text().splitlines() == ["show", *words, words[0], words[4]]
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_kubernetes_does_not_expand_a_dollar_either(kind: str) -> None:
    job = replace(PLAIN, command=("python", "$(HOME)", "a: b # c", "'\"{}"), environ={"A": "$$(B)"}, image="x")
    container = find_launcher(read_manifest(KINDS[kind].write(job)))
    assert container["command"][3:] == ["python", "$$(HOME)", "a: b # c", "'\"{}"]
    assert container["env"] == [{"name": "A", "value": "$$$$(B)"}]


def test_all_problems_of_a_job_are_told_together() -> None:
    job = replace(PLAIN, nodes=0, name="a b", output="%u.log", memory="64", extra=("#PBS -q x",), environ={"1": ""})
    with pytest.raises(SubmitError) as caught:
        SCHEDULERS["slurm"].write(job)
    for part in (
        "--nodes 0",
        "--job-name 'a b'",
        "%u is unknown",
        "--memory '64'",
        "begin with '#SBATCH'",
        "--env '1'",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_kubernetes_names_what_to_do_about_each_flag_it_has_no_use_for(kind: str) -> None:
    with pytest.raises(SubmitError) as caught:
        KINDS[kind].write(replace(FULL, name="Digits_1"))
    for part in ("--image", "--job-name", "--module", "--venv", "--account", "--signal", "--mail", "--output"):
        assert part in str(caught.value)


TIMES = {"2h": 7200, "90m": 5400, "1d12h": 129600, "02:00:00": 7200, "1-00:00:00": 86400, "30s": 30, "1h30m": 5400}


def test_times_are_read_and_written() -> None:
    assert {text: parse_time(text) for text in TIMES} == TIMES
    for text in (
        "",
        "2",
        "120",
        "0",
        "0h",
        "2 h",
        "h",
        "2h2h",
        "-2h",
        "1:00",
        "2:60:00",
        "2.5h",
        "two",
        "٢h",
        "1m1h",
        "9" * 40 + "h",
    ):
        with pytest.raises(ValueError, match="Write it like 2h, 90m, 1d12h or 02:00:00"):
            parse_time(text)
    assert [format_clock(seconds) for seconds in (5, 7200, 129600)] == ["00:00:05", "02:00:00", "36:00:00"]
    assert format_clock(129600, days=True) == "1-12:00:00"
    assert [format_minutes(seconds) for seconds in (1, 60, 5400, 129600)] == ["00:01", "00:01", "01:30", "36:00"]


@given(st.text(max_size=20))
def test_no_text_is_more_than_a_value_error(text: str) -> None:
    for parse in (parse_time, parse_warning, parse_variable):
        with contextlib.suppress(ValueError):
            parse(text)


def test_warnings_are_read() -> None:
    assert parse_warning("USR1@120") == Warning("USR1", 120)
    assert parse_warning("SIGUSR2@5m") == Warning("USR2", 300)
    assert parse_warning("USR1") == Warning("USR1", 60)
    for text in ("TERM@60", "USR1@", "USR1@0", "B:USR1@60", "USR3@1", "USR1@60;x"):
        with pytest.raises(ValueError):
            parse_warning(text)


def test_states_are_read() -> None:
    slurm = "JobId=7 JobName=x JobState={} Reason={} ExitCode={} Comment=(null)"
    assert read_slurm_state(slurm.format("PENDING", "Priority", "0:0")) == State("waiting", "pending (Priority)")
    assert read_slurm_state(slurm.format("RUNNING", "None", "0:0")) == State("running", "running")
    assert read_slurm_state(slurm.format("COMPLETED", "None", "0:0")) == State("ended", "completed", 0)
    assert read_slurm_state(slurm.format("FAILED", "NonZeroExitCode", "3:0")) == State("ended", "failed", 3)
    assert read_slurm_state(slurm.format("CANCELLED", "None", "0:15")) == State("ended", "cancelled", 143)
    assert read_slurm_state(slurm.format("TIMEOUT", "None", "0:0")) == State("ended", "timeout", 1)
    pbs = "Job Id: 7.head\n    Job_Name = x\n    job_state = {}\n{}"
    assert read_pbs_state(pbs.format("Q", "")) == State("waiting", "queued")
    assert read_pbs_state(pbs.format("R", "")) == State("running", "running")
    for status, code in ((0, 0), (3, 3), (271, 143), (-29, 1)):
        assert read_pbs_state(pbs.format("F", f"    Exit_status = {status}\n")) == State("ended", "finished", code)
    assert read_lsf_state("PEND -\n") == State("waiting", "pend")
    assert read_lsf_state("RUN -\n") == State("running", "run")
    assert read_lsf_state("DONE -\n") == State("ended", "done", 0)
    assert read_lsf_state("EXIT 3\n") == State("ended", "exit", 3)
    kubernetes = (
        '{{"status": {{"conditions": [{{"type": "Created", "status": "True"}}, {{"type": "{}", "status": "True"}}]}}}}'
    )
    assert read_state(kubernetes.format("Running")) == State("running", "running")
    assert read_state(kubernetes.format("Failed")) == State("ended", "failed", 1)
    assert read_state(kubernetes.format("Complete")) == State("ended", "complete", 0)
    assert read_state(kubernetes.format("Failed")) == State("ended", "failed", 1)
    assert read_state(kubernetes.format("Suspended")) == State("waiting", "created suspended")
    launcher = '{"status": {"jobsStatus": [{"name": "node", "active": 1}, {"name": "launcher", "active": %d}]}}'
    assert read_state(launcher % 1) == State("running", "running")
    assert read_state(launcher % 0) == State("waiting", "created")
    for read in (read_slurm_state, read_pbs_state, read_lsf_state, read_state):
        assert read("") is None
        assert read("error: nobody knows\n") is None


def test_ids_are_read() -> None:
    assert SCHEDULERS["slurm"].read_id("123;cluster\n") == "123"
    assert SCHEDULERS["slurm"].read_id("note: something\n123\n") == "123"
    assert SCHEDULERS["pbs"].read_id("123.head-1.site.org\n") == "123.head-1.site.org"
    assert SCHEDULERS["lsf"].read_id("Job <123> is submitted to default queue <normal>.\n") == "123"
    assert SCHEDULERS["k8s"].read_id("mpijob.kubeflow.org/train\n") == "train"
    names = "clustertrainingruntime.trainer.kubeflow.org/train\ntrainjob.trainer.kubeflow.org/train\n"
    assert KINDS["trainjob"].read_id(names) == "train"
    assert not SCHEDULERS["slurm"].read_id("no")


def test_the_scheduler_is_the_one_whose_command_is_there() -> None:
    assert find_defaults({"sbatch"}.__contains__, {}) == ["slurm"]
    assert find_defaults({"qsub", "bsub"}.__contains__, {}) == ["pbs", "lsf"]
    assert find_defaults({"qsub"}.__contains__, {"SGE_ROOT": "/opt/sge"}) == []
    assert find_defaults({"kubectl"}.__contains__, {}) == []


COMMON = ["submit", "--nodes", "4", "--tasks-per-node", "8", "--time", "2h"]


def test_dry_run_prints_the_script_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for name, directive in DIRECTIVES.items():
        assert cli.main([*COMMON, "--scheduler", name, "--dry-run", "--", "python", "train.py"]) == 0
        out, err = capsys.readouterr()
        assert out == (GOLDEN / f"submit_{name}_plain.sh").read_text()
        assert err == ""
        assert re.match(rf"(#.*\n)+{directive} ", out)


BAD = {
    "--nodes: -1 is not a whole number of at least 1": ["--nodes", "-1"],
    "--cpus-per-task: nan is not a whole number": ["--cpus-per-task", "nan"],
    "--dependency 'x;y' is not allowed: the id of a job": ["--dependency", "x;y"],
    "Leave one of them out": ["--json", "--follow"],
    "has no unit. Write it like 2h": ["--time", "120"],
    "is not SIGNAL@TIME with USR1 or USR2": ["--signal", "TERM@60"],
    "would be sent before the job starts": ["--signal", "USR1@2h"],
    "is not NAME=VALUE": ["--env", "A"],
    "--kind trainjob is for Kubernetes": ["--kind", "trainjob"],
    "sbatch is not on PATH": [],
    "has no bin/activate": ["--venv", "missing"],
    "mpirun starts ranks": ["--", "mpirun", "-np", "4"],
    "-np 4 of hvdrun places ranks": ["--", "hvdrun", "-np", "4"],
    "hvdrun: unknown option --no-such": ["--", "hvdrun", "--no-such=1"],
    "There is no command": ["--", ""],
    "the folder 'logs' does not exist": ["--output", "logs/x"],
}


@pytest.mark.parametrize("sentence", BAD)
def test_what_is_wrong_is_said_before_anything_is_queued(
    sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "train.py").touch()
    dashes = [] if "--" in BAD[sentence] else ["--"]
    arguments = [*COMMON, "--scheduler", "slurm", *BAD[sentence], *dashes, "python", "train.py"]
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert sentence in err


def test_a_missing_script_or_scheduler_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for command in (["python", "train.py"], ["train.py"], ["hvdrun", "--elastic", "train.py"]):
        assert cli.main([*COMMON, "--scheduler", "slurm", "--", *command]) == 2
        assert "the script 'train.py' does not exist" in capsys.readouterr().err
    assert cli.main([*COMMON, "--", "python", "train.py"]) == 2
    assert "None of sbatch, qsub (PBS) and bsub is on PATH" in capsys.readouterr().err
    without = ["submit", "--nodes", "4", "--time", "2h", "--scheduler", "slurm", "--", "true"]
    assert cli.main(without) == 2
    assert "The number of ranks on a node is unknown" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scheduler", "line"),
    [
        ("slurm", "#SBATCH --dependency=afterok:7:8.site"),
        ("pbs", "#PBS -W depend=afterok:7:8.site"),
        ("lsf", '#BSUB -w "done(7) && done(8.site)"'),
    ],
)
def test_a_job_waits_for_others(scheduler: str, line: str) -> None:
    assert line in SCHEDULERS[scheduler].write(replace(PLAIN, dependencies=("7", "8.site"))).splitlines()


@pytest.mark.parametrize("scheduler", [*DIRECTIVES, "k8s"])
def test_options_of_hvdrun_stand_before_the_command(scheduler: str) -> None:
    job = replace(PLAIN, hvdrun=("-m",), command=("package.train", "-m"), image="train:1")
    script = SCHEDULERS[scheduler].write(job)
    assert "hvdrun -m package.train -m &" in script or '"-m", "package.train", "-m"]' in script


def test_a_script_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert cli.main([*COMMON, "--scheduler", "slurm", "--dry-run", "--json", "--", "python", "train.py"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["scheduler"] == "Slurm" and document["script"].startswith("#!/bin/bash\n")
