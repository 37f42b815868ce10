"""Train on handwritten digits, and go on where the last run was: after a signal, a time limit or a crash.

Ended by SIGTERM or SIGUSR1 it saves and ends with exit code 75; started again by the same command it goes on with the
next batch, also on another number of ranks.
"""

import argparse
import sys

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


def main(args: argparse.Namespace) -> int:
    """Train, or go on training, test, and return the exit code."""
    hvd.init()  # hvd
    torch.manual_seed(hvd.rank())  # hvd: ranks drop out different neurons
    train, test = read_digits()
    sampler = hvd.data.ShardedSampler(train)  # hvd
    batches = DataLoader(train, batch_size=args.batch_size, sampler=sampler)
    test_sampler = hvd.data.ShardedSampler(test, evaluation=True)  # hvd
    test_batches = DataLoader(test, batch_size=256, sampler=test_sampler)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # hvd
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # hvd
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    things = {"model": model, "optimizer": optimizer, "schedule": schedule, "sampler": sampler}
    checkpoints = hvd.checkpoint.Checkpoints(args.checkpoints, every_s=args.every, **things)  # hvd
    checkpoints.load()  # hvd

    for epoch in range(sampler.epoch, args.epochs):  # hvd: from where the sampler is
        sampler.set_epoch(epoch)  # hvd
        loss = torch.zeros(())
        for images, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            checkpoints.step(len(labels))  # hvd
        schedule.step()
        if hvd.rank() == 0:  # hvd
            print(f"epoch {epoch + 1}  loss of the last batch {loss.item():.4f}", flush=True)
    checkpoints.save()  # hvd: so that the next run has nothing left to do
    checkpoints.close()  # hvd

    model.eval()
    mean_accuracy = hvd.metrics.Mean("accuracy")  # hvd
    for images, labels in test_batches:
        mean_accuracy.update((model(images).argmax(dim=1) == labels).double().mean(), len(labels))
    accuracy = mean_accuracy.compute()
    if hvd.rank() == 0:  # hvd
        print(f"test accuracy {accuracy:.2%}")
    return int(accuracy < args.min_accuracy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=32, help="samples in a batch of one rank")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    parser.add_argument("--checkpoints", required=True, help="folder for checkpoints, which every run goes on from")
    parser.add_argument("--every", type=float, default=600.0, help="seconds between checkpoints")
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="exit with 1 below this test accuracy")
    sys.exit(main(parser.parse_args()))
