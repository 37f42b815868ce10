"""What hvdkit.tensorflow does, and says, where training is not plain."""

from __future__ import annotations

import subprocess
import sys

import pytest
from keras_ranks import run_check
from ranks import RanksFailedError

pytestmark = [pytest.mark.ranks, pytest.mark.keras("tensorflow")]


OWN_WORDS = pytest.mark.native("Horovod says it in its own words")
TRACED_ALIKE = pytest.mark.native("on Horovod's core all ranks trace the same gradients")


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(
    "check",
    [
        pytest.param("missing_gradients", marks=[TRACED_ALIKE, pytest.mark.slow]),
        pytest.param("different_models", marks=pytest.mark.slow),
        pytest.param("adasum", marks=[pytest.mark.native("Horovod's Adasum is for powers of two"), pytest.mark.slow]),
        pytest.param("batch_normalization", marks=pytest.mark.slow),
        pytest.param("joined_too_early", marks=[OWN_WORDS, pytest.mark.slow]),
        pytest.param("two_threads", marks=pytest.mark.native("Horovod's core has no buckets")),
    ],
)
def test_in_either_mode(check: str, mode: str) -> None:
    run_check(3, "tensorflow", f"tensorflow_behaviour:{check}", mode, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        pytest.param("another_gradient_later", marks=TRACED_ALIKE),
        *("refusals", "state", "both_frameworks", "docstrings"),
    ],
)
def test_in_particular(check: str) -> None:
    run_check(2, "tensorflow", f"tensorflow_behaviour:{check}", timeout=60)


@pytest.mark.slow
def test_memory_is_used_again_only_where_references_are_counted() -> None:
    run_check(1, "tensorflow", "tensorflow_behaviour:memory_of_results", timeout=60)


@pytest.mark.slow
@OWN_WORDS
@pytest.mark.parametrize("ending", ["shutdown", "allreduce"])
def test_a_rank_that_breaks_out_of_a_graphs_loop_early_is_named_on_the_other_ranks(ending: str) -> None:
    run_check(3, "tensorflow", "tensorflow_behaviour:left_early", ending, timeout=60)


@OWN_WORDS
def test_a_step_that_fails_in_the_middle_ends_the_job_with_a_word() -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_check(2, "tensorflow", "tensorflow_behaviour:interrupted", timeout=60)
    assert "Let the exception end the job" in caught.value.tracebacks[0]


@pytest.mark.native("Horovod imports what looks for other frameworks")
@pytest.mark.parametrize(
    ("adapter", "other"),
    [
        pytest.param("torch", "tensorflow", marks=pytest.mark.slow),
        pytest.param("tensorflow", "torch", marks=pytest.mark.slow),
        ("tensorflow", "tensorflow"),
    ],
)
def test_an_adapter_needs_its_own_framework_alone(adapter: str, other: str) -> None:
    code = f"import sys; sys.modules['{other}'] = None; import hvdkit.{adapter} as hvd; hvd.init(); print(hvd.size())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    if adapter == other:
        assert "MissingDependencyError" in done.stderr
        assert f"pip install 'hvdkit[{other}]'" in done.stderr
    else:
        assert done.stdout.splitlines()[-1] == "1", done.stderr
