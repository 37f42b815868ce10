"""hvdkit submit: the command."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hvdkit.config import read_environment
from hvdkit.entry_points import find_entry_points, load_checked
from hvdkit.errors import HvdkitError, SubmitError
from hvdkit.exit_codes import TRY_AGAIN
from hvdkit.launch.cli.numbers import nonnegative_int, positive_int
from hvdkit.launch.detect.command import find_script
from hvdkit.tools.submit.follow import Follower, Scheduler, query_state, submit_script
from hvdkit.tools.submit.job import BatchJob, parse_time, parse_variable, parse_warning
from hvdkit.tools.submit.kubernetes import KUBERNETES, TRAINJOB
from hvdkit.tools.submit.scripts import LSF, PBS, SLURM
from hvdkit.tools.training_command import PLACEMENT, find_launcher, split_command, strip_dashes

#: The schedulers, by the value of --scheduler.
SCHEDULERS: Mapping[str, Scheduler] = {"slurm": SLURM, "pbs": PBS, "lsf": LSF, "k8s": KUBERNETES}

#: Group of entry points, `NAME = module:SCHEDULER`: a Scheduler, the value of --scheduler is NAME.
ENTRY_POINTS = "hvdkit.schedulers"

#: The schedulers of Kubernetes, by the value of --kind.
KINDS: Mapping[str, Scheduler] = {"mpijob": KUBERNETES, "trainjob": TRAINJOB}

_EXPLANATION = """\
Write the batch script of a training, submit it, and follow its log. The script is plain bash with comments: --dry-run
prints it, to be kept, changed and submitted by hand. It runs `hvdrun COMMAND`, which reads hosts and ranks from the
allocation; options of hvdrun go before the command: hvdkit submit ... -- hvdrun --elastic python train.py
"""

_EXAMPLES = f"""\
examples:
  hvdkit submit --nodes 4 --tasks-per-node 8 --time 2h --dry-run -- python train.py
                              print the script for the scheduler of this site, submit nothing
  hvdkit submit --scheduler slurm --nodes 4 --gpus-per-node 4 --time 1d12h --account lab --partition gpu \\
      --venv ~/venv -- python train.py --lr 0.1
                              one rank per GPU; on a terminal it follows the log, and Ctrl-C leaves the job running
  hvdkit submit --nodes 4 --gpus-per-node 4 --time 12h --requeue --signal USR1@5m -- python train.py
                              the ranks get USR1 five minutes before the time limit. If the training then saves and
                              all ranks end with exit code {TRY_AGAIN}, the job is requeued (on PBS: submit it again)
  hvdkit submit --scheduler k8s --image registry.site/train:1 --nodes 2 --gpus-per-node 8 --time 2h -- python /train.py

