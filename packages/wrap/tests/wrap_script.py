"""A script for one process, as users write them: several small trainings in turn; what each ends with goes to a file.

`python wrap_script.py OUT [BATCH [FACTOR]]`: rows of a batch, and what learning rates are multiplied with.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset, TensorDataset

OUT = sys.argv[1]
BATCH = int(sys.argv[2]) if len(sys.argv) > 2 else 16
FACTOR = float(sys.argv[3]) if len(sys.argv) > 3 else 1.0
ROWS = 67  # a last batch of 3 rows where a batch has 16, and of 1 row where it has 33 or 11

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(ROWS, 6, generator=generator)
labels = torch.randint(0, 3, (ROWS,), generator=generator)
data = TensorDataset(inputs, labels)


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def loss_of(model: nn.Module, rows: list[torch.Tensor], reduction: str = "mean") -> torch.Tensor:
    return nn.functional.cross_entropy(model(rows[0]), rows[1], reduction=reduction)


def plainly(reduction: str) -> nn.Module:
    """Momentum, a scheduler, a penalty on the weights, and an evaluation after each epoch."""
    model = make_model()
    rate = 0.1 if reduction == "mean" else 0.005
    optimizer = torch.optim.SGD(model.parameters(), lr=rate * FACTOR, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    for epoch in range(3):
        model.train()
        total, first = 0.0, None
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_of(model, batch, reduction)
            if reduction == "mean":
                loss = loss + 1e-3 * sum(one.pow(2).sum() for one in model.parameters())
            first = loss if first is None else first
            loss.backward()
            optimizer.step()
            total += loss.item()
        model.eval()
        with torch.no_grad():
            right = sum(int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(data, batch_size=50))
        print(
            reduction,
            epoch,
            right,
            f"{total / len(loader):.3f}",
            f"{first.item() if first is not None else 0:.2f} at first",
        )
        scheduler.step(loss.item())
    return model


def with_everything() -> nn.Module:
    """Accumulation over two batches, GradScaler, clipping, and going on from a file."""
    model, epochs = make_model(), 2
    for part in range(2):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * FACTOR)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        if part:
            state = torch.load(f"{OUT}.checkpoint")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        loader = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), BATCH, drop_last=False))
        for _ in range(epochs):
            for number, batch in enumerate(loader):
                scaler.scale(loss_of(model, batch) / 2).backward()
                if number % 2 or number + 1 == len(loader):
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{OUT}.checkpoint")
        model = make_model()
    model.load_state_dict(torch.load(f"{OUT}.checkpoint")["model"])
    return model


def adversaries() -> nn.Module:
    """Two models and two optimizers; one loader that worker processes feed, and no noise."""
    generator, critic = make_model(), nn.Linear(3, 1)
    two = torch.optim.Adam(critic.parameters(), lr=0.01 * FACTOR)
    one = torch.optim.Adam(generator.parameters(), lr=0.01 * FACTOR)
    for x, y in DataLoader(Subset(data, range(60)), batch_size=BATCH, shuffle=True, num_workers=2):
        real, made = nn.functional.one_hot(y, 3).float(), generator(x)
        two.zero_grad()
        (critic(made.detach()).mean() - critic(real).mean()).backward()
        two.step()
        one.zero_grad()
        (-critic(made).mean()).backward()
        one.step()
    return nn.Sequential(generator, critic)


def line_search() -> nn.Module:
    """LBFGS asks for the loss again and again, and decides by it."""
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    for batch in DataLoader(data, batch_size=33):

        def closure(batch: list[torch.Tensor] = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)
    return model


cases: dict[str, Callable[[], nn.Module]] = {"mean": lambda: plainly("mean"), "sum": lambda: plainly("sum")}
if FACTOR == 1.0:
    cases.update(everything=with_everything, adversaries=adversaries, line_search=line_search)
os.makedirs(os.path.join(os.path.dirname(OUT), "made"), exist_ok=False)
torch.save({name: copy.deepcopy(case()).state_dict() for name, case in cases.items()}, OUT)
