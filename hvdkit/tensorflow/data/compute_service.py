"""tf.data service in two jobs: a compute job that preprocesses, and the training that reads from it.

The names are those of Horovod's module of this name. Servers are reachable at the addresses of their hosts, so that the
jobs may be on several hosts; Horovod publishes "localhost".
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvdkit.engine.basics import is_initialized, rank, size
from hvdkit.log import logger
from hvdkit.tensorflow.basics import init
from hvdkit.tensorflow.data.registration import ComputeClient
from hvdkit.tensorflow.ops import barrier

_SIDES = ("compute", "training")
_LOOK_S = 1.0
_REMIND_S = 60.0


@dataclass(frozen=True)
class TfDataServiceConfig:
    """The configuration by which training ranks connect to the compute job.

    dispatchers: 1 for all ranks, or one for each.
    workers_per_dispatcher: number of workers of each.
    dispatcher_side: the job that they run in, compute or training.
    addresses: of the compute job's server.
    key: of the compute job's server.
    timeout: seconds until dispatchers and workers must be available.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Mapping[str, Sequence[tuple[str, int]]]
    key: bytes
    timeout: int = 60

    def __post_init__(self) -> None:
        if self.dispatcher_side not in _SIDES:
            raise ValueError(f"dispatcher_side is {self.dispatcher_side!r}. It must be compute or training.")

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """Make a client of the compute job; its shutdown() ends the job."""
        return ComputeClient(self.addresses, self.key, verbose=verbose)

    def to_dict(self) -> dict[str, Any]:
        """Convert the configuration to values that JSON can represent."""
        return {**asdict(self), "key": self.key.hex()}

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        """Convert the result of to_dict() back. Raises ValueError for anything else."""
        try:
            places = {name: [(str(one[0]), int(one[1])) for one in each] for name, each in config["addresses"].items()}
            return TfDataServiceConfig(
                dispatchers=int(config["dispatchers"]),
                workers_per_dispatcher=int(config["workers_per_dispatcher"]),
                dispatcher_side=config["dispatcher_side"],
                addresses=places,
                key=bytes.fromhex(config["key"]),
                timeout=int(config["timeout"]),
            )
        except (KeyError, TypeError, AttributeError, IndexError) as problem:
            raise ValueError(f"It is not the configuration of a compute service: {problem!r}.") from None

    def write(self, filename: str) -> None:
        """Write the configuration for the training, atomically, and readable by this user only: it contains the key."""
        path = Path(filename)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f"{path.name}.", delete=False) as file:
            json.dump(self.to_dict(), file)
        os.replace(file.name, path)

    @staticmethod
    def read(filename: str, wait_for_file_creation: bool = False) -> TfDataServiceConfig:
        """Read the configuration; wait_for_file_creation: until the file exists, with a warning each minute.

        Raises ValueError for a file with other content, OSError.
        """
        waited = 0.0
        while wait_for_file_creation and not Path(filename).exists():
            time.sleep(_LOOK_S)
            waited += _LOOK_S
            if waited % _REMIND_S == 0:
                logger.warning("Waiting for %s, which the compute job writes at its start.", filename)
        try:
            return TfDataServiceConfig.from_dict(json.loads(Path(filename).read_text()))
        except ValueError as problem:
            raise ValueError(f"{filename}: {problem}") from None


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Yield the address of the dispatcher for a training rank, after its workers have registered.

    A single dispatcher on the training side runs in rank 0, which at the end of the block waits for the other ranks.
    Raises ConnectionError if the compute job does not answer, TimeoutError, ValueError.
    """
    compute = compute_config.compute_client()
    one = compute_config.dispatchers == 1
    number = 0 if one else rank
    on_training_side = compute_config.dispatcher_side == "training"
    with contextlib.ExitStack() as stack:
        if on_training_side and (not one or rank == 0):
            stack.enter_context(_dispatcher(compute, number))
            stack.callback(_end_workers, compute, number, compute_config.timeout)
        address = compute.wait_for_dispatcher_registration(number, compute_config.timeout)
        compute.wait_for_dispatcher_worker_registration(number, compute_config.timeout)
        yield address
        if on_training_side and one and is_initialized() and size() > 1:
            barrier()  # others may still read


def send_to_data_service(
    dataset: Any,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> Any:
    """Make the compute job, which runs the dispatchers, execute the dataset's transformations so far.

    dataset: tf.data's.
    compute_config: of the compute job.
    rank: this rank.
    size: number of ranks.
    processing_mode: see tf.data.experimental.service.distribute.
    reuse_dataset: all ranks of a dispatcher read from one dataset, first come first served.
    round_robin: they read in turns, which needs size and an endless dataset.

    Raises RuntimeError for dispatchers on the training side; the errors of tf_data_service().
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError(
            "send_to_data_service() needs dispatchers on the compute side; these are on the training side. Use "
            "`with tf_data_service(compute_config, rank) as address:` and distribute(service=address)."
        )
    if round_robin and size is None:
        raise ValueError("round_robin=True needs size, the number of ranks that take turns.")
    turns = reuse_dataset and round_robin
    with tf_data_service(compute_config, rank) as address:
        return dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode=processing_mode,
                service=address,
                job_name="job" if reuse_dataset else None,
                consumer_index=rank if turns else None,
                num_consumers=size if turns else None,
            )
        )


tf.data.Dataset.send_to_data_service = send_to_data_service  # as in Horovod, whose scripts call it as a method


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Run a worker of the compute job, one per rank, and on some ranks a dispatcher, until shutdown().

    Raises ConnectionError, TimeoutError, ValueError.
    """
    init()
    number = rank() // compute_config.workers_per_dispatcher
    compute = compute_config.compute_client()
    with contextlib.ExitStack() as stack:
        if compute_config.dispatcher_side == "compute" and rank() % compute_config.workers_per_dispatcher == 0:
            stack.enter_context(_dispatcher(compute, number))
        dispatcher = compute.wait_for_dispatcher_registration(number, compute_config.timeout)
        worker = tf.data.experimental.service.WorkerServer(
            tf.data.experimental.service.WorkerConfig(
                dispatcher_address=dispatcher.partition("://")[2],
                worker_address=f"{compute.find_own_address()}:%port%",
                heartbeat_interval_ms=1000,
                dispatcher_timeout_ms=compute_config.timeout * 1000,
            )
        )
        try:
            compute.register_worker_for_dispatcher(number, rank())
            all_over = compute.wait_for_end(number)
        finally:
            worker._stop()  # TensorFlow has no public function that ends a server
        if compute_config.dispatcher_side == "training" and not all_over:
            compute.unregister_worker(number, rank(), stay=True)
        barrier()  # a worker whose dispatcher has gone would end only after the timeout


def _end_workers(compute: ComputeClient, number: int, timeout: int) -> None:
    try:
        compute.end_dispatcher(number, timeout)
    except (ConnectionError, TimeoutError) as problem:
        logger.warning("Dispatcher %d ends before its workers. %s", number, problem)


@contextlib.contextmanager
def _dispatcher(compute: ComputeClient, number: int) -> Iterator[None]:
    """Run a dispatcher, and register an address that other hosts can reach: its own is localhost."""
    server = tf.data.experimental.service.DispatchServer()
    try:
        port = server.target.rpartition(":")[2]
        compute.register_dispatcher(number, f"grpc://{compute.find_own_address()}:{port}")
        yield
    finally:
        server._stop()
