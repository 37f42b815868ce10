"""hvdkit on a real Ray cluster of several nodes, all on this machine."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import ray_functions
from refused import refused

from hvdkit.errors import HorovodInternalError, LaunchTimeoutError, RankLostError

pytestmark = [pytest.mark.integrations, pytest.mark.ranks]

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[3]
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # else Ray writes a token into the home directory
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support", *sorted(ROOT.glob("packages/*")), HERE))),
    "OMP_NUM_THREADS": "1",
    "HVDKIT_ENGINE": "native",
}
_WAIT_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without CPUs, and two nodes with 2 CPUs each."""
    before = dict(os.environ)
    folder = tempfile.mkdtemp(prefix="ray-")  # a path that is short enough for sockets
    os.environ.update({**VARIABLES, "RAY_TMPDIR": folder})
    Path(folder, "ray").mkdir()
    import ray
    from ray.cluster_utils import Cluster

    nodes = None
    try:
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        nodes.add_node(num_cpus=2)
        nodes.add_node(num_cpus=2)
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes
    finally:
        ray.shutdown()
        if nodes is not None:
            nodes.shutdown()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)


def wait_until(true: Callable[[], Any], what: str) -> Any:
    """Wait until the function returns something that is true, and return it."""
    deadline = time.monotonic() + _WAIT_S
    while not (found := true()):
        assert time.monotonic() < deadline, f"not within {_WAIT_S} s: {what}"
        time.sleep(0.05)
    return found


def is_running(pid: int) -> bool:
    """Is there such a process, and is it more than an entry that its parent has not read yet?"""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def raylet_of(node: Any) -> int:
    """The process of a node that starts its workers."""
    return int(node.all_processes["raylet"][0].process.pid)


def shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*hvdkit*")}


@contextlib.contextmanager
def nothing_left() -> Iterator[set[int]]:
    """All CPUs of the cluster are free after it, placement groups removed, and the processes that it notes are gone."""
    import ray
    from ray.util import placement_group_table

    files, pids = shared_files(), set[int]()
    yield pids
    wait_until(
        lambda: ray.available_resources().get("CPU", 0) == ray.cluster_resources().get("CPU", 0), "all CPUs are free"
    )
    groups = placement_group_table().values()
    assert {group["state"] for group in groups} <= {"REMOVED"}, groups
    wait_until(lambda: not any(map(is_running, pids)), f"the processes {pids} have ended")
    assert shared_files() <= files


def test_functions_run_on_ranks_that_are_ordered_by_node(cluster: Any) -> None:
    from hvdkit_ray import RayExecutor

    with nothing_left() as pids:
        executor = RayExecutor(RayExecutor.create_settings(timeout_s=90), num_hosts=2, num_workers_per_host=2)
        executor.start(ray_functions.Counter, [10], {"step": 5}, {"OF_THE_TEST": "a b"})
        ranks = executor.run(ray_functions.describe, [2])
        pids.update(rank["pid"] for rank in ranks)
        assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3] and len(pids) == 4
        assert {(rank["size"], rank["total"], rank["variable"]) for rank in ranks} == {(4, 20.0, "a b")}
        assert [rank["place"] for rank in ranks] == [[0, 2, 0], [1, 2, 0], [0, 2, 1], [1, 2, 1]]
        assert [rank["horovods"] for rank in ranks] == [[0, 4, 0, 0], [1, 4, 1, 0], [2, 4, 0, 1], [3, 4, 1, 1]]
        assert {rank["transport"] for rank in ranks} == {"shared_memory"}, "the nodes are one machine"
        assert all(rank["in_main_thread"] for rank in ranks)
        assert executor.execute(lambda counter: counter.add()) == [15, 16, 17, 18]
        assert executor.execute_single(lambda counter: counter.add()) == 20
        import ray

        again = ray.get(executor.run_remote(ray_functions.describe, kwargs={"factor": 1}))
        assert [rank["total"] for rank in again] == [10.0] * 4 and {rank["pid"] for rank in again} == pids
        text = r"failed on rank 1 \(process \d+ on node [\d.]+\):[\s\S]*in fail_on[\s\S]*of the function"
        with pytest.raises(KeyError, match=text):  # not what the ranks raise that waited for that one
            executor.run(ray_functions.fail_on, [1])
        after = executor.run(ray_functions.describe)
        assert [rank["total"] for rank in after] == [10.0] * 4 and {rank["pid"] for rank in after} == pids
        with pytest.raises(RankLostError, match=r"Rank 2 \(process \d+ on node [\d.]+\) died"):
            executor.run(ray_functions.end_on, [2])
        assert executor.workers == []
        with refused("ray-not-started", names=["run()", "start()"]):
            executor.run(ray_functions.describe)
        executor.shutdown()


