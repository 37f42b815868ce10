"""hvdkit profile: the command."""

from __future__ import annotations

import argparse

_EXPLANATION = """\
Where does the time of a training step go? Run a job as it is always run, with any launcher, and say in plain words what
its steps were made of, on all ranks: compute, waiting for data, waiting for slower ranks (which, by how much, since
when), and communication that nothing hides; how long a step would take on more hosts; and what to change first.

The script is not changed; it is one that uses hvdkit's DistributedOptimizer, in PyTorch or Keras, or a gradient tape.
The last 8 MiB of numbers of each rank are kept, which are thousands of steps. A job that fails, or is ended by Ctrl-C,
is told of as far as it came.
"""

_EXAMPLES = """\
examples:
  hvdkit profile -- hvdrun -np 4 python train.py
  hvdkit profile -- mpirun -np 8 --hostfile hosts.txt python train.py
  hvdkit profile -- srun -N 2 --ntasks-per-node 4 python train.py
  hvdkit profile -o report.html --trace trace.json -- hvdrun -np 4 python train.py
                                         drawings of all ranks; a trace for ui.perfetto.dev or chrome://tracing
  hvdkit profile --network 25gbit,20us -- hvdrun -np 2 python train.py
                                         predict for this network: of one host none can be measured
  hvdkit profile --save run.npz -- hvdrun -np 4 python train.py
  hvdkit profile --read run.npz -o report.html

In code: `with hvd.profile():` around the steps, on all ranks; rank 0 then says the same of them.
Ranks send what they record to this command, over TCP, so their hosts must reach the one it runs on.
The exit code is that of the job, or 2 if there is nothing to say.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "profile",
        help="where does the time of a training step go, and what should change first?",
        usage="hvdkit profile [options] -- job [arguments]",
        description=_EXPLANATION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-o", "--output", metavar="FILE", help="write a report with drawings, one HTML file that needs nothing else")
    add("--trace", metavar="FILE", help="write a Chrome trace of all ranks")
    add(
        "--network",
        metavar="RATE[,LATENCY]",
        help="between hosts, to predict for: 10gbit or 100gbit,5us; if left out, what the job's hosts showed, or "
        "10gbit,50us for a job on one host",
    )
    add("--save", metavar="FILE", help="keep what was recorded")
    add("--read", metavar="FILE", help="run nothing; say it of what was kept")
    add("--json", action="store_true", help="print JSON")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code. Raises ProfileError if there is nothing to say."""
    # Here, so that the help of other commands does not wait for numpy.
    from hvdkit.tools.profile.run import profile

    return profile(options)
