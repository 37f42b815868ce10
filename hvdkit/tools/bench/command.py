"""hvdkit bench: the command."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdkit.launch.cli.numbers import percent, positive_int, positive_seconds
from hvdkit.setting import parse_bytes
from hvdkit.tools.bench.report import CPU, DEVICES, DTYPES, KINDS, SIZES, Plan
from hvdkit.tools.training_command import add_hvdrun_options

_EXPLANATION = """\
Measure a collective over a range of sizes, or whole training steps, on this machine or cluster: with hvdkit, with MPI
(mpi4py) and with Gloo and DDP (torch.distributed); steps with Horovod too, where it is installed. A run measures all
of these in turn, a few calls at a time, so that a change in the load of the machine affects all alike. The time of a
call is that of its slowest rank.

With --device cuda: tensors on GPUs, beside NCCL (torch.distributed), and steps of ResNet-50 and GPT-2 small in
bfloat16, beside DDP and Horovod (if it is built with NCCL). Times are those between CUDA events. This has not been run
on a GPU yet.

The command starts 2 ranks on this machine, or the ranks that -np, -H, --hostfile or an allocation of Slurm, PBS or LSF
give; with --device cuda one rank for each GPU of this machine. Under hvdrun, mpirun or srun it measures on the ranks
that these started.
"""

_EXAMPLES = """\
examples:
  hvdkit bench allreduce                           2 ranks of this machine, 4 KiB to 16 MiB
  hvdkit bench allreduce -np 8 -H node1:4,node2:4 --sizes 1M,16M,256M --plot allreduce.svg
  hvdkit bench allgather --dtype bfloat16 --json
  hvdkit bench step                                training steps of three PyTorch models
  hvdkit bench step --models mlp --threads 4
  hvdkit bench step --device cuda                  on all GPUs of this machine
  srun -n 8 hvdkit bench alltoall                  on the ranks of another launcher

compare with an earlier run:
  hvdkit bench allreduce --output before.json
  hvdkit bench allreduce --baseline before.json                  marks times that are slower by more than noise
  hvdkit bench allreduce --baseline before.json --fail-over 20   exit code 1 if hvdkit is slower by more than 20 %

A size is in bytes and means, as in nccl-tests, the whole buffer: what is reduced or sent, or what all ranks gather.
The exit code is 0; 1 for --fail-over; 2 if nothing could be measured.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "bench",
        help="measure collectives and training steps, beside MPI and Gloo",
        usage=f"hvdkit bench {{{','.join((*KINDS, 'step'))}}} [options] [hvdrun's options]",
        description=_EXPLANATION,
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add("kind", choices=(*KINDS, "step"), metavar="WHAT", help=f"{', '.join(KINDS)}; or step, a training step")
    add(
        "--sizes",
        type=_parse_sizes,
        default=(),
        metavar="SIZE,...",
        help="sizes, like 4K,1M,64M (default: 4K to 16M, on GPUs to 256M)",
    )
    add("--dtype", choices=DTYPES, default="float32", help="type of the elements (default: float32)")
    add("--device", choices=DEVICES, default=CPU, help="where tensors and models are (default: cpu)")
    add("--models", type=_split, default=(), metavar="NAME,...", help="step: models whose names contain one of these")
    add(
        "--rounds",
        type=positive_int,
        default=11,
        metavar="N",
        help="number of rounds, each of which measures all (default: 11)",
    )
    add(
        "--seconds",
        type=positive_seconds,
        default=0.1,
        metavar="S",
        help="duration of a measurement in a round (default: 0.1)",
    )
    add("--threads", type=positive_int, default=1, metavar="N", help="compute threads of each rank (default: 1)")
    add("--alone", action="store_true", help="measure hvdkit only")
    add("--json", action="store_true", help="print JSON: all times, and the rows of the table")
    add("--output", type=Path, metavar="FILE", help="also write that JSON to a file, for --baseline")
    add("--plot", type=Path, metavar="FILE", help="draw FILE.svg, FILE.png or FILE.pdf; needs matplotlib")
    add("--baseline", type=Path, metavar="FILE", help="compare with an earlier run, written by --output")
    add("--fail-over", type=percent, metavar="PERCENT", help="with --baseline: exit code 1 if hvdkit is slower by more")
    add_hvdrun_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code. Raises BenchError if nothing can be measured."""
    from hvdkit.tools.bench.run import run_bench  # its imports would slow down every other command

    return run_bench(options, build_plan(options))


def build_plan(options: argparse.Namespace) -> Plan:
    """Build the plan from the options."""
    values = {name: getattr(options, name) for name in Plan.__dataclass_fields__}
    return Plan(**{**values, "sizes": options.sizes or SIZES[options.device]})


def _parse_sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(parse_bytes(word) for word in _split(text))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes like 4K,64K,16M")
    return sizes


def _split(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (word.strip() for word in text.split(","))))
