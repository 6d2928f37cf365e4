"""Two pipeline stages, each sharded by FSDP2 over half of the ranks. Prints a hash of each tensor of the state.

usage: stages.py CONFIG JOB save|load
"""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rapidraid

config, job, part = sys.argv[1:4]
dist.init_process_group("gloo")
torch.set_num_threads(1)
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("stage", "shard"))
stage = mesh.get_local_rank("stage")
torch.manual_seed(stage)
# The stages have different numbers of parameters.
layers = {f"layer{number}": torch.nn.Linear(6, 6, bias=number > 0) for number in ((0,), (1, 2))[stage]}
model = torch.nn.Sequential(OrderedDict(layers))
fully_shard(model, mesh=mesh["shard"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
state = {"model": model, "optimizer": optimizer}
with rapidraid.Checkpointer(job, config=config) as checkpointer:
    if part == "save":
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        checkpointer.save(1, state)
        checkpointer.wait()
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert checkpointer.load(state) == 1
for name, parameter in model.named_parameters():
    for key, tensor in {"itself": parameter.detach(), **optimizer.state[parameter]}.items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if mesh.get_local_rank("shard") == 0:
            print(f"{name} {key} {hashlib.sha256(whole.numpy().tobytes()).hexdigest()}\n", end="", flush=True)
dist.barrier()
dist.destroy_process_group()
