"""A population in your own script, one member per rank:

torchrun --nproc-per-node 2 examples/torchrun.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import papa

dist.init_process_group("gloo")  # "cpu:gloo,cuda:nccl" for accelerators
torch.manual_seed(dist.get_rank())  # each member has its own weights and its own batches
inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
targets = (inputs[:, :4].prod(dim=1) > 0).long()

net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
population = papa.Population([net], group=dist.group.WORLD)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
averager = papa.Averager(population, papa.Push(half_life=0.1, every_steps=4), optimizer, num_steps=200)
for _ in range(200):
    batch = torch.randint(len(inputs), (64,))
    optimizer.zero_grad()
    F.cross_entropy(net(inputs[batch]), targets[batch]).backward()
    optimizer.step()
    averager.step()
soup = papa.average_soup(population)  # the same network on every rank
evaluation = papa.evaluate(soup, [(inputs, targets)])
if dist.get_rank() == 0:
    print(f"one network of {population.size}: {evaluation.score:.1f}% of the training data")
dist.destroy_process_group()
