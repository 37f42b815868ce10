"""hvdkit compare: the command."""

from __future__ import annotations

import argparse

from hvdkit.launch.cli import numbers
from hvdkit.tools.training_command import add_hvdrun_options

_EXPLANATION = """\
Compare the training of a script on several ranks with its training on one rank, which gets the batches of all ranks.
The command runs the first steps of both and compares losses, gradients and parameters. They are equal within rounding,
or the command names the first step and tensor that differ, and the likely cause.

Give the number of ranks and the script, or a command of hvdrun. From a command of mpirun, srun or torchrun only the
number of ranks is used. Without -np there are 2 ranks. They run on this host, also inside an allocation, unless -H,
--hostfile or -np auto selects others. The script is not changed. It runs two or three times in this folder, which all
hosts must share, and is ended after a few steps; the files that it writes stay. Dropout is off, because ranks drop
different neurons. The script must use PyTorch with DataLoaders, or Keras 3 with fit().
"""

_EXAMPLES = """\
examples:
  hvdkit compare -- python train.py              2 ranks and one, 5 steps
  hvdkit compare -np 4 --steps 20 -- python train.py --batch-size 8
  hvdkit compare -np 2 -H node1:1,node2:1 -- python train.py
  hvdkit compare -- hvdrun -np 4 python train.py
  hvdkit compare --wrap -- python plain.py       a script for one process, with hvdrun --wrap
  hvdkit compare --alias-horovod -- python horovod_script.py
  hvdkit compare --json -- python train.py       for programs

Each cause has a name: no-broadcast, not-reduced, rates-differ, optimizer-state, same-samples, whole-epoch, left-out,
rate-scaled-twice, rate-scaled-for-nothing, sum, loss-is-a-sum, scaled-gradients, batch-norm, unequal-batches,
random-in-step, not-deterministic.

The exit code is 0 if the trainings are equal, 1 if not, 2 if the runs could not be compared.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "compare",
        help="compare training on several ranks with training on one; name the cause of a difference",
        usage="hvdkit compare [options] [hvdrun's options] -- (python train.py | hvdrun ...) [arguments]",
        description=_EXPLANATION,
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add("--steps", type=numbers.positive_int, default=5, metavar="N", help="optimizer steps to compare (default: 5)")
    add(
        "--lr",
        choices=("ranks", "script"),
        default="ranks",
        help="learning rate on one rank: that of the several ranks (default), or that of the script on one rank",
    )
    add(
        "--timeout",
        type=numbers.positive_seconds,
        default=600.0,
        metavar="SECONDS",
        help="time limit of each run (default: 600)",
    )
    add("--json", action="store_true", help="print JSON")
    add_hvdrun_options(parser, shown=("wrap", "alias_horovod"))
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code. Raises CompareError if the runs could not be compared."""
    # Here, so that the help of other commands does not wait for numpy.
    from hvdkit.tools.compare.runs import compare

    return compare(options)
