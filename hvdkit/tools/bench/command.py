"""hvdkit bench: the command."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdkit.config import parse_bytes
from hvdkit.errors import BenchError
from hvdkit.launch.numbers import seconds
from hvdkit.tools.bench.figures import KINDS
from hvdkit.tools.bench.passing import add_hvdruns_options
from hvdkit.tools.bench.plan import DTYPES, SIZES, Plan

_EXPLANATION = """\
How fast is this machine, or this cluster? Measure a collective over a range of sizes, or whole training steps, with
hvdkit and with all else that is installed: MPI (mpi4py), Gloo and DDP (torch.distributed), Horovod. All take turns in
one run, a few calls at a time, so that all meet the same machine; of a call the slowest rank's time counts.

By itself the command starts 2 ranks here, or the ranks that -np, -H, --hostfile or an allocation of Slurm, PBS or LSF
say. Started by hvdrun, mpirun or srun, the ranks are those that it has started.
"""

_EXAMPLES = """\
examples:
  hvdkit bench allreduce                           2 ranks of this machine, 4 KiB to 16 MiB
  hvdkit bench allreduce -np 8 -H node1:4,node2:4 --sizes 1M,16M,256M --plot allreduce.html
  hvdkit bench allgather --dtype bfloat16 --json allgather.json
  hvdkit bench step                                whole steps of three models of PyTorch
  hvdkit bench step --models mlp --threads 4
  KERAS_BACKEND=jax hvdkit bench step --keras
  srun -n 8 hvdkit bench alltoall                  on ranks that something else starts

has it got slower?
  hvdkit bench allreduce --save-baseline before.json
  hvdkit bench allreduce --baseline before.json                  marks what is slower by more than noise
  hvdkit bench allreduce --baseline before.json --fail-over 20   exit code 1 if hvdkit is, by more than 20 %

Sizes are of the whole, as in nccl-tests: what is reduced or sent, or what all ranks together gather.
The exit code is 0, 1 for --fail-over, 2 if nothing could be measured.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "bench",
        help="measure collectives and training steps on this machine or cluster, beside MPI, Gloo and Horovod",
        usage=f"hvdkit bench {{{','.join((*KINDS, 'step'))}}} [options] [options of hvdrun]",
        description=_EXPLANATION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("kind", choices=(*KINDS, "step"), metavar="WHAT", help=f"{', '.join(KINDS)}, or step: whole training steps")
    add("--sizes", type=_parse_sizes, default=SIZES, metavar="SIZE,...", help="like 4K,1M,64M (default: 4K to 16M)")
    add("--dtype", choices=DTYPES, default="float32", help="of the numbers (default: float32)")
    add("--models", type=_split, default=(), metavar="NAME,...", help="step: those whose names contain this")
    add("--keras", action="store_true", help="step: the MLP in Keras 3, on KERAS_BACKEND")
    add("--rounds", type=_positive, default=11, metavar="N", help="in which every peer has a turn (default: 11)")
    add("--seconds", type=seconds, default=0.1, metavar="S", help="that a turn of a collective takes (default: 0.1)")
    add("--threads", type=_positive, default=1, metavar="N", help="that each rank computes with (default: 1)")
    add("--alone", action="store_true", help="hvdkit without the peers")
    add("--json", type=Path, metavar="FILE", help="write all times and what is made of them")
    add("--plot", type=Path, metavar="FILE", help="draw it: FILE.html needs nothing else, FILE.png needs matplotlib")
    add("--save-baseline", type=Path, metavar="FILE", help="keep this run to compare later ones with")
    add("--baseline", type=Path, metavar="FILE", help="compare with a run kept by --save-baseline or --json")
    add("--fail-over", type=float, metavar="PERCENT", help="with --baseline: exit code 1 if hvdkit is slower by more")
    add_hvdruns_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code. Raises BenchError if nothing can be measured."""
    from hvdkit.tools.bench.steps import carry_out  # what this needs would slow down every other command

    return carry_out(options, build_plan(options))


def build_plan(options: argparse.Namespace) -> Plan:
    """What the options ask to measure. Raises BenchError for those that do not go together."""
    if options.keras and options.kind != "step":
        raise BenchError("--keras is for hvdkit bench step. Leave it out.")
    return Plan(**{name: getattr(options, name) for name in Plan.__dataclass_fields__})


def _parse_sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(parse_bytes(word) for word in _split(text))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} are no sizes; write them like 4K,64K,16M")
    return sizes


def _split(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (word.strip() for word in text.split(","))))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 up")
    return int(text)
