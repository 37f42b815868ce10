"""How workers of another system become ranks: their numbers, their variables, and what a function did on one."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from recorded_nodes import plant_node
from refused import refused

from hvdkit.errors import HorovodInternalError, NotInitializedError, TooFewRanksError, WorldError
from hvdkit.gpu_vendors import AMD, INTEL, list_gpus
from hvdkit.integrations import ranks
from hvdkit.integrations.ranks import (
    Offer,
    assign_ranks,
    call_function,
    check_call,
    enter_rank,
    new_secret,
    plan_variables,
)
from hvdkit.startup import modules_asked_for
from hvdkit.transport.gloo.backend import connect
from hvdkit.transport.gloo.rendezvous import find_rendezvous_store
from hvdkit.world import read_world

OFFERS = [
    Offer(4, "b", "10.0.0.2", 2004, ("1",)),
    Offer(0, "a", "10.0.0.1", 2000),
    Offer(2, "b", "10.0.0.2", 2002, ("0",)),
    Offer(1, "c", "10.0.0.3", 2001),
    Offer(3, "a", "10.0.0.1", 2003),
]


@pytest.fixture
def variables() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_ranks_follow_each_other_on_a_node_and_the_first_worker_is_rank_0() -> None:
    places = assign_ranks(OFFERS)
    assert [(each.index, each.node, each.local_rank, each.local_size) for each in places] == [
        (4, "b", 0, 2),
        (2, "b", 1, 2),
        (0, "a", 0, 2),
        (3, "a", 1, 2),
        (1, "c", 0, 1),
    ]
    assert [each.rank for each in places] == list(range(5)) and {each.size for each in places} == {5}


def test_the_gpu_of_a_rank_is_the_one_with_the_number_of_its_local_rank() -> None:
    pairs = [Offer(0, "a", "h", 1, ("6", "2")), Offer(1, "a", "h", 2, ("0", "4")), Offer(2, "b", "h", 3, ("0", "1"))]
    assert [each.gpus for each in assign_ranks(pairs)] == [("6", "0", "2", "4")] * 2 + [("0", "1")]
    shared = [Offer(0, "a", "h", 1, ("3",)), Offer(1, "a", "h", 2, ("3",))]
    assert [each.gpus for each in assign_ranks(shared)] == [("3",)] * 2


def test_a_rank_that_goes_on_keeps_its_local_rank_and_gpu_and_a_new_one_gets_those_of_the_lost_one() -> None:
    goes_on, new = Offer(1, "a", "h", 1, ("1",), place=1), Offer(2, "a", "h", 2, ("0",))
    places = assign_ranks([goes_on, new])
    assert [(each.rank, each.local_rank, each.gpus) for each in places] == [(0, 1, ("0", "1")), (1, 0, ("0", "1"))]
    variables = plan_variables(places, "h", 1, new_secret(), "job")
    for name in ("LOCAL_RANK", "HOROVOD_LOCAL_RANK"):
        assert [own[name] for own in variables] == ["1", "0"]


def test_the_variables_are_read_as_what_was_assigned(variables: None) -> None:
    secret, places = new_secret(), assign_ranks(OFFERS)
    os.environ.update({"HOROVOD_RANK": "7", "HOROVOD_SIZE": "9", "PMI_RANK": "3", "TORCHELASTIC_RESTART_COUNT": "2"})
    os.environ.update({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.9", "TORCHELASTIC_RUN_ID": "another"})
    for rank, own in zip(places, plan_variables(places, "10.0.0.2", 2004, secret, "job"), strict=True):
        enter_rank(own)
        world = read_world()
        assert (world.rank, world.size, world.local_rank, world.local_size, world.launcher) == (
            *(rank.rank, 5, rank.local_rank, rank.local_size),
            "torchrun",
        )
        place = find_rendezvous_store(os.environ, world.launcher)
        assert (place.kind, place.address, place.port, place.hosted) == ("store", "10.0.0.2", 2004, False)
        assert own.get("CUDA_VISIBLE_DEVICES") == ("1,0" if rank.node == "b" else None)
        others = {"HOROVOD_GLOO_RENDEZVOUS_ADDR", "PMI_RANK", "TORCHELASTIC_RESTART_COUNT", "JAX_PROCESS_ID"}
        assert not others & set(os.environ)
        assert (os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"]) == (str(rank.rank), "5")
        assert os.environ["HOROVOD_HOSTNAME"] == rank.node


@pytest.mark.parametrize(
    ("variable", "name", "value"),
    [
        (AMD.shows, "HIP_VISIBLE_DEVICES", "1,0"),
        ("ROCR_VISIBLE_DEVICES={}", "ROCR_VISIBLE_DEVICES", "1,0"),
        (INTEL.shows, "ONEAPI_DEVICE_SELECTOR", "level_zero:1,0"),
    ],
)
def test_gpus_are_shown_by_the_variable_of_their_vendor(variable: str, name: str, value: str) -> None:
    places = assign_ranks([replace(offer, gpu_variable=variable) for offer in OFFERS])
    for rank, own in zip(places, plan_variables(places, "10.0.0.2", 2004, new_secret(), "job"), strict=True):
        assert own.get(name) == (value if rank.node == "b" else None) and "CUDA_VISIBLE_DEVICES" not in own


def test_a_scheduler_of_amds_gpus_has_one_of_two_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders = plant_node("frontier", tmp_path)
    monkeypatch.setattr(ranks, "Folders", lambda: folders)
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES", raising=False)
    assert ranks.find_gpu_variable() == "HIP_VISIBLE_DEVICES={}"
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "3")
    assert ranks.find_gpu_variable() == "ROCR_VISIBLE_DEVICES={}"


@pytest.mark.parametrize("node", ["frontier", "aurora", "perlmutter"])
def test_gpus_are_hidden_whose_ever_they_are(tmp_path: Path, node: str) -> None:
    environ = ranks.plan_hidden_gpus()
    vendor, gpus = list_gpus(plant_node(node, tmp_path), environ)
    assert gpus and not vendor.select(environ, gpus).gpus


def test_where_horovod_is_hvdkit_it_is_so_on_the_ranks(variables: None, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(ranks, "begin", lambda variables: begun.extend(modules_asked_for(variables)))
    places = assign_ranks(OFFERS)
    enter_rank(plan_variables(places, "10.0.0.2", 2004, new_secret(), "job")[0])
    assert begun == []
    monkeypatch.setitem(sys.modules, "hvdkit.alias_horovod", ModuleType("hvdkit.alias_horovod"))
    enter_rank(plan_variables(places, "10.0.0.2", 2004, new_secret(), "job")[0])
    assert begun == ["hvdkit.alias_horovod"]


@pytest.mark.parametrize("offers", [[], [OFFERS[0], OFFERS[0]]])
def test_workers_without_numbers_of_their_own_are_refused(offers: list[Offer]) -> None:
    with refused("workers-not-numbered", names=[str([offer.index for offer in offers])]):
        assign_ranks(offers)


@pytest.mark.parametrize(("address", "port"), [("", 5), ("h", 0), ("h", 70000)])
def test_a_store_without_a_place_is_refused(address: str, port: int) -> None:
    with refused("store-address-invalid", names=[f"{address!r}, port {port}"]):
        plan_variables(assign_ranks(OFFERS), address, port, new_secret(), "job")


def test_a_secret_that_is_none_is_refused_before_anybody_is_reached(variables: None) -> None:
    enter_rank(plan_variables(assign_ranks(OFFERS), "127.0.0.1", 1, "guess", "job")[1])
    with pytest.raises(WorldError, match="HVDKIT_JOB_SECRET has 5 characters"):
        connect(read_world(), None)


def test_what_a_function_returns_or_raises_comes_back_with_its_traceback() -> None:
    assert call_function(lambda a, b: a + b, [1], {"b": 2}, last=True).get("rank 0") == 3

    def fail() -> None:
        raise ValueError("of the function")

    with pytest.raises(ValueError, match="of the function") as caught:
        call_function(fail, last=False).get("rank 1 on node a")
    assert "rank 1 on node a" in str(caught.value.__cause__) and "in fail" in str(caught.value.__cause__)


class TakesTwoError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class LostTwoError(HorovodInternalError):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_an_exception_that_pickles_in_a_way_of_its_own_is_sent_as_it_is() -> None:
    outcome = pickle.loads(pickle.dumps(call_function(json.loads, ["{"], last=True)))
    with pytest.raises(json.JSONDecodeError, match="line 1"):
        outcome.get("rank 0")


def test_an_exception_whose_class_is_unknown_where_it_arrives_has_its_type_text_and_traceback() -> None:
    def fail() -> None:
        raise json.JSONDecodeError("of the function", "", 0)

    outcome = call_function(fail, last=True)
    unknown = replace(outcome, error=outcome.error.replace(b"json", b"gone"))
    with pytest.raises(RuntimeError, match="JSONDecodeError: of the function") as caught:
        pickle.loads(pickle.dumps(unknown)).get("rank 2 on node b")
    cause = str(caught.value.__cause__)
    assert "rank 2 on node b" in cause and "in fail" in cause and "call_function" not in cause


ERRORS = [TakesTwoError(1, 2), TooFewRanksError(1, 2), SystemExit(3), KeyboardInterrupt(), LostTwoError(1, 2)]


@pytest.mark.parametrize("error", ERRORS)
def test_an_exception_that_cannot_be_sent_is_sent_as_text(error: BaseException) -> None:
    def fail() -> None:
        raise error

    outcome = pickle.loads(pickle.dumps(call_function(fail, last=True)))
    with pytest.raises(RuntimeError, match=type(error).__name__) as caught:
        outcome.get("rank 0")
    lost = isinstance(error, HorovodInternalError)
    assert isinstance(caught.value, HorovodInternalError) == lost, "else an elastic job takes it for a lost rank"


@pytest.mark.parametrize(
    ("call", "code", "names"),
    [
        ((3, None, None), "function-not-callable", ["3"]),
        ((max, 10, None), "function-args-invalid", ["args is 10", "[10]"]),
        ((max, "ab", None), "function-args-invalid", ["args is 'ab'"]),
        ((max, (), [1]), "function-kwargs-invalid", ["kwargs is [1]"]),
    ],
)
def test_what_cannot_be_called_is_refused_before_workers_start(
    call: tuple[Any, Any, Any], code: str, names: list[str]
) -> None:
    with refused(code, names=names):
        check_call(*call)
    assert check_call(max, [1, 2], {"key": abs}) == ((1, 2), {"key": abs}) and check_call(max, None, None) == ((), {})


def test_a_call_before_init_on_a_worker_has_the_same_message_on_the_driver() -> None:
    error = NotInitializedError("allreduce()")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is NotInitializedError and str(again) == str(error)
