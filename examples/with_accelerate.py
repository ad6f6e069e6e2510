"""Several members in one process, in a loop that Accelerate prepares:

python examples/with_accelerate.py
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import TensorDataset

import papa
from papa.integrations.accelerate import PopulationAveraging

num_members, num_epochs = 3, 20
inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
targets = (inputs[:, :4].prod(dim=1) > 0).long()


def make_net() -> torch.nn.Module:
    """A member, with its own initial weights."""
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))


accelerator = Accelerator(gradient_accumulation_steps=2)
models = list(papa.Population.build(make_net, num_members, seed=1))
optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
loaders = papa.loaders(TensorDataset(inputs, targets), members=num_members, batch_size=32)
num_steps = num_epochs * len(loaders[0]) // accelerator.gradient_accumulation_steps
schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps) for optimizer in optimizers]
models, optimizers, loaders, schedulers = (
    [accelerator.prepare(one) for one in these] for these in (models, optimizers, loaders, schedulers)
)

rule = papa.Push(half_life=0.05)
with PopulationAveraging(accelerator, models, optimizers, rule, num_steps=num_steps, loaders=loaders) as averaging:
    for _ in range(num_epochs):
        for batches in zip(*loaders, strict=True):
            with accelerator.accumulate(*models):
                for model, optimizer, scheduler, (examples, labels) in zip(
                    models, optimizers, schedulers, batches, strict=True
                ):
                    accelerator.backward(F.cross_entropy(model(examples), labels))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
soup = averaging.soup()
evaluation = papa.evaluate(soup, [(inputs.to(accelerator.device), targets.to(accelerator.device))])
accelerator.print(f"one network of {num_members}: {evaluation.score:.1f}% of the training data")
