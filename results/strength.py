"""A push that sets its own strength, against a grid of fixed strengths: `python -m results.make strength DATA`.

DATA is a folder with `text/alice29.txt` of the Canterbury corpus, and `fashion-mnist/` with the original files. None of
these settings was used for the design of the push.
"""

from __future__ import annotations

import gzip
import platform
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

import papa
from papa.training.data import Arrays, Data
from results.record import FOLDER, read_file, write_records

Examples = tuple[Tensor, Tensor]
"""Inputs and targets."""
CONTEXT, NUM_CHARACTERS = 12, 72
"""The number of characters before the one that is predicted, and of different ones."""
NUM_MEMBERS, NUM_POPULATIONS = 4, 3
NUM_VALIDATION = 10
"""Training examples that are held out, since every training has validation data; nothing here depends on them."""


class Setting(NamedTuple):
    """A network, its data and how it is trained."""

    words: str
    """Data, network and optimizer, for the table."""
    load: Callable[[Path], tuple[Examples, Examples]]
    """From the folder of data to training and test data."""
    network: Callable[[], nn.Module]
    steps: int
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch_size: int


def mlp(*widths: int, norm: bool = False) -> nn.Module:
    """Linear layers with ReLU, and BatchNorm if asked for, between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths[:-1]):
        layers += [nn.Linear(before, after), *([nn.BatchNorm1d(after)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


class CharacterTransformer(nn.Module):
    """One block of attention with LayerNorm; predicts the character after the last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_CHARACTERS, width)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.keys, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU())
        self.back, self.head = nn.Linear(4 * width, width), nn.Linear(width, NUM_CHARACTERS)

    def forward(self, characters: Tensor) -> Tensor:
        """The scores of the next character."""
        found = self.embedding(characters) + self.positions
        query, key, value = self.keys(self.norm(found)).chunk(3, dim=-1)
        weights = torch.softmax(query[:, -1:] @ key.transpose(1, 2) / key.shape[-1] ** 0.5, dim=-1)
        last = found[:, -1] + self.out((weights @ value)[:, 0])
        scores: Tensor = self.head(self.last(last + self.back(self.hidden(last))))
        return scores


def sgd(network: nn.Module) -> torch.optim.Optimizer:
    """With momentum and weight decay."""
    return torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)


def adamw(network: nn.Module) -> torch.optim.Optimizer:
    """With weight decay."""
    return torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=0.01)


def breast_cancer(folder: Path, num_train: int = 200) -> tuple[Examples, Examples]:
    """scikit-learn's breast cancer table, standardised."""
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer()
    order = numpy.random.default_rng(0).permutation(len(found.target))
    inputs = torch.tensor(((found.data - found.data.mean(0)) / found.data.std(0))[order]).float()
    targets = torch.tensor(found.target[order]).long()
    return (inputs[:num_train], targets[:num_train]), (inputs[num_train:], targets[num_train:])


def fashion(folder: Path, num_train: int = 2000) -> tuple[Examples, Examples]:
    """Fashion-MNIST at a quarter of its resolution."""

    def part(kind: str, count: int) -> Examples:
        raw = [
            numpy.frombuffer(gzip.decompress((folder / f"fashion-mnist/{kind}-{name}-ubyte.gz").read_bytes()), "uint8")
            for name in ("images-idx3", "labels-idx1")
        ]
        images = raw[0][16:].reshape(-1, 1, 7, 4, 7, 4)[:count].mean((3, 5)) / 90.0 - 0.8
        return torch.tensor(images).float(), torch.tensor(raw[1][8:][:count].astype("int64"))

    return part("train", num_train), part("t10k", 5000)


def book(folder: Path, num_train: int = 2000) -> tuple[Examples, Examples]:
    """Windows of characters and the character after each; the test text follows the training text."""
    characters = sorted(set(words := (folder / "text/alice29.txt").read_text()[5000 : 5000 + num_train + 8000]))
    codes = torch.tensor([characters.index(one) for one in words]).clamp(max=NUM_CHARACTERS - 1)
    windows, following = codes.unfold(0, CONTEXT, 1)[:-1], codes[CONTEXT:]
    return (windows[:num_train], following[:num_train]), (windows[num_train:], following[num_train:])


