"""The models that hvdkit bench trains, and their steps for each peer: alone, with hvdkit, with torch's DDP.

On CPUs: a model of large layers, one of convolutions, one of many small layers. On GPUs, in bfloat16 (autocast):
ResNet-50 and a transformer with GPT-2 small's sizes, written here so that no other package is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hvdkit.torch as hvd
from hvdkit.tools.bench.gpus import find_clock, read_memory
from hvdkit.tools.bench.report import CPU, CUDA, LIBRARIES, MODELS, NO_COMMUNICATION, OURS, select_models
from hvdkit.tools.bench.timing import Turn, time_each, time_in_a_row


@dataclass(frozen=True)
class Model:
    """A model to train.

    name: its name.
    make: builds it.
    batch: makes inputs and targets of one step.
    loss: computes the loss from the model's output and the targets.
    bfloat16: is it computed in bfloat16 (autocast)? Parameters and gradients are float32 in any case.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss
    bfloat16: bool = False


def _mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())))


def _conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * 8 * 8, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def _small_layers() -> nn.Module:
    layers = (layer for _ in range(100) for layer in (nn.Linear(64, 64), nn.ReLU()))
    return nn.Sequential(*layers, nn.Linear(64, 10))


_MLP, _CONV, _SMALL_LAYERS = MODELS[CPU]
CPU_MODELS = (
    Model(_MLP, _mlp, lambda: (torch.randn(64, 1024), torch.randn(64, 1024))),
    Model(_CONV, _conv_net, lambda: (torch.randn(8, 3, 32, 32), torch.randn(8, 10))),
    Model(_SMALL_LAYERS, _small_layers, lambda: (torch.randn(32, 64), torch.randn(32, 10))),
)


class Bottleneck(nn.Module):
    """ResNet's block of 1x1, 3x3 and 1x1 convolutions (He et al., arXiv 1512.03385), with the stride in the 3x3."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.main = nn.Sequential(
            *_conv(channels, width, 1),
            nn.ReLU(inplace=True),
            *_conv(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_conv(width, out, 1),
        )
        equal = stride == 1 and channels == out
        self.skip = nn.Identity() if equal else nn.Sequential(*_conv(channels, out, 1, stride))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (n, channels, h, w) to (n, 4 * width, h / stride, w / stride)."""
        return nn.functional.relu(self.main(inputs) + self.skip(inputs))


def make_resnet(blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> nn.Module:
    """Make ResNet-50 for images (n, 3, h, w), or a smaller model of the same form."""
    layers: list[nn.Module] = [*_conv(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    channels = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(channels, width << stage, 2 if stage and not block else 1))
            channels = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def _conv(channels: int, out: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    conv = nn.Conv2d(channels, out, kernel, stride=stride, padding=kernel // 2, bias=False)
    return conv, nn.BatchNorm2d(out)


class Transformer(nn.Module):
    """GPT-2 small (124 million parameters; the word embedding is the last layer too), or a smaller model."""

    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, words: int = 50257, tokens: int = 1024
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        nn.init.normal_(self.words.weight, std=0.02)  # as GPT-2 does: it is the last layer too
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, nn.GELU("tanh"), batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, words: Tensor) -> Tensor:
        """Map words (n, tokens) to the scores of the next words (n * tokens, number of words)."""
        tokens = words.shape[1]
        places = torch.arange(tokens, device=words.device)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens, device=words.device)
        inner = self.blocks(self.words(words) + self.places(places), mask, is_causal=True)
        return nn.functional.linear(inner, self.words.weight).flatten(0, 1)


_RESNET, _GPT = MODELS[CUDA]
GPU_MODELS = (
    Model(
        _RESNET,
        make_resnet,
        lambda: (torch.randn(64, 3, 224, 224), torch.randint(1000, (64,))),
        nn.functional.cross_entropy,
        bfloat16=True,
    ),
    Model(
        _GPT,
        Transformer,
        lambda: (torch.randint(50257, (8, 1024)), torch.randint(50257, (8 * 1024,))),
        nn.functional.cross_entropy,
        bfloat16=True,
    ),
)


Wrap = Callable[[nn.Module, torch.optim.Optimizer], tuple[nn.Module, Any]]
Step = Callable[[], None]

_MODELS = {CPU: CPU_MODELS, CUDA: GPU_MODELS}
WARM_UP = 3


def find_models(words: Sequence[str], device: str = CPU) -> list[Model]:
    """Return the device's models whose names contain one of the words; all without words. BenchError for none."""
    names = select_models(words, device)
    return [model for model in _MODELS[device] if model.name in names]


class StepPeers:
    """Every peer that trains the model, as turns, warmed up; made by all ranks together.

    alone: only training without communication, and hvdkit. memory: bytes of GPU memory that each peer takes; empty on
        the CPU.
    """

    def __init__(self, model: Model, *, device: str = CPU, alone: bool = False) -> None:
        self.turns: dict[str, Turn] = {}
        self.memory: dict[str, int] = {}
        wraps: dict[str, Wrap] = {
            NO_COMMUNICATION: _keep,
            OURS: lambda module, optimizer: (module, hvd.DistributedOptimizer(optimizer, module.named_parameters())),
        }
        if not alone:
            wraps[f"DDP ({LIBRARIES[device]})"] = lambda module, optimizer: (
                nn.parallel.DistributedDataParallel(module),
                optimizer,
            )
        if device != CPU:  # exclude kernels and workspaces of the process, which belong to no peer
            make_turn(model, _keep, device)(1)
        for name, wrap in wraps.items():
            before = read_memory(device, emptied=True)
            self.turns[name] = make_turn(model, wrap, device)
            self.turns[name](WARM_UP)
            if device != CPU:
                self.memory[name] = max(0, read_memory(device) - before)


def make_turn(model: Model, wrap: Wrap, device: str) -> Turn:
    """Make the turn of a peer: on the CPU every step is timed, on a GPU all in a row, as in a training loop."""
    time_steps, step = time_each if device == CPU else time_in_a_row, make_step(model, wrap, device)
    return lambda count: time_steps(step, hvd.barrier, count, find_clock(device))


def make_step(model: Model, wrap: Wrap, device: str = CPU) -> Step:
    """Make a step of SGD on the model. wrap: wraps module and optimizer for training."""
    torch.manual_seed(0)
    plain = model.make().to(device)
    module, optimizer = wrap(plain, torch.optim.SGD(plain.parameters(), lr=1e-4))
    inputs, targets = (tensor.to(device) for tensor in model.batch())

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=model.bfloat16):
            loss = model.loss(module(inputs), targets)
        loss.backward()
        optimizer.step()

    return step


def _keep(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
    return module, optimizer
