"""Studies of the regime that populations are for: few data, used up before training ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from results.controls import both
from results.study import Study, Table
from results.tables import side_by_side, tuned_options, tuned_strengths

METHODS = "independent,papa,papa-all,papa-2"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of data: a population, and one network with the same compute."""

    recipe: str
    title: str
    name: str = ""
    """Of the study; the recipe's by default."""
    methods: str = METHODS
    controls: tuple[str, ...] = ("longer", "larger-batches")
    """Methods of one network with the same compute."""
    seeds: str = "1,2,3"
    root: str = "DATA"
    options: str = ""
    """Options of all runs."""
    tuned: Mapping[str, str] = field(default_factory=dict)
    """Options that were tried for single networks, by the name of their run."""
    tuning_seeds: str = "11"
    """Seeds that no other run uses."""
    tuning_options: str = ""
    """More validation data for that."""
    tuning_members: int = 2
    has_distilled: bool = False
    """Whether a network is also distilled from each ensemble of independent networks."""
    batch_rates: tuple[float, ...] = ()
    """Learning rates that were tried for one network with larger batches."""
    half_lives: tuple[float, ...] = ()
    """Half-lives of the push that were tried, as shares of training."""
    same_init: tuple[float, ...] = ()
    """The same for members with the same initial weights, the chosen one first."""

    @property
    def study_name(self) -> str:
        """The name of the study, and of the directories of its runs."""
        return self.name or self.recipe

    def command(self, recipe: str, methods: str, seeds: str, out: str, *options: str) -> str:
        """A command at the recipe's own setting."""
        words = ("papa compare", recipe, "--methods", methods, "--seeds", seeds, self.options, *options)
        place = ("--parallel 2 --data.root", self.root, "--out", f"runs/small/{out}")
        return " ".join(filter(None, (*words, *place)))

    @property
    def main_command(self) -> str:
        """Populations at the recipe's own setting."""
        return self.command(self.recipe, self.methods, self.seeds, self.study_name)

    def control_command(self, role: str) -> str:
        """One network with the compute of a population: `longer` or `larger-batches`."""
        return self.command(self.recipe, role, self.seeds, f"{self.study_name}-{role}")

    @property
    def study(self) -> Study:
        """Controls and populations, and the search for the learning rate and weight decay of a single network."""
        one = [self.control_command(role) for role in self.controls]
        tuning = [
            self.command(
                *(self.recipe, "independent", self.tuning_seeds, f"tune/{self.study_name}-{name}"),
                *(f"--members {self.tuning_members}", self.tuning_options, tried),
            )
            for name, tried in self.tuned.items()
        ]
        batch_tuning = [
            self.command(
                *(self.recipe, "larger-batches", self.tuning_seeds, f"tune/{self.study_name}-batch-{rate:g}"),
                *(self.tuning_options, f"--train.larger-batch-lr {rate:g}"),
            )
            for rate in self.batch_rates
        ]
        if self.has_distilled:
            one += [
                self.command(
                    *(self.recipe, "independent", seed, f"{self.recipe}-distilled", "--members 1"),
                    f"--train.teacher runs/small/{self.recipe}/independent-seed{seed}",
                )
                for seed in self.seeds.split(",")
            ]
        if self.same_init:
            chosen = f"--diversity.same-init --average.half-life {self.same_init[0]:g}"
            one.append(self.command(self.recipe, "papa", self.seeds, f"{self.recipe}-same-init", chosen))
        strengths = [
            self.command(
                *(self.recipe, "papa", self.tuning_seeds, f"tune/{self.study_name}-{name}-{share:g}"),
                *(self.tuning_options, option, f"--average.half-life {share:g}"),
            )
            for name, option, shares in (
                ("half-life", "", self.half_lives),
                ("same-init", "--diversity.same-init", sorted(self.same_init)),
            )
            for share in shares
        ]
        tables = [
            Table(
                title="Populations, and one network with as much compute",
                commands=(self.main_command, *one),
                render=both(side_by_side),
            )
        ]
        # They run first, since the recipes have what they find.
        searches = (
            ("Options of a single network", tuning, tuned_options),
            ("The learning rate of larger batches", batch_tuning, tuned_options),
            ("The strength of the push", strengths, tuned_strengths),
        )
        found = [Table(title=title, commands=tuple(some), render=render) for title, some, render in searches if some]
        return Study(name=self.study_name, title=self.title, tables=(*found, *tables))


