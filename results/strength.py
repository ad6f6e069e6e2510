"""The study of a push that sets its own strength, against a grid of fixed strengths.

    python -m results.strength run DATA       train what has no record yet; stop it and start it again at will
    python -m results.strength write          write the tables into docs/strength.md

DATA is a folder with `text/alice29.txt` and `text/asyoulik.txt` of the Canterbury corpus, and `fashion-mnist/` with the
original files. The controller was changed with DESIGN settings in view only; HELD_OUT settings were run once, when it
was done.
"""

from __future__ import annotations

import gzip
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from papa._version import __version__
from papa.core.rules import AveragingContext, Independent, Push, Rule
from papa.core.soups import average_soup
from papa.couplings.adaptive import AdaptivePush
from papa.evaluation.scores import Evaluation
from papa.storage import write_atomically
from papa.training import Callback, Settings, Stacked, Training
from papa.training.data import Arrays, Data
from papa.training.entry import start_training
from papa.training.probe import with_probe
from results.record import FOLDER, read_file, write_records

Tables = tuple[Tensor, Tensor]
"""Inputs and targets."""

CONTEXT = 12
"""The number of characters before the one that is predicted."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A network, its data and how it is trained."""

    name: str
    words: str
    """Data, network and optimizer, for the table."""
    load: Callable[[Path], tuple[Tables, Tables]]
    """From the folder of data to training and test data."""
    network: Callable[[], nn.Module]
    steps: int
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch_size: int = 32


def mlp(*widths: int, norm: bool = False) -> nn.Module:
    """Linear layers with ReLU, and BatchNorm if asked for, between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths[:-1]):
        layers += [nn.Linear(before, after), *([nn.BatchNorm1d(after)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


def cnn(channels: int, *, norm: bool) -> nn.Module:
    """Two convolutions of stride 2 and a linear layer."""
    layers: list[nn.Module] = []
    for before, after in ((1, channels), (channels, 2 * channels)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=not norm)]
        layers += [*([nn.BatchNorm2d(after)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8 * channels, 10))


class CharacterMLP(nn.Module):
    """Embedded characters, one hidden layer, and the next character."""

    def __init__(self, num_characters: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, 8)
        self.layers = mlp(8 * CONTEXT, width, num_characters)

    def forward(self, characters: Tensor) -> Tensor:
        """The scores of the next character."""
        scores: Tensor = self.layers(self.embedding(characters))
        return scores


class CharacterTransformer(nn.Module):
    """One block of attention with LayerNorm; predicts the character after the last."""

    def __init__(self, num_characters: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, width)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.keys, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU())
        self.back, self.head = nn.Linear(4 * width, width), nn.Linear(width, num_characters)

    def forward(self, characters: Tensor) -> Tensor:
        """The scores of the next character."""
        found = self.embedding(characters) + self.positions
        query, key, value = self.keys(self.norm(found)).chunk(3, dim=-1)
        weights = torch.softmax(query[:, -1:] @ key.transpose(1, 2) / key.shape[-1] ** 0.5, dim=-1)
        last = found[:, -1] + self.out((weights @ value)[:, 0])
        scores: Tensor = self.head(self.last(last + self.back(self.hidden(last))))
        return scores


def sgd(lr: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """SGD with momentum and weight decay."""
    return lambda net: torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)


def adamw(lr: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """AdamW with weight decay."""
    return lambda net: torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.01)


def digits(folder: Path, num_train: int = 600) -> tuple[Tables, Tables]:
    """scikit-learn's digits."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return _split(found.images[:, None] / 8.0 - 1.0, found.target, num_train)


def breast_cancer(folder: Path, num_train: int = 200) -> tuple[Tables, Tables]:
    """scikit-learn's breast cancer table, standardised."""
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer()
    return _split((found.data - found.data.mean(0)) / found.data.std(0), found.target, num_train)


