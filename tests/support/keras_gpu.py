"""Bodies for ranks that train with Keras over the stand-in for CUDA and NCCL: host memory stands for a GPU's."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import keras
import numpy as np
from device_recording import check_records
from keras_training import (
    ROWS,
    assert_alike,
    fit,
    fit_alone,
    joined,
    make_data,
    make_model,
    make_optimizer,
    mine,
    raises,
)
from stand_in import ask_to_fail, open_stand_in, platform, stand_in_path, synchronizations

import hvdkit.keras as hvd
from hvdkit.config import Config
from hvdkit.engine import runtime
from hvdkit.engine.planned.plan import TensorSpec
from hvdkit.errors import ConfigError, HorovodInternalError, PlanMismatchError
from hvdkit.transport.dlpack import GPU_TYPES
from hvdkit.transport.nccl import groups
from hvdkit.transport.nccl.communicator import Communicator

_DLPACK_CPU = 1
SGD = {"name": "SGD", "learning_rate": 0.05, "momentum": 0.9}


@contextmanager
def _jax_gpu() -> Iterator[dict[str, Any]]:
    """Within, JAX's arrays count as those of a GPU, and nothing of them may be copied for a callback.

    On ROCm HIP and RCCL are found as on a machine with a GPU, by their names, and addresses by DLPack.
    """
    gpu = importlib.import_module("hvdkit.keras.jax_gpu")
    in_place = importlib.import_module("hvdkit.keras.jax_in_place")
    named = platform() == "rocm"

    def refuse(*_: Any) -> None:
        raise AssertionError("gradients were to go through the host")

    with (
        mock.patch.object(gpu, "is_gpu_build", lambda: True),
        mock.patch.object(gpu, "platform", platform),
        mock.patch.object(gpu, "common_gpu", lambda: 0),
        mock.patch.dict(GPU_TYPES, {"rocm": _DLPACK_CPU})
        if named
        else mock.patch.object(gpu, "address_of", lambda buffer: np.asarray(buffer).__array_interface__["data"][0]),
        mock.patch.object(gpu, "stream_of", lambda _: 0),
        mock.patch.object(in_place, "trace_in_order", refuse),
        contextlib.nullcontext()
        if named
        else mock.patch.object(groups, "open_device", lambda index, _: open_stand_in(index)),
    ):
        yield {"device_transport": "nccl", "nccl_library": "" if named else stand_in_path()}


@contextmanager
def _gpu(waits: int = 0, calls: list[int] | None = None) -> Iterator[dict[str, Any]]:
    """The stand-in under JAX. Within, NCCL is to be used and the host to wait for the device so often.

    calls: gets the elements of each allreduce.
    """
    enqueue = Communicator.all_reduce
    calls = [] if calls is None else calls

    def count(communicator: Communicator, source: int, target: int, number: int, *rest: Any) -> None:
        calls.append(number)
        enqueue(communicator, source, target, number, *rest)

    with _jax_gpu() as settings, mock.patch.object(Communicator, "all_reduce", count):
        before = synchronizations()
        yield settings
        assert calls and synchronizations() == before + waits


def train(option: dict[str, Any], tolerance: float = 1e-5, compression: str = "none", **wrap: Any) -> None:
    """Through fit: several ranks do what one process does."""
    with _gpu() as settings, joined(**settings):
        data, spec = make_data(), {**SGD, **option}
        reference, model = make_model(), make_model()
        fit_alone(reference, make_optimizer(spec), data)
        chosen = getattr(hvd.Compression, compression)
        optimizer = hvd.DistributedOptimizer(make_optimizer(spec), compression=chosen, **wrap)
        fit(model, optimizer, mine(data), rows=ROWS)
        assert_alike(model, reference, tolerance)


def builds(folder: str) -> None:
    """Which plugin is installed decides whether there are GPUs, the platform of the device whose they are."""
    gpu = importlib.import_module("hvdkit.keras.jax_gpu")
    for plugin, version, built_for in (
        ("xla_cuda12", "PJRT C API\ncuda 12080", "cuda"),
        ("xla_rocm7", "PJRT C API\nrocm 70000", "rocm"),
    ):
        plugins = Path(folder, f"{os.getpid()}-{plugin}")
        Path(plugins, plugin).mkdir(parents=True)
        Path(plugins, plugin, "__init__.py").touch()
        device = SimpleNamespace(client=SimpleNamespace(platform_version=version))
        with (
            mock.patch.dict(sys.modules, jax_plugins=SimpleNamespace(__path__=[str(plugins)])),
            mock.patch.object(gpu, "_default_device", lambda device=device: device),
        ):
            assert gpu.is_gpu_build() and gpu.platform() == built_for
            assert gpu.device_settings(Config()).platform == built_for
    with mock.patch.dict(sys.modules, jax_plugins=SimpleNamespace(__path__=[])):
        assert not gpu.is_gpu_build()


def refused_wishes() -> None:
    """Words that the adapter does not know are errors on all ranks before anything is reduced; never "auto"."""
    gpu = importlib.import_module("hvdkit.keras.jax_gpu")
    for wish, text in (("torch", "or JAX. Set HVDKIT_DEVICE_TRANSPORT to nccl"), ("ncl", "'ncl' is unknown")):
        with _jax_gpu() as settings, joined(**settings):
            wished = dataclasses.replace(gpu.device_settings(runtime.runtime("a test").config), wish=wish)
            with mock.patch.object(gpu, "device_settings", lambda _, wished=wished: wished), raises(ConfigError, text):
                fit(make_model(), hvd.DistributedOptimizer(make_optimizer(SGD)), mine(make_data()), rows=ROWS)


def buckets(option: dict[str, Any], steps: int) -> None:
    """A program on JAX has a call a bucket, each with its own gradients only; but the last one, which ends them all.

    option: of the optimizer, with which it steps so often.
    """
    in_place = importlib.import_module("hvdkit.keras.jax_in_place")
    plain = in_place.BufferCall.trace
    traced: list[list[int]] = []
    calls: list[int] = []

    def call(self: Any, arrays: Any, *rest: Any) -> Any:
        traced.append([array.size for array in arrays])
        return plain(self, arrays, *rest)

    with (
        _gpu(calls=calls) as settings,
        mock.patch.object(in_place.BufferCall, "trace", call),
        joined(**settings, fusion_bytes=0),
    ):
        reference, model, data, spec = make_model(), make_model(), make_data(), {**SGD, **option}
        fit_alone(reference, make_optimizer(spec), data)
        calls.clear()
        fit(model, hvd.DistributedOptimizer(make_optimizer(spec)), mine(data), rows=ROWS)
        assert_alike(model, reference)
        assert traced == [[5], [100], [20], [5, 100, 20, 240]]
        assert calls == [5, 100, 20, 240] * steps


def moved() -> None:
    """What XLA has moved between two calls is an error, and nothing else is."""
    kind = importlib.import_module("hvdkit.keras.jax_device").DeviceReduction
    reduction = kind.__new__(kind)
    reduction._buckets = [[2, 1], [0]]
    reduction._tensors = [TensorSpec(str(count), count, "float32") for count in (4, 0, 6)]
    reduction._check_places(0, [64, 0], [64, 8, 128], [64, 16, 128])  # the empty one may be anywhere
    reduction._check_places(1, [128], [128], [128])
    for sources, targets in (([72, 0], [64, 0]), ([64, 0], [72, 0])):
        with raises(HorovodInternalError, "HVDKIT_FUSION_BYTES"):
            reduction._check_places(0, [64, 0], sources, targets)


def interrupted() -> None:
    """After a step that has ended between two calls no other one begins: its buckets would meet the others' rest."""
    module = importlib.import_module("hvdkit.keras.jax_device")
    reduction = module.DeviceReduction.__new__(module.DeviceReduction)
    reduction._buckets, reduction._lock, reduction._index, reduction._started = [[1], [0]], threading.Lock(), 0, []
    reduction._tensors = [TensorSpec(str(count), count, "float32") for count in (4, 6)]

    def call(bucket: int, *places: int) -> None:
        reduction._arrays, reduction._rounds = [mock.Mock(), mock.Mock()], mock.Mock()
        reduction._run(bucket, bucket, None, places, places)

    with mock.patch.multiple(
        module.jax_gpu, address_of=lambda place: place, index_of=lambda _: 0, stream_of=lambda _: 0
    ):
        for _ in range(2):
            call(0, 64)
            call(1, 64, 128)
        call(0, 64)
        for _ in range(2):
            with raises(HorovodInternalError, "after 1 of 2 buckets"):
                call(0, 64)
        reduction.close()
        call(0, 64)


