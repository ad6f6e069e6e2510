"""Three members in one process in Fabric: python examples/fabric.py"""

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import TensorDataset

import papa
from papa.integrations.fabric import averaging

fabric = Fabric(devices=1)
fabric.seed_everything(1)
inputs = torch.randn(512, 8)
dataset = TensorDataset(inputs, (inputs[:, :2].prod(dim=1) > 0).long())
loaders = [fabric.setup_dataloaders(loader) for loader in papa.loaders(dataset, members=3, batch_size=64)]

nets, optimizers = [], []
for _ in range(3):
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    nets.append(net)
    optimizers.append(optimizer)

num_steps = 25 * len(loaders[0])
joined = averaging(fabric, nets, optimizers, papa.Push(half_life=0.05), num_steps=num_steps)
for _ in range(25):
    for batches in zip(*loaders, strict=True):
        for net, optimizer, (inputs, targets) in zip(nets, optimizers, batches, strict=True):
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(net(inputs), targets))
            optimizer.step()
fabric.save("fabric.ckpt", {"nets": joined.population, "papa": joined})
evaluation = papa.evaluate(joined.soup(), [fabric.to_device(dataset.tensors)])
print(f"one network of {joined.population.size}: {evaluation.score:.1f}% of the training data")
