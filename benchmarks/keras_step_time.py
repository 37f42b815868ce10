"""A whole training step of Keras on its backend: no communication, hvdkit, and Horovod's op if that is there.

    KERAS_BACKEND=jax hvdrun -np 2 python -m benchmarks.keras_step_time

What `hvdkit bench step --keras` measures, beside its aims.
"""

from __future__ import annotations

import keras

import hvdkit.keras as hvd
from benchmarks.rows import Row, build_parser, finish
from hvdkit.tools.bench.figures import NO_COMMUNICATION, OURS, summarise
from hvdkit.tools.bench.keras_rank import measure_keras_step
from hvdkit.tools.bench.keras_step import join
from hvdkit.tools.bench.plan import Plan

AIMS = {"tensorflow": 1.15, "torch": 1.25, "jax": 1.25}


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="threads that each rank computes with; not on JAX")
    options = parser.parse_args()
    work, aim, rows = join(options.threads), AIMS[keras.backend.backend()], []
    case = measure_keras_step(Plan("step", rounds=options.rounds), work)
    for peer, figures in summarise(case.times, NO_COMMUNICATION).items():
        told, met = (f"at most x{aim:.2f}", figures.ratio <= aim) if peer == OURS else ("", None)
        rows.append(Row(case.work, peer, figures.median_s, figures.ratio, NO_COMMUNICATION, told, met))
    finish(rows, hvd.describe(), options.json, first=hvd.rank() == 0)


if __name__ == "__main__":
    main()
