"""The bucket plan: every gradient travels once, in the order of backward, in pieces of the right size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from hvdkit.engine.planned.plan import Bucket, Slot, TensorSpec, describe_plan, plan_buckets, plan_digest
from hvdkit.transport.buffer import STORAGE

LINE = 64  # bytes
MIB = 2**20


def _specs(*large: int) -> st.SearchStrategy[list[TensorSpec]]:
    spec = st.builds(
        TensorSpec,
        name=st.sampled_from("abc"),
        count=st.one_of(st.integers(0, 40), st.integers(0, 3000), *map(st.just, large)),
        dtype=st.sampled_from(["float32", "float32", "float16", "bfloat16", "float64", "int8"]),
        place=st.sampled_from([0, 0, 0, 1]),
        group=st.sampled_from([None, None, None, 0, 1]),
    )
    return st.lists(spec, max_size=10)


_small = st.tuples(_specs(), st.sampled_from([1, 64, 100, 1000, 4096, 100_000]))
_large = st.tuples(_specs(MIB - 1, MIB, MIB + 1, 3 * MIB), st.sampled_from([0, MIB + 100, 4 * MIB]))
plans = given(st.one_of(_small, _large))


def slots_of(buckets: Sequence[Bucket]) -> list[Slot]:
    return [slot for bucket in buckets for slot in bucket.slots]


def floats(*counts: int) -> list[TensorSpec]:
    return [TensorSpec(f"t{at}", count, "float32") for at, count in enumerate(counts)]


@plans
def test_every_element_travels_once(case: tuple[list[TensorSpec], int]) -> None:
    tensors, limit = case
    pieces = defaultdict(list)
    for slot in slots_of(plan_buckets(tensors, limit)):
        pieces[slot.tensor].append((slot.offset, slot.offset + slot.stop - slot.start))
    assert sorted(pieces) == list(range(len(tensors)))
    for index, found in pieces.items():
        starts, stops = [start for start, _ in found], [stop for _, stop in found]
        assert [*starts, tensors[index].count] == [0, *stops]
        assert len(found) == 1 or all(start < stop for start, stop in found)


@plans
def test_a_bucket_holds_one_dtype_and_place(case: tuple[list[TensorSpec], int]) -> None:
    tensors, limit = case
    for bucket in plan_buckets(tensors, limit):
        kinds = {(tensors[slot.tensor].dtype, tensors[slot.tensor].place) for slot in bucket.slots}
        assert len(kinds) == 1 and kinds.pop()[0] == bucket.dtype


@plans
def test_the_last_tensor_comes_first(case: tuple[list[TensorSpec], int]) -> None:
    tensors, limit = case
    order = defaultdict(list)
    for slot in slots_of(plan_buckets(tensors, limit)):
        one = tensors[slot.tensor]
        order[one.dtype, one.place, one.group].append((-slot.tensor, slot.offset))
    assert all(found == sorted(found) for found in order.values())


@plans
def test_no_bucket_waits_for_a_later_one(case: tuple[list[TensorSpec], int]) -> None:
    tensors, limit = case
    last_to_come = [min(bucket.needs) for bucket in plan_buckets(tensors, limit)]
    assert last_to_come == sorted(last_to_come, reverse=True)


@plans
def test_pieces_begin_at_cache_lines_and_do_not_overlap(case: tuple[list[TensorSpec], int]) -> None:
    tensors, limit = case
    for bucket in plan_buckets(tensors, limit):
        itemsize, end = STORAGE[bucket.dtype].itemsize, 0
        for slot in bucket.slots:
            assert slot.start * itemsize % LINE == 0
            assert end <= slot.start <= slot.stop and (slot.start - end) * itemsize < LINE
            end = slot.stop
        assert bucket.data_count == end and bucket.count == end + len(bucket.slots) + 1


@plans
def test_no_bucket_exceeds_the_limit_or_is_empty(case: tuple[list[TensorSpec], int]) -> None:
    tensors, limit = case
    for bucket in plan_buckets(tensors, limit):
        assert bucket.slots
        assert bucket.data_count * STORAGE[bucket.dtype].itemsize <= max(limit or 4 * MIB, LINE)
        assert limit or len(bucket.slots) == 1


@plans
def test_buckets_are_full_but_for_the_last_of_a_kind(case: tuple[list[TensorSpec], int]) -> None:
    tensors, limit = case
    behind = set()
    for bucket in reversed(plan_buckets(tensors, limit)):
        first = tensors[bucket.slots[0].tensor]
        kind = (bucket.dtype, first.place, first.group)
        if limit and kind in behind:
            assert bucket.data_count * STORAGE[bucket.dtype].itemsize > limit - LINE
        behind.add(kind)


@plans
def test_the_same_tensors_make_the_same_plan(case: tuple[list[TensorSpec], int]) -> None:
    tensors, limit = case
    assert plan_buckets(tensors, limit) == plan_buckets(tuple(tensors), limit)


def test_a_plan_that_can_be_read() -> None:
    # Buckets of 32 floats: tensor 2 fills the first one and the beginning of the second, where tensor 1 follows at
    # the next cache line (16 floats); tensor 0 finds no room there.
    assert plan_buckets(floats(5, 10, 40), 128) == (
        Bucket("float32", (Slot(2, 0, 32, 0),), 32, frozenset({2})),
        Bucket("float32", (Slot(2, 0, 8, 32), Slot(1, 16, 26, 0)), 26, frozenset({1, 2})),
        Bucket("float32", (Slot(0, 0, 5, 0),), 5, frozenset({0})),
    )


@plans
def test_a_group_is_sent_when_all_of_it_is_there(case: tuple[list[TensorSpec], int]) -> None:
    tensors, limit = case
    for bucket in plan_buckets(tensors, limit):
        own = {slot.tensor for slot in bucket.slots}
        groups = {tensors[index].group for index in own}
        assert len(groups) == 1
        group = groups.pop()
        assert bucket.needs == (own if group is None else {i for i, one in enumerate(tensors) if one.group == group})


def test_groups_in_a_plan_that_can_be_read() -> None:
    tensors = [TensorSpec(f"t{at}", 4, "float32", group=group) for at, group in enumerate([0, None, 0, None])]
    assert [([slot.tensor for slot in one.slots], sorted(one.needs)) for one in plan_buckets(tensors, 1024)] == [
        ([3, 1], [1, 3]),
        ([2, 0], [0, 2]),
    ]


def test_a_limit_of_zero_sends_each_tensor_by_itself_in_pieces_of_4_mib() -> None:
    buckets = plan_buckets(floats(3, 0, 2 * MIB + 1), 0)
    assert [(b.slots[0].tensor, b.data_count) for b in buckets] == [(2, MIB), (2, MIB), (2, 1), (1, 0), (0, 3)]


def test_a_kind_that_ends_early_goes_early() -> None:
    tensors = [TensorSpec("a", 8, "float32"), TensorSpec("b", 8, "float16"), TensorSpec("c", 8, "float32")]
    assert [bucket.dtype for bucket in plan_buckets(tensors, 4096)] == ["float16", "float32"]


def test_nothing_makes_no_buckets() -> None:
    assert plan_buckets([], 1024) == ()


def test_the_digest_tells_any_difference() -> None:
    base = [TensorSpec("w", 6, "float32"), TensorSpec("b", 2, "float32")]
    others: list[tuple[list[TensorSpec], int, str]] = [
        (base, 1024, "sum"),
        (base, 2048, "average"),
        (base[::-1], 1024, "average"),
        (base[:1], 1024, "average"),
        *(
            ([changed, base[1]], 1024, "average")
            for changed in (
                TensorSpec("v", 6, "float32"),
                TensorSpec("w", 7, "float32"),
                TensorSpec("w", 6, "float16"),
                TensorSpec("w", 6, "float32", place=1),
                TensorSpec("w", 6, "float32", layout="(1, 2)"),
                TensorSpec("w", 6, "float32", group=0),
            )
        ),
    ]
    digests = {plan_digest(describe_plan(*each)) for each in [(base, 1024, "average"), *others]}
    assert len(digests) == 1 + len(others) and {len(digest) for digest in digests} == {32}
    assert plan_digest(describe_plan(base, 1024, "average")) == plan_digest(describe_plan(list(base), 1024, "average"))