def fashion(folder: Path, num_train: int = 2000) -> tuple[Tables, Tables]:
    """Fashion-MNIST at a quarter of its resolution."""
    parts = []
    for kind, count in (("train", num_train), ("t10k", 5000)):
        raw = {
            name: numpy.frombuffer(
                gzip.decompress((folder / f"fashion-mnist/{kind}-{name}-ubyte.gz").read_bytes()), "uint8"
            )
            for name in ("images-idx3", "labels-idx1")
        }
        images = raw["images-idx3"][16:].reshape(-1, 1, 7, 4, 7, 4)[:count].mean((3, 5)) / 90.0 - 0.8
        parts.append((torch.tensor(images).float(), torch.tensor(raw["labels-idx1"][8:][:count].astype("int64"))))
    return parts[0], parts[1]


def text(folder: Path, name: str, num_train: int = 4000) -> tuple[Tables, Tables]:
    """Windows of characters and the character after each; the test text follows the training text."""
    characters = sorted(set(words := (folder / "text" / name).read_text()[5000 : 5000 + num_train + 8000]))
    codes = torch.tensor([characters.index(one) for one in words])
    codes = codes.clamp(max=NUM_CHARACTERS - 1)
    windows, following = codes.unfold(0, CONTEXT, 1)[:-1], codes[CONTEXT:]
    return (windows[:num_train], following[:num_train]), (windows[num_train:], following[num_train:])


NUM_CHARACTERS = 72


def _split(inputs: Any, targets: Any, num_train: int) -> tuple[Tables, Tables]:
    order = numpy.random.default_rng(0).permutation(len(targets))
    table = torch.tensor(inputs[order]).float(), torch.tensor(targets[order]).long()
    return (table[0][:num_train], table[1][:num_train]), (table[0][num_train:], table[1][num_train:])


DESIGN = (
    Setting(
        name="digits-mlp",
        words="digits, MLP, SGD",
        load=digits,
        network=partial(mlp, 64, 64, 64, 10),
        steps=500,
        optimizer=sgd(0.05),
    ),
    Setting(
        name="digits-cnn",
        words="digits, CNN with BatchNorm, SGD",
        load=digits,
        network=partial(cnn, 8, norm=True),
        steps=2000,
        optimizer=sgd(0.05),
    ),
    Setting(
        name="play-mlp",
        words="a play, character MLP, AdamW",
        load=partial(text, name="asyoulik.txt"),
        network=partial(CharacterMLP, NUM_CHARACTERS, 64),
        steps=2000,
        optimizer=adamw(3e-3),
    ),
)
HELD_OUT = (
    Setting(
        name="cancer",
        words="breast cancer (a table), MLP, AdamW",
        load=breast_cancer,
        network=partial(mlp, 30, 32, 32, 2),
        steps=500,
        optimizer=adamw(3e-3),
        batch_size=16,
    ),
    Setting(
        name="fashion-norm",
        words="Fashion-MNIST (images), MLP with BatchNorm, SGD",
        load=fashion,
        network=partial(mlp, 49, 32, 32, 10, norm=True),
        steps=2000,
        optimizer=sgd(0.05),
    ),
    Setting(
        name="book-transformer",
        words="a book (text), transformer, AdamW",
        load=partial(text, name="alice29.txt", num_train=2000),
        network=partial(CharacterTransformer, NUM_CHARACTERS, 16),
        steps=2000,
        optimizer=adamw(3e-3),
        batch_size=16,
    ),
    Setting(
        name="fashion-long",
        words="Fashion-MNIST (images), MLP, SGD",
        load=fashion,
        network=partial(mlp, 49, 32, 32, 10),
        steps=8000,
        optimizer=sgd(0.05),
        batch_size=16,
    ),
)
SHARES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""The fixed half-lives, as shares of training. As in the paper, these pushes weaken with the learning rate."""
NUM_MEMBERS, NUM_POPULATIONS = 4, 3


def fixed_rules() -> dict[str, Rule]:
    """Every fixed strength, and none."""
    return {**{f"{share:.1%}": Push(half_life=share) for share in SHARES}, "independent": Independent()}


class Populations(Callback):
    """Many populations in one training: the members of each are averaged by its own rule.

    All members take their steps in one vectorised call, which costs little more than a step of four of them.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._given = rules

    def on_train_begin(self, training: Training) -> None:
        """Rules that know the length of training, and their states."""
        self.rules = [with_probe(rule, training).for_length(training.length.num_steps) for rule in self._given]
        self.states = [rule.initial_state(NUM_MEMBERS) for rule in self.rules]
        self.half_lives: list[list[float]] = [[] for _ in self.rules]

    def members(self, population: int) -> range:
        """The members of a population."""
        return range(population * NUM_MEMBERS, (population + 1) * NUM_MEMBERS)

    def on_step_end(self, training: Training) -> None:
        """Average every population whose rule is due."""
        lr_ratio = training.settings.schedule(training.step, training.length.num_steps)
        for number, rule in enumerate(self.rules):
            if rule.averages and rule.is_due(training.step, training.length.num_steps):
                self._average(training, number, lr_ratio)

    def _average(self, training: Training, number: int, lr_ratio: float) -> None:
        rule, members = self.rules[number], self.members(number)
        rows = training.population.matrix[members.start : members.stop]
        context = AveragingContext(
            step=training.step,
            size=NUM_MEMBERS,
            lr_ratio=lr_ratio,
            previous=rule.previous(training.step),
            state=self.states[number],
        )
        if rule.looks_at(context):
            probe, networks = rule.probe, [training.population[member] for member in members]  # type: ignore[attr-defined]
            probed = tuple(probe(network) for network in networks)
            context = replace(context, probed=probed, probed_mean=probe(average_soup(networks)))
        self.states[number] = dict(rule.next_state(context))
        context = replace(context, state=self.states[number])
        rows.copy_(rule.matrix(context).float() @ rows)
        if "half_life" in self.states[number] and context.probed is not None:
            self.half_lives[number].append(round(self.states[number]["half_life"], 1))


