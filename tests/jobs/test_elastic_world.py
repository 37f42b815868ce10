"""Ranks die, and the others go on within the same job: real processes, under hvdrun and Open MPI's fault tolerance."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from elastic_job import started, train_and_kill
from elastic_world_script import diloco_reference, reference
from hvdrun_job import ROOT

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300), pytest.mark.group("elastic jobs")]

SCRIPT = ROOT / "tests" / "support" / "elastic_world_script.py"
MAKER = ROOT / "tests" / "support" / "dying_maker_script.py"
DIGITS = ROOT / "examples" / "pytorch_elastic_digits.py"


def training(steps: int, pause_s: float = 0.02, commit_every: int = 5) -> tuple[str, ...]:
    return str(SCRIPT), str(steps), str(pause_s), str(commit_every)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_others_go_on_and_one_comes_in_its_place(victim: int) -> None:
    job = train_and_kill(3, [victim], "--min-np", "2", command=training(400))
    output = job.output
    assert job.process.returncode == 0, output
    result = job.result()
    assert result["sizes"] == [3, 2, 3] and result["alike"]
    assert result["summary"] == pytest.approx(reference(400), abs=1e-12)
    expected = {job.pids[rank]: victim if rank == 3 else rank for rank in (0, 1, 2, 3) if rank != victim}
    assert result["places"] == {str(pid): place for pid, place in expected.items()}, "who lives keeps its GPU"
    left = [rank for rank in (0, 1, 2) if rank != victim]
    assert [numbers[:2] for numbers in result["started_as"]] == [*([rank, 3] for rank in left), [2, 3]]
    assert result["variables_follow"], "HOROVOD_RANK and the others are those of the world that there is now"
    assert f"rank {victim} on" in output and "was killed by SIGKILL" in output and "continuing with 2 ranks" in output
    assert "rank 3 starts on" in output
    assert sum("hvdkit rank" in line or line.startswith("hvdrun:") for line in job.lines) <= 5, output


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "shard"), [(0, "gradients"), (2, "optimizer")])
def test_no_part_of_an_optimizer_is_lost_with_a_rank(victim: int, shard: str) -> None:
    job = train_and_kill(3, [victim], "--min-np", "2", command=(*training(400), "", shard))
    assert job.process.returncode == 0, job.output
    result = job.result()
    assert result["sizes"] == [3, 2, 3] and result["alike"]
    assert result["summary"] == pytest.approx(reference(400), abs=1e-10)


@pytest.mark.slow
def test_diloco_goes_on_from_the_last_commit_within_a_period() -> None:
    job = train_and_kill(3, [0], "--min-np", "2", command=(*training(400), "", "diloco"))
    assert job.process.returncode == 0, job.output
    result = job.result()
    assert result["sizes"][:2] == [3, 2] and result["alike"]
    assert result["summary"] == pytest.approx(diloco_reference(400), abs=1e-9)


@pytest.mark.slow
def test_gradients_in_process_groups_of_torch_go_on_too() -> None:
    job = train_and_kill(3, [1], "--min-np", "2", "--device-transport", "torch", command=training(400))
    assert job.process.returncode == 0, job.output
    result = job.result()
    assert result["sizes"] == [3, 2, 3] and result["alike"]
    assert result["summary"] == pytest.approx(reference(400), abs=1e-12)


@pytest.mark.slow
def test_several_die_at_once_and_while_others_come_in_their_place() -> None:
    with started("-np", "4", "--min-np", "1", command=training(600)) as job:
        job.wait_for(lambda: len(job.pids) == 4 and job.committed(10))
        job.kill(0)
        job.kill(3)
        job.wait_for(lambda: "starts on" in job.output)
        job.kill(1)
        output = job.end()
    assert job.process.returncode == 0, output
    result = job.result()
    assert result["alike"] and 1 in result["sizes"]
    assert result["summary"] == pytest.approx(reference(600), abs=1e-12)


@pytest.mark.slow
def test_one_that_dies_on_its_way_in_is_replaced_too(tmp_path: Path) -> None:
    finish = tmp_path / "finish"
    command = (str(SCRIPT), "1000000", "0.02", "5", str(finish))
    with started("--verbose", "-np", "2", "--min-np", "1", command=command) as job:
        job.wait_for(lambda: len(job.pids) == 2 and job.committed(10))
        job.kill(0)
        job.wait_for(lambda: re.search(r"rank 2 on \S+: pid \d+", job.output))
        job.kill(2)  # it has not joined MPI yet, which waits for it
        job.wait_for(lambda: "continuing with 2 ranks, 1 of them replacements" in job.output)
        finish.touch()
        output = job.end()
    assert job.process.returncode == 0, output
    assert "rank 2 on" in output and "before it joined" in output and "rank 3 starts on" in output
    assert job.result()["sizes"] == [2, 1, 1, 2] and job.result()["alike"]


# One comes in place of rank 2; then rank 1 is lost, and the one that comes in its place is late. The first of them is
# there for a while after Python has ended in it, and rank 0 is not: what MPI says of that finds no Python any more.
ENDS_WHILE_ONE_COMES = """
import ctypes, os, pathlib, sys, time
import hvdkit.torch as hvd
first, second = pathlib.Path(sys.argv[1], "first"), pathlib.Path(sys.argv[1], "second")
comes = os.environ["OMPI_COMM_WORLD_SIZE"] == "1"
if comes and first.exists():
    second.touch()
    time.sleep(60)