def test_a_rank_that_is_stopped_is_lost_and_one_that_only_works_is_not(cluster: Any) -> None:
    from hvdkit_ray import RayExecutor

    limit_s = 8.0
    with nothing_left() as pids:
        executor = RayExecutor(RayExecutor.create_settings(answer_timeout_s=limit_s), num_workers=2)
        executor.start()
        pids.update(executor.run(ray_functions.work_without_hvdkit, [2 * limit_s]))
        lost = r"for 8 s \(answer_timeout_s\); last seen: rank 0 \(process \d+ on node [\d.]+\) \d+ s ago"
        with pytest.raises(RankLostError, match=lost):  # rank 0: no other rank can tell why it does not come
            executor.run(ray_functions.wait_for_a_stopped_rank, [0])
        assert executor.workers == []


def test_workers_for_which_there_is_no_room_are_an_error_in_time(cluster: Any) -> None:
    from hvdkit_ray import RayExecutor, run

    settings = RayExecutor.create_settings(placement_group_timeout_s=1)
    assert issubclass(LaunchTimeoutError, TimeoutError), "which scripts for Horovod catch"
    with nothing_left():
        names = ["within 1 s: bundles [0, ", "4] of 5 x {'CPU': 1.0} (PACK)", "free in all"]
        with refused("ray-no-room", names=names, kind=LaunchTimeoutError):
            RayExecutor(settings, num_workers=5).start()
        with refused("ray-no-room", names=["of 3 x {'CPU': 1.0} (STRICT_SPREAD)"]):
            run(ray_functions.describe, num_hosts=3, settings=settings)
        with refused("ray-no-room", kind=LaunchTimeoutError) as caught:
            run(ray_functions.describe, min_workers=9, max_workers=9, settings=RayExecutor.create_settings(timeout_s=1))
        assert re.search(r"\b[01] workers are there, and 9 are needed", str(caught.value))


def test_a_placement_group_that_is_given_is_used_and_kept(cluster: Any) -> None:
    from ray.util import placement_group, placement_group_table, remove_placement_group

    from hvdkit_ray import run

    with nothing_left():
        group = placement_group([{"CPU": 2}], strategy="STRICT_PACK")
        with refused("ray-placement-group-too-small", names=["room for 2 of 3 workers"]):
            run(ray_functions.describe, num_workers=3, placement_group=group)
        ranks = run(ray_functions.describe, num_workers=2, placement_group=group, env={"OF_THE_TEST": "1"})
        assert [(rank["total"], rank["variable"]) for rank in ranks] == [(3.0, "1")] * 2
        assert placement_group_table(group)["state"] == "CREATED"
        remove_placement_group(group)


def test_inside_a_task_its_placement_group_is_used(cluster: Any) -> None:
    import ray
    from ray.util import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def task() -> list[str]:
        import ray

        from hvdkit_ray import run

        def find_group() -> str:
            context = ray.get_runtime_context()
            return str(context.get_placement_group_id())

        return [str(ray.get_runtime_context().get_placement_group_id()), *run(find_group, num_workers=1)]

    with nothing_left():
        group = placement_group([{"CPU": 1}, {"CPU": 1}])
        inside = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
        groups = ray.get(ray.remote(task).options(scheduling_strategy=inside).remote())
        assert groups == [group.id.hex()] * 2
        remove_placement_group(group)