def trained(setting: Setting, rules: Mapping[str, Rule], folder: Path, *, seed: int = 1) -> dict[str, Any]:
    """Train some populations with each rule; the scores of every population on test data, and its half-lives."""
    train, test = setting.load(folder)
    (inputs, targets), few = train, NUM_VALIDATION
    data = Data(
        train=Arrays(inputs[few:], targets[few:]),
        validation=Arrays(inputs[:few], targets[:few]),
        test=Arrays(*test),
    )
    populations = Populations([rule for rule in rules.values() for _ in range(NUM_POPULATIONS)])
    settings = Settings(
        num_members=len(rules) * NUM_POPULATIONS * NUM_MEMBERS,
        num_epochs=max(1, round(setting.steps * setting.batch_size / (len(inputs) - few))),
        batch_size=setting.batch_size,
        make_optimizer=setting.optimizer,
        device="cpu",
        seed=seed,
        engine=Stacked,
    )
    start = time.process_time()
    training = start_training(setting.network, data, settings, Independent(), callbacks=[populations])
    training.run()
    seconds = time.process_time() - start
    found: dict[str, Any] = {"steps": training.length.num_steps, "seconds": round(seconds, 1), "scores": {}}
    for number, name in enumerate(name for name in rules for _ in range(NUM_POPULATIONS)):
        networks = [training.population[member] for member in populations.members(number)]
        members, ensemble = training.evaluate(networks, Arrays(*test))
        soup = training.evaluate([average_soup(networks)], Arrays(*test))[0][0]
        mean = Evaluation(fmean(one.score for one in members), fmean(one.loss for one in members))
        row = {"mean": mean, "ensemble": ensemble, "average_soup": soup}
        rounded: dict[str, Any] = {key: [round(one.score, 3), round(one.loss, 5)] for key, one in row.items()}
        if populations.half_lives[number]:
            rounded["half_lives"] = populations.half_lives[number]
        found["scores"].setdefault(name, []).append(rounded)
    return found