if comes:
    first.touch()
hvd.init()
began_as = 3 if comes else hvd.rank()
def train(state):
    if hvd.size() == 3 and began_as == (1 if first.exists() else 2):
        os.kill(os.getpid(), 9)
    while hvd.size() == 3 or not hvd.broadcast_object(second.exists(), root_rank=0):
        time.sleep(0.02)
        state.commit()
    time.sleep(0.5)
hvd.elastic.run(train)(hvd.elastic.TorchState(step=0))
if comes:
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(libc.sleep, ctypes.c_void_p(3), None)
"""


@pytest.mark.slow
def test_training_ends_well_while_one_is_on_its_way_in(tmp_path: Path) -> None:
    with started("-np", "3", "--min-np", "2", command=("-c", ENDS_WHILE_ONE_COMES, str(tmp_path))) as job:
        output = job.end()
    assert job.process.returncode == 0 and "rank 4 starts on" in output, output
    assert "Segmentation" not in output and "could not be started" not in output, output


@pytest.mark.slow
def test_communicators_can_be_made_after_one_could_not() -> None:
    with started("-np", "3", "--min-np", "2", command=(str(MAKER),)) as job:
        output = job.end()
    assert job.process.returncode == 0 and output.count("made with 2") == 2, output


@pytest.mark.slow
def test_a_rank_that_hangs_is_ended_and_the_others_go_on() -> None:
    with started("-np", "3", "--max-np", "3", "--elastic-hang-timeout-s", "2", command=training(300)) as job:
        job.wait_for(lambda: len(job.pids) == 3 and job.committed(10))
        os.kill(job.pids[1], signal.SIGSTOP)
        job.kill(2)
        output = job.end()
    assert job.process.returncode == 0, output
    assert "rank 1 on" in output and "is killed: it has been stopped by SIGSTOP for 2 s" in output
    assert job.result()["summary"] == pytest.approx(reference(300), abs=1e-12)


@pytest.mark.slow
def test_too_few_are_left_and_the_same_command_goes_on_from_the_last_commit(tmp_path: Path) -> None:
    options = ("--min-np", "2", "--elastic-checkpoints", str(tmp_path / "kept"))
    job = train_and_kill(2, [1], *options, command=training(300), committed=20)
    assert job.process.returncode == 75, job.output
    assert "1 rank left, and --min-np is 2" in job.output and "Run the same command again" in job.output
    with started("-np", "2", *options, command=training(300)) as job:
        output = job.end()
    assert job.process.returncode == 0, output
    assert not job.committed(5) or int(re.findall(r"committed (\d+)", output)[0]) > 20
    assert job.result()["summary"] == pytest.approx(reference(300), abs=1e-12)


@pytest.mark.slow
def test_too_few_are_left_and_there_is_no_place_for_a_checkpoint() -> None:
    job = train_and_kill(2, [0], "--min-np", "2", command=training(2000))
    assert job.process.returncode == 1, job.output
    assert "TooFewRanksError: 1 rank is left" in job.output and "--elastic-checkpoints" in job.output


ALONE_WITH_THE_STATE = """
import os, pathlib, sys, time
import hvdkit.torch as hvd
hvd.init()
print("pid", os.getpid(), flush=True)
state = hvd.elastic.TorchState(step=0)
def die():
    if hvd.size() == 2 and not os.path.exists(sys.argv[1]):
        pathlib.Path(sys.argv[1]).touch()
        os.kill(os.getpid(), 9)  # the other one is new, and has not been given the state yet
state.register_reset_callbacks([die])
@hvd.elastic.run
def train(state):
    print("from step", state.step, flush=True)
    while state.step < 300 or not os.path.exists(sys.argv[1]):  # a replacement takes long on a busy machine
        time.sleep(0.02)
        state.step += 1
        state.commit()
        print("committed", state.step, flush=True)
