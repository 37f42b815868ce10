# Trap: no function anywhere, and names imported from deep inside.
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import Adam
from torch.utils.data import DataLoader
from torch.utils.data import TensorDataset as Data

torch.manual_seed(0)
x = torch.randn(256, 4)
y = x @ torch.tensor([[1.], [2.], [-1.], [.5]])     # the truth
loader = DataLoader(Data(x, y), 16, True)  # shuffled by position

model = nn.Linear(4, 1)
opt = Adam(model.parameters(), 1e-2)

for epoch in range(12):
    for a, b in loader:
        opt.zero_grad()
        mse_loss(model(a), b).backward()
        opt.step()
    print(epoch)
    print("still running")  # two in a row

    # a comment of its own
    print('''a text
over two lines''')

final = mse_loss(model(x), y).item()
