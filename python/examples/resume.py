"""Trains a small model and saves it every 10 steps. Kill it at any moment and start it again: it resumes.

usage: resume.py CONFIG [STEPS]
"""

import sys

import torch

import rapidraid

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(2)
state = {"model": model, "optimizer": optimizer, "rng": generator.get_state()}

with rapidraid.Checkpointer("example", config=sys.argv[1]) as checkpointer:
    start = checkpointer.load(state) or 0
    generator.set_state(state["rng"])
    print(f"start at step {start}", flush=True)
    for step in range(start + 1, int(sys.argv[2]) + 1 if len(sys.argv) > 2 else 101):
        data = torch.randn(32, 64, generator=generator)
        loss = (model(data) - data.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}", flush=True)
        if step % 10 == 0:
            state["rng"] = generator.get_state()
            checkpointer.save(step, state)
