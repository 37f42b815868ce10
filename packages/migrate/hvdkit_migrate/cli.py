"""The command, as `hvdkit migrate` and as `hvdkit-migrate`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from hvdkit_migrate.files import MigrateError, read_script, write_script

_EXPLANATION = """\
Report line by line what has to change so that a training script trains on many ranks with hvdkit, and show the changes
as a diff or write them. Scripts for Horovod, for torch.distributed (DistributedDataParallel) and for one process with
PyTorch or Keras are supported. Code whose change is not certain is left unchanged and reported, with what to write.
"""

_EXAMPLES = """\
examples:
  hvdkit migrate train.py                    the report and the diff; nothing is written
  hvdkit migrate train.py --write            write the changes, then: hvdrun -np 2 python train.py
  hvdkit migrate train.py data.py --check    exit code 1 if there are changes or something to do by hand
  hvdkit migrate train.py --json             the report and the diff as JSON

A script with something left to do by hand is written only with --partly: on many ranks it would fail or train wrongly
without an error. The comment `# hvdkit: ok` on a line confirms that the line is correct; it is then left unchanged.
The learning rate is multiplied by the number of ranks, because the script's batch size becomes that of each rank; in
scripts for torch.distributed or Horovod it stays.
"""


_PARSER: dict[str, Any] = {
    "description": _EXPLANATION,
    "epilog": _EXAMPLES,
    "formatter_class": argparse.RawDescriptionHelpFormatter,
    "allow_abbrev": False,
}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like those of hvdkit."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run hvdkit-migrate; returns the exit code."""
    parser = _Parser(prog="hvdkit-migrate", **_PARSER)
    _add_arguments(parser)
    return run(parser.parse_args(arguments))


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit; hvdkit finds this function by the entry point group hvdkit.commands."""
    _add_arguments(commands.add_parser("migrate", help="rewrite a training script for hvdkit", **_PARSER))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scripts", nargs="+", metavar="SCRIPT", help="Python files of the training")
    parser.add_argument(
        "--from",
        dest="kind",
        choices=("horovod", "ddp", "torch", "keras"),
        help="kind of script (default: detected from its imports)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="write the changed scripts, each atomically")
    what.add_argument("--check", action="store_true", help="show no diff; exit code 1 if there is something to change")
    parser.add_argument("--partly", action="store_true", help="write scripts even if something is left to do by hand")
    parser.add_argument("--json", action="store_true", help="print the report and the diff as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code."""
    try:
        return _migrate(options)
    except MigrateError as error:
        print(f"hvdkit migrate: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the report, for example head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when Python exits
        return 141  # the code that a shell reports for SIGPIPE


def _migrate(options: argparse.Namespace) -> int:
    from hvdkit_migrate.plan import plan  # libcst takes longer to load than --help needs
    from hvdkit_migrate.report import write_diff, write_json, write_report

    if options.partly and not options.write:
        raise MigrateError("--partly is for --write. Add --write, or leave --partly out.")
    texts = [read_script(path) for path in options.scripts]
    plans = [plan(text, path, options.kind) for path, (text, _) in zip(options.scripts, texts, strict=True)]
    if options.json:
        sys.stdout.write(write_json(plans))
    for one in plans if not options.json else ():
        sys.stdout.write(write_report(one))
        if not options.write and not options.check and one.before != one.after:
            _show_diff(write_diff(one))
    sys.stdout.flush()  # a closed pipe must raise an error before a script is written
    code = 0
    for one, (_, encoding) in zip(plans, texts, strict=True):
        open_points = len(one.of("break"))
        if options.check and (one.before != one.after or open_points):
            code = 1
        if not options.write or one.before == one.after:
            continue
        if open_points and not options.partly:
            raise MigrateError(
                f"{one.path}: not written: {open_points} thing{'s' * (open_points != 1)} to do by hand first. "
                "`# hvdkit: ok` confirms a line that is correct; --partly writes the other changes."
            )
        write_script(one.path, one.after, encoding)
        print(f"hvdkit migrate: {one.path} is written. Try it: hvdrun -np 2 python {one.path}", file=sys.stderr)
    return code


def _show_diff(diff: str) -> None:
    if not sys.stdout.isatty():
        sys.stdout.write("\n" + diff)
        return
    from rich.console import Console
    from rich.syntax import Syntax

    Console().print(Syntax(diff, "diff", theme="ansi_dark", background_color="default", word_wrap=True))
