"""The scheduler of docs/extensions writes the recorded script, reads the states, and refuses what it does not have."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.extensions.flux_scheduler import FLUX
from hvdkit.errors import SubmitError
from hvdkit.tools.submit.follow import State
from hvdkit.tools.submit.job import BatchJob, Warning

RECORDED = Path(__file__).parents[1] / "data" / "golden" / "flux_batch.sh"
JOB = BatchJob(
    command=("python", "train.py", "--name", "two words"),
    nodes=3,
    tasks_per_node=4,
    seconds=5400,
    name="digits",
    gpus=4,
    cpus=7,
    account="lab",
    queue="gpu",
    environ={"NCCL_DEBUG": "INFO"},
    venv="/home/me/my venv",
    dependencies=("1234",),
    hvdrun=("--verbose",),
)


def test_the_script_is_the_recorded_one() -> None:
    script = FLUX.write(JOB)
    if os.environ.get("HVDKIT_TEST_RECORD") == "1":
        RECORDED.write_text(script)
    assert script == RECORDED.read_text(), "if this is meant: HVDKIT_TEST_RECORD=1 pytest " + __file__


def test_directives_are_one_block_as_flux_wants_it() -> None:
    """Flux refuses a directive behind a line that does not begin as they do."""
    lines = FLUX.write(replace(JOB, extra=("# flux: --urgency=20",))).splitlines()
    last = max(at for at, line in enumerate(lines) if line.startswith("# flux: "))
    assert lines[last] == "# flux: --urgency=20"
    assert all(line.startswith("# ") for line in lines[1 : last + 1])


@pytest.mark.parametrize(
    "option, given",
    [
        ("--memory", {"memory": "64G"}),
        ("--mail", {"mail": "me@site.org"}),
        ("--requeue", {"requeue": True}),
        ("--signal", {"warning": Warning("USR1", 60)}),
    ],
)
def test_what_the_scheduler_does_not_have_is_refused(option: str, given: dict[str, Any]) -> None:
    with pytest.raises(SubmitError, match=f"^{option} cannot be requested of Flux"):
        FLUX.write(replace(JOB, **given))


@pytest.mark.parametrize(
    "text, state",
    [
        ("", None),
        ("DEPEND \n", State("waiting", "depend")),
        ("SCHED \n", State("waiting", "sched")),
        ("RUN \n", State("running", "run")),
        ("CLEANUP 0\n", State("running", "cleanup")),
        ("INACTIVE 0\n", State("ended", "inactive", 0)),
        ("INACTIVE 75\n", State("ended", "inactive", 75)),
        ("INACTIVE -9\n", State("ended", "inactive", 137)),
        ("INACTIVE -128\n", State("ended", "inactive", 1)),
        ("INACTIVE \n", State("ended", "inactive", None)),
    ],
)
def test_a_state_is_read(text: str, state: State | None) -> None:
    assert FLUX.read_state(text) == state


def test_an_id_is_read_in_either_spelling() -> None:
    assert [FLUX.read_id(text) for text in ("\u0192M7Zq9AKHno\n", "fM7Zq9AKHno\n", "flux-batch: ERROR\n")] == [
        "\u0192M7Zq9AKHno",
        "fM7Zq9AKHno",
        "",
    ]
