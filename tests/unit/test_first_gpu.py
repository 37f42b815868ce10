"""The run on the first GPU: its stages as data, and its report."""

from __future__ import annotations

import pytest

from benchmarks.first_gpu.report import write_report
from benchmarks.first_gpu.run import Outcome
from benchmarks.first_gpu.stages import RESULT, plan_stages


@pytest.mark.parametrize(("device", "gpus"), [("cuda", 1), ("cuda", 4), ("cpu", 0)])
def test_a_rehearsal_has_the_stages_of_a_gpu_and_each_writes_a_result(device: str, gpus: int) -> None:
    stages = plan_stages(device, gpus)
    assert [stage.name for stage in stages] == [stage.name for stage in plan_stages("cuda", 1)]
    assert all(any(RESULT in word for word in stage.arguments) for stage in stages)
    shared = [stage.name for stage in stages if "--share-gpus" in stage.arguments]
    assert shared == (["step-2", "allreduce", "memory"] if (device, gpus) == ("cuda", 1) else [])


def test_a_report_has_the_results_of_what_was_done_and_the_ends_of_what_failed() -> None:
    tests = [
        {"name": "test_a", "outcome": "passed", "seconds": 1.0, "message": ""},
        {"name": "test_b", "outcome": "failed", "seconds": 2.0, "message": "assert 1 == 2"},
    ]
    rows = [
        {"work": "1 MiB", "peer": "hvdkit", "median_s": 0.002},
        {"work": "1 MiB", "peer": "NCCL", "median_s": 0.003},
    ]
    text = write_report(
        "cuda",
        [
            Outcome("training", "as one process", "tests", "failed", 3.0, "exit code 1", ["the last line"], tests),
            Outcome("allreduce", "beside others", "bench", "done", 4.0, result={"rows": rows, "notes": ["a note"]}),
            Outcome("memory", "of a rank", "facts", "done", 1.0, result={"MiB": 7}),
            Outcome("killed", "a rank", "tests", "too slow", 60.0, "it was ended after 60 s", ["still here"]),
            Outcome("keras-jax", "on JAX", "tests", "not run", why="jax is not installed"),
        ],
    )
    assert "5 stages: 2 done, 1 failed, 1 too slow, 1 not run." in text
    for line in (
        "| test_b | failed: assert 1 == 2 | 2.0 |",
        "the last line",
        "| 1 MiB | NCCL | 3 ms | x1.50 |",
        "- a note",
        "| MiB | 7 |",
        "| killed | a rank | too slow: it was ended after 60 s | 60 |",
        "still here",
        "| keras-jax | on JAX | not run: jax is not installed | 0 |",
    ):
        assert line in text
    assert "## keras-jax" not in text
