"""Studies of the regime that populations are for: few data, used up before training ends."""

from __future__ import annotations

from dataclasses import dataclass

from results.controls import both
from results.study import Study, Table
from results.tables import rates_and_decays, side_by_side

METHODS = "independent,papa,papa-all,papa-2"
TUNING_SEED = "11"
"""A seed that no other run uses."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of data: a population, and one network with the same compute."""

    recipe: str
    title: str
    seeds: str = "1,2,3"
    root: str = "DATA"
    tuned: tuple[tuple[float, float], ...] = ()
    """Learning rates and weight decays that were tried for single networks."""
    tuning_options: str = ""
    """More validation data for that."""

    def command(self, recipe: str, methods: str, seeds: str, out: str, *options: str) -> str:
        """A command at the recipe's own setting."""
        words = ("papa compare", recipe, "--methods", methods, "--seeds", seeds, *filter(None, options))
        return " ".join([*words, "--parallel 2 --data.root", self.root, "--out", f"runs/small/{out}"])

    @property
    def study(self) -> Study:
        """Controls and populations, and the search for the learning rate and weight decay of a single network."""
        one = [
            self.command(f"{self.recipe}-{role}", "independent", self.seeds, f"{self.recipe}-{role}")
            for role in ("long", "batch")
        ]
        tuning = [
            self.command(
                *(self.recipe, "independent", TUNING_SEED, f"tune/{self.recipe}-{rate:g}-{decay:g}"),
                *("--members 2", self.tuning_options, f"--train.lr {rate:g} --train.weight-decay {decay:g}"),
            )
            for rate, decay in self.tuned
        ]
        tables = [
            Table(
                title="Populations, and one network with as much compute",
                commands=(self.command(self.recipe, METHODS, self.seeds, self.recipe), *one),
                render=both(side_by_side),
            )
        ]
        if tuning:
            tables.append(
                Table(title="Learning rate and weight decay", commands=tuple(tuning), render=rates_and_decays)
            )
        return Study(name=self.recipe, title=self.title, tables=tuple(tables))


KINDS = (
    Kind(
        recipe="cifar10-2k",
        title="CIFAR-10 with 2,000 images",
        tuned=((0.05, 5e-4), (0.05, 2e-3), (0.1, 2e-3), (0.02, 2e-3), (0.05, 5e-3), (0.1, 5e-4)),
        tuning_options="--data.max-train 2800 --data.validation 0.35714",
    ),
)
EVIDENCE = tuple(kind.study for kind in KINDS)
