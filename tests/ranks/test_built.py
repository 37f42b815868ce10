"""Horovod's questions about how it was built, answered for what is here."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from rank_job import find_mpirun
from ranks import run_ranks
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.engine import runtime as engine
from hvdkit.errors import NotInitializedError

#: Never true of hvdkit today.
ABSENT = ["ccl_built", "ddl_built", "nccl_built"]


def python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_what_hvdkit_does_not_have_is_not_there() -> None:
    assert [getattr(hvd, name)() for name in ABSENT] == [0] * len(ABSENT)
    assert hvd.nccl_built() is not False  # a version number


def test_torch_says_for_which_gpus_it_was_built() -> None:
    assert hvd.cuda_built() == torch.backends.cuda.is_built()
    assert hvd.rocm_built() == bool(torch.version.hip)


def test_before_init_neither_mpi_nor_gloo_is_in_use() -> None:
    assert hvd.mpi_enabled() is False and hvd.gloo_enabled() is False
    for call in (hvd.mpi_threads_supported, hvd.is_homogeneous):
        with pytest.raises(NotInitializedError, match=call.__name__):
            call()


def test_asking_for_mpi_loads_the_library_and_starts_nothing() -> None:
    program = """
from hvdkit.engine.built import mpi_built
assert mpi_built() and mpi_built()
import mpi4py
from mpi4py import MPI
print(MPI.Is_initialized(), mpi4py.rc.initialize, mpi4py.rc.finalize)
from hvdkit.transport.mpi.library import load_mpi
print(load_mpi().Query_thread() == MPI.THREAD_MULTIPLE)
"""
    assert python(program).split() == ["False", "True", "None", "True"]


def test_without_an_mpi_library_mpi_is_not_built() -> None:
    assert python(
        "import sys; sys.modules['mpi4py'] = None\nimport hvdkit.engine.built as b; print(b.mpi_built())"
    ) == ("False")


def test_torch_brings_gloo_and_without_torch_there_is_none() -> None:
    ask = "import hvdkit.engine.built as b; print(b.gloo_built())"
    assert hvd.gloo_built() and python(ask) == "True"
    assert python(f"import sys; sys.modules['torch'] = None\n{ask}") == "False"


def on_ranks(transport: str) -> list[bool]:
    assert hvd.mpi_built()
    with joined(transport):
        return [hvd.mpi_enabled(), hvd.gloo_enabled(), hvd.mpi_threads_supported(), hvd.is_homogeneous()]


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_use_mpi_and_the_script_may_too() -> None:
    assert run_ranks(2, on_ranks, "auto") == [[True, False, True, True]] * 2
    assert run_ranks(3, on_ranks, "mpi") == [[True, False, True, True]] * 3


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_that_use_gloo_say_so() -> None:
    assert run_ranks(2, on_ranks, "gloo") == [[False, True, False, True]] * 2


def test_one_process_uses_no_mpi() -> None:
    hvd.init(transport="single")
    try:
        assert (hvd.mpi_enabled(), hvd.mpi_threads_supported(), hvd.is_homogeneous()) == (False, False, True)
        made = engine.runtime("test")
        made.world = replace(made.world, homogeneous=False)
        assert not hvd.is_homogeneous()
    finally:
        hvd.shutdown()


@pytest.mark.ranks
@pytest.mark.parametrize(
    "before",
    [pytest.param("import mpi4py; mpi4py.rc.initialize = False", marks=pytest.mark.slow), "hvd.mpi_built()"],
)
def test_mpi_is_ended_properly_whoever_loaded_it(before: str) -> None:
    program = (
        f"import hvdkit.torch as hvd\n{before}\nhvd.init(transport='mpi'); hvd.barrier(); print('size', hvd.size())"
    )
    done = subprocess.run(
        [*find_mpirun(), "-n", "2", sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.split()) == (0, ["size", "2"] * 2), done.stderr
