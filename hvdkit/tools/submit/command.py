"""hvdkit submit: the command."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hvdkit.config import read_environment
from hvdkit.errors import SubmitError
from hvdkit.exit_codes import TRY_AGAIN
from hvdkit.launch.check import find_script
from hvdkit.tools.submit.follow import Follower
from hvdkit.tools.submit.job import BatchJob, parse_variable, parse_warning
from hvdkit.tools.submit.scheduler import Scheduler, find_defaults
from hvdkit.tools.submit.send import ask_state, submit_script
from hvdkit.tools.submit.table import SCHEDULERS
from hvdkit.tools.submit.times import parse_time

_EXPLANATION = """\
Write the batch script of a training, submit it, and follow its log. The script is plain and commented: --dry-run prints
it, and it can be kept, changed and submitted by hand. In it stands `hvdrun COMMAND`, which reads hosts and ranks from
the allocation.
"""

_EXAMPLES = f"""\
examples:
  hvdkit submit --nodes 4 --tasks-per-node 8 --time 2h --dry-run -- python train.py
                              print the script for the scheduler of this site, submit nothing
  hvdkit submit --scheduler slurm --nodes 4 --gpus-per-node 4 --time 1d12h --account lab --partition gpu \\
      --venv ~/venv -- python train.py --lr 0.1
                              one rank a GPU; follows the log on a terminal, where Ctrl-C ends only the following
  hvdkit submit --nodes 4 --gpus-per-node 4 --time 12h --requeue --signal USR1@5m -- python train.py
                              five minutes before the end the ranks get USR1. A training that then saves and ends with
                              exit code {TRY_AGAIN} on every rank is started again (PBS: asks you to)
  hvdkit submit --scheduler k8s --image registry.site/train:1 --nodes 2 --gpus-per-node 8 --time 2h -- python /train.py

