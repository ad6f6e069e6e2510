"""Three members in one process in Lightning: python examples/lightning_population.py"""

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import papa
from papa.integrations.lightning import PopulationModule


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


L.seed_everything(1)
inputs = torch.randn(768, 8)
targets = (inputs[:, :2].prod(dim=1) > 0).long()
training, held_out = TensorDataset(inputs[:512], targets[:512]), TensorDataset(inputs[512:], targets[512:])

module = PopulationModule([Classifier() for _ in range(3)], papa.Push(half_life=0.05))
trainer = L.Trainer(max_epochs=12, accelerator="cpu", enable_progress_bar=False, default_root_dir="out")
trainer.fit(module, papa.loaders(training, members=3, batch_size=64), DataLoader(held_out, batch_size=256))
for name in ("member_0/val_acc", "member_1/val_acc", "member_2/val_acc", "val_acc"):
    print(f"{name}: {trainer.callback_metrics[name]:.3f}")
torch.save(module.soup.state_dict(), "out/soup.pt")  # one network, of the class of the members