def record(folder: str) -> None:
    """Profile and timeline have the GPU's times; the host waits for it once, to set the clock."""
    with _gpu(waits=1) as settings, joined(**settings):
        optimizer = hvd.DistributedOptimizer(make_optimizer(SGD))
        check_records(lambda: fit(make_model(), optimizer, mine(make_data()), rows=ROWS), 12, folder)


def nccl_fails() -> None:
    """A failure of NCCL in a step is what this step and every later one raises, on each rank with its name."""
    with _gpu() as settings, joined(**settings):
        model, data = make_model(), mine(make_data())
        fit(model, hvd.DistributedOptimizer(make_optimizer(SGD)), data, rows=ROWS, epochs=1)
        # The first: the stand-in would write the sum of an earlier one into memory that JAX has freed.
        ask_to_fail(
            "ncclAllReduce",
            2,
        )
        where = f"rank {hvd.rank()} on {socket.gethostname()}, GPU 0"
        for _ in range(2):
            with raises(Exception, f"ncclAllReduce failed on {where}: unhandled system error"):
                model.fit(*data, batch_size=ROWS, verbose=0)
            if keras.backend.backend() == "jax":  # Keras has lost the model's variables; the communicator is common
                model = make_model()
                model.compile(hvd.DistributedOptimizer(make_optimizer(SGD)), "mse")


