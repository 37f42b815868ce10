"""What hvdkit doctor collects and concludes on nodes with GPUs of AMD and Intel, from files of /sys."""

from __future__ import annotations

import ast
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from doctor_facts import HEALTHY
from recorded_nodes import list_cpus, plant_node, read_node

from hvdkit.gpu_vendors import Folders, list_gpus
from hvdkit.launch.agent.host_info import parse_cpus
from hvdkit.tools.doctor.checks.gpus import count_visible, list_builds
from hvdkit.tools.doctor.checks.job import check_small_job
from hvdkit.tools.doctor.collect.script import scan
from hvdkit.tools.doctor.collect.vendor_gpus import (
    describe_gpus,
    describe_selection,
    parse_amd_smi,
    parse_xpu_smi,
    read_vendor_gpus,
)
from hvdkit.tools.doctor.evaluate import check_host
from hvdkit.tools.doctor.facts import Accelerators, CpuFacts, HostFacts, Launcher, decode
from hvdkit.tools.doctor.findings import Finding, JobRequest
from hvdkit.tools.doctor.report import _list_gpus
from hvdkit.tools.doctor.survey import Allreduce, Rank, Survey
from hvdkit.tools.installed import parse_torch_other

TORCH = {"AMD": {"hip": "6.4.43484"}, "Intel": {"xpu": "20250301"}}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8", "SLURM_NNODES": "1"}


def facts_of(node: str, root: Path, environ: dict[str, str] | None = None, cpus: str = "") -> HostFacts:
    """A healthy node with a torch for its GPUs; cpus: those of this process, all by default."""
    environ = environ or {}
    vendor, listed = list_gpus(plant_node(node, root), environ)
    topology = list_cpus(node)
    allowed = tuple(parse_cpus(cpus)) if cpus else tuple(cpu.number for cpu in topology)
    found = Accelerators(
        gpus=describe_gpus(listed, topology),
        vendor=vendor.name,
        driver="6.8.5",
        visible=environ.get("CUDA_VISIBLE_DEVICES"),
        torch_cuda="12.9" if vendor.name == "NVIDIA" else "",
        torch_other=TORCH.get(vendor.name, {}),
        nccl="2.27.7",
    )
    machine = replace(HEALTHY.machine, cpu=CpuFacts(2 * read_node(node)["cores"], allowed))
    return replace(HEALTHY, accelerators=found, machine=machine, environ=environ)


def find(facts: HostFacts, **request: Any) -> list[Finding]:
    return [finding for finding in check_host(facts, JobRequest(**request)) if "gpu" in finding.name]


@pytest.mark.parametrize("node", ["frontier", "lumi", "mi300a", "aurora", "perlmutter"])
def test_a_healthy_node_of_each_vendor_has_no_findings(tmp_path: Path, node: str) -> None:
    facts = facts_of(node, tmp_path)
    if node == "perlmutter":
        facts = replace(facts, accelerators=replace(facts.accelerators, driver="580.1"))
    assert check_host(facts, JobRequest(ranks_here=len(facts.accelerators.gpus))) == []
    assert decode(HostFacts, json.loads(json.dumps(asdict(facts)))) == facts, "as agents send it"


@pytest.mark.parametrize(
    ("node", "environ", "name", "words"),
    [
        ("frontier", {"ROCR_VISIBLE_DEVICES": ""}, "gpu-hidden", "ROCR_VISIBLE_DEVICES='' hides all 8 GPUs"),
        ("frontier", {"HIP_VISIBLE_DEVICES": "-1"}, "gpu-hidden", "HIP_VISIBLE_DEVICES='-1' hides all 8"),
        (
            "frontier",
            {"ROCR_VISIBLE_DEVICES": "0,8"},
            "gpu-not-there",
            "this host has 8 GPUs, numbered from 0: ROCm ign",
        ),
        (
            *("lumi", {"ROCR_VISIBLE_DEVICES": "6", "HIP_VISIBLE_DEVICES": "6"}, "gpu-not-there"),
            "HIP_VISIBLE_DEVICES=6 names '6', and it counts the 1 GPU that ROCR_VISIBLE_DEVICES=6 leaves",
        ),
        ("frontier", {"ROCR_VISIBLE_DEVICES": "1,1,0"}, "gpu-twice", "ROCm ignores the second and all after it"),
        ("aurora", {"ONEAPI_DEVICE_SELECTOR": "opencl:cpu"}, "gpu-hidden", "ONEAPI_DEVICE_SELECTOR='opencl:cpu' hides"),
        ("aurora", {"ZE_AFFINITY_MASK": "0.1"}, "gpu-not-there", "card.tile is for ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE"),
        ("aurora", {"ZE_AFFINITY_MASK": "3,12"}, "gpu-not-there", "has 12 GPUs, numbered from 0, a tile each"),
        ("perlmutter", {"CUDA_VISIBLE_DEVICES": "0,4"}, "gpu-not-there", "CUDA ignores that one and all after it"),
    ],
)
def test_variables_that_do_not_select_what_they_name(
    tmp_path: Path, node: str, environ: dict[str, str], name: str, words: str
) -> None:
    findings = find(facts_of(node, tmp_path, environ))
    assert [finding.name for finding in findings] in ([name], ["cuda-driver-old", name])
    assert words in findings[-1].seen


