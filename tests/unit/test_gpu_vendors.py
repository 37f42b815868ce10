"""The table of GPU vendors, on files of /sys and /proc as five kinds of nodes have them."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded_nodes import list_cpus, plant_node
from refused import refused

from hvdkit.gpu_vendors import (
    AMD,
    INTEL,
    NVIDIA,
    VARIABLES,
    VENDORS,
    Folders,
    Gpu,
    find_vendor,
    list_gpus,
    read_seen,
)
from hvdkit.launch.agent.host_info import divide_near, find_gpus, format_cpus
from hvdkit.launch.detect.gpus import count_gpus
from hvdkit.launch.plan.gpu_sharing import GpuSharing
from hvdkit.launch.plan.resources import HostResources, check_gpus, count_gpus_in_use, find_near_cpus, parse_resources

MI250X = "0-15,64-79", "16-31,80-95", "32-47,96-111", "48-63,112-127"


def numbers(gpus: tuple[Gpu | None, ...]) -> list[int | None]:
    return [None if gpu is None else gpu.number for gpu in gpus]


@pytest.mark.parametrize(
    ("node", "vendor", "count", "nodes"),
    [
        ("frontier", "AMD", 8, [3, 3, 1, 1, 0, 0, 2, 2]),
        ("lumi", "AMD", 8, [3, 3, 1, 1, 0, 0, 2, 2]),
        ("mi300a", "AMD", 4, [0, 1, 2, 3]),
        ("aurora", "Intel", 12, [0] * 6 + [1] * 6),
        ("perlmutter", "NVIDIA", 4, [3, 2, 1, 0]),
    ],
)
def test_the_gpus_of_a_node_are_counted_and_near_a_numa_node(
    tmp_path: Path, node: str, vendor: str, count: int, nodes: list[int]
) -> None:
    found, gpus = list_gpus(plant_node(node, tmp_path), {})
    assert (found.name, len(gpus)) == (vendor, count) and numbers(gpus) == list(range(count))
    assert [gpu.node for gpu in gpus] == nodes and all(gpu.cpus for gpu in gpus)
    assert len({gpu.place for gpu in gpus}) == count, "each has a name of its own"


def test_what_is_known_of_a_gpu(tmp_path: Path) -> None:
    gpu = list_gpus(plant_node("frontier", tmp_path / "amd"), {})[1][4]
    assert gpu == Gpu(
        4, "0000:d1:00.0", -1, "GPU-1a00000000004444", "AMD Instinct MI250X", 68702699520, 10960896, 0, MI250X[0]
    )
    tile = list_gpus(plant_node("aurora", tmp_path / "intel"), {})[1][7]
    assert (tile.place, tile.model) == ("0001:18:00.0/1", "Intel Data Center GPU Max 1550")
    assert tile.memory_bytes == 64 * 2**30


@pytest.mark.parametrize(
    ("node", "cores"),
    [
        # Frontier User Guide: GCD 0 with cores 48-55, 1 with 56-63, 2 with 16-23, ..., and each core's second thread.
        ("frontier", [48, 56, 16, 24, 0, 8, 32, 40]),
        ("mi300a", [0, 24, 48, 72]),
        ("aurora", [0, 8, 17, 26, 34, 43, 52, 60, 69, 78, 86, 95]),
        ("perlmutter", [48, 32, 16, 0]),
    ],
)
def test_ranks_of_hvdrun_get_cores_near_their_gpus(tmp_path: Path, node: str, cores: list[int]) -> None:
    _, seen = find_gpus({}, plant_node(node, tmp_path))
    near = find_near_cpus([[(name, cpus) for name, cpus in seen]] * len(seen))
    shares = divide_near(list_cpus(node), near, "core")
    assert shares and [min(share.cpus) for share in shares] == cores
    if node == "frontier":
        assert format_cpus(shares[0].cpus) == "48-55,112-119" and format_cpus(shares[5].cpus) == "8-15,72-79"


@pytest.mark.parametrize(
    ("variables", "expected", "fault"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7], ()),
        ({"ROCR_VISIBLE_DEVICES": "4,0"}, [4, 0], ()),
        ({"ROCR_VISIBLE_DEVICES": "GPU-1A00000000004444, 0"}, [4, 0], ()),
        ({"ROCR_VISIBLE_DEVICES": ""}, [], ()),
        ({"ROCR_VISIBLE_DEVICES": "2,9,0"}, [2], ("ROCR_VISIBLE_DEVICES", "9", None)),
        ({"ROCR_VISIBLE_DEVICES": "2,2,0"}, [2], ("ROCR_VISIBLE_DEVICES", None, "2")),  # ends the list
        ({"ROCR_VISIBLE_DEVICES": "GPU-1a"}, [], ("ROCR_VISIBLE_DEVICES", "GPU-1a", None)),  # which of the eight?
        ({"HIP_VISIBLE_DEVICES": "2,2,0"}, [2, 0], ("HIP_VISIBLE_DEVICES", None, "2")),  # is skipped
        ({"HIP_VISIBLE_DEVICES": "-1"}, [], ("HIP_VISIBLE_DEVICES", "-1", None)),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1"}, [1], ()),
        ({"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "1"}, [3], ()),
        ({"CUDA_VISIBLE_DEVICES": ""}, [0, 1, 2, 3, 4, 5, 6, 7], ()),  # hides nothing, as HIP reads it
        ({"ROCR_VISIBLE_DEVICES": "6,7", "HIP_VISIBLE_DEVICES": "1"}, [7], ()),
        ({"ROCR_VISIBLE_DEVICES": "6", "HIP_VISIBLE_DEVICES": "6"}, [], ("HIP_VISIBLE_DEVICES", "6", None)),
        ({"ROCR_VISIBLE_DEVICES": "x", "HIP_VISIBLE_DEVICES": "0"}, [], ("ROCR_VISIBLE_DEVICES", "x", None)),
    ],
)
def test_amd_selects_by_rocr_and_within_that_by_hip(
    tmp_path: Path, variables: dict[str, str], expected: list[int], fault: tuple[str, ...]
) -> None:
    _, gpus = list_gpus(plant_node("frontier", tmp_path), variables)
    seen = AMD.select(variables, gpus)
    assert numbers(seen.gpus) == expected
    assert (seen[1:] if fault else seen[2:]) == (fault or (None, None))


def test_a_gpu_that_the_control_group_denies_is_not_counted(tmp_path: Path) -> None:
    """Slurm's task with GCDs 4 and 5 reads the properties of these only; its ROCR_VISIBLE_DEVICES counts from 0."""
    folders = plant_node("lumi", tmp_path)
    for node in (4, 5, 6, 7, 10, 11):
        (folders.kfd / str(node) / "properties").unlink()
    environ = {"ROCR_VISIBLE_DEVICES": "1", "SLURM_STEP_GPUS": "4,5"}
    vendor, gpus = list_gpus(folders, environ)
    assert [gpu.bus for gpu in gpus] == ["0000:d1:00.0", "0000:d6:00.0"]
    assert read_seen(vendor, gpus, environ) == [["0000:d6:00.0", MI250X[0]]]


