"""The usual training loop with networks of other libraries, and the scripts in `examples/`."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import papa
from papa.lab.models import make_model

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_a_torchvision_network() -> None:
    models = pytest.importorskip("torchvision.models")
    inputs, targets = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))

    population = papa.Population([models.resnet18(num_classes=10) for _ in range(2)])
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in population]
    averager = papa.Averager(population, papa.Push(alpha=0.9, every_steps=2), optimizers)
    for _ in range(2):
        for net, optimizer in zip(population, optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
        averaging = averager.step()
    soup = papa.reset_batch_norm_(papa.average_soup(population), [inputs])

    assert averaging.alpha == pytest.approx(0.9)
    assert averaging.distances_after == pytest.approx(population.distances().tolist(), rel=1e-4)
    assert all(
        torch.isfinite(papa.evaluate(net, [(inputs, targets)]).loss + torch.zeros(1)) for net in (*population, soup)
    )


class Tagger(nn.Module):
    """A small transformer that tags the tokens of a sentence."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=32, batch_first=True)
        self.embedding = nn.Embedding(20, 16)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens))).transpose(1, 2)


def test_a_transformer() -> None:
    tokens, tags = torch.randint(20, (4, 7)), torch.randint(5, (4, 7))

    population = papa.Population([Tagger() for _ in range(3)])
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in population]
    averager = papa.Averager(population, papa.MergePairs(every_steps=1, seed=1), optimizers, num_steps=3)
    for _ in range(3):
        for net, optimizer in zip(population, optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(net(tokens), tags).backward()
            optimizer.step()
        averager.step()
    soup = papa.greedy_soup(population, score=lambda net: -papa.evaluate(net, [(tokens, tags)]).loss)
    ensemble = papa.Ensemble(population)

    assert soup.score >= max(soup.member_scores)
    assert papa.evaluate(soup.network, [(tokens, tags)]).loss == pytest.approx(-soup.score)
    assert torch.isfinite(torch.tensor(papa.evaluate(ensemble, [(tokens, tags)]).loss))


def rename(source: Path, target: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["rename_weights.py", str(source), "resnet10t", str(target)])
        runpy.run_path(str(EXAMPLES / "rename_weights.py"), run_name="__main__")


def test_renaming_weights(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    original = timm.create_model("resnet10t", num_classes=1000).state_dict()
    foreign = {f"{number}.{name.rpartition('.')[2]}": value for number, (name, value) in enumerate(original.items())}
    foreign["0.weight"] = foreign["0.weight"].contiguous(memory_format=torch.channels_last)
    torch.save(foreign, tmp_path / "original.pth")
    rename(tmp_path / "original.pth", tmp_path / "ours.safetensors")
    net = make_model("timm:resnet10t", num_classes=1000, image_size=64, weights=tmp_path / "ours.safetensors")
    assert all(torch.equal(tensor, original[name]) for name, tensor in net.state_dict().items())

    torch.save({**foreign, "0.weight": torch.zeros(3)}, tmp_path / "original.pth")
    with pytest.raises(SystemExit, match=r"0.weight \(3,\) is not .*: the networks differ, nothing written"):
        rename(tmp_path / "original.pth", tmp_path / "none.safetensors")
    assert not (tmp_path / "none.safetensors").exists()


@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:.*smaller than the logging interval:UserWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_members_of_fabric_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "fabric.py"))
    assert "one network of 3: 9" in capsys.readouterr().out
    assert (tmp_path / "fabric.ckpt").exists()


def test_members_of_lightning_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "lightning_members.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(papa.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(r"member (\d): the soup of 2 has (0\.9\d\d)", done.stdout))
    assert len(found) == 2
    assert found["0"] == found["1"]  # the same network
    checkpoints = [torch.load(next((tmp_path / f"out/{j}").rglob("*.ckpt")), weights_only=True) for j in range(2)]
    soup = papa.average_soup([checkpoint["current_model_state"] for checkpoint in checkpoints])
    for checkpoint in checkpoints:
        torch.testing.assert_close(checkpoint["state_dict"], soup)