def apply_by_hand() -> None:
    """Outside of a program, with variables of several dtypes, one of them empty; then in another world."""
    with _gpu() as settings:
        kinds = [((3, 5), "float32"), ((4,), "bfloat16"), ((0, 2), "float32"), ((), "float16"), ((), "float32")]
        optimizer = None
        for _ in range(2):
            with joined(**settings):
                if optimizer is None:
                    variables = [keras.Variable(np.zeros(shape), dtype=dtype) for shape, dtype in kinds]
                    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
                own = [keras.ops.full(shape, 2.0 ** hvd.rank(), dtype) for shape, dtype in kinds]
                optimizer.apply(own, variables)
        for variable in variables:
            whole = np.asarray(keras.ops.convert_to_numpy(variable)).astype("float32")
            np.testing.assert_array_equal(whole, np.full(variable.shape, -6.0))  # 1 + 2, twice


def different_models() -> None:
    """Ranks with other gradients are told so when the first step is traced."""
    with _gpu() as settings, joined(**settings):
        hvd.allreduce(np.ones(1))
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(4 + hvd.rank()), keras.layers.Dense(5)])
        with raises(PlanMismatchError, "do not hold the same parameters"):
            fit(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), mine(make_data()), rows=ROWS)
        fit(make_model(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), mine(make_data()), rows=ROWS)


def coded() -> None:
    """What NCCL cannot send goes through the host, on all ranks."""
    in_place = importlib.import_module("hvdkit.keras.jax_in_place")
    allowed = mock.patch.object(in_place, "trace_in_order", in_place.trace_in_order)
    with _jax_gpu() as settings, allowed, joined(**{**settings, "transport": "mpi"}):
        data = make_data()
        reference, model = make_model(), make_model()
        fit_alone(reference, make_optimizer(SGD), data)
        coding = importlib.import_module("hvdkit.transport.coding.top_k").TopK(1.0)
        fit(model, hvd.DistributedOptimizer(make_optimizer(SGD), compression=coding), mine(data), rows=ROWS)
        assert_alike(model, reference)
