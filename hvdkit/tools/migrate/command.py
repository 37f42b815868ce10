"""hvdkit migrate: the command."""

from __future__ import annotations

import argparse
import sys

from hvdkit.errors import MigrateError
from hvdkit.optional_import import optional_import

_EXPLANATION = """\
Read a training script and say, line by line, what has to change so that it trains on many ranks with hvdkit; then show
the changes as a diff, or make them. It reads scripts for Horovod, for torch.distributed (DistributedDataParallel), and
for one process with PyTorch or Keras. What it is not certain of it leaves alone, and says what to write.
"""

_EXAMPLES = """\
examples:
  hvdkit migrate train.py                    the report and the diff; nothing is written
  hvdkit migrate train.py --write            make the changes, then: hvdrun -np 2 python train.py
  hvdkit migrate train.py data.py --check    exit code 1 if something would change or is to be done by hand
  hvdkit migrate train.py --json             for programs

A script with things to be done by hand is not written, unless with --partly: run on many ranks it would fail, or train
wrongly without saying so. A line that is right as it is gets the comment `# hvdkit: ok`, and is left alone.
The learning rate is multiplied by the number of ranks, as every rank has a batch of the script's size; a script for
torch.distributed or Horovod keeps its own.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "migrate",
        help="change a script for Horovod, DDP, or one process of PyTorch or Keras into one for hvdkit",
        description=_EXPLANATION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("scripts", nargs="+", metavar="SCRIPT")
    parser.add_argument(
        "--from", dest="kind", choices=("horovod", "ddp", "torch", "keras"), help="what it is for (default: found out)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="change the scripts, each in one step")
    what.add_argument("--check", action="store_true", help="show no diff; exit code 1 if something is to be changed")
    parser.add_argument(
        "--partly", action="store_true", help="write scripts although something is left to be done by hand"
    )
    parser.add_argument("--json", action="store_true", help="write the report and the diff as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code. Raises MigrateError for a script that cannot be read or written."""
    optional_import("libcst", "migrate")
    from hvdkit.tools.migrate.plan import plan  # libcst takes longer to load than --version takes to answer
    from hvdkit.tools.migrate.show import write_diff, write_json, write_report
    from hvdkit.tools.migrate.store import read_script, write_script

    texts = [read_script(path) for path in options.scripts]
    plans = [plan(text, path, options.kind) for path, (text, _) in zip(options.scripts, texts, strict=True)]
    if options.json:
        sys.stdout.write(write_json(plans))
    for one in plans if not options.json else ():
        sys.stdout.write(write_report(one))
        if not options.write and not options.check and one.before != one.after:
            _show_diff(write_diff(one))
    code = 0
    for one, (_, encoding) in zip(plans, texts, strict=True):
        open_points = len(one.of("break"))
        if options.check and (one.before != one.after or open_points):
            code = 1
        if not options.write or one.before == one.after:
            continue
        if open_points and not options.partly:
            raise MigrateError(
                f"{one.path}: not written: {open_points} thing{'s' * (open_points != 1)} to be done by hand first, "
                "see above (`# hvdkit: ok` on a line that is right). --partly writes the rest all the same."
            )
        write_script(one.path, one.after, encoding)
        print(f"hvdkit: {one.path} is written. Try it: hvdrun -np 2 python {one.path}", file=sys.stderr)
    return code


def _show_diff(diff: str) -> None:
    if not sys.stdout.isatty():
        sys.stdout.write("\n" + diff)
        return
    from rich.console import Console
    from rich.syntax import Syntax

    Console().print(Syntax(diff, "diff", theme="ansi_dark", background_color="default", word_wrap=True))
