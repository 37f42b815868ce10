"""A training step of Keras with the optimizer's state divided among the ranks, beside one with all of it on each.

    KERAS_BACKEND=jax hvdrun -np 2 python -m benchmarks.keras_sharded_step

Every rank trains the MLP of benchmarks.keras_step_time with AdamW, a few steps at a time, in turns and round after
round. Medians over all rounds; ratios to the step without shard, within a round. Below them the bytes of the
optimizer's variables on the rank that has most.

    KERAS_BACKEND=jax hvdrun -np 2 python -m benchmarks.keras_sharded_step --peak gradients --width 2048 --layers 18

takes a few steps of one of them only, and prints the peak of resident memory in them, of the rank that has most; here
with 302 MB of gradients.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import keras

import hvdkit.keras as hvd
from benchmarks.keras_step_time import LAYERS, WIDTH, join, make_step
from benchmarks.rows import Row, build_parser, finish
from hvdkit.launch.cli.numbers import positive_int
from hvdkit.tools.bench.report import STEPS, summarise
from hvdkit.tools.bench.timing import Turn, interleave, time_each

_WHOLE = "without shard"
_SHARDS = {_WHOLE: None, 'shard="optimizer"': "optimizer", 'shard="gradients"': "gradients"}
_AIM, _STATE_AIM = 1.1, 1.05


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=positive_int, default=7)
    parser.add_argument(
        "--threads", type=positive_int, default=1, help="threads that each rank computes with; not on JAX"
    )
    parser.add_argument("--width", type=positive_int, default=WIDTH, help="of each layer of the model")
    parser.add_argument("--layers", type=positive_int, default=LAYERS)
    parser.add_argument("--peak", choices=("whole", "optimizer", "gradients"), help="peak memory of steps of this kind")
    options = parser.parse_args()
    work = join(options.threads)
    if options.peak:
        peer = next(peer for peer, shard in _SHARDS.items() if options.peak == (shard or "whole"))
        step = make_step(_wrap(keras.optimizers.AdamW(1e-4), peer), options.width, options.layers)
        _forget_peak()
        time_each(step, hvd.barrier, 5)
        row = Row(f"{work}, peak", peer, None, mb=max(hvd.allgather_object(_peak_mb())))
        finish([row], hvd.describe(), options.json, first=hvd.rank() == 0)
        return
    optimizers = {peer: keras.optimizers.AdamW(1e-4) for peer in _SHARDS}
    turns: dict[str, Turn] = {}
    for peer, optimizer in optimizers.items():
        step = make_step(_wrap(optimizer, peer), options.width, options.layers)
        turns[peer] = functools.partial(time_each, step, hvd.barrier)
        turns[peer](3)
    times = interleave(turns, dict.fromkeys(turns, STEPS), options.rounds)
    rows = []
    for peer, figures in summarise(times, _WHOLE).items():
        aim = "" if peer == _WHOLE else f"at most x{_AIM:.2f}"
        met = figures.ratio <= _AIM if aim else None
        rows.append(Row(work, peer, figures.median_s, figures.ratio, _WHOLE, aim, met))
    held = {peer: max(hvd.allgather_object(_state_bytes(one))) for peer, one in optimizers.items()}
    for peer, nbytes in held.items():
        part = nbytes / held[_WHOLE] * hvd.size()
        aim = "" if peer == _WHOLE else f"at most x{_STATE_AIM:.2f} of 1/{hvd.size()}"
        met = part <= _STATE_AIM if aim else None
        rows.append(Row(f"{work}, state", peer, None, None, "", aim, met, nbytes / 1e6))
    finish(rows, hvd.describe(), options.json, first=hvd.rank() == 0)


def _wrap(optimizer: keras.optimizers.Optimizer, peer: str) -> keras.optimizers.Optimizer:
    return hvd.DistributedOptimizer(optimizer, shard=_SHARDS[peer])


def _state_bytes(optimizer: keras.optimizers.Optimizer) -> int:
    """Of the optimizer's variables, on this rank; all are of 4 bytes here."""
    return int(4 * sum(math.prod(variable.shape) for variable in optimizer.variables))


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_mb() -> float:
    """Of this process's resident memory since _forget_peak(), in 10^6 bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024 / 1e6


if __name__ == "__main__":
    main()