The exit code is the job's if it was followed to its end; 0 if not followed; 130 after Ctrl-C; 2 if not submitted.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "submit",
        help="write a batch script for Slurm, PBS, LSF or Kubernetes, submit it, and follow its log",
        usage="hvdkit submit [options] -- command [arguments]",
        description=_EXPLANATION,
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add(
        "--scheduler",
        metavar="NAME",
        help=f"{', '.join(SCHEDULERS)}, or one of an installed package, see `hvdkit docs extensions/scheduler` "
        "(default: the one whose sbatch, qsub or bsub is on PATH)",
    )
    add("--nodes", type=positive_int, required=True, metavar="N", help="number of nodes")
    add("--tasks-per-node", type=positive_int, metavar="N", help="ranks on each node (default: --gpus-per-node)")
    add(
        "--time",
        dest="seconds",
        type=_parsed(parse_time),
        required=True,
        metavar="T",
        help="time limit: 2h, 90m, 1d12h or 02:00:00",
    )
    add(
        "--gpus-per-node",
        dest="gpus",
        type=nonnegative_int,
        default=0,
        metavar="N",
        help="GPUs on each node (default: 0)",
    )
    add("--cpus-per-task", dest="cpus", type=nonnegative_int, default=0, metavar="N", help="cores of each rank")
    add("--memory", default="", metavar="SIZE", help="memory of each node, like 64G")
    add("--account", default="", metavar="NAME", help="account to charge")
    add("--partition", "--queue", dest="queue", default="", metavar="NAME", help="partition or queue")
    add("--job-name", dest="name", metavar="NAME", help="(default: the script's name)")
    add(
        "--output",
        default=BatchJob.output,
        metavar="FILE",
        help="log file; %%j is the job's id, %%x its name (default: %(default)s)",
    )
    add("--requeue", action="store_true", help="run again after a node failure or a preemption")
    add(
        "--signal",
        dest="warning",
        type=_parsed(parse_warning),
        metavar="SIG@T",
        help="send USR1 or USR2 to the ranks T before the limit",
    )
    add(
        "--env",
        dest="environ",
        type=_parsed(parse_variable),
        action="append",
        default=[],
        metavar="K=V",
        help="set a variable; repeatable",
    )
    add("--module", dest="modules", action="append", default=[], metavar="M", help="load a module; repeatable")
    add("--venv", default="", metavar="DIR", help="virtual environment to activate")
    add("--mail", default="", metavar="ADDRESS", help="send mail at start, end and failure")
    add(
        "--extra",
        action="append",
        default=[],
        metavar="LINE",
        help="add a directive, like '#SBATCH --exclusive'; repeatable",
    )
    add(
        "--dependency",
        dest="dependencies",
        action="append",
        default=[],
        metavar="JOB",
        help="start only after this job has succeeded; repeatable",
    )
    add("--image", default="", help="container image; Kubernetes only")
    add(
        "--kind",
        choices=tuple(KINDS),
        help="on Kubernetes: an MPIJob of the MPI Operator (default), or a TrainJob of Kubeflow Trainer",
    )
    add("--dry-run", action="store_true", help="print the script; submit nothing")
    add("--json", action="store_true", help="print scheduler, job id, log and the command that cancels the job as JSON")
    add(
        "--follow",
        action=argparse.BooleanOptionalAction,
        help="print the log until the job ends (default: if stdout is a terminal)",
    )
    add("command", nargs=argparse.PARSER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code. Raises SubmitError if nothing was submitted."""
    if options.json and options.follow:
        raise SubmitError("--json prints one document, and --follow the job's log. Leave one of them out.")
    if options.kind is not None and options.scheduler != "k8s":
        raise SubmitError(f"--kind {options.kind} is for Kubernetes. Add --scheduler k8s, or leave it out.")
    name = options.scheduler or find_scheduler(read_environment())
    scheduler = KINDS[options.kind] if options.kind else load_scheduler(name)
    job = make_job(options)
    script = _write(name, scheduler, job)
    problems = list(_check_files(job)) if scheduler.sees_files else []
    if job.gpus and job.gpus != job.tasks_per_node:
        _say(f"warning: {job.tasks_per_node} ranks share the {job.gpus} GPUs of a node; usually each rank has one.")
    if options.dry_run:
        for problem in problems:
            _say(f"warning: {problem}.")
        print(
            json.dumps({"scheduler": scheduler.title, "script": script}, indent=2) if options.json else script.rstrip()
        )
        return 0
    if problems:
        raise SubmitError("; ".join(problems) + ". Nothing was submitted.")
    follow = sys.stdout.isatty() and not options.json if options.follow is None else options.follow
    return _submit(scheduler, job, script, follow=follow, as_json=options.json)


def load_scheduler(name: str) -> Scheduler:
    """Return the scheduler of this name, hvdkit's or an installed package's.

    Raises SubmitError for an unknown name, HvdkitError for a package that cannot be loaded or whose object is wrong.
    """
    entries = find_entry_points(ENTRY_POINTS)
    if name not in entries and name not in SCHEDULERS:
        raise SubmitError(
            f"--scheduler {name} is unknown. Choose one of {', '.join((*SCHEDULERS, *entries))}, or install the "
            "package that has it."
        )
    if name not in entries:
        return SCHEDULERS[name]
    scheduler: Scheduler = load_checked(entries[name], SCHEDULERS, _find_flaw)
    return scheduler


def _find_flaw(name: str, scheduler: object) -> str:
    return "" if isinstance(scheduler, Scheduler) else "is not a Scheduler of hvdkit.tools.submit.follow"


def _write(name: str, scheduler: Scheduler, job: BatchJob) -> str:
    """Write the script. Raises SubmitError also for the errors of a package's scheduler."""
    if name in SCHEDULERS:
        return scheduler.write(job)
    try:
        script = scheduler.write(job)
    except HvdkitError:
        raise
    except (Exception, SystemExit) as error:  # whatever a package raises
        raise SubmitError(
            f"the scheduler {name} wrote no script: {type(error).__name__}: {error}. This is a fault of its package."
        ) from error
    if not isinstance(script, str):
        raise SubmitError(f"the scheduler {name} wrote no script: write() returned {type(script).__name__}, not str.")
    return script


def find_scheduler(environ: Mapping[str, str]) -> str:
    """Find the scheduler of this site. Raises SubmitError if it finds none, or several."""
    path = environ.get("PATH", "")
    found = find_defaults(lambda name: shutil.which(name, path=path) is not None, environ)
    if len(found) == 1:
        return found[0]
    if found:
        raise SubmitError(f"PATH has the commands of several schedulers. Choose: --scheduler {' or '.join(found)}.")
    raise SubmitError(
        "None of sbatch, qsub (PBS) and bsub is on PATH. Run this on a host where jobs are submitted; or choose with "
        f"--scheduler ({', '.join(SCHEDULERS)}) and print the script with --dry-run. In a job script of Grid Engine, "
        "Torque, Flux or HTCondor hvdrun needs no hosts: write `hvdrun python train.py` there."
    )


def find_defaults(on_path: Callable[[str], bool], environ: Mapping[str, str]) -> list[str]:
    """List the schedulers whose command is on PATH. Kubernetes is used only if it is named."""
    qsub = on_path("qsub") and "SGE_ROOT" not in environ  # Grid Engine has a qsub too, with other options
    return [name for name, found in (("slurm", on_path("sbatch")), ("pbs", qsub), ("lsf", on_path("bsub"))) if found]


def make_job(options: argparse.Namespace) -> BatchJob:
    """Turn the options into a job. Raises SubmitError if they do not give the number of ranks."""
    hvdrun, command = _split_command(options.command)
    tasks = options.gpus if options.tasks_per_node is None else options.tasks_per_node
    if options.tasks_per_node is None and not tasks:
        raise SubmitError("The number of ranks on a node is unknown. Give --tasks-per-node or --gpus-per-node.")
    guess = re.sub(r"[^A-Za-z0-9]+", "-", Path(_find_script(command) or command[0]).stem).strip("-")[:40]
    name = options.name if options.name is not None else guess.lower() or BatchJob.name
    own = {"command": tuple(command), "hvdrun": hvdrun, "tasks_per_node": tasks, "name": name}
    lists = {field: tuple(getattr(options, field)) for field in ("modules", "extra", "dependencies")}
    typed = {field.name: getattr(options, field.name) for field in fields(BatchJob) if field.name not in own}
    return BatchJob(**{**typed, **own, **lists, "environ": dict(options.environ)})


def _split_command(words: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Split `hvdrun OPTIONS COMMAND`.

    Raises SubmitError for options that assign ranks to hosts, and for another launcher.
    """
    launcher = find_launcher(strip_dashes(words))
    if launcher not in ("", "hvdrun"):
        raise SubmitError(
            f"{launcher} starts ranks, and the batch script starts them with hvdrun. Leave {launcher} out; --nodes and "
            "--tasks-per-node give the number of ranks."
        )
    options, command = split_command(words, ())
    for option in options:
        if option.name in PLACEMENT:
            raise SubmitError(
                f"{' '.join(option.words)} of hvdrun places ranks, which --nodes and --tasks-per-node do in a batch "
                "job. Leave it out."
            )
    if not command or not command[0]:
        raise SubmitError("There is no command. Write it like: hvdkit submit ... -- python train.py")
    return tuple(word for option in options for word in option.words), command


def _find_script(command: Sequence[str]) -> str:
    """Find the Python script that hvdrun runs for a command; "" if it runs none."""
    return command[0] if command[0].endswith(".py") else find_script(command)


def _submit(scheduler: Scheduler, job: BatchJob, script: str, *, follow: bool, as_json: bool) -> int:
    log = None if scheduler.read_log else job.output.replace("%x", job.name)
    old = {path: path.stat().st_size for path in ([Path(log)] if log else []) if path.is_file()}
    job_id = submit_script(scheduler, script)
    path = Path(log.replace("%j", job_id.partition(".")[0])) if log else None
    where = str(path) if path else shlex.join(scheduler.read_log(job_id)) if scheduler.read_log else ""
    end = shlex.join(scheduler.cancel(job_id))
    if as_json:
        print(json.dumps({"scheduler": scheduler.title, "job": job_id, "log": where, "cancel": end}, indent=2))
    else:
        _say(f"{scheduler.title} job {job_id} is submitted; log: {where}; cancel it with: {end}")
    if not follow:
        return 0
    follower = Follower(
        ask=lambda: query_state(scheduler, job_id),
        show=_show,
        say=lambda text: _say(f"job {job_id}: {text}"),
        log=path,
        offset=old.get(path, 0) if path else 0,
        read_log=scheduler.read_log(job_id) if scheduler.read_log else (),
    )
    try:
        state = follower.follow()
    except KeyboardInterrupt:
        again = f"tail -f {shlex.quote(str(path))}" if path else where
        _say(f"job {job_id} is still running; follow its log with: {again}")
        return 130
    result = "exit code unknown" if state.code is None else f"exit code {state.code}"
    _say(f"job {job_id} has ended: {state.text}, {result}.")
    return 1 if state.code is None else state.code


def _check_files(job: BatchJob) -> Iterator[str]:
    """Find missing files, which the job would report only after hours in the queue."""
    script = _find_script(job.command)
    if script and not Path(script).is_file():
        yield f"the script {script!r} does not exist in {Path.cwd()}, where the job will run"
    if job.venv and not Path(job.venv, "bin", "activate").is_file():
        yield f"--venv {job.venv} has no bin/activate"
    folder = Path(job.output).parent
    if "%" not in str(folder) and not folder.is_dir():
        yield f"--output {job.output}: the folder {str(folder)!r} does not exist, so no log would be written"


def _parsed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _say(line: str) -> None:
    print(f"hvdkit submit: {line}", file=sys.stderr, flush=True)


def _show(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
