"""hvdkit profile: the command."""

from __future__ import annotations

import argparse

from hvdkit.tools.training_command import add_hvdrun_options

_EXPLANATION = """\
Show where the time of a training step goes. The command runs a job and reports, for all ranks, the time of a step in
compute, in waiting for data, in waiting for slower ranks (which ranks, how long, since which step) and in exposed
communication. It predicts the step time on more hosts, gives speedup and efficiency against one rank (with the same
batch on each rank, and with the same batch in all), and says what to change first.

Give the number of ranks and a Python script, which hvdrun then starts (2 ranks by default), or the command of any
launcher. The script is not changed. It must use hvdkit's DistributedOptimizer (PyTorch or Keras),
DistributedGradientTape, or a Mesh of hvdkit.parallel: then the report has the time of each pipeline stage, the bubble,
and the exposed communication of each axis of the mesh. Each rank keeps its last 8 MiB of measurements, which is
thousands of steps. If the job fails, or Ctrl-C ends it, the report covers the steps until then.
"""

_EXAMPLES = """\
examples:
  hvdkit profile -np 4 -- python train.py
  hvdkit profile -np 8 -H node1:4,node2:4 -- python train.py
  hvdkit profile -- mpirun -np 8 --hostfile hosts.txt python train.py
  hvdkit profile -- srun -N 2 --ntasks-per-node 4 python train.py
  hvdkit profile -np 4 -o report.html --trace trace.json -- python train.py
                                         figures of all ranks; a trace for ui.perfetto.dev or chrome://tracing
  hvdkit profile -np 2 --network 25gbit,20us -- python train.py
                                         predict for this network, which a job on one host cannot measure
  hvdkit profile -np 4 --save run.npz -- python train.py
  hvdkit profile --read run.npz -o report.html

In code, put `with hvd.profile():` around the steps on all ranks; rank 0 then prints the same report.
Ranks send their measurements to this command over TCP, so their hosts must be able to connect to this host.
The exit code is that of the job, or 2 if there is no profile.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "profile",
        help="show where the time of a training step goes, and what to change first",
        usage="hvdkit profile [options] [hvdrun's options] -- (python train.py | launcher's command) [arguments]",
        description=_EXPLANATION,
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add("-o", "--output", metavar="FILE", help="write an HTML report with figures; needs matplotlib")
    add("--trace", metavar="FILE", help="write a Chrome trace of all ranks")
    add(
        "--network",
        metavar="RATE[,LATENCY]",
        help="network between hosts to predict for, such as 10gbit or 100gbit,5us (default: as measured in the job; "
        "10gbit,50us for a job on one host)",
    )
    add(
        "--one-rank-s",
        type=float,
        metavar="SECONDS",
        help="measured duration of a step on one rank with the same batch per rank, for speedup and efficiency "
        "(default: estimated from this job)",
    )
    add("--save", metavar="FILE", help="write the measurements, for --read")
    add("--read", metavar="FILE", help="run no job; report on measurements written by --save")
    add("--json", action="store_true", help="print the report as JSON; the job's output goes to stderr")
    add_hvdrun_options(parser)
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code. Raises ProfileError if there is no profile."""
    # Here, so that the help of other commands does not wait for numpy.
    from hvdkit.tools.profile.run import profile

    return profile(options)
