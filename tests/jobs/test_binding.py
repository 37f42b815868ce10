"""How cores are shared out among the ranks of a host: planned on made-up machines, and done on this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_job import plan_job
from refused import refused

from hvdkit.engine.cores import CoresSeen, fair_share, warn_of_crowding
from hvdkit.engine.planned.progress import has_spare_core
from hvdkit.engine.planned.settings import PlanSettings
from hvdkit.launch.agent.host_info import (
    Cpu,
    Share,
    allowed_cpus,
    bind,
    divide,
    format_cpus,
    parse_cpus,
    plan_share,
    read_topology,
)
from hvdkit.launch.cli.options import parse_arguments
from hvdkit.launch.plan.registration import plan_cores, take_free_shares


def machine(nodes: int, cores: int, threads: int = 1) -> list[Cpu]:
    """CPUs numbered as Linux does on a PC: first one of each core, then the siblings."""
    total = nodes * cores
    return [Cpu(t * total + core, core, core // cores) for t in range(threads) for core in range(total)]


def write_system(folder: Path, cpus: Sequence[Cpu], *, numa: bool = True, old: bool = False) -> Path:
    """A /sys/devices/system with these CPUs online."""
    for cpu in cpus:
        topology = folder / f"cpu/cpu{cpu.number}/topology"
        topology.mkdir(parents=True)
        siblings = format_cpus(one.number for one in cpus if one.core == cpu.core)
        (topology / ("thread_siblings_list" if old else "core_cpus_list")).write_text(siblings + "\n")
        (topology / "physical_package_id").write_text(f"{cpu.node}\n")
    for node in {cpu.node for cpu in cpus} if numa else ():
        (folder / f"node/node{node}").mkdir(parents=True)
        (folder / f"node/node{node}/cpulist").write_text(format_cpus(c.number for c in cpus if c.node == node) + "\n")
    return folder


def shown(shares: list[Share] | None) -> list[tuple[str, int]]:
    assert shares is not None
    return [(format_cpus(share.cpus), share.threads) for share in shares]


@given(st.sets(st.integers(0, 5000)))
def test_a_list_of_cpus_is_read_as_it_is_written(cpus: set[int]) -> None:
    assert parse_cpus(format_cpus(cpus)) == sorted(cpus)


@pytest.mark.parametrize("numa", [True, False])
@pytest.mark.parametrize("old", [True, False])
def test_the_topology_is_read_from_sys(tmp_path: Path, numa: bool, old: bool) -> None:
    cpus = machine(2, 4, threads=2)
    online = [cpu for cpu in cpus if cpu.number not in (8, 3, 11)]  # a sibling, and a whole core, are offline
    system = write_system(tmp_path, online, numa=numa, old=old)
    allowed = [cpu.number for cpu in online if cpu.number != 5]  # a cgroup's
    assert list(read_topology(allowed, system)) == [cpu for cpu in online if cpu.number != 5]


def test_without_sys_each_cpu_is_a_core(tmp_path: Path) -> None:
    assert read_topology([4, 1], tmp_path) == (Cpu(1, 1, 0), Cpu(4, 4, 0))


@pytest.mark.parametrize(
    ("cpus", "ranks", "kind", "expected"),
    [
        (machine(1, 2), 2, "core", [("0", 1), ("1", 1)]),
        (machine(2, 8, threads=2), 2, "core", [("0-7,16-23", 8), ("8-15,24-31", 8)]),
        (machine(2, 4, threads=2), 4, "core", [("0-1,8-9", 2), ("2-3,10-11", 2), ("4-5,12-13", 2), ("6-7,14-15", 2)]),
        (machine(2, 4), 3, "core", [("0-1", 2), ("2-3", 2), ("4-7", 4)]),  # none across sockets, none below 8 // 3
        (machine(2, 6), 3, "core", [("0-3", 4), ("4-7", 4), ("8-11", 4)]),  # across, since all else gives someone 3
        (machine(4, 2), 2, "core", [("0-3", 4), ("4-7", 4)]),  # two nodes each
        (machine(2, 4), 4, "numa", [("0-3", 2), ("0-3", 2), ("4-7", 2), ("4-7", 2)]),
        (machine(1, 5)[1:], 2, "core", [("1-2", 2), ("3-4", 2)]),  # a cgroup leaves out core 0
    ],
)
def test_cores_are_shared_out(cpus: list[Cpu], ranks: int, kind: str, expected: list[tuple[str, int]]) -> None:
    assert shown(divide(cpus, ranks, kind)) == expected


@given(st.data())
def test_a_share_is_whole_cores_and_no_smaller_than_fair(data: st.DataObject) -> None:
    cpus = machine(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6)), data.draw(st.integers(1, 2)))
    allowed = data.draw(st.lists(st.sampled_from(cpus), min_size=1, unique=True))
    cores = {cpu.core for cpu in allowed}
    ranks = data.draw(st.integers(1, len(cores) + 2))
    shares = divide(allowed, ranks, "core")
    if ranks > len(cores):
        assert shares is None
        return
    assert shares is not None and len(shares) == ranks
    seen: set[int] = set()
    for share in shares:
        mine = {cpu.core for cpu in allowed if cpu.number in share.cpus}
        assert share.cpus == {cpu.number for cpu in allowed if cpu.core in mine}, "siblings stay together"
        assert not mine & seen, "nobody else's"
        assert share.threads == len(mine) >= len(cores) // ranks
        seen |= mine
    wider = divide(allowed, ranks, "numa")
    assert wider is not None and all(one.cpus >= share.cpus for one, share in zip(wider, shares, strict=True))


def test_a_replacement_gets_the_share_of_the_lost_rank() -> None:
    cpus = list(range(8))
    first = plan_cores(dict.fromkeys(range(4), cpus), "auto")

    def replace(held: Mapping[int, Mapping[str, Any]], *ranks: int) -> dict[int, int]:
        planned = plan_cores(dict.fromkeys([*held, *ranks], cpus), "auto")
        return {rank: order["at"] for rank, order in take_free_shares(planned, held).items()}

    without_1 = {rank: first[rank] for rank in (0, 2, 3)}
    assert replace(without_1, 4) == {0: 0, 2: 2, 3: 3, 4: 1}
    assert replace({0: first[0], 3: first[3]}, 4, 5) == {0: 0, 3: 3, 4: 1, 5: 2}
    # A fifth rank: nothing is free, and it shares with others.
    assert take_free_shares(plan_cores(dict.fromkeys(range(5), cpus), "auto"), first)[4]["ranks"] == 5
    assert take_free_shares(first, {}) == first


def test_a_replacement_on_a_host_that_hvdkit_has_not_bound_is_ordered_anew() -> None:
    held = plan_cores({0: [0, 1], 1: [0, 1]}, "none")
    planned = plan_cores({1: [0, 1], 2: [0, 1]}, "none")
    assert take_free_shares(planned, {1: held[1]}) == planned


def test_who_is_bound() -> None:
    alike = {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    assert plan_cores(alike, "auto")[1] == {"divide": [0, 1, 2, 3], "kind": "core", "at": 1, "ranks": 2}
    assert plan_cores(alike, "numa")[0]["kind"] == "numa"
    assert plan_cores(alike, "none") == {0: {"sharers": 2}, 1: {"sharers": 2}}
    assert plan_cores({7: [0, 1]}, "auto") == {7: {"sharers": 1}}, "alone, it may use them all"
    by_launcher = {4: [0, 1], 5: [2, 3]}
    assert plan_cores(by_launcher, "auto") == {4: {"sharers": 1}, 5: {"sharers": 1}}
    assert [one["divide"] for one in plan_cores(by_launcher, "core").values()] == [[0, 1, 2, 3]] * 2
    unknown: dict[int, list[int]] = {0: [], 1: []}
    assert plan_cores(unknown, "core") == {0: {"sharers": 2}, 1: {"sharers": 2}}


def test_what_a_rank_has() -> None:
    mine = sorted(allowed_cpus())
    cores = len({cpu.core for cpu in read_topology(mine)})
    assert plan_share(mine, {}, 0) == (frozenset(mine), cores, False), "nothing is known"
    assert plan_share(mine, {"sharers": 2}, 5) == (frozenset(mine), max(1, cores // 2), False)
    crowd = {"divide": mine, "kind": "core", "at": 1, "ranks": cores + 1}
    assert plan_share(mine, crowd, cores + 1) == (frozenset(mine), 1, False), "more ranks than cores"
    whole = plan_share(mine, {"divide": mine, "kind": "core", "at": 0, "ranks": 1}, 1)
    with bind(whole) as prevented:
        assert not prevented and allowed_cpus() == whole.cpus
    with bind(Share(frozenset({1 << 12}), 1, bound=True)) as prevented:
        assert prevented and sorted(allowed_cpus()) == mine, "a CPU that is not there"


def test_only_one_of_hvdrun_and_the_launcher_binds() -> None:
    def job(*options: str) -> str:
        return plan_job(parse_arguments([*options, "-np", "2", "true"]), {"PATH": "/usr/bin:/bin"}).bind

    assert (job(), job("--bind", "numa"), job("--binding-args=--bind-to socket")) == ("auto", "numa", "none")
    with refused("binding-contradicts", names=["--bind core", "--binding-args"]):
        job("--bind", "core", "--binding-args=--bind-to core")


def test_a_rank_counts_the_cores_that_it_has_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    bound = [CoresSeen("a", 0b0011, 4), CoresSeen("a", 0b1100, 4), CoresSeen("b", 0b1111, 4)]
    assert [fair_share(bound, rank) for rank in range(3)] == [2, 2, 4]
    free = [CoresSeen("a", 0b1111, 4)] * 2
    assert fair_share(free, 1) == 2
    for seen in (bound, free, [CoresSeen("a", 1, 1)] * 3):
        for rank in range(len(seen)):
            warn_of_crowding(seen, rank)
    assert not caplog.records
    crowd = [CoresSeen("b", 0b10, 4), *[CoresSeen("a", 0b1, 4)] * 2]
    for rank in range(3):
        warn_of_crowding(crowd, rank)
    (record,) = caplog.records
    assert "2 ranks on a are bound to 1 of its 4 CPUs" in record.getMessage()


@pytest.mark.parametrize(("cores", "threads", "thread"), [(2, 1, True), (1, 1, False), (1.5, 1, False), (4, 0, False)])
def test_a_thread_drives_reductions_where_a_core_is_spare(cores: float, threads: int, thread: bool) -> None:
    spare = has_spare_core(cores, threads)
    settings = {progress: PlanSettings(1, 1, progress=progress) for progress in ("auto", "thread", "inline")}
    assert settings["auto"].threaded(spare) is thread
    assert settings["thread"].threaded(spare) and not settings["inline"].threaded(spare)


@pytest.mark.ranks
def test_each_rank_of_a_job_has_cores_of_its_own() -> None:
    cores = len({cpu.core for cpu in read_topology(allowed_cpus())})
    script = "import os; print(*os.sched_getaffinity(0), '|', os.environ['OMP_NUM_THREADS'])"
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-m", "hvdkit.launch", "-np", "2", "--verbose", sys.executable, "-c", script],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    told = [line.partition("] ")[2].partition(" | ") for line in done.stdout.splitlines()]
    mine = [set(map(int, cpus.split())) for cpus, _, _ in told]
    if cores < 2:
        assert mine[0] == mine[1] and "may use CPUs" in done.stderr
        return
    assert not mine[0] & mine[1] and mine[0] | mine[1] == set(allowed_cpus())
    assert sorted(int(threads) for _, _, threads in told) == sorted([cores // 2, cores - cores // 2])
    assert f"bound to CPUs {format_cpus(mine[0])}, OMP_NUM_THREADS=" in done.stderr
