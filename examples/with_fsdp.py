"""Several ranks train each member, by FSDP2 in a plain torchrun script; papa adds the lines marked with `+`:

torchrun --nproc-per-node 2 -m papa.member --member 0 --members 2 --store HOST:29400 examples/with_fsdp.py --seed 0
torchrun --nproc-per-node 2 -m papa.member --member 1 --members 2 --store HOST:29400 examples/with_fsdp.py --seed 1
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import papa  # +

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

dist.init_process_group("gloo")  # "cpu:gloo,cuda:nccl" for accelerators
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(options.seed)  # the ranks of a member begin with the same weights
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
fully_shard(net, mesh=mesh)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
papa.join(net, optimizer, papa.Push(half_life=0.05), num_steps=options.steps)  # +

inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
targets = (inputs[:, :4].prod(dim=1) > 0).long()
batches = torch.Generator().manual_seed(1000 * options.seed + dist.get_rank())
for _ in range(options.steps):
    batch = torch.randint(len(inputs), (64,), generator=batches)
    loss = F.cross_entropy(net(inputs[batch]), targets[batch])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(f"member {options.seed}: loss {loss.item():.3f}")
dist.destroy_process_group()
