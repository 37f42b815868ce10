"""hvdkit plan: the command."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdkit.launch.cli.numbers import positive_int
from hvdkit.setting import parse_bytes

_EXPLANATION = """\
Choose how to divide the training of a transformer over GPUs: data, tensor and pipeline parallelism, schedule,
micro-batch, ZeRO stage and recomputation. The command computes memory and time of all layouts, by part, and lists those
that fit, the fastest first, with the reasons why the others are slower. Nothing is run, and no GPU is needed.

MODEL is a config.json in the form of Hugging Face (or its folder), a script and its function that returns a PyTorch
model (train.py:build_model), or sizes such as hidden=4096,layers=32,heads=32,sequence=2048.
Weights and activations are in 16 bits, gradients and Adam's state in float32, as in Megatron-LM.

The constants are fitted to times of A100s in one node. Other GPUs have the same efficiencies on their data sheets'
figures, which has not been compared with measurements.
"""

_EXAMPLES = """\
examples:
  hvdkit plan hidden=4096,layers=32,heads=32,sequence=2048 --gpus 64 --batch 512
  hvdkit plan config.json --gpu h100 --gpus 128 --batch 1024 --sequence 4096 --explain
  hvdkit plan train.py:build_model --gpu a100-40 --gpus 16 --batch 256 --plot plan.svg
  hvdkit plan config.json --gpus 64 --batch 512 --explain 8,2,4     explain dp 8 x tp 2 x pp 4
  hvdkit plan config.json --gpus 16 --batch 64 --bench allreduce.json   links as hvdkit bench has measured them
  hvdkit plan hidden=256,layers=4,heads=4,sequence=128,vocabulary=512 --measure --bench allreduce.json \\
      --gpus 2 --batch 8                              ranks on this machine's CPU, of which one layer is measured

compare with measurements:
  hvdkit plan --evaluate measured.csv --gpu a100-80 --output predicted.csv
A row is a run; columns are known by name, such as: # GPUs, global batch, micro batch, hidden size, attention heads,
# layers, sequence length, tensor parallelism, data parallelism, pipeline parallelism, iteration time (ms); also
vocabulary, virtual stages, recomputation (none, selective, full), sequence parallelism, ZeRO, GPUs per node. What a
table does not say is taken from the options, else assumed, and the column "assumed" says so.

The exit code is 0; 1 if nothing fits; 2 if the input cannot be used.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "plan",
        help="choose data, tensor and pipeline parallelism for a model and a cluster",
        usage="hvdkit plan MODEL --gpus N --batch N [options]\n       hvdkit plan --evaluate FILE.csv [options]",
        description=_EXPLANATION,
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="config.json, train.py:FUNCTION, or hidden=N,layers=N,heads=N,...")
    add("--evaluate", type=Path, metavar="FILE", help="predict every row of a table of measurements instead")
    add("--gpu", default="a100-80", metavar="NAME", help="v100-16, v100-32, a100-40, a100-80, h100-80 or mi250")
    add("--gpus", type=positive_int, metavar="N", help="number of GPUs")
    add("--node", type=positive_int, metavar="N", help="GPUs of a node (default: 8)")
    add("--batch", type=positive_int, metavar="N", help="samples of a step, on all GPUs together")
    add("--memory", type=_bytes, metavar="SIZE", help="memory of a GPU, such as 40G, if not the data sheet's")
    add("--link", type=_bytes, metavar="SIZE", help="bytes a second from a GPU to others of its node, such as 300G")
    add("--network", type=_bytes, metavar="SIZE", help="bytes a second of a GPU's share of its node's network: 25G")
    add("--bench", type=Path, metavar="FILE", help="take link and latency from `hvdkit bench allreduce --output FILE`")
    add(
        "--measure", action="store_true", help="ranks on this machine's CPU: measure one layer; needs --bench for links"
    )
    for name in ("hidden", "layers", "heads", "sequence", "vocabulary"):
        add(
            f"--{name}",
            type=positive_int,
            metavar="N",
            help=f"the model's {name}, if it does not say it, or another one",
        )
    add("--fused-attention", action="store_true", help="FlashAttention: no s x s matrix of scores in memory")
    add("--recompute", choices=("none", "selective", "full"), help="with --evaluate: where the table does not say it")
    add(
        "--chunks",
        type=positive_int,
        metavar="N",
        help="with --evaluate: virtual stages, where the table does not say it",
    )
    add("--sequence-parallel", action="store_true", help="with --evaluate: where the table does not say it")
    add("--top", type=positive_int, default=10, metavar="N", help="number of plans to list (default: 10)")
    add(
        "--explain",
        nargs="?",
        const="",
        metavar="DP,TP,PP",
        help="explain memory and time of the best plan, or of this one",
    )
    add("--json", action="store_true", help="print JSON, in bytes and seconds")
    add("--output", type=Path, metavar="FILE", help="with --evaluate: write the table there (default: print it)")
    add("--plot", type=Path, metavar="FILE", help="draw FILE.svg, FILE.png or FILE.pdf; needs matplotlib")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code. Raises PlanError for invalid options or files."""
    from hvdkit_planner.run import run_plan  # its imports would slow down every other command

    return run_plan(options)


def _bytes(text: str) -> int:
    try:
        number = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is no size from 1 up")
    return number
