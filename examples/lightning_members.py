"""One member per process in Lightning, started by papa or by torchrun:

torchrun --nproc-per-node 2 -m papa.member --soup out/soup.safetensors examples/lightning_members.py
torchrun --nproc-per-node 2 examples/lightning_members.py
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import papa
from papa.integrations.lightning import MemberPerRank, PopulationAveraging


class Classifier(L.LightningModule):
    """Any module of yours."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def training_step(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch):
        self.log("val_acc", (self.net(batch[0]).argmax(dim=1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


inputs = torch.randn(768, 8, generator=torch.Generator().manual_seed(0))
targets = (inputs[:, :2].prod(dim=1) > 0).long()
training, held_out = TensorDataset(inputs[:512], targets[:512]), TensorDataset(inputs[512:], targets[512:])

strategy = MemberPerRank()  # only torchrun alone needs it: with papa.member a process looks like a single one
L.seed_everything(strategy.member)  # each member has its own weights and its own order of the data
trainer = L.Trainer(
    max_epochs=12,
    strategy=strategy,
    callbacks=PopulationAveraging(papa.Push(half_life=0.05)),
    default_root_dir=f"out/{strategy.member}",  # each member has its own checkpoints
    enable_progress_bar=False,
)
trainer.fit(Classifier(), DataLoader(training, batch_size=64, shuffle=True), DataLoader(held_out, batch_size=256))
print(f"member {strategy.member}: the soup of {strategy.num_members} has {trainer.callback_metrics['val_acc']:.3f}")