FASHION = Kind(
    recipe="fashion-mnist-1k",
    title="Fashion-MNIST with 1,000 images",
    tuned={
        f"{rate:g}-{decay:g}": f"--train.lr {rate:g} --train.weight-decay {decay:g}"
        for rate, decay in ((0.05, 5e-4), (0.05, 2e-3), (0.05, 5e-3), (0.1, 2e-3))
    },
    tuning_options="--data.max-train 1900 --data.validation 0.526316",
    batch_rates=(0.05, 0.1, 0.2),
    half_lives=(0.002, 0.005, 0.015),
)
CIFAR10 = Kind(
    recipe="cifar10-2k",
    title="CIFAR-10 with 2,000 images",
    tuned={
        f"{rate:g}-{decay:g}": f"--train.lr {rate:g} --train.weight-decay {decay:g}"
        for rate, decay in ((0.05, 5e-4), (0.05, 2e-3), (0.05, 5e-3), (0.05, 1e-2), (0.05, 2e-2), (0.1, 2e-3))
    },
    tuning_options="--data.max-train 2800 --data.validation 0.35714",
    batch_rates=(0.05, 0.1, 0.2),
    half_lives=(0.005, 0.015, 0.05),
)
CIFAR100 = Kind(
    recipe="cifar100-5k",
    title="CIFAR-100 with 5,000 images",
    options="--train.precision bfloat16",
    tuned={
        f"{rate:g}-{decay:g}": f"--train.lr {rate:g} --train.weight-decay {decay:g}"
        for rate, decay in ((0.05, 2e-3), (0.05, 5e-3), (0.05, 1e-2), (0.1, 5e-3))
    },
    tuning_options="--data.max-train 6500 --data.validation 0.307692",
    batch_rates=(0.05, 0.1, 0.2, 0.4),
    half_lives=(0.002, 0.005, 0.015),
)
CIFAR100_USED_UP = Kind(
    recipe="cifar100-2k",
    title="CIFAR-100 with 2,000 images",
    options="--train.precision bfloat16 --train.validate-every 5",
    tuned={
        f"{rate:g}-{decay:g}": f"--train.lr {rate:g} --train.weight-decay {decay:g}"
        for rate, decay in ((0.05, 2e-3), (0.05, 5e-3), (0.05, 1e-2), (0.05, 2e-2), (0.1, 5e-3))
    },
    tuning_options="--data.max-train 2800 --data.validation 0.35714 --train.validate-every 10",
    batch_rates=(0.05, 0.1, 0.2),
    half_lives=(0.001, 0.002, 0.005, 0.015),
)
DIGITS = Kind(
    recipe="digits-150",
    title="150 handwritten digits",
    seeds="1,2,3,4,5",
    options="--trajectory.kind ema --trajectory.decay 0.9 --average.keep-best-soup",
    tuned={
        f"{rate:g}-{decay:g}": f"--train.lr {rate:g} --train.weight-decay {decay:g}"
        for rate, decay in ((0.1, 5e-4), (0.1, 5e-3), (0.1, 2e-2), (0.1, 5e-2), (0.05, 2e-2), (0.2, 2e-2))
    },
    tuning_seeds="11,12,13,14,15",
    tuning_options="--data.max-train 300 --data.validation 0.6 --train.validate-every 10",
    tuning_members=4,
    batch_rates=(0.05, 0.1, 0.2, 0.4),
    half_lives=(0.003, 0.01, 0.03, 0.1),
)
KINDS = (
    CIFAR10,
    CIFAR100_USED_UP,
    CIFAR100,
    FASHION,
    DIGITS,
    Kind(
        recipe="breast-cancer-mlp",
        title="The breast cancer table",
        seeds=",".join(map(str, range(1, 11))),
        tuned={
            f"{rate:g}-{dropout:g}": f"--train.lr {rate:g} --model.dropout {dropout:g}"
            for rate in (0.01, 0.05)
            for dropout in (0.0, 0.2, 0.5)
        },
        tuning_seeds="11,12,13,14,15",
        batch_rates=(0.01, 0.02, 0.04),
    ),
)
LETTERS = Kind(
    recipe="letters-mlp",
    title="Letters: 1,000 rows of a table",
    root="DATA/tables/letter.csv",
    options="--train.precision float32",
    seeds="1,2,3,4,5",
    tuned={
        **{
            f"{rate:g}-{dropout:g}": f"--train.lr {rate:g} --model.dropout {dropout:g}"
            for rate in (0.01, 0.05, 0.1, 0.2)
            for dropout in (0.0, 0.2, 0.5)
        },
        **{
            f"{rate:g}-0-{decay:g}": f"--train.lr {rate:g} --model.dropout 0 --train.weight-decay {decay:g}"
            for rate in (0.05, 0.1)
            for decay in (1e-4, 3e-3)
        },
    },
    tuning_seeds="11,12,13",
    tuning_options="--train.validate-every 10",
    batch_rates=(0.05, 0.1, 0.2, 0.4),
    half_lives=(0.002, 0.005, 0.015, 0.05),
)
TEXT = Kind(
    recipe="text-gpt-mini",
    title="Paradise Lost",
    options="--train.precision float32",
    root="DATA/text/paradise-lost.txt",
    tuned={
        f"{dropout:g}-{decay:g}": f"--gpt.dropout {dropout:g} --train.weight-decay {decay:g}"
        for dropout, decay in ((0.0, 0.1), (0.1, 0.1), (0.2, 0.1), (0.1, 0.5))
    },
    tuning_options="--trajectory.decay 0.999",
    tuning_members=1,
    batch_rates=(1e-3, 2e-3, 3e-3, 6e-3),
    half_lives=(0.005, 0.03),
    same_init=(0.03, 0.1),
    has_distilled=True,
)
ALONG_TRAINING = (
    "--trajectory.kind ema --trajectory.decay 0.99 --trajectory.batch-norm-batches 10 --average.keep-best-soup"
)
"""For the controls with EMA and with early stopping."""
AERIAL = Kind(
    recipe="aerial-unet",
    title="Aerial images, a class for every pixel",
    name="aerial",
    methods="independent,longer,papa,papa-all",
    controls=(),
    root="DATA/aerial",
    options="--budget mini --members 3 --diversity.grid none --train.epochs 60 --train.lr 0.1 "
    f"--average.half-life 0.005 --average.every-epochs 6 --train.precision bfloat16 {ALONG_TRAINING}",
    tuned={f"{rate:g}": f"--train.lr {rate:g}" for rate in (0.01, 0.03, 0.1)},
    tuning_options="--train.epochs 30 --average.every-epochs 3",
    tuning_members=1,
    half_lives=(0.005, 0.02, 0.05),
)
PRETRAINED = Kind(
    recipe="cifar100-finetune-effnetv2s",
    title="EfficientNet-Lite0 from ImageNet, fine-tuned on 500 images of CIFAR-10",
    name="pretrained",
    methods="independent,longer,papa",
    controls=(),
    options=" ".join(
        (
            "--model.name timm:tf_efficientnet_lite0 --model.weights lite0.safetensors --data.name cifar10",
            "--data.image-size 64 --data.max-train 500 --data.validation 0.2 --data.max-test 2000",
            "--members 3 --diversity.grid none --train.epochs 27 --train.batch-size 16 --train.precision bfloat16",
            "--train.channels-last --train.validate-every 3 --train.lr 0.003 --average.alpha None",
            "--average.half-life 0.1",
            ALONG_TRAINING,
        )
    ),
    tuned={f"{rate:g}": f"--train.lr {rate:g}" for rate in (3e-4, 1e-3, 3e-3, 1e-2)},
    tuning_options="--data.max-train 1300 --data.validation 0.692308",
    tuning_members=1,
    half_lives=(0.005, 0.02, 0.1, 0.3),
)
EVIDENCE = tuple(kind.study for kind in (*KINDS, LETTERS, TEXT, AERIAL, PRETRAINED))
