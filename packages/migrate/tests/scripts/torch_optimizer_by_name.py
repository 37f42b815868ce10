"""Trap: one of several optimizers, chosen by an option; the model may be wrapped for all GPUs of the machine."""
import sys
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def make_loader(x, batch_size=8):
    return DataLoader(TensorDataset(x), batch_size=batch_size, shuffle=True)


def main(name="adam"):
    torch.manual_seed(0)
    x = torch.rand(80, 2)
    net = nn.Linear(2, 1)
    if torch.cuda.device_count() > 1:
        net = nn.DataParallel(net)
    if name == "sgd":
        optimizer = torch.optim.SGD(net.parameters(), lr=.1)
    elif name == "adam":
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    else:
        sys.exit("no such optimizer")
    batches = make_loader(x)
    for epoch in range(4):
        for (a,) in batches:
            optimizer.zero_grad()
            (net(a) - 2).square().mean().backward()
            optimizer.step()
    whole = net.module if hasattr(net, "module") else net
    torch.save(whole.state_dict(), "net.pt")
    return whole, (whole(x) - 2).square().mean().item()


if __name__ == "__main__": model, final = main()
