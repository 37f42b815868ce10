"""Federated averaging of handwritten digits: each client has few of the ten digits, and keeps its images."""

import argparse
from collections.abc import Callable

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import hvdkit.torch as hvd  # hvd
import hvdkit_federated as federated  # hvd

Data = tuple[torch.Tensor, torch.Tensor]
SERVERS: dict[str, Callable[[], federated.ServerOptimizer]] = {  # hvd: what makes the next weights from the mean update
    "fedavg": federated.FedAvg,
    "fedavgm": lambda: federated.FedAvgM(0.5, momentum=0.7),
    "fedadam": lambda: federated.FedAdam(0.03),
    "fedyogi": lambda: federated.FedYogi(0.03),
}


def read_digits(clients: int) -> tuple[list[Data], Data]:
    """1437 images, sorted by digit and cut into two pieces for each client; and 360 to test with."""
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16).float(), torch.tensor(digits)
    train, test = np.split(np.random.default_rng(0).permutation(len(digits)), [1437])
    pieces = np.array_split(train[np.argsort(digits[train], kind="stable")], 2 * clients)
    pieces = [pieces[at] for at in np.random.default_rng(1).permutation(2 * clients)]
    own = [np.concatenate(pieces[2 * client : 2 * client + 2]) for client in range(clients)]
    return [(images[rows], labels[rows]) for rows in own], (images[test], labels[test])


def make_model() -> nn.Module:
    """A small network."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train_epochs(model: nn.Module, data: Data, args: argparse.Namespace, seed: int) -> None:
    """Some epochs on one client's images, held near the weights of the round if --mu is given."""
    images, labels = data
    term = federated.ProximalTerm(model, args.mu)  # hvd: FedProx
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(args.local_epochs):
        for rows in torch.randperm(len(labels), generator=generator).split(args.batch_size):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[rows]), labels[rows]) + term()  # hvd
            loss.backward()
            optimizer.step()


def measure(model: nn.Module, data: Data) -> float:
    """The part of the images whose digit is recognised."""
    with torch.no_grad():
        return float((model(data[0]).argmax(dim=1) == data[1]).double().mean())


def main(args: argparse.Namespace) -> None:
    """Train and test."""
    hvd.init()  # hvd
    torch.set_num_threads(1)  # hvd: the ranks of a host share its cores
    torch.manual_seed(args.seed)
    clients, test = read_digits(args.clients)
    model = make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # hvd
    federation = federated.Federation(
        list(range(hvd.rank(), args.clients, hvd.size())),  # hvd: the clients whose data this rank has
        fraction=args.fraction,
        seed=args.seed,
        server=SERVERS[args.server](),
        secure=federated.SecureAggregation() if args.secure else None,  # hvd: nobody sees a single update
    )
    weights = federated.get_weights(model)
    for turn in range(args.rounds):

        def train(client: int, start: list[np.ndarray], turn: int = turn) -> tuple[list[np.ndarray], int]:
            federated.set_weights(model, start)
            train_epochs(model, clients[client], args, args.seed + 1000 * turn + client)
            return federated.get_weights(model), len(clients[client][1])

        result = federation.round(weights, train)  # hvd: trains this rank's clients, and averages all
        weights = result.weights
        federated.set_weights(model, weights)
        if hvd.rank() == 0 and (turn + 1) % 5 == 0:  # hvd
            print(f"round {turn + 1}  {len(result.clients)} clients  test accuracy {measure(model, test):.2%}")
    if measure(model, test) < args.min_accuracy:
        raise SystemExit(f"the test accuracy is below {args.min_accuracy:.2%}")


PARSER = argparse.ArgumentParser(description=__doc__)
OPTIONS = {"clients": 8, "rounds": 30, "local-epochs": 2, "batch-size": 16, "lr": 0.1, "mu": 0.0, "fraction": 1.0}
for option, default in {**OPTIONS, "seed": 0, "min-accuracy": 0.0}.items():
    PARSER.add_argument(f"--{option}", type=type(default), default=default)
PARSER.add_argument("--server", choices=SERVERS, default="fedavg")
PARSER.add_argument("--secure", action="store_true")
if __name__ == "__main__":
    main(PARSER.parse_args())
