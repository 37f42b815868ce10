"""Scripts that import from inside Horovod find the same names in hvdkit: `horovod` in the path becomes `hvdkit`."""

from __future__ import annotations

import importlib
import os

import pytest

import hvdkit
import hvdkit.torch as hvd
from hvdkit.common import exceptions
from hvdkit.common.util import env, extension_available, mpi_built

PATHS = {
    "common.elastic": "ObjectState State",
    "common.exceptions": "HorovodInternalError HorovodVersionMismatchError HostsUpdatedInterrupt",
    "common.process_sets": "ProcessSet add_process_set global_process_set remove_process_set",
    "common.util": "ccl_built ddl_built env extension_available gloo_built mpi_built nccl_built",
    "tensorflow.compression": "Compression",
    "tensorflow.elastic": "TensorFlowKerasState",
    "tensorflow.functions": "allgather_object broadcast_object broadcast_object_fn broadcast_variables",
    "tensorflow.keras": "DistributedOptimizer callbacks",
    "tensorflow.mpi_ops": "allreduce init join rank size size_op",
    "tensorflow.sync_batch_norm": "SyncBatchNormalization",
    "keras.callbacks": "BroadcastGlobalVariablesCallback MetricAverageCallback LearningRateWarmupCallback",
    "torch.compression": "Compression",
    "torch.elastic": "ElasticSampler TorchState",
    "torch.elastic.sampler": "ElasticSampler",
    "torch.elastic.state": "TorchState",
    "torch.functions": "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters",
    "torch.mpi_ops": "allreduce_async_ init join poll rank size synchronize",
    "torch.optimizer": "DistributedOptimizer",
    "torch.sync_batch_norm": "SyncBatchNorm",
}


@pytest.mark.parametrize("path", PATHS)
def test_a_module_of_horovod_has_its_names(path: str) -> None:
    module = importlib.import_module(f"hvdkit.{path}")
    for name in PATHS[path].split():
        assert hasattr(module, name)


def test_what_is_reached_by_two_paths_is_the_same() -> None:
    ops = importlib.import_module("hvdkit.torch.mpi_ops")
    for name in ops.__all__:
        if name in hvd.__all__:
            assert getattr(ops, name) is getattr(hvd, name), name
    inner = ops._basics
    assert inner._get_process_set_ids_and_ranks is hvd.get_process_sets is hvd.get_process_set_ids_and_ranks
    assert exceptions.HorovodInternalError is hvd.HorovodInternalError is hvdkit.HorovodInternalError


def test_horovods_exceptions_take_its_arguments() -> None:
    assert hvdkit.HostsUpdatedInterrupt(True).skip_sync
    with pytest.raises(ImportError, match=r"torch 2\.13"):
        raise hvdkit.HorovodVersionMismatchError("torch", "2.13", "2.12")


def test_horovods_questions() -> None:
    assert extension_available("torch", verbose=True) and not extension_available("mxnet")
    assert mpi_built(verbose=True) == hvd.mpi_built()
    with env(HVDKIT_A_TEST="1", HOME=None):
        assert os.environ["HVDKIT_A_TEST"] == "1" and "HOME" not in os.environ
    assert "HVDKIT_A_TEST" not in os.environ and "HOME" in os.environ