class Training:
    """An elastic job in a thread, and what it has written so far."""

    def __init__(self, folder: Path, run: Callable[[], list[Any]]) -> None:
        self.folder, self._run = folder, run
        self.results: list[Any] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)  # one that hangs does not keep pytest
        self._thread.start()

    def _work(self) -> None:
        try:
            self.results = self._run()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        (self.folder / "stop").touch()  # a test that has failed leaves the cluster to others
        self._thread.join(_WAIT_S)

    def steps(self) -> list[tuple[int, int, int, int]]:
        """(step, size, rank, pid) of each step of each rank so far."""
        path = self.folder / "steps"
        return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def reach(self, size: int, after: int = 0) -> int:
        """Wait for some steps with so many ranks, after a number of lines; returns the number of lines then."""

        def reached() -> bool:
            assert self._error is None, self._error
            assert self._thread.is_alive(), self.results
            return sum(found[1] == size for found in self.steps()[after:]) > 3 * size

        wait_until(reached, f"{size} ranks after {self.steps()[-1:]}")
        return len(self.steps())

    def end(self) -> list[Any]:
        (self.folder / "stop").touch()
        self._thread.join(_WAIT_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self.results


def test_an_elastic_job_goes_on_when_an_actor_and_a_node_die_and_takes_in_new_ones(
    cluster: Any, tmp_path: Path
) -> None:
    import ray

    from hvdkit_ray import ElasticRayExecutor

    several_hosts = not ray.util.get_node_ip_address().startswith("127.")
    with nothing_left() as pids:
        executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=3))
        executor.start()
        call = functools.partial(ray_functions.train_elastic, str(tmp_path), several_hosts)
        with Training(tmp_path, lambda: executor.run(call)) as training:
            at = training.reach(3)
            first = {rank: pid for _, _, rank, pid in training.steps()}
            os.kill(first[1], signal.SIGKILL)
            at = training.reach(3, at)  # the replacement is there
            assert first[1] not in {pid for _, _, _, pid in training.steps()[at - 9 :]}
            other = next(node for node in cluster.worker_nodes if raylet_of(node) != parent_of(first[0]))
            cluster.remove_node(other, allow_graceful=False)
            at = training.reach(2, at)
            cluster.add_node(num_cpus=2)
            training.reach(3, at)
            results = training.end()
            pids.update(pid for _, _, _, pid in training.steps())
    assert len(results) == 3 and len({result["steps"] for result in results}) == 1
    for result in results:
        assert result["sums"] == [result["expected"]] * 5, "a step was lost or counted twice"
    assert results[0]["pid"] == first[0], "rank 0 has gone on in its own process"
    assert {result["transport"] for result in results} == {"hierarchical" if several_hosts else "shared_memory"}


def test_an_elastic_job_ends_with_an_error_when_nobody_has_the_commit(cluster: Any, tmp_path: Path) -> None:
    from hvdkit_ray import run

    with nothing_left() as pids:
        arguments = [str(tmp_path), False]
        job = functools.partial(run, ray_functions.train_elastic, arguments, min_workers=1, max_workers=1)
        with Training(tmp_path, job) as training:
            training.reach(1)
            pids.update(pid for _, _, _, pid in training.steps())
            os.kill(next(iter(pids)), signal.SIGKILL)
            with pytest.raises(
                RankLostError, match=r"Rank 0 \(process \d+ on node [\d.]+\) is lost, and no rank is left"
            ):
                training.end()


