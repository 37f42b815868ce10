"""Train on handwritten digits with Ray's actors as ranks: `python examples/ray_digits.py --workers 2`.

With `--elastic` the job takes what room there is, up to that number, and goes on when actors or nodes die.
"""

import argparse
import sys
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import hvdkit.torch as hvd  # hvd
import hvdkit_ray  # hvd


def train(epochs: int, batch_size: int, lr: float) -> tuple[int, float]:
    """What each rank does; returns the number of ranks and the accuracy."""
    hvd.init()  # hvd
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    known, test = random_split(dataset, [1437, 360], torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=lr), model.named_parameters())  # hvd
    sampler = hvd.elastic.ElasticSampler(known)  # hvd
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)  # hvd

    @hvd.elastic.run  # hvd: called again, from the last commit, when the ranks change
    def run_epochs(state: hvd.elastic.TorchState) -> None:
        batches = DataLoader(known, batch_size, sampler=state.sampler)
        while state.epoch < epochs:
            for number, (inputs, labels) in enumerate(batches):
                state.optimizer.zero_grad()
                nn.functional.cross_entropy(state.model(inputs), labels).backward()
                state.optimizer.step()
                state.sampler.record_batch(number, len(labels))  # hvd
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)  # hvd
            state.commit()  # hvd

    run_epochs(state)
    model.eval()
    inputs, labels = next(iter(DataLoader(test, len(test))))
    return hvd.size(), (model(inputs).argmax(dim=1) == labels).double().mean().item()


def main(args: argparse.Namespace) -> int:
    """Start the ranks, print what they reached, and return the exit code."""
    size: dict[str, Any] = (
        {"min_workers": 1, "max_workers": args.workers} if args.elastic else {"num_workers": args.workers}
    )
    results = hvdkit_ray.run(train, (args.epochs, args.batch_size, args.lr), use_gpu=args.gpu, **size)  # hvd
    ranks, accuracy = results[0]
    print(f"{ranks} workers  test accuracy {accuracy:.2%}")
    return int(accuracy < args.min_accuracy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="number of ranks")
    parser.add_argument("--elastic", action="store_true", help="go on when ranks come and go")
    parser.add_argument("--gpu", action="store_true", help="one GPU for each rank")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=32, help="samples in a batch of one rank")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="exit with 1 below this test accuracy")
    sys.exit(main(parser.parse_args()))
