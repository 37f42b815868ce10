"""tf.data service: registration between the jobs, and real dispatchers and workers under hvdrun."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from gallery import EXAMPLES
from hvdrun_job import HVDRUN, environment
from ranks import run_ranks

if TYPE_CHECKING:
    from hvdkit.tensorflow.data.registration import ComputeClient, ComputeService

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

KEY = b"k" * 32
NUMBERS = 60


def make_service(dispatchers: int, workers: int) -> ComputeService:
    # Not at the top: TensorFlow takes 4 s, in each process that reads this file to find its tests.
    from hvdkit.tensorflow.data.registration import ComputeService

    return ComputeService(dispatchers, workers, KEY)


def make_client(addresses: dict[str, list[tuple[str, int]]], key: bytes) -> ComputeClient:
    from hvdkit.tensorflow.data.registration import ComputeClient

    return ComputeClient(addresses, key)


@pytest.fixture
def service() -> Any:
    """Two dispatchers with two workers each."""
    service = make_service(2, 2)
    yield service
    service.shutdown()


def client(service: ComputeService, key: bytes = KEY) -> ComputeClient:
    return make_client(service.addresses(), key)


def test_whoever_waits_is_told_when_the_others_are_there(service: ComputeService) -> None:
    one = client(service)
    found: list[str] = []
    waiting = threading.Thread(target=lambda: found.append(one.wait_for_dispatcher_registration(1, 30)))
    waiting.start()
    one.register_dispatcher(1, "grpc://a:7")
    one.register_dispatcher(1, "grpc://a:7")  # again is nothing new
    waiting.join(30)
    assert found == ["grpc://a:7"]
    one.register_worker_for_dispatcher(1, 2)
    with pytest.raises(TimeoutError, match=r"After 0\.01 s dispatcher 1 has not all its 2 workers"):
        one.wait_for_dispatcher_worker_registration(1, 0.01)
    one.register_worker_for_dispatcher(1, 3)
    one.wait_for_dispatcher_worker_registration(1, 30)
    with pytest.raises(TimeoutError, match="dispatcher 0 has not registered"):  # each has workers of its own
        one.wait_for_dispatcher_registration(0, 0.01)


def test_a_dispatcher_ends_after_its_workers(service: ComputeService) -> None:
    one = client(service)
    for worker in (0, 1):
        one.register_worker_for_dispatcher(0, worker)

    def end_worker() -> None:
        one.wait_for_end(0)
        one.unregister_worker(0, 1)

    waiting = threading.Thread(target=end_worker)
    waiting.start()
    with pytest.raises(TimeoutError, match="workers of dispatcher 0 have not ended"):
        one.end_dispatcher(0, 0.01)
    waiting.join(30)
    one.unregister_worker(0, 0)
    one.end_dispatcher(0, 30)
    one.end_dispatcher(1, 30)  # that has none


def test_a_worker_that_has_ended_waits_for_the_shutdown_that_its_end_allows(service: ComputeService) -> None:
    one = client(service)
    one.register_worker_for_dispatcher(0, 0)
    ended: list[bool] = []

    def end_worker() -> None:
        ended.append(one.wait_for_end(0))
        one.unregister_worker(0, 0, stay=True)
        ended.append(True)

    waiting = [threading.Thread(target=end_worker), threading.Thread(target=lambda: ended.append(one.wait_for_end(1)))]
    for thread in waiting:
        thread.start()
    one.end_dispatcher(0, 30)
    assert ended == [False], "the worker is still there"
    while len(service._changed._waiters) < 2:  # type: ignore[attr-defined]
        waiting[0].join(0.01)
    one.shutdown()
    for thread in waiting:
        thread.join(30)
    assert ended == [False, True, True]


def test_a_wrong_request_is_an_error_with_the_cure(service: ComputeService) -> None:
    one = client(service)
    with pytest.raises(ValueError, match=r"no dispatcher 2: this service has 2.*as many training ranks"):
        one.register_dispatcher(2, "grpc://a:7")
    one.register_dispatcher(0, "grpc://a:7")
    with pytest.raises(ValueError, match=r"registered at grpc://a:7 already, and now at grpc://b:7"):
        one.register_dispatcher(0, "grpc://b:7")
    for numbers in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="must be one or more"):
            make_service(*numbers)


def test_only_who_knows_the_key_is_heard(service: ComputeService) -> None:
    stranger = make_client({"lo": service.addresses()["all"][-1:]}, b"x" * 32)
    with pytest.raises(ConnectionError, match=r"does not answer .*its file is that of an earlier one"):
        stranger.shutdown()
    client(service).register_dispatcher(0, "grpc://a:7")


def sends_a_byte(connection: socket.socket) -> bool:
    try:
        return connection.send(b"\0") > 0
    except OSError:
        return False


def test_strangers_who_send_a_byte_now_and_then_keep_nobody_out(service: ComputeService) -> None:
    place, ended = service.addresses()["all"][-1], threading.Event()
    strangers = [socket.create_connection(place) for _ in range(70)]

    def drip() -> None:
        while not ended.wait(0.5):
            for at, stranger in enumerate(strangers):
                if not sends_a_byte(stranger):  # it was dropped, and comes again
                    stranger.close()
                    strangers[at] = socket.create_connection(place)

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        client(service).register_dispatcher(0, "grpc://a:7")
        assert client(service).wait_for_dispatcher_registration(0, 30) == "grpc://a:7"
    finally:
        ended.set()
        thread.join()
        for stranger in strangers:
            stranger.close()


def test_the_end_reaches_all_who_wait_for_it() -> None:
    service = make_service(1, 1)
    one = client(service)
    said: list[str] = []

    def wait() -> None:
        try:
            one.wait_for_dispatcher_registration(0, 30)
        except ValueError as error:
            said.append(str(error))

    waiting = [threading.Thread(target=one.wait_for_shutdown), threading.Thread(target=wait)]
    for thread in waiting:
        thread.start()
    while len(service._serving) < 2:
        waiting[0].join(0.01)
    one.shutdown()
    for thread in waiting:
        thread.join(30)
    assert not any(thread.is_alive() for thread in waiting)
    assert said == ["The compute service was shut down while dispatcher 0 has not registered."]
    with pytest.raises(ConnectionError, match="It has ended"):
        one.shutdown()


def test_a_configuration_is_private_and_is_read_as_it_was_written(tmp_path: Path) -> None:
    from hvdkit.tensorflow.data import TfDataServiceConfig

    config = TfDataServiceConfig(2, 3, "compute", {"all": [("10.0.0.1", 7)]}, KEY, 9)
    path = tmp_path / "service.json"
    config.write(str(path))
    assert TfDataServiceConfig.read(str(path)) == config
    assert path.stat().st_mode & 0o777 == 0o600 and list(tmp_path.iterdir()) == [path]
    for text in ("[]", "{", json.dumps({**config.to_dict(), "key": "z"}), json.dumps({"dispatchers": 1})):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"service\.json: "):
            TfDataServiceConfig.read(str(path))
    with pytest.raises(ValueError, match="must be compute or training"):
        TfDataServiceConfig(1, 1, "both", {}, KEY)


def serve_and_read(side: str, dispatchers: int) -> list[int]:
    """Be a worker, and if need be a dispatcher, in a thread, and read what the workers prepare."""
    import tensorflow as tf

    import hvdkit.tensorflow as hvd
    from hvdkit.tensorflow.data import TfDataServiceConfig, compute_worker_fn, tf_data_service

    hvd.init()
    config = None
    if hvd.rank() == 0:
        service = make_service(dispatchers, hvd.size() // dispatchers)
        config = TfDataServiceConfig(dispatchers, hvd.size() // dispatchers, side, service.addresses(), KEY, 30)
    config = hvd.broadcast_object(config)
    assert config is not None
    worker = threading.Thread(target=compute_worker_fn, args=(config,))
    worker.start()
    with tf_data_service(config, hvd.rank()) as address:
        assert "localhost" not in address
        data = tf.data.Dataset.range(NUMBERS).map(lambda number: number * number)
        data = data.apply(tf.data.experimental.service.distribute("distributed_epoch", address, job_name="numbers"))
        found = [int(number) for number in data]
    hvd.barrier()
    if hvd.rank() == 0:
        config.compute_client().shutdown()
    worker.join(30)
    assert not worker.is_alive()
    return found


@pytest.mark.ranks
@pytest.mark.keras("tensorflow")
@pytest.mark.parametrize(
    ("side", "dispatchers"),
    [
        ("training", 1),
        pytest.param("compute", 1, marks=pytest.mark.slow),
        pytest.param("compute", 2, marks=pytest.mark.slow),
    ],
)
def test_every_element_comes_once_from_each_dispatcher(side: str, dispatchers: int) -> None:
    parts = run_ranks(2, serve_and_read, side, dispatchers, backend="tensorflow")
    squares = [number * number for number in range(NUMBERS)]
    if dispatchers == 1:
        assert sorted(parts[0] + parts[1]) == squares
    else:
        assert [sorted(part) for part in parts] == [squares, squares]


@pytest.mark.slow
@pytest.mark.ranks
def test_the_example_learns_from_a_compute_job(tmp_path: Path) -> None:
    """With dispatchers in the training; the others are tried on hosts of their own (tests/cluster)."""
    env = {**environment(), "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
    worker = [
        sys.executable,
        "-m",
        "hvdkit.tensorflow.data.compute_worker",
        "service.json",
        "--timeout",
        "30",
        "--dispatcher-side",
        "training",
    ]
    with subprocess.Popen([*HVDRUN, "-np", "2", *worker], env=env, cwd=tmp_path, stderr=subprocess.PIPE) as compute:
        try:
            script = [sys.executable, str(EXAMPLES / "tensorflow2_data_service.py"), "--service", "service.json"]
            done = subprocess.run(
                [*HVDRUN, "-np", "2", *script, "--min-accuracy", "0.7"],
                env=env,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=150,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert len(re.findall(r"^\[0\] epoch \d  loss ", done.stdout, re.MULTILINE)) == 4
            assert compute.wait(100) == 0
            assert list(tmp_path.iterdir()) == [], "the compute job removes its file"
        finally:
            compute.terminate()


@pytest.mark.slow
def test_the_example_learns_without_a_service(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "tensorflow2_data_service.py"), "--min-accuracy", "0.7"]
    env = {**environment(), "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
