"""The training speed of a population: papa as it ships, against the usual script.

Four ResNet-20, batches of 64 images of 32x32 pixels. The script is one process in float32 with a `DataLoader` of PIL
transforms for each member (in the same process, or in a separate one), members in a loop, and averaging by state dicts
every 10 steps. papa has one worker process per core with one thread each, in bfloat16 if the processor supports it, and
augments a batch at a time, with a draw from the default grid for each member.
Every contender trains in new processes, so that none inherits threads or caches.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _bench import Parts, Result, finish, parser, positive
from papa.core.group import Group
from papa.core.rules import Independent, Push, Rule
from papa.distributed.start import start_workers
from papa.lab.augment.policy import GRIDS, draw_policies
from papa.lab.domains.pipeline import ImagePipeline
from papa.lab.models import make_model
from papa.lab.recipes.recipe import fast_precision
from papa.training import Callback, Numerics, Settings, Training, Transforms, sgd, start_training
from papa.training.data import Arrays, Data
from push import push_state_dicts_

NUM_MEMBERS = 4
BATCH_SIZE = 64
NUM_IMAGES = 10_000
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
WARM_UP_STEPS = 5


def images() -> tuple[Tensor, Tensor]:
    """Random images of the shape of CIFAR; the speed does not depend on their content."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (NUM_IMAGES, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return pixels, torch.randint(10, (NUM_IMAGES,), generator=generator)


