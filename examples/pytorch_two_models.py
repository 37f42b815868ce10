"""Train two networks at once, each on half of the ranks, and let them vote; see the README here."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import hvdkit.torch as hvd  # hvd


def make_models() -> list[nn.Module]:
    """One network sees the image, the other its rows."""
    image = nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    rows = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()
    return [nn.Sequential(*image, nn.Linear(256, 10)), nn.Sequential(*rows, nn.Linear(128, 10))]


def main(args: argparse.Namespace) -> None:
    """Train and test."""
    hvd.init()  # hvd
    torch.set_num_threads(1)  # hvd: the ranks of a host share its cores, and the networks are small
    torch.manual_seed(args.seed)
    everything, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(everything / 16).float(), torch.tensor(labels))
    train, test = random_split(digits, [1437, 360], generator=torch.Generator().manual_seed(0))
    images, labels = next(iter(DataLoader(test, len(test))))

    votes = torch.zeros(len(labels), 10)
    for turn, model in enumerate(make_models()):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # hvd
        team = hvd.global_process_set  # hvd
        if hvd.size() > 1:  # hvd: even ranks have the first network, odd ranks the second
            team = hvd.add_process_set(range(turn, hvd.size(), 2))  # hvd: on every rank, also on those outside
        if not team.included():  # hvd
            continue  # hvd: the other half is at it, now
        sampler = hvd.data.ShardedSampler(train, rank=team.rank(), size=team.size(), seed=args.seed)  # hvd
        batches = DataLoader(train, args.batch_size, sampler=sampler)
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=team)  # hvd
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)  # hvd
            for some, targets in batches:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(some), targets)
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            scores = model(images).softmax(dim=1)
        votes += scores / team.size()  # hvd: each member of a team says the same
        right = (scores.argmax(dim=1) == labels).float().mean()
        if team.rank() == 0:  # hvd
            print(f"network {turn + 1} on ranks {team.ranks}: test accuracy {right:.2%}")

    votes = hvd.allreduce(votes, name="votes", op=hvd.Sum)  # hvd
    if hvd.rank() == 0:  # hvd
        print(f"both together: test accuracy {(votes.argmax(dim=1) == labels).float().mean():.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=32, help="samples in a batch of one rank")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the shuffling")
    main(parser.parse_args())