def test_the_word_that_hip_skips_is_no_finding(tmp_path: Path) -> None:
    assert not find(facts_of("frontier", tmp_path, {"HIP_VISIBLE_DEVICES": "1,1,0"}))


def test_ranks_and_visible_gpus_are_compared_for_each_vendor(tmp_path: Path) -> None:
    facts = facts_of("frontier", tmp_path / "amd", {"ROCR_VISIBLE_DEVICES": "0,1,2"})
    assert count_visible(facts) == 3
    (finding,) = find(facts, ranks_here=4)
    assert finding.name == "gpu-shared" and "4 ranks would share 3 GPUs" in finding.seen
    assert finding.cure.startswith("RCCL refuses two ranks on one GPU. Start as many")
    (finding,) = find(facts_of("aurora", tmp_path / "intel"), ranks_here=6)
    assert finding.name == "gpu-idle" and "6 of the 12 GPUs" in finding.seen


def test_a_torch_that_was_built_for_another_vendor(tmp_path: Path) -> None:
    facts = facts_of("frontier", tmp_path)
    assert list_builds(facts) == {"torch": "6.4.43484"}
    wrong = replace(facts, accelerators=replace(facts.accelerators, torch_other={}, torch_cuda="13.0"))
    (finding,) = find(wrong)
    assert finding.name == "gpu-unused" and "AMD Instinct MI250X" in finding.seen and "ROCm of torch" in finding.cure


def test_nccls_wheel_is_not_compared_with_the_driver_of_amd(tmp_path: Path) -> None:
    facts = facts_of("frontier", tmp_path)
    found = replace(facts.accelerators, nccl_wheels={"nvidia-nccl-cu13": "2.28.3"})
    assert check_host(replace(facts, accelerators=found)) == []


def test_memory_and_device_files(tmp_path: Path) -> None:
    facts = facts_of("frontier", tmp_path)
    used = (replace(facts.accelerators.gpus[0], used_bytes=30 * 2**30), *facts.accelerators.gpus[1:])
    found = replace(facts.accelerators, gpus=used, denied="/dev/kfd")
    denied, in_use = find(replace(facts, accelerators=found))
    assert (denied.name, in_use.name) == ("gpu-denied", "gpu-in-use")
    assert "/dev/kfd" in denied.seen and "30 of 64 GiB of GPU 0" in in_use.seen and "amd-smi" in in_use.cure