NUM_VALIDATION = 10
"""Training examples that are held out, since every training has validation data; nothing here depends on them."""


FILE = FOLDER / "strength.jsonl"
PAGE = Path(__file__).parent.parent / "docs/strength.md"
BLOCK = re.compile(r"(<!-- strengths -->\n).*?(<!-- end of strengths -->\n)", re.DOTALL)
AUTO = "papa-auto"


def jobs() -> list[tuple[Setting, str, dict[str, Rule]]]:
    """Settings, names of records and rules: the fixed strengths of a setting, and the one that sets itself."""
    rules: dict[str, dict[str, Rule]] = {"": fixed_rules(), "-auto": {AUTO: AdaptivePush(check_every=50)}}
    return [(setting, f"{setting.name}{end}", chosen) for setting in HELD_OUT for end, chosen in rules.items()]


def run(folder: Path) -> None:
    """Train what has no record yet."""
    torch.set_num_threads(1)
    for setting, name, rules in jobs():
        if name not in read_file(FILE):
            found = trained(setting, rules, folder)
            versions = {"papa": __version__, "torch": torch.__version__, "python": platform.python_version()}
            write_records(FILE.stem, {name: {"setting": setting.words, **found, **versions}}, FILE.parent)
            print(f"{name}: {found['seconds']:.0f} s", flush=True)


NAMES = (*(f"{share:.1%}" for share in SHARES), "independent", AUTO)
"""The columns of tables."""
TABLES = {
    "The average soup's accuracy on test data": ("average_soup", 0),
    "Its loss on test data": ("average_soup", 1),
    "The mean accuracy of members": ("mean", 0),
    "The accuracy of their ensemble": ("ensemble", 0),
}
"""Titles of tables, what they show of a record, and whether it is the score (0) or the loss (1)."""


def table(what: str, place: int, file: Path = FILE) -> str:
    """Means and standard deviations for each setting and strength, in Markdown; the best fixed one is bold."""
    lines = [f"| setting | steps | {' | '.join(NAMES)} |", f"|---|{'--:|' * (len(NAMES) + 1)}"]
    for setting in HELD_OUT:
        found = values_of(setting, what, place, file)
        means = {name: fmean(values) * (-1 if place else 1) for name, values in found.items() if name != AUTO}
        best = max(means, key=lambda name: means[name], default="")
        cells = [_cell(found[name], 3 if place else 2, name == best) if name in found else "not run" for name in NAMES]
        lines.append(f"| {setting.words} | {setting.steps:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def values_of(setting: Setting, what: str, place: int, file: Path = FILE) -> dict[str, list[float]]:
    """A number of every population, by strength; of those that have a record."""
    records = read_file(file)
    own = [records[name] for one, name, _ in jobs() if one is setting and name in records]
    found = {name: rows for record in own for name, rows in record["scores"].items()}
    return {name: [row[what][place] for row in rows] for name, rows in found.items()}


def _cell(values: Sequence[float], digits: int, is_best: bool) -> str:
    mark = "**" if is_best else ""
    return f"{mark}{fmean(values):.{digits}f}{mark} ({stdev(values):.{digits}f})"


def page_with_tables(page: str, file: Path = FILE) -> str:
    """The page with its tables filled in."""
    parts = [f"{title}:\n\n{table(*chosen, file)}\n" for title, chosen in TABLES.items()]
    return BLOCK.sub(lambda match: "\n".join([match[1], *parts, match[2]]), page)


def main(arguments: Sequence[str]) -> int:
    """Run the study, or write its tables."""
    match list(arguments):
        case ["run", folder]:
            run(Path(folder))
        case ["write"]:
            write_atomically(PAGE, page_with_tables(PAGE.read_text()))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
