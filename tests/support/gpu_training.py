"""What ranks on GPUs train: small models, beside one process that has the whole batch, on any device of torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import hvdkit.torch as hvd

ROWS = 3
STEPS = 20
#: Of the buckets, so that there are several.
FUSION_BYTES = 512


@dataclass(frozen=True)
class Training:
    """A training run, and how far its float32 parameters may be from those of one process.

    passes: backward passes in a step. clip: the gradients' norm, 0 for none. autocast: to bfloat16, with a GradScaler.
    unused: is a layer left out in every other step?
    """

    tolerance: float = 1e-5
    optimizer: str = "SGD"
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.05, "momentum": 0.9})
    compression: str = "none"
    passes: int = 1
    clip: float = 0.0
    autocast: bool = False
    unused: bool = False


_ADAM = {"lr": 0.01}
#: 16 bits on the wire cost of an update 2^-11 and 2^-8, in each of 20 steps; products in bfloat16 2^-9.
TRAININGS = {
    "SGD": Training(),
    "Adam": Training(optimizer="Adam", options=_ADAM),
    "fp16": Training(2e-3, compression="fp16"),
    "bf16": Training(2e-2, compression="bf16"),
    "two passes, clipped": Training(passes=2, clip=0.3),
    "autocast, GradScaler": Training(5e-3, autocast=True, clip=1.0),
    "a layer left out": Training(unused=True),
}


class Net(nn.Module):
    """Two layers, and one beside them that need not be used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.beside, self.last = nn.Linear(12, 20), nn.Linear(12, 20), nn.Linear(20, 5)
        self.all_used = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (n, 12) to (n, 5)."""
        inner = self.first(inputs)
        if self.all_used:
            inner = inner + self.beside(inputs)
        outputs: torch.Tensor = self.last(torch.tanh(inner))
        return outputs


def start(device: str) -> torch.device:
    """init(), and this rank's device as torch's current one. Only a process group will do, and float32 is not TF32."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    hvd.init(fusion_bytes=FUSION_BYTES, device_transport="torch")
    if device == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_device())
    return hvd.local_device()


def make(case: Training, place: torch.device) -> tuple[Net, torch.optim.Optimizer]:
    """The model and its optimizer, always the same."""
    torch.manual_seed(1)
    model = Net().to(place)
    return model, getattr(torch.optim, case.optimizer)(model.parameters(), **case.options)


def distribute(case: Training, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    """hvdkit's optimizer for the model, which is that of rank 0 from then on. options: more of its options."""
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    compression = getattr(hvd.Compression, case.compression)
    named = model.named_parameters()
    return hvd.DistributedOptimizer(
        optimizer, named, compression=compression, backward_passes_per_step=case.passes, **options
    )


def make_step(case: Training, place: torch.device, **options: Any) -> tuple[Net, Callable[[], None]]:
    """hvdkit's step on the same batch again and again, which is on the device. options: of the optimizer."""
    model, optimizer = make(case, place)
    optimizer = distribute(case, model, optimizer, **options)
    inputs, targets = torch.randn(ROWS, 12, device=place), torch.randn(ROWS, 5, device=place)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()

    return model, step


def train_all(device: str, **options: Any) -> dict[str, tuple[float, str]]:
    """Train every case; returns the largest difference to one process with the whole batch, and a digest.

    options: of the optimizer; static_graph=True leaves out the case in which the graph is another one in each step.
    """
    place, results = start(device), {}
    for name, case in TRAININGS.items():
        if case.unused and options.get("static_graph"):
            continue
        reference, plain = make(case, place)
        _train(case, reference, plain, place, rank=0, of=1)
        model, optimizer = make(case, place)
        if hvd.rank() > 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(3)
        _train(case, model, distribute(case, model, optimizer, **options), place, rank=hvd.rank(), of=hvd.size())
        results[name] = _difference(model, reference), _digest(model)
    hvd.shutdown()
    return results


def _train(case: Training, model: Net, optimizer: Any, place: torch.device, *, rank: int, of: int) -> None:
    """Train on part `rank` of `of` parts of each batch."""
    generator = torch.Generator().manual_seed(2)
    scaler = torch.amp.GradScaler(place.type, init_scale=2.0**8, growth_interval=5, enabled=case.autocast)
    rows = hvd.size() * ROWS // of
    mine = slice(rank * rows, (rank + 1) * rows)
    for step in range(STEPS):
        model.all_used = not case.unused or step % 2 == 0
        optimizer.zero_grad()
        for _ in range(case.passes):
            inputs = torch.randn(hvd.size() * ROWS, 12, generator=generator)[mine].to(place)
            targets = torch.randn(hvd.size() * ROWS, 5, generator=generator)[mine].to(place)
            with torch.autocast(place.type, torch.bfloat16, enabled=case.autocast):
                loss = nn.functional.mse_loss(model(inputs), targets)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        scaler.step(optimizer)
        scaler.update()


@torch.no_grad()
def _difference(model: nn.Module, reference: nn.Module) -> float:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((one - two).abs().max()) for one, two in pairs)


def _digest(model: nn.Module) -> str:
    arrays = [parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters()]
    return hashlib.sha256(b"".join(arrays)).hexdigest()
