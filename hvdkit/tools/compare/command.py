"""hvdkit compare: the command."""

from __future__ import annotations

import argparse

from hvdkit.launch import numbers

_EXPLANATION = """\
Is it the same training? Run the first steps of a script on several ranks of this machine, then on one rank that is
given the batches of all of them, and compare losses, gradients and parameters. Either they are equal within rounding,
or the first step and tensor that differ are named, with the likely cause.

The script is not changed. It is run in this folder, two or three times, and ended after a few steps, so what it writes
by then is written. Dropout is off, as ranks draw different neurons. PyTorch with DataLoaders, or Keras 3 with fit().
"""

_EXAMPLES = """\
examples:
  hvdkit compare -- python train.py              2 ranks beside one, 5 steps
  hvdkit compare -np 4 --steps 20 -- python train.py --batch-size 8
  hvdkit compare --wrap -- python plain.py       a script for one process, with hvdrun --wrap
  hvdkit compare --alias-horovod -- python horovod_script.py
  hvdkit compare --json -- python train.py       for programs

Each cause has a name: no-broadcast, not-reduced, rates-differ, optimizer-state, same-samples, whole-epoch, left-out,
rate-scaled-twice, rate-scaled-for-nothing, sum, loss-is-a-sum, scaled-gradients, batch-norm, unequal-batches,
random-in-step, not-deterministic.

The exit code is 0 if it is the same training, 1 if not, 2 if the runs could not be compared.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "compare",
        help="is training on several ranks the same as on one with the same batch? If not, why?",
        usage="hvdkit compare [options] -- command [arguments]",
        description=_EXPLANATION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "-np",
        "--num-proc",
        dest="ranks",
        type=numbers.ranks,
        default=2,
        metavar="N",
        help="ranks beside one (default: 2)",
    )
    add("--steps", type=int, default=5, metavar="N", help="steps of an optimizer to compare (default: 5)")
    add(
        "--lr",
        choices=("ranks", "script"),
        default="ranks",
        help="learning rate of the one rank: that of the ranks, so that all else is compared (default), or what the "
        "script sets there",
    )
    add("--wrap", action="store_true", help="run the script with hvdrun --wrap: it is one for a single process")
    add("--alias-horovod", action="store_true", help="run it with hvdrun --alias-horovod: it imports Horovod")
    add("--timeout", type=numbers.seconds, default=600.0, metavar="SECONDS", help="limit of each run (default: 600)")
    add("--json", action="store_true", help="print JSON")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code. Raises CompareError if the runs could not be compared."""
    # Here, so that the help of other commands does not wait for numpy.
    from hvdkit.tools.compare.comparison import compare

    return compare(options)
