"""Hugging Face Accelerate."""

import torch
from accelerate import Accelerator
from problem import BATCH, RATE, make_data, make_model, report
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
loader = DataLoader(make_data(), BATCH // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for inputs, targets in loader:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
report(accelerator.process_index, accelerator.num_processes, list(model.parameters()))
accelerator.end_training()
