"""hvdkit plan: sizes, memory and times against published figures, and what the command says."""

from __future__ import annotations

import csv
import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hvdkit.cli import main
from hvdkit.tools.bench.report import OURS, Case, Report
from hvdkit_planner.errors import PlanError
from hvdkit_planner.evaluate import Evaluation, build_csv, evaluate, read_table, summarise
from hvdkit_planner.layout import GIB, PRESETS, Calibration, Cluster, Layout, Transformer, check_layout, find_gpu
from hvdkit_planner.measured import with_links
from hvdkit_planner.search import Job, assess, search
from hvdkit_planner.sources import from_config, read_model
from hvdkit_planner.step import (
    compute_memory,
    data_bandwidth,
    layer_activations,
    ring_s,
    stage_bandwidth,
    tensor_bandwidth,
)

DATA = Path(__file__).parents[3] / "benchmarks" / "plan_data"
A100 = PRESETS["a100-80"]
GPT3 = Transformer(12288, 96, 96, 2048)
SMALL = "hidden=1024,layers=24,heads=16,sequence=1024"


def ask(*words: str) -> int:
    return main(["plan", *words])


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        (GPT3, 174.6),
        (Transformer(20480, 105, 128, 2048), 529.6),
        (Transformer(25600, 128, 160, 2048), 1008.0),
        (Transformer(8192, 48, 64, 2048), 39.1),
        (Transformer(768, 12, 12, 1024, vocabulary=50257), 0.1244),
    ],
)
def test_parameters_are_those_published_within_one_percent(model: Transformer, billions: float) -> None:
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_operations_are_those_of_the_article() -> None:
    h, s, layers, v, batch = 12288, 2048, 96, 51200, 64
    published = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))  # 96 with recomputation
    assert GPT3.step_flops(batch) == pytest.approx(published, rel=1e-3)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
LLAMA_3 = {**LLAMA, "intermediate_size": 14336, "vocab_size": 128256, "num_key_value_heads": 8}
GPT2 = {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50257, "n_positions": 1024}


@pytest.mark.parametrize(("config", "billions"), [(LLAMA, 6.738), (LLAMA_3, 8.03), (GPT2, 1.5576)])
def test_a_configuration_gives_the_published_number_of_parameters(config: dict[str, object], billions: float) -> None:
    assert from_config(config, {}, "a test").parameters / 1e9 == pytest.approx(billions, rel=1e-3)


SCRIPT = """
import torch
class Block(torch.nn.Module):
    def __init__(self, h):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(h, 4)
        self.a, self.b = torch.nn.LayerNorm(h), torch.nn.LayerNorm(h)
        self.up, self.down = torch.nn.Linear(h, 4 * h), torch.nn.Linear(4 * h, h)
def build_model():
    m = torch.nn.Module()
    m.words, m.places = torch.nn.Embedding(1000, 64), torch.nn.Embedding(128, 64)
    m.blocks = torch.nn.ModuleList(Block(64) for _ in range(6))
    m.norm = torch.nn.LayerNorm(64)
    return m
"""