def test_partitions_of_an_apu_are_gpus_of_one_address(tmp_path: Path) -> None:
    folders = plant_node("mi300a", tmp_path)
    text = (folders.kfd / "4" / "properties").read_text()
    (folders.kfd / "12").mkdir()
    (folders.kfd / "12" / "properties").write_text(text.replace("location_id 256", f"location_id {256 + (1 << 28)}"))
    _, gpus = list_gpus(folders, {})
    assert [gpu.place for gpu in gpus] == [
        "0000:01:00.0/0",
        "0001:01:00.0",
        "0002:01:00.0",
        "0003:01:00.0",
        "0000:01:00.0/1",
    ]


def test_the_small_gpu_of_a_desktop_processor_is_left_out(tmp_path: Path) -> None:
    folders = plant_node("mi300a", tmp_path)
    for device in folders.devices.iterdir():
        (device / "mem_info_vram_total").write_text(f"{512 * 2**20}\n")
    assert list_gpus(folders, {}) == (NVIDIA, ())
    (folders.devices / "0002:01:00.0" / "mem_info_vram_total").write_text(f"{16 * 2**30}\n")
    assert len(list_gpus(folders, {})[1]) == 4, "beside a large one HIP counts it, and so do its numbers"


@pytest.mark.parametrize(
    ("variables", "expected", "invalid"),
    [
        ({}, list(range(12)), None),
        ({"ZE_FLAT_DEVICE_HIERARCHY": "COMBINED"}, list(range(12)), None),
        ({"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, list(range(6)), None),
        ({"ZE_AFFINITY_MASK": "7,0"}, [0, 7], None),  # in the driver's order
        ({"ZE_AFFINITY_MASK": "12,3"}, [3], "12"),  # is skipped
        ({"ZE_AFFINITY_MASK": "0.1"}, [], "0.1"),  # the driver skips card.tile unless COMPOSITE
        ({"ZE_AFFINITY_MASK": ""}, list(range(12)), None),
        ({"ZE_AFFINITY_MASK": "0.1,5.0,5.1", "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, [0, 5], None),
        ({"ONEAPI_DEVICE_SELECTOR": "level_zero:gpu"}, list(range(12)), None),
        ({"ONEAPI_DEVICE_SELECTOR": "level_zero:3,1"}, [1, 3], None),
        ({"ONEAPI_DEVICE_SELECTOR": "level_zero:1", "ZE_AFFINITY_MASK": "6,7"}, [7], None),
        ({"ONEAPI_DEVICE_SELECTOR": "opencl:cpu"}, [], None),
        ({"ONEAPI_DEVICE_SELECTOR": "!opencl:*"}, list(range(12)), None),
    ],
)
def test_intel_counts_tiles_or_cards_and_selects_by_the_mask(
    tmp_path: Path, variables: dict[str, str], expected: list[int], invalid: str | None
) -> None:
    _, gpus = list_gpus(plant_node("aurora", tmp_path), variables)
    seen = INTEL.select(variables, gpus)
    assert numbers(seen.gpus) == expected and seen.invalid == invalid


def test_the_gpu_in_an_intel_processor_is_left_out(tmp_path: Path) -> None:
    folders = plant_node("aurora", tmp_path)
    device = folders.devices / "0000:00:02.0"
    (device / "drm" / "card6").mkdir(parents=True)
    (device / "vendor").write_text("0x8086\n")
    (device / "class").write_text("0x030000\n")
    assert len(list_gpus(folders, {})[1]) == 12
    device.rename(folders.devices / "0000:03:00.0")
    _, gpus = list_gpus(folders, {})
    assert len(gpus) == 13 and gpus[0].place == "0000:03:00.0", "behind a bridge it is a card of its own"


def test_the_driver_xe_has_a_folder_for_each_tile(tmp_path: Path) -> None:
    folders = plant_node("aurora", tmp_path)
    for device in folders.devices.glob("*:42:*"):
        for gt in device.glob("drm/card*/gt/gt*"):
            (gt / "id").unlink()
            gt.rmdir()
        for tile in range(2):
            (device / f"tile{tile}" / "memory").mkdir(parents=True)
    assert len(list_gpus(folders, {})[1]) == 12


def test_it_is_unknown_which_gpu_a_number_of_a_slurm_job_is_where_all_are_listed(tmp_path: Path) -> None:
    environ = {"SLURM_JOB_GPUS": "2,3", "ZE_AFFINITY_MASK": "0"}
    assert find_gpus(environ, plant_node("aurora", tmp_path)) == ("Intel", [["", ""]])


def test_a_host_with_gpus_of_two_vendors_uses_those_of_the_first_in_the_table(tmp_path: Path) -> None:
    plant_node("frontier", tmp_path)
    plant_node("perlmutter", tmp_path)
    vendor, gpus = list_gpus(Folders.under(tmp_path), {})
    assert vendor is NVIDIA and len(gpus) == 4
    assert list_gpus(Folders.under(tmp_path / "none"), {}) == (NVIDIA, ())


def test_the_table_is_complete() -> None:
    for vendor in VENDORS:
        assert all(vendor[:-1]), f"{vendor.name} has an empty field"
        assert find_vendor(vendor.name) is vendor and vendor.variable in VARIABLES
        assert vendor.hides.partition("=")[0] in vendor.variables
    assert find_vendor("") is NVIDIA
    assert NVIDIA.describe_selection({}) == "CUDA_VISIBLE_DEVICES is not set"
    chosen = {"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "4", "PATH": "/bin"}
    assert AMD.describe_selection(chosen) == "ROCR_VISIBLE_DEVICES='4' HIP_VISIBLE_DEVICES='0'"


@pytest.mark.parametrize(
    ("node", "variables", "ranks"),
    [
        ("frontier", {}, 8),
        ("frontier", {"ROCR_VISIBLE_DEVICES": "0,1,2"}, 3),
        ("frontier", {"ROCR_VISIBLE_DEVICES": "0,1,2", "HIP_VISIBLE_DEVICES": "1"}, 1),
        ("mi300a", {}, 4),
        ("aurora", {}, 12),
        ("aurora", {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, 6),
        ("aurora", {"ZE_AFFINITY_MASK": "0,1,2,3"}, 4),
        ("perlmutter", {}, 4),
        ("perlmutter", {"CUDA_VISIBLE_DEVICES": "3,2"}, 2),
    ],
)
def test_np_gpu_counts_the_gpus_of_each_vendor(
    tmp_path: Path, node: str, variables: dict[str, str], ranks: int
) -> None:
    folders = plant_node(node, tmp_path)
    assert count_gpus({"PATH": "", **variables}, folders.nvidia, tmp_path) == ranks


@pytest.mark.parametrize(
    ("node", "variables", "names"),
    [
        ("lumi", {"ROCR_VISIBLE_DEVICES": ""}, ["list 8 of AMD; ROCR_VISIBLE_DEVICES=''.", "Check amd-smi and ROCR_V"]),
        (
            "aurora",
            {"ZE_AFFINITY_MASK": "0.0"},
            ["list 12 of Intel; ZE_AFFINITY_MASK='0.0'.", "xpu-smi and ZE_AFFINITY"],
        ),
    ],
)
def test_np_gpu_names_the_variable_that_hides_the_gpus(
    tmp_path: Path, node: str, variables: dict[str, str], names: list[str]
) -> None:
    plant_node(node, tmp_path)
    with refused("gpu-missing", names=names):
        count_gpus({"PATH": "", **variables}, tmp_path / "none", tmp_path)


@pytest.mark.parametrize(
    ("node", "library", "show", "hide"),
    [
        ("frontier", "RCCL refuses", "(ROCR_VISIBLE_DEVICES)", "ROCR_VISIBLE_DEVICES=''"),
        ("aurora", "oneCCL is made for one rank", "(ZE_AFFINITY_MASK)", "ONEAPI_DEVICE_SELECTOR=opencl:cpu"),
        ("perlmutter", "NCCL refuses", "(CUDA_VISIBLE_DEVICES)", "CUDA_VISIBLE_DEVICES=''"),
    ],
)
def test_hvdrun_names_the_vendors_library_and_variable_where_ranks_would_share_gpus(
    tmp_path: Path, node: str, library: str, show: str, hide: str
) -> None:
    vendor, gpus = find_gpus({}, plant_node(node, tmp_path))
    report = {"allowed": [0], "cores": 1, "shared_mib": 999, "python": "3.11.1", "gpus": gpus, "gpu_vendor": vendor}
    host = parse_resources(report)
    (text,) = check_gpus([("n1", host)] * (len(gpus) + 1), GpuSharing.WARNED)
    assert all(part in text for part in (library, show, hide)), text
    assert not check_gpus([("n1", host)] * len(gpus), GpuSharing.WARNED)
    with refused("gpus-shared", names=[show]):
        check_gpus([("n1", host)] * (len(gpus) + 1), GpuSharing.REFUSED_BY_NP)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([[("a", ""), ("b", "")]] * 3, {"n1": "2 AMD"}),
        ([[("a", "")], [("b", "")], [("c", "")]], {"n1": "3 AMD"}),
        ([[("", "")]] * 3, {"n1": "3 AMD"}),  # a task sees one, whichever it is
        ([[("", "")] * 4] * 3, {"n1": "4 AMD"}),
        ([[]] * 3, {}),
    ],
)
def test_the_gpus_of_a_host_are_counted_once(seen: list[list[tuple[str, str]]], expected: dict[str, str]) -> None:
    ranks = [("n1", HostResources(gpus=tuple(gpus), gpu_vendor="AMD")) for gpus in seen]
    assert count_gpus_in_use([*ranks, ("n2", HostResources())]) == expected


def test_an_agents_report_names_the_vendor_or_is_of_nvidia() -> None:
    report = {"allowed": [0], "cores": 1, "shared_mib": 999, "python": "3.11.1", "gpus": []}
    assert parse_resources(report).gpu_vendor == HostResources().gpu_vendor == "NVIDIA"
    for wrong in ({**report, "gpu_vendor": 7}, [7], 7):
        with pytest.raises(ValueError, match="resources of a host"):
            parse_resources(wrong)  # type: ignore[arg-type]