The exit code is the job's if it was followed to its end, 130 after Ctrl-C, 2 if it was not submitted.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "submit",
        help="write a batch script for Slurm, PBS, LSF or Kubernetes, submit it, follow its log",
        usage="hvdkit submit [options] -- command [arguments]",
        description=_EXPLANATION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--scheduler", choices=tuple(SCHEDULERS), help="default: the one whose sbatch, qsub or bsub is on PATH")
    add("--nodes", type=int, required=True, metavar="N")
    add("--tasks-per-node", type=int, metavar="N", help="ranks of a node (default: as many as --gpus-per-node)")
    add("--time", type=_parsed(parse_time), required=True, metavar="T", help="limit: 2h, 90m, 1d12h or 02:00:00")
    add("--gpus-per-node", type=int, default=0, metavar="N")
    add("--cpus-per-task", type=int, default=0, metavar="N", help="cores of a rank")
    add("--memory", default="", metavar="SIZE", help="of a node, like 64G")
    add("--account", default="", metavar="NAME", help="who pays")
    add("--partition", "--queue", dest="queue", default="", metavar="NAME")
    add("--job-name", metavar="NAME", help="default: the script's name")
    add(
        "--output",
        default=BatchJob.output,
        metavar="FILE",
        help="the log; %%j is the job's id, %%x its name (default: %(default)s)",
    )
    add("--requeue", action="store_true", help="run again after a lost node or a preemption")
    add("--signal", type=_parsed(parse_warning), metavar="SIG@T", help="warn the ranks: USR1 or USR2, T before the end")
    add("--env", type=_parsed(parse_variable), action="append", default=[], metavar="K=V", help="may be repeated")
    add("--module", action="append", default=[], metavar="M", help="module to load; may be repeated")
    add("--venv", default="", metavar="DIR", help="virtual environment to activate")
    add("--mail", default="", metavar="ADDRESS", help="tell of the beginning, the end and failures")
    add("--extra", action="append", default=[], metavar="LINE", help="a further directive, like '#SBATCH --exclusive'")
    add("--image", default="", help="of the containers; Kubernetes only")
    add("--dry-run", action="store_true", help="print the script and end")
    add(
        "--follow",
        action=argparse.BooleanOptionalAction,
        help="show the log until the job ends (default: if the output is a terminal)",
    )
    add("command", nargs=argparse.PARSER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code. Raises SubmitError if nothing was submitted."""
    environ = read_environment()
    scheduler = SCHEDULERS[options.scheduler or find_scheduler(environ)]
    job = make_job(options)
    script = scheduler.write(job)
    problems = [] if options.scheduler == "k8s" else list(_check_files(job))
    if job.gpus and job.gpus != job.tasks_per_node:
        _say(f"{job.tasks_per_node} ranks share the {job.gpus} GPUs of a node; usually each rank has one.")
    if options.dry_run:
        for problem in problems:
            _say(f"beware: {problem}.")
        print(script, end="")
        return 0
    if problems:
        raise SubmitError("; ".join(problems) + ". Nothing was submitted.")
    return _submit(scheduler, job, script, follow=sys.stdout.isatty() if options.follow is None else options.follow)


def make_job(options: argparse.Namespace) -> BatchJob:
    """Turn the options into a job. Raises SubmitError if it is not told how many ranks there are."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    tasks = options.gpus_per_node if options.tasks_per_node is None else options.tasks_per_node
    if options.tasks_per_node is None and not tasks:
        raise SubmitError("How many ranks on a node? Say it with --tasks-per-node, or give --gpus-per-node.")
    script = find_script(command) if command else ""
    guess = re.sub(r"[^A-Za-z0-9]+", "-", Path(script or (command[0] if command else "")).stem).strip("-")[:40]
    return BatchJob(
        command=tuple(command),
        nodes=options.nodes,
        tasks_per_node=tasks,
        seconds=options.time,
        name=options.job_name if options.job_name is not None else guess.lower() or BatchJob.name,
        gpus=options.gpus_per_node,
        cpus=options.cpus_per_task,
        memory=options.memory,
        account=options.account,
        queue=options.queue,
        output=options.output,
        requeue=options.requeue,
        warning=options.signal,
        environ=dict(options.env),
        modules=tuple(options.module),
        venv=options.venv,
        mail=options.mail,
        extra=tuple(options.extra),
        image=options.image,
    )


def find_scheduler(environ: Mapping[str, str]) -> str:
    """Find the scheduler of this site. Raises SubmitError if there is none, or more than one."""
    path = environ.get("PATH", "")
    found = find_defaults(lambda name: shutil.which(name, path=path) is not None, environ)
    if len(found) == 1:
        return found[0]
    if found:
        raise SubmitError(f"There are commands of several schedulers here. Choose: --scheduler {' or '.join(found)}.")
    raise SubmitError(
        "None of sbatch, qsub (PBS) and bsub is on PATH. Run this where jobs are submitted, or name the scheduler "
        f"({', '.join(SCHEDULERS)}) with --scheduler and print the script with --dry-run."
    )


def _submit(scheduler: Scheduler, job: BatchJob, script: str, *, follow: bool) -> int:
    log = None if scheduler.read_log else job.output.replace("%x", job.name)
    old = {path: path.stat().st_size for path in ([Path(log)] if log else []) if path.is_file()}
    job_id = submit_script(scheduler, script)
    path = Path(log.replace("%j", job_id.partition(".")[0])) if log else None
    where = str(path) if path else shlex.join(scheduler.read_log(job_id)) if scheduler.read_log else ""
    end = shlex.join(scheduler.cancel(job_id))
    _say(f"{scheduler.title} job {job_id} is submitted; log: {where}; end it with: {end}")
    if not follow:
        return 0
    follower = Follower(
        ask=lambda: ask_state(scheduler, job_id),
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
        _say(f"stopped following. Job {job_id} goes on; to see it again: {again}")
        return 130
    result = "how is not known" if state.code is None else f"exit code {state.code}"
    _say(f"job {job_id} has ended: {state.text}, {result}.")
    return 1 if state.code is None else state.code


def _check_files(job: BatchJob) -> Iterator[str]:
    """What a job would find missing after hours in the queue."""
    script = find_script(job.command)
    if script and not Path(script).is_file():
        yield f"there is no script {script!r}, seen from {Path.cwd()}, where the job will run"
    if job.venv and not Path(job.venv, "bin", "activate").is_file():
        yield f"--venv {job.venv}: there is no bin/activate in it"
    folder = Path(job.output).parent
    if "%" not in str(folder) and not folder.is_dir():
        yield f"--output {job.output}: there is no folder {str(folder)!r}, so there would be no log; mkdir -p makes it"


def _parsed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _say(line: str) -> None:
    print(f"hvdkit: {line}", file=sys.stderr, flush=True)


def _show(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