SETTINGS = {
    "cancer": Setting(
        *("breast cancer (a table), MLP, AdamW", breast_cancer, partial(mlp, 30, 32, 32, 2)), 500, adamw, 16
    ),
    "fashion-norm": Setting(
        "Fashion-MNIST (images), MLP with BatchNorm, SGD", fashion,
        partial(mlp, 49, 32, 32, 10, norm=True), 2000, sgd, 32,
    ),
    "book-transformer": Setting(
        "a book (text), transformer, AdamW", book, partial(CharacterTransformer, 16), 2000, adamw, 16
    ),
    "fashion-long": Setting(
        "Fashion-MNIST (images), MLP, SGD", fashion, partial(mlp, 49, 32, 32, 10), 8000, sgd, 16
    ),
}  # fmt: skip
SHARES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""The fixed half-lives, as shares of training. As in the paper, these pushes weaken with the learning rate."""
AUTO = "papa-auto"
FIXED: Mapping[str, papa.Rule] = {
    **{f"{share:.1%}": papa.Push(half_life=share) for share in SHARES},
    "independent": papa.Independent(),
}
JOBS: Mapping[str, Mapping[str, papa.Rule]] = {"": FIXED, "-auto": {AUTO: papa.AdaptivePush(check_every=50)}}
"""What is compared in each setting, by the end of its record's name."""


def trained(setting: Setting, rules: Mapping[str, papa.Rule], folder: Path, *, seed: int = 1) -> dict[str, Any]:
    """Train some populations with each rule; the scores of every population on test data."""
    (inputs, targets), test = setting.load(folder)
    few = NUM_VALIDATION
    data = Data(
        train=Arrays(inputs[few:], targets[few:]),
        validation=Arrays(inputs[:few], targets[:few]),
        test=Arrays(*test),
    )
    num_epochs = max(1, round(setting.steps * setting.batch_size / (len(inputs) - few)))
    found: dict[str, Any] = {"seconds": 0.0, "scores": {}}
    for name, rule in rules.items():
        for population in range(NUM_POPULATIONS):
            outcome = papa.train(
                setting.network,
                data,
                rule=rule,
                num_members=NUM_MEMBERS,
                num_epochs=num_epochs,
                batch_size=setting.batch_size,
                make_optimizer=setting.optimizer,
                device="cpu",
                seed=seed + population,
                verbose=False,
            )
            scores = outcome.test
            assert scores is not None
            members = [fmean(getattr(one, key) for one in scores.members) for key in ("score", "loss")]
            row = {"mean": members}
            row |= {
                key: [getattr(scores, key).score, getattr(scores, key).loss] for key in ("ensemble", "average_soup")
            }
            rounded = {key: [round(score, 3), round(loss, 5)] for key, (score, loss) in row.items()}
            found["scores"].setdefault(name, []).append(rounded)
            found["seconds"] += round(sum(outcome.seconds.values()), 1)
    return {**found, "steps": num_epochs * ((len(inputs) - few) // setting.batch_size)}


FILE = FOLDER / "strength.jsonl"
BLOCK = re.compile(r"(<!-- strengths -->\n).*?(<!-- end of strengths -->\n)", re.DOTALL)


def run(folder: Path) -> int:
    """Train what has no record yet."""
    torch.set_num_threads(1)
    for setting_name, setting in SETTINGS.items():
        for end, rules in JOBS.items():
            if (name := f"{setting_name}{end}") not in read_file(FILE):
                found = trained(setting, rules, folder)
                versions = {"papa": papa.__version__, "torch": torch.__version__, "python": platform.python_version()}
                write_records(FILE.stem, {name: {"setting": setting.words, **found, **versions}}, FILE.parent)
                sys.stdout.write(f"{name}: {found['seconds']:.0f} s\n")
    return 0


TABLES = {
    "The average soup's accuracy on test data": ("average_soup", 0),
    "Its loss on test data": ("average_soup", 1),
    "The mean accuracy of members": ("mean", 0),
    "The accuracy of their ensemble": ("ensemble", 0),
}
"""Titles of tables, what they show of a record, and whether it is the score (0) or the loss (1)."""


def table(what: str, place: int, file: Path = FILE) -> str:
    """Means and standard deviations for each setting and strength, in Markdown; the best fixed one is bold."""
    names, records = (*FIXED, AUTO), read_file(file)
    lines = [f"| setting | steps | {' | '.join(names)} |", f"|---|{'--:|' * (len(names) + 1)}"]
    for name, setting in SETTINGS.items():
        own = [records[f"{name}{end}"]["scores"] for end in JOBS if f"{name}{end}" in records]
        found = {rule: [row[what][place] for row in rows] for scores in own for rule, rows in scores.items()}
        means = {rule: fmean(values) * (-1 if place else 1) for rule, values in found.items() if rule != AUTO}
        best = max(means, key=lambda rule: means[rule], default="")
        cells = []
        for rule in names:
            digits, mark = 3 if place else 2, "**" if rule == best else ""
            values = found.get(rule, ())
            mean = f"{mark}{fmean(values):.{digits}f}{mark} ({stdev(values):.{digits}f})" if values else "not run"
            cells.append(mean)
        lines.append(f"| {setting.words} | {setting.steps:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def filled(page: str) -> str:
    """The page on strength with its tables filled in."""
    parts = [f"{title}:\n\n{table(*chosen)}\n" for title, chosen in TABLES.items()]
    return BLOCK.sub(lambda match: "\n".join([match[1], *parts, match[2]]), page)
