"""Train on handwritten digits, and go on when ranks die: from the last commit, with others started in their place.

    hvdrun --elastic -np 3 --min-np 2 python examples/pytorch_elastic_digits.py

Then end any rank, with `kill -9` and a number that `hvdrun --verbose` tells.
"""

import argparse
import sys
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

import hvdkit.torch as hvd  # hvd


def read_digits() -> list[Subset[tuple[torch.Tensor, ...]]]:
    """Split 1797 images of 8 x 8 pixels into 1437 to train on and 360 to test with, always the same."""
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    return random_split(dataset, [1437, 360], torch.Generator().manual_seed(0))


@hvd.elastic.run  # hvd: called again, from the last commit, after each change of the world
def train(state: Any, images: torch.utils.data.Dataset[Any], args: argparse.Namespace) -> None:
    """Train the state's model from where the state is."""
    batches = DataLoader(images, batch_size=args.batch_size, sampler=state.sampler)
    while state.epoch < args.epochs:  # hvd: from where the state is
        loss = torch.zeros(())
        for number, (inputs, labels) in enumerate(batches):
            state.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(state.model(inputs), labels)
            loss.backward()
            state.optimizer.step()
            state.sampler.record_batch(number, len(labels))  # hvd
            if number % args.commit_every == 0:  # hvd
                state.commit()  # hvd: what is lost when a rank dies is what came after this
        if hvd.rank() == 0:  # hvd
            print(f"epoch {state.epoch + 1}  {hvd.size()} ranks  loss of the last batch {loss.item():.4f}", flush=True)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)  # hvd


def main(args: argparse.Namespace) -> int:
    """Train, test, and return the exit code."""
    hvd.init()  # hvd
    torch.manual_seed(0)
    images, test = read_digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # hvd
    sampler = hvd.elastic.ElasticSampler(images)  # hvd
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)  # hvd
    train(state, images, args)

    model.eval()
    inputs, labels = next(iter(DataLoader(test, batch_size=len(test))))
    accuracy = (model(inputs).argmax(dim=1) == labels).double().mean().item()  # the same on all ranks
    if hvd.rank() == 0:  # hvd
        print(f"test accuracy {accuracy:.2%}")
    return int(accuracy < args.min_accuracy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=32, help="samples in a batch of one rank")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    parser.add_argument("--commit-every", type=int, default=5, help="batches from one commit to the next")
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="exit with 1 below this test accuracy")
    sys.exit(main(parser.parse_args()))
