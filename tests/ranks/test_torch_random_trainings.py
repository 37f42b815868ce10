"""Random trainings give the parameters of one process, whatever a script does between its steps."""

from __future__ import annotations

import pytest
from random_trainings import Form, train
from ranks import run_ranks
from torch_world import joined

pytestmark = pytest.mark.native("Horovod's core has no sharded state, and fails where a rank has no gradient")

FORMS = {
    "one pass": Form(),
    "two passes": Form(passes=2),
    "three passes": Form(passes=3),
    "optimizer": Form(shard="optimizer"),
    "optimizer, two passes": Form(passes=2, shard="optimizer"),
    "gradients": Form(shard="gradients", simple=True),
    "gradients, two passes": Form(passes=2, shard="gradients", simple=True),
}


def _train(form: Form, seeds: range) -> list[str]:
    with joined():
        return [found for seed in seeds if (found := train(form, seed))]


@pytest.mark.parametrize("form", FORMS)
def test_random_trainings_are_those_of_one_process(form: str) -> None:
    assert run_ranks(3, _train, FORMS[form], range(6)) == [[]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_more_random_trainings_are_those_of_one_process(form: str) -> None:
    assert run_ranks(3, _train, FORMS[form], range(6, 60)) == [[]] * 3