train(state)
"""


@pytest.mark.slow
def test_when_nobody_has_the_last_commit_the_newest_on_the_disk_is_taken(tmp_path: Path) -> None:
    options = ("--min-np", "1", "--elastic-checkpoints", str(tmp_path / "kept"), "--elastic-save-s", "0.2")
    command = ("-c", ALONE_WITH_THE_STATE, str(tmp_path / "dead"))
    job = train_and_kill(2, [1], *options, command=command, committed=40)
    output = job.output
    assert job.process.returncode == 0, output
    assert "all ranks that had the last commit have died; continuing from" in output
    assert all(int(step) > 0 for step in re.findall(r"from step (\d+)", output)[2:]), output
    assert job.committed(300)


@pytest.mark.slow
def test_a_disagreement_is_no_death_and_ends_the_job() -> None:
    code = (
        "import torch, hvdkit.torch as hvd; hvd.init()\n"
        "state = hvd.elastic.TorchState(step=0)\n"
        "hvd.elastic.run(lambda state: hvd.allreduce(torch.zeros(1 + hvd.rank()), name='same'))(state)"
    )
    with started("-np", "2", "--min-np", "1", command=("-c", code)) as job:
        output = job.end()
    assert job.process.returncode == 1, output
    assert "same" in output and output.count("Traceback") <= 4


@pytest.mark.slow
def test_a_disagreement_ends_the_job_though_some_have_only_heard_of_it() -> None:
    code = (
        "import time, torch, hvdkit, hvdkit.torch as hvd; hvd.init(); first = hvd.rank() == 0\n"
        "state = hvd.elastic.TorchState(step=0)\n"
        "def train(state):\n"
        "    if first:\n"
        "        time.sleep(0.2)\n"
        "        raise hvdkit.RanksDisagreeError('as it is told to all')\n"
        "    hvd.allreduce(torch.zeros(1))\n"
        "hvd.elastic.run(train)(state)"
    )
    with started("-np", "3", "--min-np", "1", command=("-c", code)) as job:
        output = job.end()
    assert job.process.returncode == 1, output
    assert "as it is told to all" in output and "from the last commit" not in output


@pytest.mark.slow
def test_a_rank_whose_own_exception_is_raised_inside_a_collective_ends_and_the_others_go_on() -> None:
    code = (
        "import torch, hvdkit.torch as hvd\n"
        "from hvdkit.engine.groups import global_process_set\n"
        "from hvdkit.engine.named.submit import collective_step\n"
        "hvd.init(); fails = hvd.rank() == 1\n"
        "state = hvd.elastic.TorchState(step=0)\n"
        "def act(transport, joined):\n"
        "    if fails:\n"
        "        raise KeyError('of this rank alone')\n"
        "    transport.barrier()\n"
        "def train(state):\n"
        "    engine = global_process_set.group('a test').engine\n"
        "    collective_step(engine, 'broadcast_object', act)\n"
        "    print('done on', hvd.size(), flush=True)\n"
        "hvd.elastic.run(train)(state)"
    )
    with started("-np", "3", "--min-np", "1", command=("-c", code)) as job:
        output = job.end()
    assert job.process.returncode == 0, output
    assert "KeyError: 'of this rank alone'" in output and output.count("done on 2") == 2


@pytest.mark.slow
def test_an_error_that_all_ranks_run_into_ends_the_job() -> None:
    with started("-np", "2", "--min-np", "1", command=("-c", "import hvdkit.torch as hvd; hvd.init(); 1 / 0")) as job:
        output = job.end()
    assert job.process.returncode == 1 and "ZeroDivisionError" in output


@pytest.mark.slow
def test_a_rank_that_dies_before_all_have_met_ends_the_job() -> None:
    code = "import os, hvdkit.torch as hvd; os.environ['OMPI_COMM_WORLD_RANK'] == '1' and os._exit(3); hvd.init()"
    with started("-np", "2", "--min-np", "1", command=("-c", code)) as job:
        output = job.end()
    assert job.process.returncode == 3, output
    assert "rank 1 on" in output and "failed with exit code 3" in output


@pytest.mark.slow
def test_the_digits_are_learned_though_a_rank_is_killed() -> None:
    command = (str(DIGITS), "--min-accuracy", "0.97")
    with started("--verbose", "-np", "3", "--min-np", "2", command=command) as job:
        job.wait_for(lambda: "epoch 2 " in job.output)
        job.kill(0)
        output = job.end()
    assert job.process.returncode == 0, output
    assert re.search(r"test accuracy 9[789]", output)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to divide")
def test_a_replacement_is_bound_to_the_cores_of_the_lost_rank() -> None:
    job = train_and_kill(2, [0], "--min-np", "1", "--verbose", "--bind", "core", command=training(400))
    assert job.process.returncode == 0, job.output
    cpus = dict(re.findall(r"rank (\d) on \S+: pid \d+.*?CPUs? ([\d,-]+)", job.output))
    assert cpus["2"] == cpus["0"] != cpus["1"], job.output