def test_a_worker_that_is_stopped_and_one_that_dies_while_the_ranks_connect_are_replaced(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from hvdkit_ray import answers, elastic, run
    from hvdkit_ray.members import Worker

    stopped: list[int] = []
    ask = elastic.ElasticWorkers._all_live

    def stop_one(job: elastic.ElasticWorkers, chosen: list[Worker]) -> bool:
        if not stopped:
            arrival = chosen[1].arrival
            assert arrival is not None
            stopped.append(arrival.pid)
            os.kill(arrival.pid, signal.SIGSTOP)
        return ask(job, chosen)

    monkeypatch.setattr(elastic.ElasticWorkers, "_all_live", stop_one)
    monkeypatch.setattr(answers, "_ANSWER_S", 2.0)
    with nothing_left() as pids:
        call = functools.partial(
            run, ray_functions.lose_a_rank_while_the_others_connect, [str(tmp_path)], min_workers=2, max_workers=2
        )
        with Training(tmp_path, call) as training:
            wait_until(lambda: (tmp_path / "died").exists(), "a worker is there in place of the stopped one")
            training.reach(2)  # Gloo's own time limit is longer than this waits
            results = training.end()
            pids.update(stopped, {pid for _, _, _, pid in training.steps()})
    assert len(results) == 2 and all(result["sums"] == [result["expected"]] * 5 for result in results)
    assert f"(process {stopped[0]} on node" in caplog.text and "not answered within 2 s" in caplog.text


def test_the_example_learns(cluster: Any) -> None:
    env = {**os.environ, "RAY_ADDRESS": cluster.address}
    options = ["--workers", "2", "--epochs", "8", "--min-accuracy", "0.85"]
    command = [sys.executable, str(ROOT / "examples" / "ray_digits.py"), *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 workers" in done.stdout


def test_arguments_that_contradict_each_other_are_refused() -> None:
    from hvdkit_ray import ElasticRayExecutor, RayExecutor
    from hvdkit_ray.elastic import ElasticWorkers
    from hvdkit_ray.placement import reserve
    from hvdkit_ray.settings import Demand, check_env, plan_workers
    from hvdkit_ray.workers import Workers

    for arguments, code, name in [
        ({}, "arguments-contradict", "num_workers is None and num_hosts is None"),
        ({"num_workers": 2, "num_hosts": 1}, "arguments-contradict", "num_workers is 2 and num_hosts is 1"),
        ({"num_workers": 0}, "number-invalid", "num_workers is 0"),
        ({"num_hosts": 2, "num_workers_per_host": 1.5}, "number-invalid", "num_workers_per_host is 1.5"),
        (
            {"num_workers": 2, "gpus_per_worker": 1},
            "arguments-contradict",
            "is 1, but use_gpu is False",
        ),
        ({"num_workers": 2, "use_gpu": True, "gpus_per_worker": 0}, "resources-invalid", "is 0 (use_gpu=True)"),
        ({"num_workers": 2, "cpus_per_worker": 0}, "resources-invalid", "cpus_per_worker is 0"),
        ({"num_workers": 2, "max_workers": 3}, "needs-elastic", "max_workers: "),
        ({"num_workers": 2, "elastic_timeout": 5, "reset_limit": 1}, "needs-elastic", "reset_limit, elastic_timeout: "),
        ({"num_workers": 2, "min_workers": 1}, "arguments-contradict", "min_workers is 1"),
        ({"min_workers": 3, "max_workers": 2}, "arguments-contradict", "max_workers is 2, but min_workers is 3"),
        ({"min_workers": 3, "elastic_timeout": 0}, "number-invalid", "elastic_timeout is 0"),
        ({"min_workers": 3, "elastic_timeout": "5"}, "number-invalid", "elastic_timeout is '5'"),
        ({"min_workers": 3, "reset_limit": 0.5}, "number-invalid", "reset_limit is 0.5"),
        ({"settings": {"timeout_s": 3}, "num_workers": 2}, "settings-invalid", "settings is a dict"),
        ({"settings": RayExecutor.create_settings(timeout_s=0), "num_workers": 2}, "number-invalid", "timeout_s is 0"),
    ]:
        with refused(f"ray-{code}", names=[name]):
            RayExecutor(**arguments)  # type: ignore[arg-type]
    with refused("ray-nics", names=["nics is ['eth0']", "GLOO_SOCKET_IFNAME"]):
        ElasticRayExecutor.create_settings(nics=["eth0"])
    with refused("ray-setting-unknown", names=["elastic_timout: "]):
        ElasticRayExecutor.create_settings(elastic_timout=5, verbose=2)
    with refused("ray-placement-group-invalid", names=["placement_group is a str"]):
        reserve(Demand(1), "group", 1.0)
    with refused("ray-callbacks"):
        RayExecutor(num_workers=2).run(print, callbacks=[print])
    with refused("ray-variable-invalid", names=["'LEVEL'", " 3;"]):
        check_env({"LEVEL": 3})  # type: ignore[dict-item]
    started = RayExecutor(num_workers=2)
    started._workers = MagicMock(spec=ElasticWorkers)
    with refused("ray-started-before", names=["start()"]):
        started.start()
    with refused("ray-not-elastic", names=["execute()"]):
        started._fixed("execute")
    uneven = Workers.__new__(Workers)
    uneven._demand = Demand(6, hosts=2)
    with refused("ray-placement-group-uneven", names=["2 hosts with 3 workers", "[4, 4, 4, 4, 2, 2]"]):
        uneven._check_hosts([4, 4, 4, 4, 2, 2])
    hosts = plan_workers(None, 2, 3, 2, True, None)
    assert hosts == Demand(6, 2, 1, 2) and hosts.bundles == [{"CPU": 6, "GPU": 3}] * 2
    assert [hosts.place(worker) for worker in range(6)] == [0, 0, 0, 1, 1, 1]
    packed = plan_workers(3, None, 1, 0.5, False, None)
    assert Demand(3, cpus=0.1).count_room({"CPU": 0.3}) == 3
    assert packed.bundles == [{"CPU": 0.5}] * 3 and [packed.place(worker) for worker in range(3)] == [0, 1, 2]


def make_elastic_job(monkeypatch: pytest.MonkeyPatch, members: int) -> Any:
    """The driver's side of an elastic job that runs, without actors: a reference is a function that ray.get() calls."""
    import ray

    from hvdkit_ray import answers, elastic
    from hvdkit_ray.members import Worker
    from hvdkit_ray.settings import Demand, RaySettings

    fake = MagicMock(exceptions=ray.exceptions)
    fake.get.side_effect = lambda ref: ref()
    for module in (answers, elastic):
        monkeypatch.setattr(module, "ray", fake)
    job = elastic.ElasticWorkers(Demand(1), RaySettings(min_workers=1, max_workers=members + 1), {})
    job._members = [
        Worker(100 + rank, MagicMock(), None, rank=rank, place=f"process {rank}") for rank in range(members)
    ]
    job._candidates, job._worlds = job._candidates[:1], 1
    return job


def test_a_rank_that_returns_while_others_wait_for_the_next_world_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    job = make_elastic_job(monkeypatch, 3)
    _, second, third = job._members
    second.result = MagicMock(side_effect=ray.exceptions.RayActorError(error_msg="it was killed"))
    third.result = MagicMock(return_value=7)
    job._take_result(second)
    with pytest.raises(RankLostError, match=r"has returned on rank 2.*rank 1 \(process 1\) is lost: it was killed"):
        job._take_result(third)


def test_workers_of_a_node_that_is_no_good_do_not_end_a_job_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from hvdkit.errors import MissingDependencyError

    job = make_elastic_job(monkeypatch, 2)
    error = ray.exceptions.RayTaskError("arrive", "no torch", MissingDependencyError("no torch"))
    for _ in range(3):
        (worker,) = job._candidates
        worker.arriving = MagicMock(side_effect=error)
        job._take_candidate(worker)
        job._fill()
    assert job._candidates == [], "no more are asked for"
    lost = job._members[1]
    lost.result = MagicMock(side_effect=ray.exceptions.RayActorError())
    job._take_result(lost)
    job._fill()
    assert len(job._candidates) == 2, "a rank is missing"


def arrive(worker: Any, *, has_state: bool = False, committed: bool = False) -> Any:
    """Have a worker wait for its place."""
    from hvdkit.integrations.ranks import Offer
    from hvdkit_ray.actor import Arrival

    arrival = Arrival(Offer(worker.index, "a", "h", 1), 7, has_state, committed, "a rank is lost")
    if worker.rank < 0:
        return MagicMock(return_value=arrival)
    worker.arrival = arrival
    return None


@pytest.mark.parametrize(("elastic_timeout", "limit_s"), [(600.0, 30.0), (5.0, 5.0)])
def test_a_worker_that_does_not_answer_before_a_world_begins_is_lost(
    monkeypatch: pytest.MonkeyPatch, elastic_timeout: float, limit_s: float
) -> None:
    from hvdkit_ray import elastic

    job = make_elastic_job(monkeypatch, 3)
    job._settings = replace(job._settings, elastic_timeout=elastic_timeout)
    first, second, third = job._members
    (candidate,) = job._candidates
    candidate.arriving = arrive(candidate)
    job._take_candidate(candidate)
    third.result = MagicMock(side_effect=HorovodInternalError("of the function"))
    job._take_result(third)
    assert all(worker.actor.end_world.options.called for worker in (first, second)), "they may be connecting"
    for worker in (first, second):
        arrive(worker, has_state=True)
    asked = elastic.ray.wait
    asked.side_effect = lambda refs, **_: (refs[:1], refs[1:])
    first.actor.answer.options.return_value.remote.return_value = MagicMock(return_value=None)
    assert not job._all_live([first, second, candidate])
    assert asked.call_args.kwargs["timeout"] == limit_s
    assert job._members == [first] and job._candidates == []
    ended = [call.args[0] for call in elastic.ray.kill.call_args_list]
    assert ended == [third.actor, second.actor, candidate.actor]
    assert re.search(rf"rank 1 .* is lost: It has not answered within {limit_s:g} s", job._why)


def ask_until(
    job: Any, monkeypatch: pytest.MonkeyPatch, over: Callable[[], bool], answer_of: Callable[[Any, float], Any]
) -> float:
    """Let the driver ask, second by second; returns after how many. answer_of: has this worker called hvd.init() by
    then? None where it does not answer.
    """
    from hvdkit_ray import answers, members

    now = [1000.0]
    for module in (answers, members):
        monkeypatch.setattr(module, "time", MagicMock(monotonic=lambda: now[0]))
    for worker in [*job._members, *job._candidates]:
        worker.asked_s = now[0]
        worker.began_s = now[0] if worker in job._members else None
        answer = MagicMock(side_effect=lambda worker=worker: answer_of(worker, now[0] - 1000))
        worker.actor.answer.options.return_value.remote.return_value = answer
    answers.ray.wait.side_effect = lambda refs, **_: ([ref for ref in refs if ref() is not None], [])
    while not over() and now[0] < 3000:
        now[0] += 1
        job._find_lost()
    return now[0] - 1000


def test_a_rank_that_is_stopped_while_it_trains_is_lost_when_it_has_not_answered_for_the_elastic_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hvdkit_ray import answers

    job = make_elastic_job(monkeypatch, 2)
    lives, stopped = job._members
    job._candidates = []
    seconds = ask_until(
        job, monkeypatch, lambda: stopped not in job._members, lambda worker, _: None if worker is stopped else True
    )
    assert job._members == [lives] and 600 < seconds < 700
    assert re.search(r"rank 1 .* is lost: It has not answered for 600 s \(elastic_timeout\)", job._why)
    answers.ray.kill.assert_called_once_with(stopped.actor)


@pytest.mark.parametrize("other", ["waits in hvd.init()", "has given up hvd.init()", "does without hvdkit"])
def test_a_worker_that_does_not_call_init_is_lost_after_the_start_timeout_if_another_rank_waits(
    monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    from hvdkit_ray import answers

    job = make_elastic_job(monkeypatch, 2)
    waits, hangs = job._members
    job._candidates = []
    if other == "has given up hvd.init()":
        arrive(waits)
    nobody_waits = other == "does without hvdkit"
    seconds = ask_until(
        job,
        monkeypatch,
        lambda: hangs not in job._members,
        lambda worker, _: worker is waits and other == "waits in hvd.init()",
    )
    if nobody_waits:
        assert job._members == [waits, hangs], "how long a function works alone is its own affair"
        return
    assert job._members == [waits] and 120 < seconds < 200
    lost = r"rank 1 \(process 1\) is lost: It has not called hvd.init\(\) within 120 s \(timeout_s\)"
    assert re.search(lost, job._why)
    answers.ray.kill.assert_called_once_with(hangs.actor)
    assert job._deadline is not None, "the others are to form the next world"


def test_a_worker_that_calls_init_late_but_in_time_is_none_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_elastic_job(monkeypatch, 2)
    slow = job._members[1]
    job._candidates = []
    ask_until(job, monkeypatch, lambda: False, lambda worker, now_s: worker is not slow or now_s > 118)
    assert slow in job._members


def test_a_candidate_that_hangs_while_it_starts_is_replaced_and_one_without_room_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_elastic_job(monkeypatch, 1)
    job._settings = replace(job._settings, max_workers=3)
    job._fill()
    hangs, waits_for_room = job._candidates
    for worker in job._candidates:
        worker.actor = MagicMock()
    seconds = ask_until(
        job,
        monkeypatch,
        lambda: hangs not in job._candidates,
        lambda worker, now_s: worker in job._members or (False if worker is hangs and now_s > 500 else None),
    )
    assert job._candidates == [waits_for_room] and 620 < seconds < 700
    assert "has not loaded torch within 120 s (timeout_s)" in caplog.text
    job._fill()
    assert len(job._candidates) == 2


def begin_world_with_a_new_worker(job: Any) -> Any:
    """All members wait for their places, and one candidate is ready: the world begins. Returns the new worker."""
    from hvdkit_ray.members import choose_members

    (new,) = job._candidates
    new.arriving = arrive(new)
    job._take_candidate(new)
    chosen = choose_members(job._members, job._candidates, job._most())
    assert job._can_begin(chosen)
    job._begin_world(chosen, print)
    return new


@pytest.mark.parametrize("commits", [False, True])
def test_new_workers_that_are_lost_before_a_commit_are_replaced_a_few_times_only(
    monkeypatch: pytest.MonkeyPatch, commits: bool
) -> None:
    import ray

    job = make_elastic_job(monkeypatch, 2)
    members = list(job._members)
    for worker in members:
        arrive(worker, has_state=True)
    for _ in range(3):
        new = begin_world_with_a_new_worker(job)
        new.result = MagicMock(side_effect=ray.exceptions.RayActorError(error_msg="no memory"))
        job._take_result(new)
        job._fill()
        for worker in members:
            arrive(worker, has_state=True, committed=commits)
    assert len(job._candidates) == 1
    assert job._can_begin(members) == commits
    job._fill()
    assert len(job._candidates) == commits and job._members == members
    if commits:
        return
    assert job._can_begin(members), "they go on without it"
    job._begin_world(members, print)
    job._lose(members[1], ray.exceptions.RayActorError())
    job._fill()
    assert len(job._candidates) == 2, "a rank is missing"


def test_too_few_ranks_without_the_new_workers_are_an_error_with_what_the_last_one_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = make_elastic_job(monkeypatch, 2)
    job._settings = replace(job._settings, min_workers=3)
    members = list(job._members)
    for worker in members:
        arrive(worker, has_state=True)
    for _ in range(3):
        new = begin_world_with_a_new_worker(job)
        new.result = MagicMock(side_effect=HorovodInternalError("no route to host"))
        job._take_result(new)
        job._fill()
        for worker in members:
            arrive(worker, has_state=True)
    with refused("ray-too-few-workers", names=["3 times in a row; 2 are left, and 3 are needed", "no route to host"]):
        job._can_begin(members)


def test_a_job_that_runs_out_of_memory_loses_a_worker_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    job = make_elastic_job(monkeypatch, 2)
    lost = job._members[1]
    lost.result = MagicMock(side_effect=ray.exceptions.OutOfMemoryError("the node is low on memory"))
    job._take_result(lost)
    assert len(job._members) == 1 and "low on memory" in job._why


def test_the_end_of_a_world_reaches_a_worker_that_is_still_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdkit_ray import actor

    monkeypatch.setattr(actor, "ray", MagicMock())
    monkeypatch.setattr(actor, "enter_rank", lambda variables: None)
    rank = actor.ElasticRank(0)
    rank._enter(4, {"RANK": "0"})
    rank.end_world(3, "rank 1 is lost")
    rank.check()
    rank.end_world(4, "rank 2 is lost")
    with pytest.raises(RankLostError, match="rank 2 is lost"):
        rank.check()
    rank._enter(5, {"RANK": "0"})
    rank.check()


def test_workers_that_do_not_become_ranks_in_time_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from hvdkit_ray import workers
    from hvdkit_ray.settings import Demand, RaySettings

    fake = MagicMock(exceptions=ray.exceptions)
    fake.get.side_effect = lambda ref: ref()
    fake.wait.side_effect = lambda refs, **_: (refs[:1], refs[1:])
    monkeypatch.setattr(workers, "ray", fake)
    job = workers.Workers.__new__(workers.Workers)
    job._demand, job._settings, job._places = Demand(2), RaySettings(timeout_s=3), ["process 1", "process 2"]
    first, lives = MagicMock(return_value=None), MagicMock(return_value=None)
    dies = MagicMock(side_effect=ray.exceptions.RayActorError(error_msg="killed"))
    with refused("ray-workers-late", names=["1 of 2 workers", "within 3 s: rank 1 (process 2)"]):
        job._answers([first, lives], job._name)
    with refused("ray-worker-died", names=["rank 0 (process 1): killed"]):
        job._answers([dies, lives], job._name)


def test_the_workers_with_the_last_commit_come_first() -> None:
    from hvdkit.integrations.ranks import Offer
    from hvdkit_ray.actor import Arrival
    from hvdkit_ray.members import Worker, choose_members

    def make(index: int, rank: int, has_state: bool, ready: bool = True) -> Worker:
        arrival = Arrival(Offer(index, "a", "h", 1), 1, has_state) if ready else None
        return Worker(index, None, None, arrival, rank=rank)

    members = [make(0, 0, False), make(1, 2, True), make(2, 1, True)]
    candidates = [make(3, -1, False, ready=False), make(4, -1, False), make(5, -1, False)]
    assert [worker.index for worker in choose_members(members, candidates, 9)] == [2, 1, 0, 4, 5]
    assert [worker.index for worker in choose_members(members, candidates, 4)] == [2, 1, 0, 4]
