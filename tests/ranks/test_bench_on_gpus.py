"""hvdkit bench --device cuda without a GPU: its clock over events of no GPU, its models made small, its report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from torch import nn

from hvdkit.cli import build_parser, main
from hvdkit.errors import BenchError
from hvdkit.tools.bench.command import build_plan
from hvdkit.tools.bench.models import Model, Transformer, find_models, make_resnet, make_step
from hvdkit.tools.bench.report import (
    CPU,
    CUDA,
    NO_COMMUNICATION,
    OURS,
    SIZES,
    Case,
    Report,
    compare,
    read_report,
    select_models,
    write_report,
)
from hvdkit.tools.bench.show import list_rows
from hvdkit.tools.bench.timing import EventClock, time_each, time_in_a_row


class Gpu:
    """Has what EventClock uses of torch.cuda. Work takes 2 ms of it; `log` is what the host has asked for."""

    def __init__(self) -> None:
        self.given_ms, self.log = 0.0, list[str]()

    def work(self) -> None:
        self.given_ms += 2.0
        self.log.append("work")

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def Event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._at_ms = gpu, -1.0

    def record(self) -> None:
        self._at_ms = self._gpu.given_ms
        self._gpu.log.append("record")

    def synchronize(self) -> None:
        self._gpu.log.append("wait")

    def elapsed_time(self, end: Event) -> float:
        return end._at_ms - self._at_ms


def test_calls_in_a_row_are_timed_by_two_events_and_nothing_waits_between_them() -> None:
    gpu = Gpu()
    assert time_in_a_row(gpu.work, lambda: gpu.log.append("barrier"), 3, EventClock(gpu)) == [0.002]
    assert gpu.log == ["work", "synchronize", "barrier", "record", *["work"] * 3, "record", "wait"]


def test_each_call_is_timed_by_events_of_its_own() -> None:
    gpu = Gpu()
    assert time_each(gpu.work, lambda: gpu.log.append("barrier"), 2, EventClock(gpu)) == [0.002, 0.002]
    assert gpu.log == ["synchronize", "barrier", "record", "work", "record", "wait"] * 2


@pytest.mark.parametrize(
    ("make", "parameters"), [(make_resnet, 25_557_032), pytest.param(Transformer, 124_439_808, marks=pytest.mark.slow)]
)
def test_the_models_have_the_sizes_of_their_namesakes(make: Callable[[], nn.Module], parameters: int) -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in make().parameters()) == parameters


SMALL = {
    "ResNet": Model(
        "small",
        lambda: make_resnet((1, 1), 4, 5),
        lambda: (torch.randn(2, 3, 32, 32), torch.tensor([1, 3])),
        nn.functional.cross_entropy,
        bfloat16=True,
    ),
    "GPT-2": Model(
        "small",
        lambda: Transformer(2, 8, 2, 11, 6),
        lambda: (torch.randint(11, (2, 6)), torch.randint(11, (12,))),
        nn.functional.cross_entropy,
        bfloat16=True,
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_step_in_bfloat16_moves_every_float32_parameter(name: str) -> None:
    modules: list[nn.Module] = []

    def keep(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        optimizer.param_groups[0]["lr"] = 1.0
        modules.append(module)
        return module, optimizer

    step = make_step(SMALL[name], keep)
    before = {name: parameter.detach().clone() for name, parameter in modules[0].named_parameters()}
    step()
    for parameter_name, parameter in modules[0].named_parameters():
        assert parameter.dtype == torch.float32
        assert not torch.equal(parameter, before[parameter_name]), parameter_name


def test_a_transformer_looks_at_no_later_word() -> None:
    torch.manual_seed(0)
    model, words = Transformer(2, 8, 2, 11, 6), torch.randint(11, (1, 6))
    changed = words.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 11
    difference = (model(words) - model(changed)).abs().amax(dim=1)
    assert torch.all(difference[:4] == 0)
    assert torch.all(difference[4:] > 0)


def test_each_device_has_its_models_and_sizes() -> None:
    assert [model.name for model in find_models(["gpt"], CUDA)] == ["GPT-2 small, 8 x 1024 words"]
    with pytest.raises(BenchError, match="The models are: ResNet-50"):
        select_models(["mlp"], CUDA)
    plans = [build_plan(build_parser().parse_args(["bench", "allreduce", *more])) for more in ([], ["--device", CUDA])]
    assert [(plan.device, plan.sizes) for plan in plans] == [(CPU, SIZES[CPU]), (CUDA, SIZES[CUDA])]
    assert SIZES[CUDA][-1] == 256 * 2**20


REPORT = Report(
    "step",
    NO_COMMUNICATION,
    1,
    "",
    "1 rank",
    {"processor": "P", "GPU": "G"},
    [],
    [Case("m", 0, {NO_COMMUNICATION: [1.0], OURS: [1.009]}, {NO_COMMUNICATION: 2**20, OURS: 3 * 2**20})],
    CUDA,
)


def test_a_step_on_gpus_is_reported_with_its_memory_and_the_third_digit(tmp_path: Path) -> None:
    row = {"model": "m", "peer": OURS, "median": "1.01 s", "spread": "0 %", "ratio": "x1.009", "memory": "3 MiB"}
    assert list_rows(REPORT, [])[1] == row
    write_report(REPORT, tmp_path / "run.json")
    assert read_report(tmp_path / "run.json") == REPORT


def test_a_gpu_is_not_compared_with_a_cpu() -> None:
    with pytest.raises(BenchError, match="has device cpu, and this run cuda"):
        compare(replace(REPORT, device=CPU), REPORT)


@pytest.mark.skipif(torch.version.cuda is not None, reason="no GPU is missing: torch is a CUDA build")
@pytest.mark.parametrize("words", [["step"], ["allreduce", "-np", "2"]])
def test_without_cuda_nothing_starts(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words, "--device", CUDA]) == 2
    said = capsys.readouterr().err
    assert "no GPU can be used" in said and "is a build without CUDA. Install a CUDA build" in said
