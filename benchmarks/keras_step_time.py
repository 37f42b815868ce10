"""A whole training step of Keras on its backend: no communication, hvdkit, and Horovod's op if that is there.

    KERAS_BACKEND=jax hvdrun -np 2 python -m benchmarks.keras_step_time

The model is the MLP of benchmarks.step_time, trained by the function that fit() calls for each step. All peers take
turns, a few steps at a time, round after round, so that they meet the same machine. The ranks begin each step together,
and the slower one's time counts. The table gives medians over all rounds, and ratios to the step without communication.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import hvdkit.keras as hvd
from benchmarks.rows import Row, build_parser, finish
from hvdkit.tools.bench.figures import NO_COMMUNICATION, OURS, summarise

Step = Callable[[], Any]
Wrap = Callable[[Any], Any]
AIMS = {"tensorflow": 1.15, "torch": 1.25, "jax": 1.25}
ROWS, WIDTH = 64, 1024


def _make_step(wrap: Wrap, layers: int) -> Step:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((WIDTH,))])
    for _ in range(layers):
        model.add(keras.layers.Dense(WIDTH, activation="relu"))
    model.compile(wrap(keras.optimizers.SGD(1e-4)), "mse", jit_compile=keras.backend.backend() == "jax")
    inputs = np.random.RandomState(hvd.rank()).randn(ROWS, WIDTH).astype("float32")
    model.fit(inputs, inputs, batch_size=ROWS, epochs=1, verbose=0)
    return _STEPS[keras.backend.backend()](model, inputs)


def _tensorflow_step(model: Any, inputs: Any) -> Step:
    data = importlib.import_module("tensorflow").data
    batches = iter(data.Dataset.from_tensors((inputs, inputs)).cache().repeat().prefetch(2))
    return lambda: float(model.train_function(batches)["loss"])


def _torch_step(model: Any, inputs: Any) -> Step:
    batch = keras.ops.convert_to_tensor(inputs)
    return lambda: model.train_function([(batch, batch)])


def _jax_step(model: Any, inputs: Any) -> Step:
    jax = importlib.import_module("jax")
    batch = jax.numpy.asarray(inputs)
    names = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
    held = [model._get_jax_state(**dict.fromkeys(names, True), purge_model_variables=True)]

    def step() -> None:
        logs, held[0] = model.train_function(held[0], iter([(batch, batch)]))
        jax.block_until_ready((logs, held[0]))

    return step


_STEPS = {"tensorflow": _tensorflow_step, "torch": _torch_step, "jax": _jax_step}


def _peers() -> dict[str, Wrap]:
    peers: dict[str, Wrap] = {NO_COMMUNICATION: lambda optimizer: optimizer, OURS: hvd.DistributedOptimizer}
    if keras.backend.backend() != "tensorflow":
        return peers
    try:
        horovod = importlib.import_module("horovod.tensorflow")
    except ImportError:
        return peers
    horovod.init()

    class WithHorovod(keras.optimizers.SGD):
        """Its own optimizer wrapper fails with Keras 3, so its operation is called by hand."""

        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            return super().apply(horovod.grouped_allreduce(list(grads)), trainable_variables)

    peers["Horovod's op"] = lambda optimizer: WithHorovod.from_config(optimizer.get_config())
    return peers


def _time(step: Step, steps: int) -> float:
    """Seconds a step: all ranks begin it together, the slowest one counts, and the median of `steps` is taken."""
    times = []
    for _ in range(steps):
        hvd.barrier()
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return float(np.median(hvd.allreduce(np.array(times), op=hvd.Max)))


def measure(layers: int, *, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds a step of every peer in every round."""
    made = {name: _make_step(wrap, layers) for name, wrap in _peers().items()}
    for step in made.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, step in made.items():
            times[name].append(_time(step, steps))
    return times


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=15, help="steps in a round")
    parser.add_argument("--layers", type=int, default=8, help="of 1024 x 1024")
    parser.add_argument("--threads", type=int, default=1, help="threads that each rank computes with; not on JAX")
    options = parser.parse_args()
    backend = keras.backend.backend()
    if backend == "torch":
        importlib.import_module("torch").set_num_threads(options.threads)
    if backend == "tensorflow":
        threading = importlib.import_module("tensorflow").config.threading
        threading.set_intra_op_parallelism_threads(options.threads)
        threading.set_inter_op_parallelism_threads(options.threads)
    hvd.init()
    where, rows, aim = hvd.describe(), [], AIMS[backend]
    times = measure(options.layers, rounds=options.rounds, steps=options.steps)
    for peer, figures in summarise(times, NO_COMMUNICATION).items():
        told, met = (f"at most x{aim:.2f}", figures.ratio <= aim) if peer == OURS else ("", None)
        work = f"Keras on {backend}, the MLP"
        rows.append(Row(work, peer, figures.median_s, figures.ratio, NO_COMMUNICATION, told, met))
    finish(rows, where, options.json, first=hvd.rank() == 0)


if __name__ == "__main__":
    main()
