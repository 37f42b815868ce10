"""Gradients of rank 8, and bodies for ranks that reduce them with PowerSGD(8), in each framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.transport.coding.power_sgd import PowerSGD, matrix_shape

CODING = PowerSGD(8)
#: Kernels as PyTorch has them and as TensorFlow does, what gains nothing by rank 8, vectors.
SHAPES = [(96, 64), (40, 16, 3, 3), (40,), (3, 3, 24, 32), (10, 40), (200, 120), (120,), (7,)]

Array = NDArray[Any]


def gradients(step: int, rank: int) -> list[Array]:
    """Those of a rank; the matrices of all ranks and steps span the same 8 dimensions, so their mean is of rank 8."""
    basis, own = np.random.default_rng(0), np.random.default_rng((step, rank))
    found = []
    for shape in SHAPES:
        rows, columns = matrix_shape(shape)
        left, right = basis.standard_normal((rows, 8)), basis.standard_normal((8, columns))
        found.append((left @ own.standard_normal((8, 8)) @ right).reshape(shape).astype(np.float32))
    return found


def check(reduce: Callable[[list[Array]], list[Any]], rank: int, size: int) -> None:
    """Reduce three steps' gradients; raise where a matrix is not near the mean of the ranks, or a vector not it."""
    for step in range(3):
        results = reduce(gradients(step, rank))
        everyone = [gradients(step, each) for each in range(size)]
        for at, shape in enumerate(SHAPES):
            mean = np.mean([one[at] for one in everyone], axis=0, dtype=np.float64)
            error = np.linalg.norm(np.asarray(results[at]) - mean) / np.linalg.norm(mean)
            assert error < (1e-5 if CODING.codes(shape) else 2e-7), f"step {step}, {shape}: {error}"


def with_torch(transport: str, settings: dict[str, Any]) -> int:
    """The bytes that this rank gave to the network in a step."""
    import torch
    from torch_world import joined

    import hvdkit.torch as hvd

    with joined(transport, **settings):
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        parameters[1] = torch.nn.Parameter(torch.zeros(SHAPES[1]).to(memory_format=torch.channels_last))
        names = [f"tensor{at}" for at in range(len(SHAPES))]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters), list(zip(names, parameters, strict=True)), CODING
        )

        def reduce(mine: list[Array]) -> list[Any]:
            optimizer.zero_grad()
            torch.stack(
                [(p * torch.from_numpy(g)).sum() for p, g in zip(parameters, mine, strict=True)]
            ).sum().backward()
            optimizer.synchronize()
            return [one.grad for one in parameters]

        check(reduce, hvd.rank(), hvd.size())
        sent: int = optimizer.reduction_statistics().sent_bytes // 3
        return sent


def with_tensorflow(mode: str) -> None:
    """By the tape, between hosts that are simulated."""
    import tensorflow as tf
    from tensorflow_world import in_mode, joined

    import hvdkit.tensorflow as hvd

    with joined("hierarchical_uneven"):
        variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]

        def differentiate(mine: list[Any]) -> list[Any]:
            with hvd.DistributedGradientTape(tf.GradientTape(), compression=CODING) as tape:
                loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables, mine, strict=True)])
            return list(tape.gradient(loss, variables))

        call = in_mode(mode, differentiate)
        check(lambda mine: call([tf.constant(one) for one in mine]), hvd.rank(), hvd.size())


def with_keras() -> None:
    """By an optimizer that subtracts the gradients."""
    import keras
    from keras_training import joined

    import hvdkit.keras as hvd

    with joined(transport="mpi"):
        variables = [keras.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=CODING)

        def reduce(mine: list[Array]) -> list[Any]:
            for variable in variables:
                variable.assign(np.zeros(variable.shape, np.float32))
            optimizer.apply([keras.ops.convert_to_tensor(one) for one in mine], variables)
            return [-keras.ops.convert_to_numpy(variable) for variable in variables]

        check(reduce, hvd.rank(), hvd.size())
