"""What LocalSGD and DiLoCo learn, beside synchronous training: digits, and a small language model on Python's manual.

    hvdrun -np 2 python -m benchmarks.local_sgd

Every way of training has the same steps, data, learning rates and seeds, and is tested after synchronize_parameters().
Digits: the network of examples/pytorch_digits.py, SGD with momentum, `--epochs` of 22 steps, the mean of `--seeds`.
Language model: that of examples/pytorch_language_model.py, AdamW with a cosine schedule, `--text` letters of the
manual, `--passes` in windows of 65, 16 a rank and step. No times: this says what is learned, whatever else the machine
does. Run it with HVDKIT_TRANSPORT=mpi to have ranks of one host send as between hosts, so that compression counts.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import hvdkit.torch as hvd
from benchmarks.rows import build_parser, positive
from hvdkit.launch.cli.numbers import nonnegative_int, positive_int

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

Wrap = Callable[[torch.optim.Optimizer, nn.Module], Any]

SYNCHRONOUS, ALONE = "synchronous", "rank 0 alone, without communication"


def find_ways(every: int, start_after: int, outer: hvd.OuterSGD) -> dict[str, Wrap]:
    """Ways of training by name."""
    return {
        SYNCHRONOUS: lambda optimizer, model: hvd.DistributedOptimizer(optimizer, model.named_parameters()),
        ALONE: lambda optimizer, model: optimizer,
        "LocalSGD, every 8": lambda optimizer, model: hvd.LocalSGD(
            optimizer, model=model, every=8, start_after=start_after
        ),
        f"LocalSGD, every {every}": lambda optimizer, model: hvd.LocalSGD(
            optimizer, model=model, every=every, start_after=start_after
        ),
        f"DiLoCo, every {every}": lambda optimizer, model: hvd.DiLoCo(
            optimizer, model=model, every=every, outer=outer, start_after=start_after
        ),
        f"DiLoCo, every {every}, 2 fragments, overlap 5, fp16": lambda optimizer, model: hvd.DiLoCo(
            optimizer,
            model=model,
            every=every,
            outer=outer,
            start_after=start_after,
            fragments=2,
            overlap=5,
            compression=hvd.Compression.fp16,
        ),
        f"DiLoCo, every {every}, Int8": lambda optimizer, model: hvd.DiLoCo(
            optimizer,
            model=model,
            every=every,
            outer=outer,
            start_after=start_after,
            compression=hvd.Compression.Int8(),
        ),
    }


def main() -> None:
    """Train in all ways, and print the table on rank 0."""
    parser = build_parser(__doc__)
    parser.add_argument("--every", type=positive_int, default=50)
    parser.add_argument("--epochs", type=positive_int, default=20)
    parser.add_argument("--seeds", type=positive_int, default=3)
    parser.add_argument("--start-after", type=nonnegative_int, default=50)
    parser.add_argument("--first-seed", type=nonnegative_int, default=0)
    parser.add_argument("--outer", type=float, nargs=2, default=(0.7, 0.9), help="learning rate and momentum")
    parser.add_argument("--text", type=positive_int, default=400_000)
    parser.add_argument("--lr", type=positive, default=0.004, help="of the language model")
    parser.add_argument("--passes", type=positive_int, default=4, help="over its text")
    parser.add_argument("--only", choices=["digits", "language"])
    parser.add_argument("--ways", nargs="*", default=(), help="those whose name contains one of these, and synchronous")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    ways = {
        name: wrap
        for name, wrap in find_ways(options.every, options.start_after, hvd.OuterSGD(*options.outer)).items()
        if name == SYNCHRONOUS or not options.ways or any(part in name for part in options.ways)
    }
    if options.only != "language":
        accuracies = {
            name: [100 * train_digits(wrap, options.first_seed + seed, options.epochs) for seed in range(options.seeds)]
            for name, wrap in ways.items()
        }
        best = statistics.mean(accuracies[SYNCHRONOUS])
        _show("| digits | test accuracy, mean | of each seed | points below synchronous, at most 0.5 |")
        for name, found in accuracies.items():
            each = ", ".join(f"{one:.1f}" for one in found)
            below = best - statistics.mean(found)
            _show(f"| {name} | {statistics.mean(found):.2f} % | {each} | {below:.2f}{_missed(below > 0.5)} |")
    if options.only != "digits":
        losses = {name: train_language(wrap, options.text, options.lr, options.passes) for name, wrap in ways.items()}
        _show("| language model | test loss, nats a letter | above synchronous, at most 2 % |")
        for name, loss in losses.items():
            above = 100 * (loss / losses[SYNCHRONOUS] - 1)
            _show(f"| {name} | {loss:.4f} | {above:+.1f} %{_missed(above > 2)} |")
    hvd.shutdown()


def _missed(is_missed: bool) -> str:
    return ", missed" if is_missed else ""


def _show(line: str) -> None:
    if hvd.rank() == 0:
        print(line, flush=True)


def train_digits(wrap: Wrap, seed: int, epochs: int) -> float:
    """The accuracy on the test images."""
    example = load_example("pytorch_digits")
    torch.manual_seed(seed)
    model = example.make_model()
    torch.manual_seed(1000 * seed + hvd.rank())  # ranks drop out different neurons
    train, test = example.read_digits()
    sampler = hvd.data.ShardedSampler(train, seed=seed)
    batches = DataLoader(train, 32, sampler=sampler, drop_last=True)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9), model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.04, epochs * len(batches), cycle_momentum=False)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in batches:
            _step(optimizer, schedule, nn.functional.cross_entropy(model(images), labels), model)
    finish(optimizer)
    model.eval()
    with torch.no_grad():
        right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in DataLoader(test, 360))
    return right / len(test)


def train_language(wrap: Wrap, letters: int, rate: float, passes: int) -> float:
    """The loss on the test windows, in nats a letter."""
    example = load_example("pytorch_language_model")
    text = " ".join(" ".join(topics[name] for name in sorted(topics)).split())[:letters]
    codes = torch.tensor(list(text.encode("ascii", "replace")))
    width = example.CONTEXT + 1
    windows = TensorDataset(codes[: len(codes) // width * width].view(-1, width))
    train, test = random_split(windows, [0.9, 0.1], generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = example.LanguageModel()
    sampler = hvd.data.ShardedSampler(train, seed=0)
    batches: Iterable[Any] = DataLoader(train, 16, sampler=sampler, drop_last=True)
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=rate), model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, passes * len(batches))  # type: ignore[arg-type]
    for epoch in range(passes):
        sampler.set_epoch(epoch)
        for (batch,) in batches:
            _step(optimizer, schedule, model(batch), model)
    finish(optimizer)
    with torch.no_grad():
        losses = [(float(model(batch)), len(batch)) for (batch,) in DataLoader(test, 64)]
    return sum(loss * count for loss, count in losses) / sum(count for _, count in losses)


def _step(optimizer: Any, schedule: Any, loss: torch.Tensor, model: nn.Module) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()


def finish(optimizer: Any) -> None:
    """Make the ranks' parameters equal, where they are not."""
    if hasattr(optimizer, "synchronize_parameters"):
        optimizer.synchronize_parameters()


def load_example(name: str) -> Any:
    """A script of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