@pytest.mark.parametrize(
    ("node", "environ", "launchers", "words"),
    [
        (
            *("frontier", {"SLURM_JOB_ID": "7"}, ()),
            # LUMI documentation has the same masks without each core's second thread: 0x00ff000000000000, ...
            "mask_cpu:0xff00000000000000ff000000000000,0xff00000000000000ff00000000000000,0xff00000000000000ff0000,",
        ),
        ("lumi", {"SLURM_JOB_ID": "7"}, (), "srun --gpus-per-task=1 --gpu-bind=closest; or"),
        (
            *("perlmutter", {}, (Launcher("mpiexec", "/opt/cray/pals/bin/mpiexec", "pals", "1.3"),)),
            "mpiexec --cpu-bind list:48-63,112-127:32-47,96-111:16-31,80-95:0-15,64-79.",
        ),
        (
            *("perlmutter", {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0,1,2,3", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ()),
            "mask_cpu:0xffff000000000000ffff000000000000,0xffff000000000000ffff00000000,",
        ),
        ("perlmutter", {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}, (), ""),
        ("frontier", {}, (), ""),  # no launcher but hvdrun's
        ("mi300a", {"SLURM_JOB_ID": "7"}, (), ""),  # in order
        ("aurora", {}, (Launcher("mpiexec", "/opt/cray/pals/bin/mpiexec", "pals", "1.3"),), ""),
        ("frontier", {"SLURM_JOB_ID": "7", "ROCR_VISIBLE_DEVICES": "4,5,2,3,6,7,0,1"}, (), ""),  # in order of cores
    ],
)
def test_gpus_in_another_order_than_their_cores(
    tmp_path: Path, node: str, environ: dict[str, str], launchers: tuple[Launcher, ...], words: str
) -> None:
    facts = facts_of(node, tmp_path, environ)
    facts = replace(facts, launchers=(*facts.launchers, *launchers))
    findings = [finding for finding in find(facts) if finding.name == "gpu-order"]
    assert len(findings) == bool(words)
    assert not findings or (words in findings[0].cure and findings[0].severity == "note")


def test_cores_that_a_job_may_not_use_are_left_out_of_the_options(tmp_path: Path) -> None:
    """LUMI keeps the first core of each L3 cache from jobs; its documentation has these masks."""
    cpus = ",".join(f"{first + 1}-{first + 7}" for first in range(0, 64, 8))
    (finding,) = find(facts_of("lumi", tmp_path, {"SLURM_JOB_ID": "7"}, cpus))
    masks = "0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe000000,0xfe,0xfe00,0xfe00000000,0xfe0000000000"
    assert finding.name == "gpu-order" and f"--cpu-bind=mask_cpu:{masks}." in finding.cure


@pytest.mark.parametrize(
    ("node", "local_rank", "variables", "cpus", "severity"),
    [
        ("frontier", 0, {}, "0-7", "warning"),  # GPU 0 is near 48-63
        ("frontier", 0, {}, "48-55", ""),
        ("frontier", 2, {}, "16-23", ""),
        ("frontier", 2, {}, "0-31", "note"),
        ("frontier", 0, {"ROCR_VISIBLE_DEVICES": "4"}, "0-7", ""),  # --gpu-bind=closest
        ("frontier", 5, {"ROCR_VISIBLE_DEVICES": "4"}, "40-47", "warning"),
        ("perlmutter", 3, {}, "0-15", ""),
        ("perlmutter", 3, {"CUDA_VISIBLE_DEVICES": "3,2,1,0"}, "0-15", "warning"),
        ("perlmutter", 0, {"CUDA_VISIBLE_DEVICES": "1,0", "SLURM_STEP_GPUS": "0,1"}, "0-15", ""),  # which are they?
        ("frontier", 0, {"HVDKIT_AGENT": "1"}, "0-7", ""),  # hvdrun binds
    ],
)
def test_a_task_of_srun_far_from_its_gpu(
    tmp_path: Path, node: str, local_rank: int, variables: dict[str, str], cpus: str, severity: str
) -> None:
    environ = {**SRUN, "SLURM_PROCID": str(local_rank), "SLURM_LOCALID": str(local_rank), **variables}
    findings = [finding for finding in find(facts_of(node, tmp_path, environ, cpus)) if finding.name == "gpu-far"]
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
    assert not findings or "--gpu-bind=closest" in findings[0].cure


def test_a_rank_of_pals_far_from_its_tile(tmp_path: Path) -> None:
    environ = {"PALS_RANKID": "19", "PMI_SIZE": "24", "PALS_LOCAL_RANKID": "7", "PMI_LOCAL_SIZE": "12"}
    (finding,) = find(facts_of("aurora", tmp_path / "far", environ, "0-7"))
    assert finding.name == "gpu-far" and "Local rank 7 runs on CPUs 0-7, and GPU 7 (0001:18:00.0)" in finding.seen
    assert (
        finding.cure.startswith("mpiexec --cpu-bind list:0-7,104-111:8-16,112-120:") and finding.cure.count(":") == 12
    )
    assert not find(facts_of("aurora", tmp_path / "near", environ, "60-67"))
    environ = {**environ, "ZE_AFFINITY_MASK": "7"}
    assert not find(facts_of("aurora", tmp_path / "one", environ, "60-67"))
    (finding,) = find(facts_of("aurora", tmp_path / "one", environ, "0-7"))
    assert finding.cure.startswith("Bind each rank to the cores near its GPU")


def test_a_script_that_sets_another_vendors_variable_too_late() -> None:
    found = scan("x.py", ast.parse("import os\nhvd.init()\nos.environ['ROCR_VISIBLE_DEVICES'] = '0'"))
    assert (found.visible_late, found.visible_variable) == (3, "ROCR_VISIBLE_DEVICES")
    (finding,) = [
        each for each in check_host(HEALTHY, JobRequest(script=replace(found, saves=True))) if "late" in each.name
    ]
    assert "x.py:3 sets ROCR_VISIBLE_DEVICES after" in finding.seen


def test_a_script_that_uses_the_local_rank_where_a_task_sees_one_gpu(tmp_path: Path) -> None:
    script = scan("x.py", ast.parse("import hvdkit\nhvd.init()\ntorch.cuda.set_device(hvd.local_rank())\nsave()"))
    one = facts_of("frontier", tmp_path, {"ROCR_VISIBLE_DEVICES": "6"})
    (finding,) = check_host(one, JobRequest(script=script))
    assert finding.name == "device-by-rank" and "(ROCR_VISIBLE_DEVICES=6)" in finding.seen
    assert not check_host(facts_of("frontier", tmp_path), JobRequest(script=script))


def test_ranks_of_the_small_job_on_one_gpu(tmp_path: Path) -> None:
    folders = plant_node("lumi", tmp_path)
    environ = {"ROCR_VISIBLE_DEVICES": "4"}
    selection = describe_selection(environ, folders)
    assert selection == {"visible": "0000:d1:00.0", "chosen": "ROCR_VISIBLE_DEVICES='4'"}
    assert describe_selection({}, folders) == {"visible": None, "chosen": ""}
    assert describe_selection({"CUDA_VISIBLE_DEVICES": "1"}, Folders.under(tmp_path / "x"))["visible"] == "1"
    ranks = tuple(Rank(rank, "n1", 2, 8, selection["visible"], selection["chosen"] or "") for rank in range(2))
    survey = Survey(hosts=(), here=HEALTHY, allreduce=Allreduce(ranks=ranks))
    (finding,) = check_small_job(survey)
    assert "Ranks 0, 1 on n1 share one GPU (ROCR_VISIBLE_DEVICES='4')" in finding.seen
    assert finding.cure.startswith("Unset ROCR_VISIBLE_DEVICES where")


def test_software_of_amd_and_intel_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = plant_node("frontier", tmp_path)
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    (tmp_path / "sys/module/amdgpu/version").write_text("6.8.5\n")
    (tmp_path / "opt/rocm/.info").mkdir(parents=True)
    (tmp_path / "opt/rocm/.info/version").write_text("6.3.1-48\n")
    vendor, listed = list_gpus(folders, {})
    found = read_vendor_gpus(vendor, listed, {"PATH": ""}, tmp_path)
    assert (found.driver, found.runtime, found.denied) == ("6.8.5", "ROCm 6.3.1-48", "")
    facts = replace(
        facts_of("frontier", tmp_path),
        accelerators=Accelerators(gpus=found.gpus, vendor="AMD", driver=found.driver, runtime=found.runtime),
    )
    row, library = _list_gpus(replace(facts, environ={"ROCR_VISIBLE_DEVICES": "1"}))
    assert library[0] == "RCCL" and row == (
        "GPUs",
        "8: AMD Instinct MI250X; driver 6.8.5, ROCm 6.3.1-48",
        "ROCR_VISIBLE_DEVICES=1",
    )
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may open anything
    assert read_vendor_gpus(vendor, listed, {"PATH": ""}, tmp_path).denied == str(tmp_path / "dev/kfd")
    (tmp_path / "usr/lib64").mkdir(parents=True)
    (tmp_path / "usr/lib64/libze_intel_gpu.so.1.6.31294").touch()
    vendor, listed = list_gpus(plant_node("aurora", tmp_path / "intel"), {})
    found = read_vendor_gpus(vendor, listed, {"PATH": "", "CCL_ROOT": "/opt/oneapi/ccl/2021.17"}, tmp_path)
    assert found.runtime == "Level Zero driver 1.6.31294"
    assert (found.library, found.library_version) == ("/opt/oneapi/ccl/2021.17", "2021.17")


def test_answers_of_amd_smi_and_xpu_smi() -> None:
    record = {"gpu": 0, "asic": {"market_name": "AMD Instinct MI300A"}, "driver": {"version": "6.12.12"}}
    for text in (json.dumps([record, {"gpu": 1}]), json.dumps({"gpu_data": [record, {"gpu": 1}]})):
        assert parse_amd_smi(text) == ({"0": "AMD Instinct MI300A", "1": ""}, "6.12.12")
    card = {"device_id": 0, "device_name": "Intel(R) Data Center GPU Max 1550", "pci_bdf_address": "0000:18:00.0"}
    assert parse_xpu_smi(json.dumps({"device_list": [card]})) == {"0000:18:00.0": card["device_name"]}
    for text in ("", "no GPU", "[3]", "{}", '{"gpu_data": 3}', '{"device_list": {}}'):
        assert parse_amd_smi(text) == ({}, "") and parse_xpu_smi(text) == {}


def test_for_which_gpus_torch_was_built() -> None:
    text = "cuda: Optional[str] = None\nhip: Optional[str] = '6.4.43484'\nxpu: Optional[str] = None\n"
    assert parse_torch_other(text) == {"hip": "6.4.43484"}
    assert parse_torch_other(text.replace("'6.4.43484'", "None")) == {}