class Stopwatch(Callback):
    """Times a number of steps after a warm-up, and then ends the training."""

    class Done(Exception):  # noqa: N818
        """All steps were timed."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.start = 0.0
        self.seconds = 0.0
        self.parts = Parts()

    def on_step_begin(self, training: Training) -> None:
        """Start the time after the warm-up."""
        if training.step == WARM_UP_STEPS:
            training.group.barrier()
            training.seconds["average"] = 0.0
            self.parts.seconds.clear()
            self.start = time.perf_counter()

    def on_step_complete(self, training: Training) -> None:
        """Stop the time and the training after the steps."""
        if training.step == WARM_UP_STEPS + self.num_steps:
            training.group.barrier()
            self.seconds = time.perf_counter() - self.start
            self.parts.seconds["averaging"] = training.seconds["average"]
            raise self.Done


def train_papa(group: Group, rule: Rule, num_steps: int) -> tuple[float, dict[str, float]]:
    """The seconds of `num_steps` steps of a population as in a recipe, and of their parts in this process."""
    pipeline = ImagePipeline(num_classes=10, mean=MEAN, std=STD, crop_padding=4, flip=True)
    watch = Stopwatch(num_steps)
    source = Arrays(*images())
    source.batch = watch.parts.timed("data", source.batch)  # type: ignore[method-assign]
    policies = draw_policies(GRIDS["default"], NUM_MEMBERS, seed=1)

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = sgd(model)
        optimizer.step = watch.parts.timed("optimizer", optimizer.step)  # type: ignore[method-assign]
        return optimizer

    settings = Settings(
        num_members=NUM_MEMBERS,
        num_epochs=1,
        batch_size=BATCH_SIZE,
        make_optimizer=make_optimizer,
        device="cpu",
        transforms=Transforms(
            augment=[
                watch.parts.timed("augmentation", partial(pipeline.augment, policy=policy)) for policy in policies
            ],
            prepare=pipeline.prepare,
        ),
        numerics=Numerics(autocast=torch.bfloat16 if fast_precision() == "bfloat16" else None, channels_last=True),
    )
    make, data = partial(make_model, "resnet20", num_classes=10), Data(train=source, validation=source)
    training = start_training(make, data, settings, rule, group=group)
    try:
        training.run([watch])
    except Stopwatch.Done:
        return watch.seconds, watch.parts.seconds
    raise AssertionError("the training ended before the steps were over")


class PilImages(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """The data set of the script: one image at a time, through PIL."""

    def __init__(self) -> None:
        from torchvision import transforms

        pixels, targets = images()
        self.pixels, self.targets = pixels.permute(0, 2, 3, 1).numpy(), targets.tolist()
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.pixels[index])), self.targets[index]


def train_script(num_steps: int, num_loaders: int) -> float:
    """The seconds of `num_steps` steps of the script, with `num_loaders` data loading processes per member."""
    dataset = PilImages()
    loaders = [
        torch.utils.data.DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=num_loaders)
        for _ in range(NUM_MEMBERS)
    ]
    models = [make_model("resnet20", num_classes=10) for _ in range(NUM_MEMBERS)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4) for net in models]
    iterators = [iter(loader) for loader in loaders]
    start = 0.0
    for step in range(WARM_UP_STEPS + num_steps):
        if step == WARM_UP_STEPS:
            start = time.perf_counter()
        for model, optimizer, iterator in zip(models, optimizers, iterators, strict=True):
            inputs, targets = next(iterator)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        if (step + 1) % 10 == 0:
            push_state_dicts_(models)
    return time.perf_counter() - start


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function, called in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:  # can start others
        return pool.submit(function, *arguments).result()


def main() -> None:
    """Run the benchmark."""
    options_parser = parser(__doc__.splitlines()[0])
    options_parser.add_argument("--steps", type=positive, default=20, help="number of steps to time in each round")
    options_parser.set_defaults(rounds=3)
    options = options_parser.parse_args()
    push, steps = Push(alpha=0.99, every_steps=10), options.steps
    contenders: dict[str, Callable[[], tuple[float, dict[str, float]]]] = {
        "the script one would write": lambda: (in_new_process(train_script, steps, 0), {}),
        "papa, two workers": lambda: start_workers(train_papa, 2, NUM_MEMBERS, push, steps),
        "papa, one worker": lambda: start_workers(train_papa, 1, NUM_MEMBERS, push, steps),
        "independent, two workers": lambda: start_workers(train_papa, 2, NUM_MEMBERS, Independent(), steps),
        "the script, a loader process for each member": lambda: (in_new_process(train_script, steps, 1), {}),
    }
    close = ("independent, two workers", "papa, two workers")
    """These differ by a percent or less, so that they run twice per round."""
    best: dict[str, float] = {}
    parts: dict[str, dict[str, float]] = {}
    again: list[dict[str, float]] = []
    for _ in range(options.rounds):
        for name, run in contenders.items():
            seconds, where = run()
            if seconds < best.get(name, float("inf")):
                best[name], parts[name] = seconds, where
        again.append({name: contenders[name]()[0] for name in close})
    script, two, one = (best[name] for name in list(contenders)[:3])
    loading = best["the script, a loader process for each member"]
    alone, together = (min(best[name], *(seconds[name] for seconds in again)) for name in close)
    spent = {name: parts["papa, one worker"][name] for name in ("data", "augmentation", "optimizer", "averaging")}
    averaged = parts["papa, two workers"]["averaging"]
    num_images = NUM_MEMBERS * BATCH_SIZE * steps
    results = [
        *(
            Result(name=name, seconds=seconds, note=f"{num_images / seconds:.0f} images/s")
            for name, seconds in best.items()
        ),
        Result(name="papa against the script", ratio=two / script, target=1 / 2.5),
        Result(name="papa against the script with loader processes", ratio=two / loading),
        Result(name="papa, one worker, against the script", ratio=one / script),
        Result(name="two workers against one", ratio=two / one, target=1 / 1.85),
        Result(
            name="papa against independent", ratio=together / alone, target=1.01, note="best of twice as many rounds"
        ),
        Result(
            name="two workers: share of averaging in the first, waiting for the other included", ratio=averaged / two
        ),
        Result(name="share of data and augmentation", ratio=(spent["data"] + spent["augmentation"]) / one, target=0.08),
        Result(name="share of the optimizer", ratio=spent["optimizer"] / one),
        Result(name="share of averaging", ratio=spent["averaging"] / one, target=0.01),
        Result(name="share of forward, backward and the rest", ratio=1 - sum(spent.values()) / one),
    ]
    finish(results, options, title=f"Training {NUM_MEMBERS} ResNet-20 in {fast_precision()}, {steps} steps")


if __name__ == "__main__":
    main()
