"""Short runs of every method with fixed seeds, whose numbers are stored in `fixed_runs.json`.

python tests/fixed_runs.py            # differences to the stored numbers; exit code 1 if there are any
python tests/fixed_runs.py --bits     # digests of the weights, to compare two versions on one machine
python tests/fixed_runs.py --write    # store the numbers anew, for a change that alters them and says so
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import papa
from papa.training import Align, AveragingOptions, Repair, Stacked, TrajectoryAverage

STORED = Path(__file__).with_name("fixed_runs.json")
TOLERANCE = 1e-3
"""Relative to the number, or to 0.1 if it is smaller. Processors round differently, and training amplifies that."""

NUM_STEPS = 40


def images() -> tuple[Tensor, Tensor]:
    """Noisy images of four classes."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(4, (256,), generator=generator)
    centres = torch.randn(4, 1, 6, 6, generator=generator)
    return 0.3 * centres[targets] + torch.randn(256, 1, 6, 6, generator=generator), targets


INPUTS, TARGETS = images()


def make_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 4)
    )


def validation_loss(network: nn.Module) -> float:
    network.eval()
    with torch.no_grad():
        found = nn.functional.cross_entropy(network(INPUTS[192:]), TARGETS[192:]).item()
    network.train()
    return found


def own_loop(rule: papa.Rule, *, merge_hooks: Callable[[list[Tensor]], Any] | None = None) -> Iterable[nn.Module]:
    population = papa.Population.build(make_network, 3, seed=1)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3) for net in population]
    hooks: Any = () if merge_hooks is None else merge_hooks([INPUTS[:64], INPUTS[64:128]])
    averager = papa.Averager(population, rule, optimizers, num_steps=NUM_STEPS, merge_hooks=hooks)
    generators = [torch.Generator().manual_seed(10 + member) for member in range(3)]
    for _ in range(NUM_STEPS):
        for network, optimizer, generator in zip(population, optimizers, generators, strict=True):
            batch = torch.randint(192, (16,), generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(INPUTS[batch]), TARGETS[batch]).backward()
            optimizer.step()
        averager.step()
    return [*population, papa.average_soup(population)]


def repair_merges(batches: list[Tensor]) -> papa.RepairMerges:
    return papa.RepairMerges(lambda member: batches)


def trained(rule: papa.Rule | None = None, **options: Any) -> Iterable[nn.Module]:
    outcome = papa.train(
        make_network,
        (INPUTS, TARGETS),
        num_epochs=4,
        num_members=3,
        batch_size=20,
        validation=0.25,
        rule=rule,
        device="cpu",
        verbose=False,
        **options,
    )
    return [*outcome.population, outcome.average_soup]


def small_network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 4))


def distilled() -> Iterable[nn.Module]:
    teacher = papa.Ensemble(list(own_loop(papa.Independent()))[:3])
    data = INPUTS, TARGETS
    return [papa.distill(teacher, small_network, data, num_epochs=4, device="cpu", verbose=False).average_soup]


def chosen_soups() -> Iterable[nn.Module]:
    *members, _ = own_loop(papa.Push(half_life_steps=10))
    population = papa.Population(members)
    batches = [(INPUTS[192:], TARGETS[192:])]
    return [
        papa.learned_soup(population, batches).network,
        papa.model_stock(population, papa.Population.build(make_network, 3, seed=1)[0]).network,
    ]


RUNS: dict[str, Callable[[], Iterable[nn.Module]]] = {
    "independent": lambda: own_loop(papa.Independent()),
    "papa": lambda: own_loop(papa.Push(half_life=0.1)),
    "papa-alpha": lambda: own_loop(papa.Push(alpha=0.9, every_steps=3)),
    "papa-all": lambda: own_loop(papa.MergeAll(every_steps=10)),
    "papa-2": lambda: own_loop(papa.MergePairs(every_steps=10)),
    "merge-many": lambda: own_loop(papa.MergeMany(every_steps=10)),
    "mix": lambda: own_loop(papa.Mix([[0.8, 0.1, 0.1], [0.2, 0.6, 0.2], [0.0, 0.5, 0.5]], every_steps=5)),
    "papa-all-repair": lambda: own_loop(
        papa.MergeAll(every_steps=10), merge_hooks=lambda batches: papa.RepairMerges(lambda member: batches)
    ),
    "elastic": lambda: own_loop(papa.Elastic(every_steps=5)),
    "lookahead": lambda: own_loop(papa.Lookahead(every_steps=5)),
    "outer-step": lambda: own_loop(papa.OuterStep(every_steps=10)),
    "outer-step-fragments": lambda: own_loop(papa.OuterStep(every_steps=10, fragments=2)),
    "gossip": lambda: own_loop(papa.Gossip(every_steps=5)),
    "sparse": lambda: own_loop(papa.SparseAverage(share=0.05)),
    "shuffle": lambda: own_loop(papa.Shuffle(share=0.05)),
    "push-pull": lambda: own_loop(papa.PushPull()),
    "gradient-weighted": lambda: own_loop(papa.GradientWeightedPush(every_steps=5)),
    "score-weighted": lambda: own_loop(papa.ScoreWeightedPush(validation_loss, every_steps=5)),
    "adaptive": lambda: trained(papa.AdaptivePush()),
    "trained": lambda: trained(),
    "trained-repair": lambda: trained(papa.MergeAll(every_steps=9), averaging=AveragingOptions(repair=Repair())),
    "trained-aligned": lambda: trained(
        papa.MergePairs(every_steps=9), averaging=AveragingOptions(align=Align(), repair=Repair())
    ),
    "trained-ema": lambda: trained(callbacks=[TrajectoryAverage(decay=0.9)]),
    "stacked": lambda: trained(engine=Stacked),
    "distilled": distilled,
    "chosen-soups": chosen_soups,
}


def numbers_of(networks: Iterable[nn.Module]) -> list[float]:
    """The size of each network's weights, and its validation loss."""
    found = []
    for network in networks:
        square = sum(float(value.double().square().sum()) for value in network.state_dict().values())
        found += [square**0.5, validation_loss(network)]
    return found


def digest_of(networks: Iterable[nn.Module]) -> str:
    """A digest of all bits."""
    digest = hashlib.sha256()
    for network in networks:
        for value in network.state_dict().values():
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def differences(name: str, found: list[float], stored: dict[str, list[float]]) -> str | None:
    """What differs from the stored numbers of a run, or None."""
    if name not in stored:
        return "has no stored numbers"
    pairs = list(zip(found, stored[name], strict=True))
    worst = max(abs(one - other) / max(abs(other), 0.1) for one, other in pairs)
    return None if worst <= TOLERANCE else f"differs by {worst:.2g}: {found} instead of {stored[name]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help=f"of {', '.join(RUNS)}; all by default")
    parser.add_argument("--bits", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    status = 0
    for name in options.runs or RUNS:
        networks = list(RUNS[name]())
        if options.bits:
            print(name, digest_of(networks))
        elif options.write:
            stored[name] = [round(number, 6) for number in numbers_of(networks)]
        elif (difference := differences(name, numbers_of(networks), stored)) is not None:
            print(f"{name} {difference}")
            status = 1
    if options.write:
        STORED.write_text(
            "{\n" + ",\n".join(f'"{name}": {json.dumps(values)}' for name, values in stored.items()) + "\n}\n"
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
