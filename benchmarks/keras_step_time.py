"""A whole training step of Keras on its backend: no communication, hvdkit, and Horovod's op if that is there.

    KERAS_BACKEND=jax hvdrun -np 2 python -m benchmarks.keras_step_time

The model is the MLP of hvdkit/tools/bench/models.py, trained by the function that fit() calls for each step.
"copies alone" is the step without communication and then, in numpy, as many bytes copied and added as a reduction among
these ranks has to: what a step costs at least where gradients lie in the framework's memory and all cores compute.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import hvdkit.keras as hvd
from benchmarks.rows import Row, build_parser, finish
from hvdkit.launch.cli.numbers import positive_int
from hvdkit.tools.bench.report import NO_COMMUNICATION, OURS, STEPS, summarise
from hvdkit.tools.bench.timing import Turn, interleave, time_each
from hvdkit.transport.buckets import CHUNK_BYTES

Step = Callable[[], Any]
Wrap = Callable[[Any], Any]
ROWS, WIDTH, LAYERS = 64, 1024, 8
AIMS = {"tensorflow": 1.10, "torch": 1.10, "jax": 1.20}
COPIES = "copies alone"


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=positive_int, default=7)
    parser.add_argument(
        "--threads", type=positive_int, default=1, help="threads that each rank computes with; not on JAX"
    )
    options = parser.parse_args()
    work, aim, rows = join(options.threads), AIMS[keras.backend.backend()], []
    turns = make_peers()
    times = interleave(turns, dict.fromkeys(turns, STEPS), options.rounds)
    for peer, figures in summarise(times, NO_COMMUNICATION).items():
        told, met = (f"at most x{aim:.2f}", figures.ratio <= aim) if peer == OURS else ("", None)
        rows.append(Row(work, peer, figures.median_s, figures.ratio, NO_COMMUNICATION, told, met))
    finish(rows, hvd.describe(), options.json, first=hvd.rank() == 0)


def join(threads: int) -> str:
    """Begin hvdkit, with so many threads a rank (JAX takes what it likes); returns the name of the work."""
    backend = keras.backend.backend()
    if backend == "torch":
        importlib.import_module("torch").set_num_threads(threads)
    if backend == "tensorflow":
        threading = importlib.import_module("tensorflow").config.threading
        threading.set_intra_op_parallelism_threads(threads)
        threading.set_inter_op_parallelism_threads(threads)
    hvd.init()
    return f"Keras MLP on {backend}"


def make_peers() -> dict[str, Turn]:
    """The turns of every peer, warmed up; collective."""
    turns: dict[str, Turn] = {}
    for name, wrap in _list_peers().items():
        step = make_step(wrap(keras.optimizers.SGD(1e-4)))
        turns[name] = functools.partial(time_each, step, hvd.barrier)
        if name == NO_COMMUNICATION and hvd.size() > 1:
            turns[COPIES] = functools.partial(time_each, _followed_by_copies(step), hvd.barrier)
    for turn in turns.values():
        turn(3)
    return turns


def _followed_by_copies(step: Step) -> Step:
    """The step, then the memory traffic of an allreduce: each rank adds up its own part of the gradients.

    The other parts are copied to where their ranks read them, the own sum to each other rank, and the rest back. The
    arrays of the other ranks are this rank's own here, so nothing waits and nothing passes from core to core.
    """
    ranks, count = hvd.size(), LAYERS * (WIDTH + 1) * WIDTH
    gradients, shared, results = (np.ones(count, np.float32) for _ in range(3))
    peers = [np.ones((ranks - 1, count // ranks), np.float32) for _ in ("read", "written")]
    chunk = CHUNK_BYTES // gradients.itemsize

    def step_and_copies() -> None:
        step()
        own = count // ranks
        for at in range(own, count, chunk):
            shared[at : at + chunk] = gradients[at : at + chunk]
        for at in range(0, own, chunk):
            part = slice(at, min(at + chunk, own))
            total = results[part]
            np.add(gradients[part], peers[0][0][part], out=total)
            for read in peers[0][1:]:
                np.add(total, read[part], out=total)
            np.divide(total, np.float32(ranks), out=total)
            for written in peers[1]:
                written[part] = total
        for at in range(own, count, chunk):
            results[at : at + chunk] = shared[at : at + chunk]

    return step_and_copies


def make_step(optimizer: Any, width: int = WIDTH, layers: int = LAYERS) -> Step:
    """A step of the MLP with this optimizer, for time_each(); collective."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((width,))])
    for _ in range(layers):
        model.add(keras.layers.Dense(width, activation="relu"))
    model.compile(optimizer, "mse", jit_compile=keras.backend.backend() == "jax")
    inputs = np.random.RandomState(hvd.rank()).randn(ROWS, width).astype("float32")
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


def _list_peers() -> dict[str, Wrap]:
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


if __name__ == "__main__":
    main()
