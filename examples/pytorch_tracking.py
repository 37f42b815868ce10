"""Write a training's averages over all ranks to CSV and TensorBoard: `hvdrun -np 2 python FILE --folder run`."""

import argparse
import csv
import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import hvdkit.torch as hvd  # hvd


def train(args: argparse.Namespace, folder: Path) -> float:
    """Train, and return the accuracy on the test images."""
    hvd.init()  # hvd
    torch.set_num_threads(1)  # hvd: the ranks of a host share its cores, and the network is small
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    train, test = random_split(digits, [1437, 360], generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # hvd
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # hvd
    sampler = hvd.data.ShardedSampler(train)  # hvd
    loader = DataLoader(train, 32, sampler=sampler)
    test_loader = DataLoader(test, 256, sampler=hvd.data.ShardedSampler(test, evaluation=True))  # hvd

    with hvd.track(csv=folder / "run.csv", tensorboard=folder / "board", every=20) as tracker:  # hvd: rank 0 writes
        for epoch in range(1, args.epochs + 1):
            sampler.set_epoch(epoch)  # hvd
            for images, labels in hvd.progress(loader, label=f"epoch {epoch}"):  # hvd: one bar, all ranks' samples/s
                optimizer.zero_grad()
                output = model(images)
                loss = nn.functional.cross_entropy(output, labels)
                loss.backward()
                optimizer.step()
                right = (output.argmax(dim=1) == labels).double().mean()
                tracker.log({"loss": loss, "accuracy": right}, samples=len(labels))  # hvd: averaged over ranks

    accuracy = hvd.metrics.Mean("test accuracy")  # hvd
    for images, labels in test_loader:
        accuracy.update((model(images).argmax(dim=1) == labels).double().mean(), len(labels))
    return accuracy.compute()


def describe(path: Path) -> str:
    """The last value of each series in a file of hvd.track()."""
    with path.open(newline="") as file:
        last = {line["key"]: line for line in csv.DictReader(file)}
    return "\n".join(f"{key:24} {float(line['value']):10.4g}  at step {line['step']}" for key, line in last.items())


def main(args: argparse.Namespace) -> int:
    """Train, show what was written, and return the exit code."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        accuracy = train(args, folder)
        if hvd.rank() == 0:  # hvd
            print(describe(folder / "run.csv"))
            print(f"test accuracy {accuracy:.2%}")
    return int(accuracy < args.min_accuracy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--folder", default="", help="for run.csv and TensorBoard's files; a temporary one if empty")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training images")
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="exit with 1 below this test accuracy")
    if code := main(parser.parse_args()):
        sys.exit(code)
