"""The search for settings: on made-up step times, and in the first steps of real trainings."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.config import Config, read_config, read_settings
from hvdkit.engine.planned.plan import TensorSpec, plan_buckets
from hvdkit.engine.planned.settings import PlanSettings, settings_of
from hvdkit.engine.tuning.saved import Entry, Key, find_entry, read_entries, save_entry
from hvdkit.engine.tuning.search import VALUES, Search, Shape, plan_axes
from hvdkit.errors import ConfigError
from hvdkit.setting import MIB
from hvdkit.tools.doctor.settings import with_tuned

FIRST = replace(settings_of(Config()), progress="inline")
AXES = plan_axes(FIRST, Config())
BEST = PlanSettings(64 * MIB, 8, 2 * MIB, "thread", "auto")


def far_from_best(point: PlanSettings) -> int:
    """How many values lie between a point and the best one."""
    pairs = ((AXES[name], getattr(point, name), getattr(BEST, name)) for name in AXES)
    return sum(abs(values.index(one) - values.index(other)) for values, one, other in pairs)


def run(cost: Callable[[PlanSettings], float], *, noise: float = 0.0, seed: int = 0, most: int = 16) -> Search:
    """Search with steps of cost(point) seconds, times noise: mostly small, sometimes a step that was held up."""
    draw = random.Random(seed)
    search = Search(FIRST, AXES, most=most)
    while search.point is not None:
        search.record(
            [
                cost(search.point) * (1 + abs(draw.gauss(0, noise)) + noise * (10 if draw.random() < 0.05 else 0))
                for _ in range(8)
            ]
        )
    return search


def chosen(search: Search) -> PlanSettings:
    assert search.outcome is not None
    point: PlanSettings = search.outcome.best.point
    return point


def test_without_noise_the_best_point_is_found() -> None:
    search = run(lambda point: 0.1 + 0.01 * far_from_best(point), most=40)
    assert chosen(search) == BEST
    assert search.outcome is not None and search.outcome.gain == pytest.approx(1 - 0.1 / (0.1 + 0.01 * 5))
    assert len(search.trials) <= 40


def test_where_nothing_makes_a_difference_noise_is_not_followed() -> None:
    kept = sum(chosen(run(lambda point: 0.1, noise=0.05, seed=seed)) == FIRST for seed in range(200))
    assert kept >= 195


def test_a_machine_that_gets_slower_is_no_reason_to_change() -> None:
    def keeps(seed: int) -> bool:
        times = iter([0.1 * (1 + 0.02 * trial) for trial in range(100)])
        return chosen(run(lambda point: next(times) / 8, noise=0.02, seed=seed)) == FIRST

    assert sum(map(keeps, range(100))) >= 98


def test_a_real_gain_is_found_in_spite_of_noise() -> None:
    def cost(point: PlanSettings) -> float:
        return 0.1 * (1 if point.fusion_bytes >= 16 * MIB else 1.3)

    found = [run(cost, noise=0.05, seed=seed) for seed in range(100)]
    assert sum(chosen(search).fusion_bytes >= 16 * MIB for search in found) >= 98
    assert all(len(search.trials) <= 16 for search in found)


@given(st.integers(1, 30), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_a_search_keeps_to_its_number_of_trials(most: int, seed: int) -> None:
    search = run(lambda point: 0.1 + 0.01 * far_from_best(point), noise=0.1, seed=seed, most=most)
    assert len(search.trials) <= max(most, 1)
    assert search.outcome is not None
    before, after = search.outcome.first.median_s, search.outcome.best.median_s
    assert chosen(search) == FIRST or after < before


def test_what_cannot_be_used_is_not_chosen() -> None:
    search = Search(FIRST, AXES, most=30)
    while search.point is not None:
        large = search.point.fusion_bytes > 4 * MIB
        search.record([] if large else [0.1 - 0.001 * search.point.buckets_in_flight] * 8)
    assert chosen(search).fusion_bytes <= 4 * MIB and chosen(search).buckets_in_flight == 8


def test_an_axis_without_order_is_tried_whole() -> None:
    times = {"library": 0.12, "doubling": 0.13, "auto": 0.1, "halving": 0.11, "pieces": 0.08}
    search = Search(replace(FIRST, progress="auto"), {"progress": sorted(times)}, unordered=["progress"], most=20)
    while search.point is not None:
        search.record([times[search.point.progress]] * 8)
    assert chosen(search).progress == "pieces"


sizes = st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=12)


@given(sizes, st.integers(1, 4), st.data())
@settings(max_examples=60, deadline=None)
def test_settings_that_come_to_the_same_are_measured_once(counts: list[int], sharers: int, data: st.DataObject) -> None:
    tensors = [TensorSpec(str(at), count, "float32") for at, count in enumerate(counts)]
    nbytes = sum(bucket.nbytes for bucket in plan_buckets(tensors, 4 * MIB))
    shape = Shape(nbytes, "shared_memory", sharers, sharers)
    draw = {name: data.draw(st.sampled_from(values)) for name, values in VALUES.items()}
    one = PlanSettings(**draw)
    name = data.draw(st.sampled_from(list(VALUES)))
    other = replace(one, **{name: data.draw(st.sampled_from(VALUES[name]))})
    if shape.same(one) != shape.same(other):
        return
    first, second = (plan_buckets(tensors, each.fusion_bytes) for each in (one, other))
    assert first == second and one.progress == other.progress


def test_what_the_user_has_set_is_left_alone() -> None:
    assert set(AXES) == set(VALUES)
    asked = read_config({"HVDKIT_FUSION_BYTES": "3m", "HVDKIT_PROGRESS": "thread"})
    assert set(plan_axes(settings_of(asked), asked)) == {"buckets_in_flight", "chunk_bytes", "algorithm"}
    odd = replace(FIRST, buckets_in_flight=5)
    assert plan_axes(odd, Config())["buckets_in_flight"] == [2, 4, 5, 8]


def test_what_was_found_is_kept_for_a_job_like_it(tmp_path: Path) -> None:
    path, key = str(tmp_path / "tuned.json"), Key("a" * 64, (2, 2), "hierarchical", 4.0)
    first, second = Entry(key, BEST, 0.2, 0.1), Entry(replace(key, plan="b" * 64), FIRST, 0.3, 0.3)
    for entry in (replace(first, tuned_s=9.0), second, first):
        save_entry(path, entry)
    entries = read_entries(path)
    assert entries == [second, first]
    assert find_entry(entries, key) == (first, "")
    for other, why in (
        (replace(key, plan="c" * 64), "names, sizes and options"),
        (replace(key, hosts=(4,)), "4 ranks on 2 hosts then, 4 ranks on 1 host now"),
        (replace(key, cores=1.0), "4 cores per rank then, 1 now"),
        (replace(key, version="9"), "hvdkit 0.1.0 then, 9 now"),
        (replace(key, transport="mpi"), "transport hierarchical then, mpi now"),
    ):
        found, said = find_entry(entries, other)
        assert found is None and why in said


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"plans": [{"key": {}}]}', None])
def test_a_file_that_is_none_of_ours_is_an_error_that_names_it(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "tuned.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"tuned\.json.*--autotune-save"):
        read_entries(str(path))


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def on_ranks() -> Callable[..., Any]:
    pytest.importorskip("torch")
    from ranks import run_ranks
    from torch_world import assert_alike
    from tuned_trainings import train, train_alone

    def run(steps: list[int], models: int = 1, **options: Any) -> Any:
        """Train on ranks, compare with one process, and return what they have seen."""
        seen = run_ranks(len(steps), train, steps, models, timeout=90, **options)
        for at, expected in enumerate(train_alone(steps, models)):
            assert_alike([one.weights[at] for one in seen], expected, 1e-5)
        return seen

    return run


@pytest.mark.ranks
@pytest.mark.native("Horovod's core tunes itself")
def test_a_training_that_is_tuned_ends_where_it_would_have(on_ranks: Callable[..., Any], tmp_path: Path) -> None:
    log, saved = tmp_path / "log.csv", tmp_path / "tuned.json"
    files = {"autotune_log": str(log), "autotune_save": str(saved)}
    seen = on_ranks([110, 110], autotune_steps=100, **files)
    rows = rows_of(log)
    assert 3 <= len(rows) <= 10 and len({tuple(row[name] for name in VALUES) for row in rows}) >= 3
    assert all(
        float(row["median_ms"]) == pytest.approx(math.log2(int(row["fusion_bytes"])), abs=0.01) and row["steps"] == "8"
        for row in rows
    )
    # On a busy machine rank 0 warns of other things, too.
    said = [text for text in seen[0].said if text.startswith(("autotune ", "Tuned settings"))]
    assert [text.startswith("autotune of optimizer.1: after ") for text in said] == [True, False]
    assert said[1] == f"Tuned settings were saved in {saved}. Use them with hvdrun --tuned {saved}."
    assert not seen[1].said
    (entry,) = read_entries(str(saved))
    assert entry.key.hosts == (2,) and entry.default_s > entry.tuned_s > 0

    content = json.loads(saved.read_text())
    content["plans"][0]["settings"] = {
        "fusion_bytes": MIB,
        "buckets_in_flight": 2,
        "chunk_bytes": 128 * 1024,
        "progress": "thread",
        "algorithm": "auto",
    }
    saved.write_text(json.dumps(content))
    for again in on_ranks([4, 4], tuned=str(saved)):
        assert not again.said and again.buckets == [5]
    content["plans"][0]["key"]["hosts"] = [4]
    saved.write_text(json.dumps(content))
    seen = on_ranks([4, 4], tuned=str(saved))
    assert seen[0].buckets == [2] and not seen[1].said
    assert seen[0].said == [
        f"The tuned settings in {saved} are not used: they were measured for this model under other "
        f"conditions: 4 ranks on 1 host then, 2 ranks on 1 host now."
    ]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.native("Horovod's core tunes itself")
def test_several_hosts_optimizers_and_ranks_that_join_do_not_stop_it(
    on_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    log = tmp_path / "log.csv"
    seen = on_ranks([75, 48, 75], 2, over="hierarchical_uneven", autotune=True, autotune_log=str(log))
    rows = rows_of(log)
    assert {row["plan"] for row in rows} == {"optimizer.1"}, "one at a time"
    assert 2 <= len(rows) <= 5, "not while a rank had joined"
    assert all("before the search was complete" in text for text in seen[0].said) and len(seen[0].said) == 2


@pytest.mark.ranks
@pytest.mark.native("Horovod's core tunes itself")
def test_what_cannot_be_tuned_is_said(on_ranks: Callable[..., Any]) -> None:
    import hvdkit.torch as hvd

    seen = on_ranks([3, 3], options={"compression": hvd.Compression.TopK(1.0)}, autotune=True)
    said = "autotune: optimizer.1 is not tuned, because its compression keeps what it has not sent yet for each bucket."
    assert [one.said for one in seen] == [[said], []]


def test_doctor_shows_tuned_settings_with_their_file(tmp_path: Path) -> None:
    path, key = str(tmp_path / "tuned.json"), Key("a" * 64, (2,), "shared_memory", 1.0)
    for entry in (
        Entry(key, BEST, 0.2, 0.1),
        Entry(replace(key, plan="b" * 64), replace(BEST, progress="inline"), 1, 1),
    ):
        save_entry(path, entry)
    shown = with_tuned(read_settings({"HVDKIT_TUNED": path, "HVDKIT_CHUNK_BYTES": "1m"}))
    found = {one.name: (one.value, one.origin) for one in shown}
    assert found["fusion_bytes"] == (64 * MIB, path)
    assert found["progress"] == ("inline or thread", path)
    assert found["chunk_bytes"] == (MIB, "HVDKIT_CHUNK_BYTES"), "what the user says goes before"
    assert found["small_bytes"] == (64 * 1024, "default")
    assert with_tuned(read_settings({})) == read_settings({})
