"""hvdrun and the GPUs of the hosts: who has which, cores near it, and ranks that would share one. Made-up GPUs."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from planned_job import plan_job
from recorded_nodes import plant_node
from refused import refused

from hvdkit.gpu_vendors import VARIABLES, Folders
from hvdkit.launch.agent.host_info import Cpu, divide_near, format_cpus, plan_share, read_gpus
from hvdkit.launch.cli import hvdrun
from hvdkit.launch.cli.options import parse_arguments
from hvdkit.launch.facts import Facts
from hvdkit.launch.options import LaunchOptions
from hvdkit.launch.plan.gpu_sharing import GpuSharing
from hvdkit.launch.plan.job import AGENT, Job
from hvdkit.launch.plan.network import HostInterfaces
from hvdkit.launch.plan.registration import Registration, plan_cores, plan_start_orders
from hvdkit.launch.plan.resources import (
    Gpu,
    HostResources,
    assign_gpus,
    check_gpus,
    find_near_cpus,
    find_shared_gpus,
    plan_shared_gpus,
)
from hvdkit.launch.plan_start import StartPlan, plan_start

PATH = os.environ["PATH"]
A, B, C, D = GPUS = [
    (f"0000:{bus}:00.0", cpus) for bus, cpus in (("07", "0-3"), ("0f", "0-3"), ("47", "4-7"), ("4e", "4-7"))
]
UNKNOWN = ("", "")


def write_gpus(folder: Path, gpus: list[Gpu], models: str = "XXXX") -> tuple[Path, Path]:
    """The driver's and the kernel's folders of a host with these GPUs, which have UUIDs GPU-0aa, GPU-1aa, ..."""
    driver, devices = folder / "driver", folder / "devices"
    for number, (name, cpus) in enumerate(gpus):
        (driver / name.upper()).mkdir(parents=True)
        text = f"Model: \t\t NVIDIA {models[number]}\nIRQ:   \t\t 81\nGPU UUID: \t GPU-{number}aa\n"
        (driver / name.upper() / "information").write_text(text)
        (devices / name).mkdir(parents=True)
        (devices / name / "local_cpulist").write_text(f"{cpus}\n")
    return driver, devices


@pytest.mark.parametrize(
    ("environ", "models", "expected"),
    [
        ({}, "XXXX", GPUS),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, "XXXX", [C, A]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-3, 1"}, "XXXX", [D, B]),
        ({"CUDA_VISIBLE_DEVICES": "1,9,0"}, "XXXX", [B]),
        ({"CUDA_VISIBLE_DEVICES": ""}, "XXXX", []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "XXXX", []),
        ({"CUDA_VISIBLE_DEVICES": "1,1"}, "XXXX", []),  # CUDA shows none
        ({"CUDA_VISIBLE_DEVICES": "MIG-3,MIG-4"}, "XXXX", []),
        ({}, "XXYX", [UNKNOWN] * 4),  # CUDA begins with the fastest model, whichever that is
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "XXYX", GPUS),
        ({"SLURM_JOB_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"}, "XXXX", [UNKNOWN] * 2),  # of the job, or of the host
    ],
)
def test_a_rank_knows_the_gpus_that_it_sees(
    tmp_path: Path, environ: dict[str, str], models: str, expected: list[Gpu]
) -> None:
    driver, devices = write_gpus(tmp_path, GPUS, models)
    found = [(name.lower(), cpus) for name, cpus in read_gpus(environ, driver, devices)]
    assert found == expected
    assert read_gpus(environ, tmp_path / "none", devices) == []


@pytest.mark.parametrize(
    ("seen", "own", "shared"),
    [
        ([GPUS] * 4, GPUS, ()),
        ([GPUS] * 2, [A, B], ()),
        ([[C], [A]], [C, A], ()),  # the launcher shows each rank one
        ([[A], [A]], [], (2, 1)),
        ([[A, B]] * 3, [], (3, 2)),
        ([[UNKNOWN] * 2] * 2, [UNKNOWN] * 2, ()),
        ([[UNKNOWN] * 2] * 3, [], (3, 2)),
        ([[UNKNOWN]] * 2, [UNKNOWN] * 2, ()),  # each its own, as Slurm numbers them for each task
        ([[], []], [], ()),  # nothing is known
        ([[A], []], [], ()),
        ([[A, B], [C]], [], ()),
    ],
)  # fmt: skip
def test_each_rank_has_a_gpu_of_its_own_or_they_share(
    seen: list[list[Gpu]], own: list[Gpu], shared: tuple[int, ...]
) -> None:
    assert assign_gpus(seen) == own
    found = find_shared_gpus([("n", HostResources(gpus=tuple(gpus))) for gpus in seen])
    assert found == ([("n", *shared)] if shared else [])


def test_ranks_that_would_share_a_gpu_are_refused_only_where_gpus_were_asked_for() -> None:
    resources = [*[("n1", HostResources(gpus=(A, B)))] * 3, *[("n2", HostResources(gpus=(A, B)))] * 2]
    names = ["n1: 3 ranks, but 2 GPUs.", "-np gpu", "-H n1:2)", "--share-gpus"]
    with refused("gpus-shared", names=names):
        check_gpus(resources, GpuSharing.REFUSED_BY_NP)
    (text,) = check_gpus(resources, GpuSharing.WARNED)
    assert "NCCL refuses two ranks on one GPU" in text and "CUDA_VISIBLE_DEVICES=''" in text
    assert check_gpus(resources, GpuSharing.ALLOWED) == check_gpus(resources[3:], GpuSharing.REFUSED_BY_NP) == []


def test_what_asks_for_one_gpu_a_rank(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: X'\necho 'GPU 1: X'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)

    def choice(*options: str) -> GpuSharing:
        return plan_job(parse_arguments([*options, "true"]), {"PATH": f"{tmp_path}:{PATH}"}).gpu_sharing

    assert choice("-np", "9") is GpuSharing.WARNED and choice("-np", "gpu") is GpuSharing.REFUSED_BY_NP
    assert choice("-np", "2", "--device-transport", "nccl") is GpuSharing.REFUSED_BY_TRANSPORT
    assert choice("-np", "2", "--device-transport", "host") is GpuSharing.ALLOWED
    assert choice("-np", "gpu", "--share-gpus") is GpuSharing.ALLOWED


def test_sharing_sets_what_nccl_needs_and_keeps_what_is_set() -> None:
    job = plan_job(parse_arguments(["-np", "2", "--share-gpus", "true"]), {"PATH": PATH, "NCCL_MAX_CTAS": "4"})
    assert job.variables["NCCL_MULTI_RANK_GPU_ENABLE"] == "1" and job.variables["NCCL_SOCKET_IFNAME"] == "lo"
    assert job.variables["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false" and "NCCL_MAX_CTAS" not in job.variables
    plain = plan_job(parse_arguments(["-np", "2", "true"]), {"PATH": PATH})
    assert not [name for name in plain.variables if name.startswith(("NCCL_", "XLA_"))]
    with refused("share-gpus-on-hosts", names=["--share-gpus", "this job has 2"]):
        plan_shared_gpus(2, {})


def test_ranks_that_share_a_gpu_have_a_host_id_each() -> None:
    ranks = {rank: Registration(rank, 2, "n", HostInterfaces(())) for rank in range(2)}
    sharing = Job(command=(), ranks=2, variables={"HVDKIT_SHARE_GPUS": "1"})
    orders = plan_start_orders(ranks, sharing).by_rank
    assert [orders[rank]["variables"]["NCCL_HOSTID"] for rank in range(2)] == ["rank0", "rank1"]
    assert "NCCL_HOSTID" not in plan_start_orders(ranks, Job(command=(), ranks=2)).by_rank[0]["variables"]


def two_nodes(cores: int) -> list[Cpu]:
    return [Cpu(number, number, number // cores) for number in range(2 * cores)]


@pytest.mark.parametrize(
    ("near", "kind", "expected"),
    [
        (["0-3", "0-3", "4-7", "4-7"], "core", ["0-1", "2-3", "4-5", "6-7"]),
        (["4-7", "4-7", "0-3", "0-3"], "core", ["4-5", "6-7", "0-1", "2-3"]),  # the first GPUs at the second socket
        (["0-3", "0-3"], "core", ["0-1", "2-3"]),  # both at one socket; the other one's cores are left unused
        (["0-3", "0-3", "0-3", "4-7"], "core", ["0", "1", "2-3", "4-7"]),
        (["4-7", "0-3"], "numa", ["4-7", "0-3"]),
        (["0-3", "0-3"], "numa", ["0-3", "0-3"]),
        (["0-7", "0-7"], "core", ["0-3", "4-7"]),  # near all: one node, or not known
        (["0-3"] * 5, "core", None),  # more ranks than cores there
        (["0-3", "2-5"], "core", None),  # some are near both
        (["8-9", "0-3"], "core", None),  # no CPU there may be used
    ],
)  # fmt: skip
def test_ranks_get_cores_near_their_gpus(near: list[str], kind: str, expected: list[str] | None) -> None:
    shares = divide_near(two_nodes(4), near, kind)
    assert (None if shares is None else [format_cpus(share.cpus) for share in shares]) == expected


def test_cores_near_gpus_are_ordered_where_hvdrun_binds_and_else_all_are_shared_out() -> None:
    alike = {rank: list(range(8)) for rank in range(2)}
    near = find_near_cpus([GPUS, GPUS])
    assert plan_cores(alike, "auto", near)[1]["near"] == ["0-3", "0-3"]
    assert plan_cores(alike, "none", near) == plan_cores(alike, "none")
    assert "near" not in plan_cores(alike, "auto", find_near_cpus([[UNKNOWN], [UNKNOWN]]))[0]
    mine = sorted(os.sched_getaffinity(0))[:1]
    order = {"divide": mine, "kind": "core", "at": 0, "ranks": 1, "near": ["4095"]}
    assert plan_share(mine, order, 1).cpus == set(mine), "none of the CPUs near it may be used"


def use_agent_with(folder: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let hvdrun start a copy of its agent that reads GPUs from these folders."""
    agent = shutil.copytree(AGENT, folder / "hvdkit/launch/agent")
    for name in ("handshake.py", "ranges.py", "visible_gpus.py", "gpu_vendors.py"):
        shutil.copy(Path(AGENT).parents[1] / name, folder / "hvdkit")
    text = (agent / "host_info.py").read_text()
    for usual, other in zip(Folders(), folders, strict=True):
        assert str(usual) in text
        text = text.replace(str(usual), str(other))
    (agent / "host_info.py").write_text(text)

    def plan(options: LaunchOptions, facts: Facts) -> StartPlan:
        start = plan_start(options, facts)
        return replace(start, job=replace(start.job, agent=str(agent)))

    monkeypatch.setattr("hvdkit.launch.start.plan_start", plan)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("node", "environ", "words"),
    [
        ("frontier", {"ROCR_VISIBLE_DEVICES": "6,7"}, "3 ranks, but 2 GPUs. RCCL refuses two ranks on one GPU."),
        pytest.param(
            *("aurora", {"ZE_AFFINITY_MASK": "6,7"}, "3 ranks, but 2 GPUs. oneCCL is made for one rank on each GPU."),
            marks=pytest.mark.slow,
        ),
        pytest.param("frontier", {}, "", marks=pytest.mark.slow),
    ],
)
def test_hvdrun_warns_of_shared_gpus_of_other_vendors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    node: str,
    environ: dict[str, str],
    words: str,
) -> None:
    use_agent_with(tmp_path, plant_node(node, tmp_path), monkeypatch)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert hvdrun.main(["-np", "3", sys.executable, "-S", "-c", "pass"]) == 0
    said = capfd.readouterr().err
    assert words in said and ("GPU" in said) == bool(words)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--device-transport", "nccl"], 2, "3 ranks, but 2 GPUs. device_transport=nccl asks for one GPU a rank"),
        pytest.param([], 0, "3 ranks, but 2 GPUs. NCCL refuses two ranks on one GPU", marks=pytest.mark.slow),
        pytest.param(["--share-gpus"], 0, "", marks=pytest.mark.slow),
    ],
)
def test_hvdrun_refuses_or_warns_before_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    options: list[str],
    code: int,
    words: str,
) -> None:
    driver, devices = write_gpus(tmp_path, GPUS[:2])
    use_agent_with(tmp_path, Folders(devices, nvidia=driver), monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    script = "import json, os; print(json.dumps([os.environ.get('NCCL_HOSTID'), os.environ.get('NCCL_NET')]))"
    assert hvdrun.main(["-np", "3", *options, sys.executable, "-S", "-c", script]) == code
    out, said = capfd.readouterr()
    assert words in said and ("GPU" in said) == bool(words)
    started = sorted(tuple(json.loads(line.partition("] ")[2])) for line in out.splitlines())
    shares = "--share-gpus" in options
    assert started == ([(f"rank{rank}", "Socket") if shares else (None, None) for rank in range(3)] if not code else [])