def test_a_script_that_builds_the_model_gives_its_sizes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    model = read_model(str(script), {})
    assert model == Transformer(64, 6, 4, 128, vocabulary=1000, feedforward=256)
    scope: dict[str, object] = {}
    exec(SCRIPT, scope)
    built = scope["build_model"]()  # type: ignore[operator]
    assert model.parameters == sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize(
    ("text", "sizes", "message"),
    [
        ("nowhere.json", {}, "cannot be read: No such file.*Give a config.json"),
        ("hidden=64,layers=2", {}, "does not say heads. Add --heads N"),
        ("hidden=64,leyers=2", {}, "'leyers=2' is no size of a model"),
        ("hidden=65,layers=2,heads=2", {}, "hidden 65 is no multiple of the 2 heads"),
        ("nowhere.py:f", {}, "there is no script nowhere.py"),
    ],
)
def test_models_that_cannot_be_read(text: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_model(text, sizes)


def test_experts_are_refused() -> None:
    with pytest.raises(PlanError, match="mixtures of experts are not planned"):
        from_config({**LLAMA, "num_local_experts": 8}, {}, "config.json")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_state_is_divided_as_the_zero_stage_says(zero: int) -> None:
    layout = Layout(8, 1, 1, 1, zero=zero)
    model = Transformer(1024, 4, 16, 1024)
    size = [18, 6 + 12 / 8, 2 + 16 / 8, 18 / 8][zero]
    memory = compute_memory(model, layout, 8)
    assert memory.state == pytest.approx(size * model.parameters, rel=1e-3)


def test_activations_are_those_of_the_article() -> None:
    s, h, a, t = 2048, 12288, 96, 8
    layout = Layout(1, t, 8, 1)
    assert layer_activations(GPT3, layout) == s * h * (10 + 24 / t + 5 * a * s / (h * t))
    both = replace(layout, sequence_parallel=True)
    assert layer_activations(GPT3, both) == s * h / t * (34 + 5 * a * s / h)
    assert layer_activations(GPT3, replace(both, recompute="selective")) == 34 * s * h / t
    assert layer_activations(GPT3, replace(layout, recompute="full")) == 2 * s * h


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages() -> None:
    def held(micro_batches: int, chunks: int = 1) -> float:
        return compute_memory(GPT3, Layout(1, 8, 8, 1, chunks), micro_batches).activations

    assert held(64) == held(8)
    assert held(4) == pytest.approx(held(8) / 2, rel=0.01)
    assert held(64, 3) == pytest.approx(held(64) * (1 + 7 / (8 * 3)), rel=0.01)


def test_links_are_those_of_the_ranks_places() -> None:
    constants = Calibration(link_efficiency=1.0, network_efficiency=1.0, collective_s=0.0)
    cluster, link, network = Cluster(A100, 64), A100.link, A100.network
    assert tensor_bandwidth(cluster, Layout(1, 8, 8, 1), constants) == link
    assert data_bandwidth(cluster, Layout(8, 8, 1, 1), constants) == network  # each GPU of a node in a ring of its own
    assert data_bandwidth(cluster, Layout(32, 2, 1, 1), constants) == 4 * network
    assert data_bandwidth(cluster, Layout(4, 2, 8, 1), constants) == link  # a node each
    assert stage_bandwidth(cluster, Layout(1, 8, 8, 1), constants) == network
    assert ring_s(8e9, 4, 1e9, constants) == 12
    assert ring_s(8e9, 1, 1e9, constants) == 0


def test_the_bubble_is_that_of_the_schedule() -> None:
    job = Job(replace(GPT3, vocabulary=1), Cluster(A100, 64), 64)
    plain, interleaved = (assess(job, Layout(1, 8, 8, 1, chunks)).time for chunks in (1, 3))
    assert plain.bubble / (plain.compute + plain.tensor) == pytest.approx(7 / 64, rel=0.02)  # the loss is on one stage
    assert interleaved.bubble == pytest.approx(plain.bubble / 3)
    assert interleaved.transfers > 2 * plain.transfers


def test_the_best_plan_is_the_fastest_that_fits_and_the_articles_layout_is_listed() -> None:
    job = Job(Transformer(4096, 32, 32, 2048), Cluster(A100, 64), 512)
    plans = search(job)
    assert all(candidate.fits(job) for candidate in plans.fitting)
    times = [candidate.time.total for candidate in plans.fitting]
    assert times[0] <= min(times) * 1.01
    assert (8, 2, 4) in {(plan.layout.dp, plan.layout.tp, plan.layout.pp) for plan in plans.fitting}


def _half() -> Evaluation:
    """The rows of the sizes that the constants were not fitted to (benchmarks/plan_fit.py)."""
    whole = evaluate(read_table(DATA / "single_node.csv"), A100, Calibration(), {})
    fitted = ((1024, 12), (1024, 20), (2048, 16), (2048, 24))
    verdicts = [v for v in whole.verdicts if v.row and (v.row.model.hidden, v.row.model.layers) not in fitted]
    assert len(verdicts) == 720
    return Evaluation(whole.header, [], verdicts)


def test_errors_on_the_sizes_that_were_not_fitted() -> None:
    found = summarise(_half())
    assert found["predicted"] == 720
    assert found["mean_error"] < 0.06
    assert found["worst_error"] < 0.25
    assert found["mean_regret"] < 0.03


def test_errors_on_published_times_of_up_to_3072_gpus() -> None:
    found = summarise(evaluate(read_table(DATA / "published.csv"), A100, Calibration(), {}))
    assert found["predicted"] == found["timed"] == 18
    assert found["mean_error"] < 0.08
    assert found["worst_error"] < 0.20


TABLE = (
    "\ufeffName, Global  Batch,MICRO BATCH,Hidden Size,attention heads,# Layers,Sequence Length,Tensor Parallelism,"
    "data parallelism,Pipeline Parallelism,Iteration Time (s)\n"
    "right,16,8,1024,16,24,1024,1,1,2,0.372\n"
    "large,8,1,25600,160,128,2048,8,1,1,\n"
    "wrong,15,8,1024,16,24,1024,1,1,2,0.3\n"
    "words,16,eight,1024,16,24,1024,1,1,2,0.3\n"
)


def test_a_table_is_kept_and_its_predictions_stand_beside_it() -> None:
    found = evaluate(TABLE, A100, Calibration(), {})
    right, large, wrong, words = csv.DictReader(io.StringIO(build_csv(found)))
    assert right["Name"] == "right"
    assert right["Iteration Time (s)"] == "0.372"
    assert float(right["predicted time (ms)"]) == pytest.approx(372, rel=0.1)
    assert float(right["error of time (%)"]) == pytest.approx(
        100 * (float(right["predicted time (ms)"]) / 372 - 1), abs=0.01
    )
    assert 5 < float(right["predicted memory (GiB)"]) < 80
    assert "vocabulary 51200" in right["assumed"]
    assert large["predicted time (ms)"] == "does not fit"
    assert float(large["predicted memory (GiB)"]) > 1000
    assert "a batch of 15 is no multiple of dp 1 x micro-batch 8" in wrong["predicted time (ms)"]
    assert "micro batch is 'eight', not a whole number" in words["predicted time (ms)"]
    assert summarise(found)["timed"] == 1


def test_an_evaluated_table_can_be_evaluated_again() -> None:
    once = build_csv(evaluate(TABLE, A100, Calibration(), {}))
    assert build_csv(evaluate(once, A100, Calibration(), {})) == once


def test_a_table_without_what_is_needed() -> None:
    with pytest.raises(PlanError, match="no column says layers, batch, gpus or dp; there are hidden size, tp, pp"):
        evaluate("hidden size,tp,pp\n1,1,1\n", A100, Calibration(), {})
    with pytest.raises(PlanError, match="'tp' and 'tensor parallelism' are both tp"):
        evaluate("tp,tensor parallelism\n1,1\n", A100, Calibration(), {})


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(2, 8, 8, 1), "is 128 ranks, but there are 64 GPUs"),
        (Layout(1, 64, 1, 1), "tp 64 does not divide the 96 attention heads"),
        (Layout(1, 8, 8, 3), "a batch of 64 is no multiple of dp 1 x micro-batch 3"),
        (Layout(1, 8, 8, 1, chunks=5), "do not divide 96 layers"),
        (Layout(2, 4, 8, 1, zero=2), "Use ZeRO-1, or pp 1"),
        (Layout(0, 8, 8, 1), "dp is 0"),
    ],
)
def test_layouts_that_cannot_be_trained(layout: Layout, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_layout(layout, GPT3, Cluster(A100, 64), 64)


def test_the_command_lists_plans_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(SMALL, "--gpus", "8", "--batch", "64", "--explain", "2,2,2") == 0
    shown = capsys.readouterr().out
    assert "the fastest" in shown
    assert shown.splitlines()[2].split().count("tp") == 2, "the degree, and the time of its collectives"
    assert "pp bubble +" in shown
    assert "dp 2 x tp 2 x pp 2" in shown
    assert "of the GPUs' peak" in shown


def test_a_small_model_has_millions_of_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("hidden=64,layers=2,heads=4,vocabulary=1000,sequence=64", "--gpus", "1", "--batch", "8") == 0
    assert capsys.readouterr().out.startswith("0.1682 million parameters on 1 x ")


def test_a_plot_without_matplotlib_names_the_option_and_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert ask(SMALL, "--gpus", "8", "--batch", "64", "--plot", "plan.svg") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("hvdkit plan: --plot draws with matplotlib") and "hvdkit[plot]" in said


def test_json_has_memory_and_time_by_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(SMALL, "--gpus", "8", "--batch", "64", "--json", "--top", "2") == 0
    document = json.loads(capsys.readouterr().out)
    best, second = document["plans"]
    assert document["format"] == "hvdkit plan 1"
    assert best["dp"] * best["tp"] * best["pp"] == 8
    assert sum(size for part, size in best["memory_bytes"].items() if part != "total") == pytest.approx(
        best["memory_bytes"]["total"]
    )
    assert set(best["step_s"]) == {"compute", "tensor", "bubble", "transfers", "gradients", "update", "total"}
    assert best["step_s"]["total"] <= second["step_s"]["total"] * 1.01
    assert best["tokens_per_s"] == pytest.approx(64 * 1024 / best["step_s"]["total"])


def test_what_does_not_fit_is_said_with_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("hidden=12288,layers=96,heads=96", "--gpus", "8", "--batch", "8", "--gpu", "A100-40") == 1
    assert "does not fit: none of" in (shown := capsys.readouterr().out)
    assert "into 40 GiB" in shown
    assert "Use more GPUs" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([SMALL, "--gpus", "8"], "--batch is missing"),
        ([SMALL, "--gpus", "8", "--batch", "7", "--gpu", "b52"], "there is no GPU 'b52'. Give one of v100-16"),
        ([SMALL, "--gpus", "8", "--batch", "8", "--plot", "x.txt"], "the suffix chooses the format"),
        ([SMALL, "--gpus", "8", "--batch", "8", "--explain", "3,1,1"], "no layout of dp,tp,pp = 3,1,1"),
        ([SMALL, "--gpus", "2", "--batch", "8", "--measure"], "needs the links: add --bench"),
        ([SMALL, "--evaluate", "x.csv"], "takes the models from its table"),
        (["--evaluate", "nowhere.csv"], "nowhere.csv cannot be read"),
    ],
)
def test_input_that_cannot_be_used(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(*words) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_links_can_be_those_that_bench_has_measured() -> None:
    cases = [Case("4 KiB", 4096, {OURS: [2e-5]}), Case("1 GiB", GIB, {OURS: [0.1]})]
    report = Report("allreduce", OURS, 2, "float32", "2 ranks", {}, (), cases)
    gpu, constants = with_links(find_gpu("A100"), Calibration(), report)
    assert gpu.link == pytest.approx(GIB / 0.1)
    assert ring_s(GIB, 2, gpu.link * constants.link_efficiency, constants) == pytest.approx(0.1, rel=0.01)
    with pytest.raises(PlanError, match="Give the file of hvdkit bench allreduce"):
        with_links(gpu, constants, replace(report, kind="step"))


def test_fused_attention_keeps_no_scores(capsys: pytest.CaptureFixture[str]) -> None:
    def activations(*words: str) -> float:
        assert ask("hidden=64,layers=1,heads=8,sequence=8192", "--gpus", "1", "--batch", "1", "--json", *words) == 0
        (plan,) = json.loads(capsys.readouterr().out)["plans"]
        return float(plan["memory_bytes"]["activations"])

    assert activations() - activations("--fused-attention") == 5 * 8 * 8192**2


@pytest.mark.slow
def test_the_example_is_planned_with_a_layer_measured_here(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[3] / "examples" / "pytorch_language_model.py"
    words = [f"{example}:LanguageModel", "--sequence", "64", "--gpus", "1", "--batch", "8", "--measure", "--json"]
    assert ask(*words) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["model"]["hidden"], document["model"]["layers"], document["model"]["heads"]) == (64, 2, 4)
    assert 1e-5 < document["plans"][0]["step_s"]["compute"] < 10


def test_a_figure_is_drawn(tmp_path: Path) -> None:
    assert ask(SMALL, "--gpus", "8", "--batch", "64", "--plot", str(tmp_path / "plan.svg")) == 0
    assert "exposed dp" in (tmp_path / "plan.svg").read_text()


def test_the_evaluated_table_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text(TABLE, encoding="utf-8")
    assert ask("--evaluate", str(source), "--output", str(target)) == 0
    assert len(target.read_text().splitlines()) == 5
    assert "4 rows, 1 predicted, 1 do not fit, 2 refused" in capsys.readouterr().out
