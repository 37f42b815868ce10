"""What hvdkit on Spark decides, as pure functions: no pyspark, no Java."""

from __future__ import annotations

import io
import pickle
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused import refused

from hvdkit.errors import ConfigError, HorovodInternalError, LaunchTimeoutError
from hvdkit.integrations.ranks import Offer
from hvdkit.launch.function_outcome import FunctionOutcome, describe_error
from hvdkit_spark import output, session
from hvdkit_spark.common import batches
from hvdkit_spark.common.batches import Batches, plan_pieces
from hvdkit_spark.common.checkpoints import Checkpoint, Checkpoints
from hvdkit_spark.common.dataset import Arrays, DataSet, RowGroup
from hvdkit_spark.common.store import Store
from hvdkit_spark.elastic import plan_elastic_env, plan_sizes, repeat
from hvdkit_spark.job_monitor import GRACE_S, JobMonitor
from hvdkit_spark.output import ERROR, OUT, LineSender, Output
from hvdkit_spark.reports import Report, Status, describe_loss, read_results
from hvdkit_spark.runner import _REFUSED, plan_env, refuse, run
from hvdkit_spark.session import describe_loopback, wait_for_slots
from hvdkit_spark.task import RankSpec, find_loopback, plan_environment, plan_rank

GROUPS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(GROUPS, st.integers(1, 5))
def test_row_groups_are_divided_among_ranks(rows: list[int], size: int) -> None:
    starts = np.cumsum([0, *rows])

    def numbers(rank: int, *, evaluation: bool) -> list[int]:
        pieces = plan_pieces(rows, rank, size, evaluation=evaluation)
        return [row for group, start, stop in pieces for row in range(starts[group] + start, starts[group] + stop)]

    total = sum(rows)
    training = [numbers(rank, evaluation=False) for rank in range(size)]
    share = -(-total // size)
    assert [len(each) for each in training] == [share] * size
    wanted = [row % total for row in range(share * size)]
    assert [row for each in training for row in each] == wanted, "the first rows are repeated at the end"
    testing = [numbers(rank, evaluation=True) for rank in range(size)]
    assert [row for each in testing for row in each] == list(range(total))
    assert max(map(len, testing)) - min(map(len, testing)) <= 1


def read_numbers(store: Any, group: RowGroup, widths: dict[str, int], start: int, stop: int) -> Arrays:
    return {"row": np.arange(group.number * 10 + start, group.number * 10 + stop)}


def flat(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


@pytest.mark.parametrize("cache", [False, True])
def test_an_epoch_has_every_row_once_in_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch, cache: bool) -> None:
    monkeypatch.setattr(batches, "read_group", read_numbers)
    data = DataSet(tuple(RowGroup("file", number, 10) for number in range(5)), {"row": 0})
    options: dict[str, Any] = {"seed": 0, "buffer_rows": 12, "cache": cache}
    seen = []
    for rank in range(2):
        mine = Batches(Store("memory://rows"), data, 4, rank=rank, size=2, **options)
        first, second = ([batch["row"].tolist() for batch in mine.epoch(epoch)] for epoch in (0, 1))
        assert [len(batch) for batch in first] == [4] * 6 + [1] and len(mine) == 7
        assert first != second and sorted(flat(first)) == sorted(flat(second))
        assert len(list(mine.epoch(0, 9))) == 9, "a longer epoch begins the rows again"
        assert [batch["row"].tolist() for batch in mine.epoch(0)] == first, "an epoch can be repeated"
        seen += flat(first)
    assert sorted(seen) == list(range(50))
    plain = Batches(Store("memory://rows"), data, 4, rank=0, size=1)
    assert flat([batch["row"].tolist() for batch in plain.epoch(3)]) == list(range(50))


@pytest.mark.parametrize("prefix", ["", "memory://hvdkit-spark-test"])
def test_the_newest_complete_checkpoint_is_loaded(tmp_path: Path, prefix: str) -> None:
    store = Store.create(prefix or str(tmp_path))
    assert store.prefix_path == (prefix or f"file://{tmp_path}")
    run = Checkpoints(store, "mine")
    assert run.load() is None
    for epoch in (1, 2):
        run.save(Checkpoint(b"state %d" % epoch, {"loss": [1.0] * epoch}, epoch))
    assert store.list(store.get_checkpoint_path("mine")) == ["epoch-000002"]
    store.write(f"{store.get_checkpoint_path('mine')}/epoch-000003/state", b"half")
    assert run.load() == Checkpoint(b"state 2", {"loss": [1.0, 1.0]}, 2)
    assert (
        pickle.loads(pickle.dumps(store)).read(f"{store.get_checkpoint_path('mine')}/epoch-000002/state") == b"state 2"
    )
    store.remove(store.prefix_path)
    assert run.load() is None


def test_paths_of_stores_are_those_of_spark_and_of_python() -> None:
    store = Store.create("/dbfs/models")
    assert store.get_train_data_path(7) == "dbfs:/models/intermediate_train_data.7"
    assert store.get_localized_path(store.get_run_path("a")) == "/dbfs/models/runs/a"
    with pytest.raises(ConfigError, match="nothing://there cannot be opened"):
        Store.create("nothing://there")


def outcome(value: Any = None, error: BaseException | None = None) -> bytes:
    return pickle.dumps(FunctionOutcome(value) if error is None else describe_error(error, pickle.dumps))


def test_the_cause_is_told_from_what_follows_from_it() -> None:
    follows = Report(0, "a", "lost a rank", outcome(error=HorovodInternalError("rank 1 is lost")))
    done = [Report(1, "b", "returned", outcome(1)), Report(0, "a", "returned", outcome(0))]
    assert read_results(done) == [0, 1]
    with pytest.raises(KeyError) as raised:
        read_results([follows, Report(1, "b", "raised", outcome(error=KeyError("cause")))])
    assert "rank 1 on b" in str(raised.value.__cause__)
    with pytest.raises(HorovodInternalError, match="Rank 1 on b: killed"):
        read_results([follows, Report(1, "b", "died", text="killed")])
    with pytest.raises(HorovodInternalError, match="rank 1 is lost"):
        read_results([follows])


def test_a_job_is_ended_when_it_is_late_or_has_failed() -> None:
    watch = JobMonitor(2, 30.0, 0.0)
    assert watch.check(29.0, 1, False) is None and watch.check(30.0, 0, False) == "late"
    assert watch.check(31.0, 2, False) is None and watch.check(1000.0, 1, False) is None
    assert watch.check(1000.0, 2, True) is None and watch.check(1000.0 + GRACE_S, 1, True) == "failed"


def test_waiting_for_executors_ends() -> None:
    assert wait_for_slots(lambda: 5, 2, 3, 0.0) == 3
    assert wait_for_slots(lambda: 2, 2, 3, 0.0) == 2
    with refused("spark-no-room", names=["4 ranks", "4 tasks", "room for 2 ", "after 0 s"], kind=LaunchTimeoutError):
        wait_for_slots(lambda: 2, 4, 4, 0.0)


def test_a_driver_that_other_hosts_cannot_reach_is_an_error_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_loopback("127.0.0.1", "local-cluster[2,1,1024]") == ""
    assert describe_loopback("10.0.0.1", "spark://a:7077") == describe_loopback("node1", "yarn") == ""
    monkeypatch.setattr(session, "_UNREACHABLE_S", 0.0)
    names = ["room for 0 ", "spark.driver.host is 'localhost'", "spark.driver.host=ADDRESS"]
    with refused("spark-no-room", names=names, kind=LaunchTimeoutError):
        wait_for_slots(lambda: 0, 2, 2, 600.0, 0.0, describe_loopback("localhost", "spark://a:7077"))
    offers = [Offer(0, "a", "127.0.1.1", 10), Offer(1, "a", "127.0.1.1", 20), Offer(2, "b", "1.1.1.2", 30)]
    assert find_loopback(offers[:2], "a") == "" and find_loopback(offers[::-1], "a") == ""
    assert "rank 0 on a is at 127.0.1.1" in find_loopback(offers, "a")


def test_an_application_without_barrier_stages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spark = MagicMock()
    monkeypatch.setattr(session, "optional_import", lambda name: spark)
    spark.SparkContext._active_spark_context.getConf.return_value = {"spark.dynamicAllocation.enabled": "true"}
    with refused("spark-dynamic-allocation", names=["spark.dynamicAllocation.enabled=false"]):
        session.find_context()
    spark.SparkContext._active_spark_context = None
    with refused("spark-no-context"):
        session.find_context()


@pytest.mark.parametrize("name", sorted(_REFUSED))
def test_arguments_of_horovod_that_cannot_be_followed_are_refused(name: str) -> None:
    arguments: dict[str, Any] = {name: name != "use_gloo"}
    with refused("spark-argument-refused", names=[f"hvdkit_spark.run({name}={arguments[name]!r})"]):
        run(print, **arguments)


def test_lines_of_ranks_come_to_the_driver() -> None:
    out, closed, secret = io.StringIO(), io.StringIO(), "0" * 64
    closed.close()
    with Output(out, closed, timestamps=True).receive("127.0.0.1", secret) as port:
        sender = LineSender("127.0.0.1", port, secret, 1)
        for kind, line in ((OUT, "[1] one\n"), (ERROR, "[1] lost\n"), (OUT, "[1] two\n")):
            sender.send(kind, line)
        sender.close()
        with pytest.raises(OSError, match="closed the connection"):
            LineSender("127.0.0.1", port, "1" * 64, 1)
    assert re.fullmatch(r"[-\d]+ [:\d]+ \[1\] one\n[-\d]+ [:\d]+ \[1\] two\n", out.getvalue())
    with refused("spark-output-invalid", names=["run(stderr='err.txt')"]):
        run(print, stderr="err.txt")
    with refused("spark-needs-output", names=["run(prefix_output_with_timestamp=True)", "stdout=sys.stdout"]):
        run(print, prefix_output_with_timestamp=True)


def test_a_stream_that_raises_loses_its_own_lines_only() -> None:
    class Broken:
        def write(self, text: str) -> None:
            raise RuntimeError(text)

    err, secret = io.StringIO(), "0" * 64
    with Output(Broken(), err).receive("127.0.0.1", secret) as port:
        sender = LineSender("127.0.0.1", port, secret, 0)
        for kind, line in ((OUT, "[0] lost\n"), (ERROR, "[0] one\n"), (OUT, "[0] lost\n"), (ERROR, "[0] two\n")):
            sender.send(kind, line)
        sender.close()
    assert err.getvalue() == "[0] one\n[0] two\n"


@pytest.mark.parametrize(
    ("host", "found", "listens"),
    [
        ("node1", "10.0.0.1", "10.0.0.1"),
        ("node1", "127.0.1.1", "0.0.0.0"),  # other hosts find it at another address
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_the_driver_listens_where_executors_find_it(
    host: str, found: str, listens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: found)
    assert output._resolve(host) == listens


def test_every_task_makes_the_same_plan_of_ranks() -> None:
    offers = [Offer(0, "b", "1.1.1.2", 10), Offer(1, "a", "1.1.1.1", 20), Offer(2, "b", "1.1.1.2", 30)]
    spec = RankSpec(b"", {}, "0" * 64, "job", "driver", 1.0)
    planned = dict(plan_rank(spec, offers, index) for index in range(3))
    assert [planned[rank]["LOCAL_RANK"] for rank in range(3)] == ["0", "1", "0"], "ranks of a host follow each other"
    assert {(each["MASTER_ADDR"], each["MASTER_PORT"], each["WORLD_SIZE"]) for each in planned.values()} == {
        ("1.1.1.2", "10", "3")
    }


def test_variables_of_ranks() -> None:
    assert plan_env({"A": "1", "GLOO_SOCKET_IFNAME": "ib0"}, 2, ["eth0"]) == {
        "A": "1",
        "GLOO_SOCKET_IFNAME": "ib0",
        "HVDKIT_LOG_LEVEL": "info",
    }
    assert plan_env(None, 1, "eth0") == {"GLOO_SOCKET_IFNAME": "eth0"}, "and not its first letter"
    spec = RankSpec(b"", {"A": "2"}, "", "job", "driver", 1.0, alias_horovod=True)
    found = plan_environment(spec, {"A": "1", "B": "1"}, ["", "/job", Path(pickle.__file__).parent.as_posix()])
    assert (found["A"], found["B"], found["HVDKIT_ALIAS_HOROVOD"]) == ("2", "1", "1")
    assert found["PYTHONPATH"].split(":")[1:] == ["/job"]
    with refused("spark-argument-refused", names=["run(use_mpi=True)", ": MPI starts no"]):
        refuse("run", {"stdout": None, "use_mpi": True})
    refuse("run", {"use_gloo": True, "verbose": 2, "prefix_output_with_timestamp": False})


def attempts(*statuses: Status) -> Callable[[int], list[Report]]:
    return lambda restarts: [Report(0, "a", statuses[restarts], text=f"attempt {restarts}")]


def test_losses_are_repeated_and_exceptions_are_not() -> None:
    assert repeat(attempts("executor lost", "died", "returned"), 2)[0].status == "returned"
    assert repeat(attempts("lost a rank", "raised"), 5)[0].status == "raised"
    with pytest.raises(HorovodInternalError, match="Rank 0 on a: attempt 1"):
        repeat(attempts("died", "died", "returned"), 1)


def test_elastic_jobs_say_what_they_need() -> None:
    assert plan_sizes(None, None, None, 4) == (4, 4, 4)
    assert plan_sizes(3, 2, None, 4) == (3, 2, 3)
    assert plan_sizes(None, 2, 8, 0) == (8, 2, 8)
    with refused("spark-numbers-contradict", names=["they are 3, 2, 2"]):
        plan_sizes(2, 3, None, 4)
    with refused("spark-needs-checkpoints", names=["checkpoints=", "HVDKIT_ELASTIC_CHECKPOINTS"]):
        plan_elastic_env({}, None)
    assert plan_elastic_env({}, "/shared")["HVDKIT_ELASTIC_RESTARTS"] == "1"


LOST = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to failure: Could not recover from a failed barrier ResultStage. \
Most recent failure reason: Stage failed because barrier task ResultTask(3, 1) finished unsuccessfully.
ExecutorLostFailure (executor 0 exited caused by one of the running tasks) Reason: Command exited with code 137
\tat org.apache.spark.scheduler.DAGScheduler.$anonfun$abortStage$3(DAGScheduler.scala:4568)"""


def test_a_lost_executor_is_told_from_other_errors_of_spark() -> None:
    report = describe_loss(LOST)
    assert report.status == "executor lost"
    assert "(executor 0 exited caused by one of the running tasks) Reason: Command exited with code 137." in report.text
    with pytest.raises(HorovodInternalError, match=r"Spark could not run the ranks: no more memory$"):
        describe_loss("no more memory\n\tat java")
