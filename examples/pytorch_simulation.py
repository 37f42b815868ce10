"""Train a network on what a simulation sends over MPI, in one job: some ranks simulate, the others train."""

import argparse
import sys

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import hvdkit.torch as hvd  # hvd

SECONDS = 4.0  # that a pendulum swings


def simulate(random: np.random.Generator, count: int) -> np.ndarray:
    """Let damped pendulums swing: (count, 5) of angle, speed and damping at first, time, and the angle then."""
    start = random.uniform([-2.0, -2.0, 0.1], [2.0, 2.0, 1.0], (count, 3))
    time = random.uniform(0, SECONDS, count)
    angle, speed, damping = start.T.copy()
    steps = 100
    for _ in range(steps):  # each pendulum to a time of its own
        speed += (-np.sin(angle) - damping * speed) * time / steps
        angle += speed * time / steps
    return np.column_stack([start, time, angle]).astype(np.float32)


def run_simulation(job: MPI.Intracomm, args: argparse.Namespace) -> None:
    """Send a batch of samples to each training rank in turn; this rank never calls hvdkit."""
    random = np.random.default_rng([args.seed, job.rank])
    trainers = job.size - args.simulations
    for step in range(args.steps):
        for rank in range(trainers):
            if trainers + (step + rank) % args.simulations == job.rank:
                job.Send(simulate(random, args.batch_size), dest=rank)


def train(job: MPI.Intracomm, comm: MPI.Comm, args: argparse.Namespace) -> None:
    """Train on the samples that come, each of which is seen once, and test on others."""
    hvd.init(comm=comm)  # hvd: the world is the training ranks, and their ranks are those of comm
    torch.set_num_threads(1)  # hvd: the ranks of a host share its cores, and the network is small
    torch.manual_seed(args.seed)
    device = hvd.local_device()  # hvd
    layers = nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1), nn.Flatten(0)
    model = nn.Sequential(*layers).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # hvd
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # hvd
    alone, samples = np.random.default_rng(args.seed), np.empty((args.batch_size, 5), np.float32)
    for step in range(args.steps):
        if job.size > comm.size:
            source = comm.size + (step + comm.rank) % args.simulations
            job.Recv(samples, source)  # mpi4py's messages go beside hvdkit's
        else:
            samples = simulate(alone, args.batch_size)
        batch = torch.from_numpy(samples).to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch[:, :4]), batch[:, 4])
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            mean_loss = hvd.allreduce(loss.detach(), name="loss")  # hvd
            if hvd.rank() == 0:  # hvd
                print(f"step {step + 1}  loss {mean_loss:.4f}", flush=True)

    test = torch.from_numpy(simulate(np.random.default_rng(1_000_003), 2000)).to(device)
    with torch.no_grad():
        left = ((model(test[:, :4]) - test[:, 4]) ** 2).mean() / test[:, 4].var()
    if hvd.rank() == 0:  # hvd: every rank has the same model
        print(f"{job.size - comm.size} of {job.size} ranks simulated: test R2 {1 - left:.3f}")
    hvd.shutdown()  # hvd


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--simulations", type=int, default=1, help="ranks that simulate, the last ones of the job")
    parser.add_argument("--steps", type=int, default=600, help="batches that each training rank gets")
    parser.add_argument("--batch-size", type=int, default=128, help="samples in a batch")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the samples")
    args = parser.parse_args()
    world = MPI.COMM_WORLD
    if not 0 < args.simulations < max(2, world.size):
        sys.exit(f"--simulations {args.simulations}: of {world.size} ranks 1 at least has to train, and 1 to simulate.")
    trains = world.size == 1 or world.rank < world.size - args.simulations
    part = world.Split(trains, world.rank)
    if trains:
        train(world, part, args)
    else:
        run_simulation(world, args)
