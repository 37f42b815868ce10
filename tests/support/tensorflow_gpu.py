"""Bodies for ranks that train over the stand-in for CUDA and NCCL: TensorFlow's CPU stands for the GPU."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from device_recording import check_records
from keras_training import raises
from stand_in import ask_to_fail, open_stand_in, platform, stand_in_path, synchronizations
from tensorflow_world import joined

import hvdkit.tensorflow as hvd
from hvdkit.errors import HorovodInternalError
from hvdkit.tensorflow import gpu
from hvdkit.transport.dlpack import GPU_TYPES
from hvdkit.transport.nccl import groups
from hvdkit.transport.nccl.group import DeviceGroup

_DLPACK_CPU = 1


@contextmanager
def stand_in_gpu() -> Iterator[dict[str, Any]]:
    """Within, TensorFlow's CPU counts as a GPU. Yields settings for init(), under which only NCCL will do.

    On ROCm HIP and RCCL are found as on a machine with a GPU, by their names.
    """
    named = platform() == "rocm"
    with (
        mock.patch.object(gpu, "platform", platform),
        mock.patch.object(gpu, "common_gpu", lambda _: "CPU:0"),
        mock.patch.object(gpu, "device_index", lambda _: 0),
        mock.patch.dict(GPU_TYPES, {platform(): _DLPACK_CPU}),
        contextlib.nullcontext()
        if named
        else mock.patch.object(groups, "open_device", lambda index, _: open_stand_in(index)),
    ):
        yield {"device_transport": "nccl", "nccl_library": "" if named else stand_in_path()}


def on_gpu(file: str, check: str, *args: Any, **kwargs: Any) -> None:
    """A check of another file of bodies, whose gradients NCCL reduces; which the host waits for by asking alone."""
    bodies = import_module(file)
    runs: list[int] = []

    def run(self: DeviceGroup, *given: Any) -> None:
        runs.append(self.rank)
        plain(self, *given)

    plain, before = DeviceGroup.run, synchronizations()
    with (
        stand_in_gpu() as settings,
        mock.patch.object(DeviceGroup, "run", run),
        mock.patch.object(bodies, "joined", functools.partial(bodies.joined, **settings)),
    ):
        getattr(bodies, check)(*args, **kwargs)
    assert runs
    assert synchronizations() == before


def _average(settings: dict[str, Any], function: Any) -> None:
    """In a world of its own each rank's number is averaged, as the gradient of a variable."""
    with joined(**settings):
        found = function(tf.constant(hvd.rank() + 1.0))
        assert float(found) == (hvd.size() + 1) / 2


def _step() -> Any:
    variable = tf.Variable(1.0)

    def step(weight: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = variable * weight
        return hvd.DistributedGradientTape(tape).gradient(loss, variable)

    return step


def record(folder: str, mode: str) -> None:
    """Profile and timeline have the GPU's times; the host waits for an event once, to set the clock."""
    before = synchronizations()
    with stand_in_gpu() as settings, joined(**settings):
        step = _step() if mode == "eager" else tf.function(_step())
        check_records(lambda: [step(tf.constant(1.0)) for _ in range(5)], 5, folder)
    assert synchronizations() == before + 1


def nccl_fails() -> None:
    """A failure of NCCL in a step is what this step and every later one raises, on each rank with its name."""
    with stand_in_gpu() as settings, joined(**settings):
        step, one = _step(), tf.constant(1.0)
        graph = tf.function(step)
        step(one), graph(one)
        ask_to_fail("ncclAllReduce", 2)
        for again in (graph, step, graph):
            with raises(
                tf.errors.OpError, f"ncclAllReduce failed on rank {hvd.rank()} on {socket.gethostname()}, GPU 0"
            ):
                again(one)


def other_worlds() -> None:
    """A graph serves in the next world too, but not where gradients begin to be reduced on GPUs, or cease to be."""
    with stand_in_gpu() as settings:
        host = {"device_transport": "host"}
        for first, second in ((settings, settings), (host, settings), (settings, host)):
            function = tf.function(_step())
            _average(first, function)
            if first is second:
                _average(second, function)
            else:
                with raises(tf.errors.UnknownError, "Create a new tf.function"):
                    _average(second, function)
                hvd.shutdown()


def not_all_on_gpus() -> None:
    """Where a rank, or every rank, has no GPU, gradients go through the host's memory; not if NCCL was asked for."""
    for everyone in (True, False):
        with (
            stand_in_gpu() as settings,
            mock.patch.object(gpu, "common_gpu", _first_rank_only if not everyone else _none),
        ):
            _average({**settings, "device_transport": "auto"}, tf.function(_step()))
            if everyone:
                _average(settings, _step())
            else:
                with raises(HorovodInternalError, "its tensors are not all on one GPU"):
                    _average(settings, _step())
                hvd.shutdown()


def _none(_: Any) -> str | None:
    return None


def _first_rank_only(_: Any) -> str | None:
    return "CPU:0" if hvd.rank() == 0 else None


def builds(_: str) -> None:
    """What TensorFlow says of its build decides which libraries reduce, and which memory DLPack has to name."""
    for built_for in ("cuda", "rocm", ""):
        gpu.platform.cache_clear()
        with (
            mock.patch.object(tf.test, "is_built_with_cuda", lambda name=built_for: name == "cuda"),
            mock.patch.object(tf.test, "is_built_with_rocm", lambda name=built_for: name == "rocm"),
        ):
            assert gpu.platform() == built_for
    gpu.platform.cache_clear()
    assert GPU_TYPES == {"cuda": 2, "rocm": 10}  # kDLCUDA, kDLROCM


def device_numbers() -> None:
    """TensorFlow counts the GPUs that it was left, and parts of one as several; CUDA counts all that are there."""
    left = [SimpleNamespace(name=f"/physical_device:GPU:{number}") for number in (3, 1)]
    parts = {left[0].name: ["a half", "the other"], left[1].name: None}
    with (
        mock.patch.object(tf.config, "get_visible_devices", lambda _: left),
        mock.patch.object(tf.config, "get_logical_device_configuration", lambda device: parts[device.name]),
    ):
        assert [gpu.device_index(f"GPU:{number}") for number in range(3)] == [3, 3, 1]


def devices_of_variables() -> None:
    """Variables are on one GPU, or they are not; those of Keras and tensors of a graph too."""
    on = "/job:localhost/replica:0/task:0/device:"
    first, second, host = (
        SimpleNamespace(value=SimpleNamespace(device=on + name)) for name in ("GPU:0", "GPU:1", "CPU:0")
    )
    assert gpu.common_gpu([first, first]) == "GPU:0"
    for others in ([first, second], [first, host], [host], [], [tf.Variable(1.0), keras.Variable(1.0)]):
        assert gpu.common_gpu(others) is None
    tf.function(lambda one: _assert_none(gpu.common_gpu([one])), autograph=False)(tf.constant(1.0))
    with raises(HorovodInternalError, "HVDKIT_DEVICE_TRANSPORT=host"):
        gpu.address_of(tf.constant([1.0]))


def _assert_none(value: object) -> None:
    assert value is None
