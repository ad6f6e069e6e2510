"""What several tests share: small networks of every kind that could go wrong, and slow, obvious references."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from papa.core import layout
from papa.core.population import Population
from papa.core.rules import Independent, MergeAll, Rule
from papa.lab import launch
from papa.lab.config import Config
from papa.lab.recipes import find
from papa.lab.recorder import Recorder
from papa.lab.runs import RunDirectory
from papa.training import AveragingOptions, BestSoup, Callback, Monitoring, Repair, Settings, Training, Transforms
from papa.training.data import Data, as_source
from papa.training.merge_hooks import merge_hooks_for
from papa.training.task import Task

TOLERANCES = {
    torch.float64: 1e-13,
    torch.complex128: 1e-13,
    torch.float32: 5e-7,
    torch.complex64: 5e-7,
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
}
"""How far a mixed tensor may be from its float64 reference, relative to the largest number in it."""


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(tokens)))


class MixedDtypes(nn.Module):
    """Three dtypes side by side, none of them dividing the others' alignment evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(3, 5)
        self.double = nn.Linear(5, 3).double()
        self.brain = nn.Linear(3, 7).bfloat16()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.brain(self.double(self.single(inputs).double()).bfloat16())


class Oddities(nn.Module):
    """Complex weights, integer buffers, a scalar, an empty tensor, a transposed weight and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.register_buffer("count", torch.randint(100, (3,)))
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        self.register_buffer("table", torch.randn(4), persistent=False)
        self.register_buffer("shift", torch.randn(5))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale


def conv_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)),
    "conv_batch_norm": conv_batch_norm,
    "channels_last": lambda: conv_batch_norm().to(memory_format=torch.channels_last),
    "group_norm": lambda: nn.Sequential(nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4)),
    "tied": Tied,
    "mixed_dtypes": MixedDtypes,
    "oddities": Oddities,
}


def make_network(kind: str, seed: int) -> nn.Module:
    """A network of one kind whose parameters and running statistics are its seed's own."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = NETWORKS[kind]()
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
                module.num_batches_tracked.random_(100)
    return network


def make_networks(kind: str, size: int, seed: int = 0) -> list[nn.Module]:
    return [make_network(kind, 1000 * seed + index) for index in range(size)]


def snapshot(network: nn.Module) -> dict[str, Tensor]:
    """Every tensor of a network, whether persistent or not, as an independent copy."""
    tensors = [*network.named_parameters(), *network.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in tensors}


def reference_mix(states: list[dict[str, Tensor]], matrix: Tensor, name: str) -> list[Tensor]:
    """`A @ W` for one tensor, as a loop anybody can check, in double precision."""
    wide = torch.complex128 if states[0][name].is_complex() else torch.float64
    wide_states = [state[name].to(wide) for state in states]
    return [sum(weight * state for weight, state in zip(row, wide_states, strict=True)) for row in matrix.tolist()]


def random_stochastic(size: int, seed: int) -> Tensor:
    """A dense row-stochastic matrix."""
    return torch.softmax(2 * torch.randn(size, size, generator=torch.Generator().manual_seed(seed)).double(), dim=1)


def assert_close(found: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Equal up to what the dtype of `found` can hold, relative to the largest number."""
    bound = TOLERANCES[found.dtype] if tolerance is None else tolerance
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    difference = (found.detach().to(expected.dtype) - expected).abs()
    assert found.shape == expected.shape
    assert not difference.numel() or float(difference.max()) <= bound * scale, float(difference.max())


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor], names: Iterable[str] | None = None) -> None:
    """Equal bit for bit, signs of zeros and payloads of NaNs included."""
    for name in expected if names is None else names:
        one, other = found[name].contiguous(), expected[name].contiguous()
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.reshape(-1).view(torch.uint8).equal(other.reshape(-1).view(torch.uint8)), name


class Attention(nn.Module):
    """`nn.MultiheadAttention` between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.after = nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.before(tokens)
        return self.after(self.attention(hidden, hidden, hidden, need_weights=False)[0])


def averaged_tensors(population: Population) -> list[dict[str, Tensor]]:
    """The averaged tensors of every member held here, by name, where they are."""
    population.refresh_()
    return [
        {name: tensor.detach() for name, tensor in layout.named_tensors(model, population.averaged).items()}
        for model in population
    ]


def small_config(**changes: object) -> Config:
    """A few steps of the digits recipe."""
    config = replace(find("digits").config(), members=3, **changes)  # type: ignore[arg-type]
    return replace(
        config,
        train=replace(config.train, epochs=3, batch_size=64),
        average=replace(config.average, repair=2, probes=True, probe_steps=2),
    )


def execute(config: Config, path: Path, *, stop: Any = None, **options: Any) -> dict[str, Any]:
    """Execute a run, with the options of a `RunSpec` as keywords."""
    return launch.execute(launch.RunSpec(config=config, path=path, **options), stop=stop)


def networks_of(path: Path) -> dict[str, torch.Tensor]:
    files = [path / "soup.safetensors", path / "greedy.safetensors", *sorted((path / "members").iterdir())]
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


def metrics_of(path: Path) -> list[dict[str, object]]:
    """A run's metrics without what depends on how and where it ran."""
    events = RunDirectory(path).read_metrics()
    return [{key: value for key, value in event.items() if key not in ("bytes", "seconds")} for event in events]


def assert_same_run(first: Path, second: Path) -> None:
    ours, theirs = networks_of(first), networks_of(second)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    assert metrics_of(first) == metrics_of(second)


class Killed(Exception):  # noqa: N818
    """Ends a run where it stands."""


@contextlib.contextmanager
def killed_after(step: int, *, settled: bool = False) -> Iterator[None]:
    """Let a run in this process end right after a step; `settled`: once its last checkpoint is written."""
    original = Recorder.on_step_complete

    def on_step_complete(self: Recorder, training: Training) -> None:
        original(self, training)
        if training.step == step:
            if settled:
                self.writer.settle()
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "on_step_complete", on_step_complete)
        with contextlib.suppress(Killed):
            yield
            pytest.fail(f"the run ended before step {step}")


class AskToStop(Callback):
    """Sends a signal to the process that started a run, and gives it time to stop the run before all steps are done."""

    def __init__(self, number: int, step: int) -> None:
        self.number, self.step = number, step

    def __enter__(self) -> AskToStop:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def on_step_begin(self, training: Training) -> None:
        if training.step == self.step:
            starter = multiprocessing.parent_process()
            os.kill(os.getpid() if starter is None else starter.pid or 0, self.number)
        if training.step >= self.step:
            time.sleep(0.2)


def small_data(num_examples: int = 240) -> Data:
    """Three classes that a small network learns, in three equal parts."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_examples, 4, generator=generator)
    targets = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()
    parts = [as_source((inputs[start::3], targets[start::3])) for start in range(3)]
    return Data(train=parts[0], validation=parts[1], test=parts[2])


def small_net() -> nn.Module:
    """A network for `small_data`."""
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def make_training(make_model: Callable[[], nn.Module], data: Any, **options: Any) -> Training:
    """A training ready to run, with the options of all groups as keywords."""
    group, rule = options.pop("group", None), options.pop("rule", Independent())
    hooks, callbacks = options.pop("merge_hooks", ()), options.pop("callbacks", ())
    groups: dict[str, type] = {
        "task": Task,
        "transforms": Transforms,
        "averaging": AveragingOptions,
        "monitoring": Monitoring,
    }
    parts = {}
    for name, kind in groups.items():
        own = {field.name: options.pop(field.name) for field in fields(kind) if field.name in options}
        parts[name] = kind(**own)
    best = [BestSoup()] if parts["monitoring"].keep_best_soup else []
    settings = Settings(**{"device": "cpu", **parts, **options})
    training = Training(make_model, data, settings, callbacks=[*callbacks, *best], group=group)
    rule = rule if isinstance(rule, Rule) else rule(training)
    training.use_rule(rule, [*hooks, *merge_hooks_for(training, rule)])
    return training


def small_training(**changes: Any) -> Training:
    """Three members that are merged every 5 steps, with noise as augmentation: 3 epochs of 5 steps."""
    options: dict[str, Any] = {
        "make_model": small_net,
        "data": small_data(),
        "num_members": 3,
        "num_epochs": 3,
        "batch_size": 16,
        "rule": MergeAll(every_steps=5),
        "make_optimizer": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        "augment": lambda inputs, targets, generator: (
            inputs + torch.randn(inputs.shape, generator=generator),
            targets,
        ),
        "eval_batch_size": 80,
        "repair": Repair(num_batches=2),
    }
    return make_training(**{**options, **changes})


def write_images(root: Path, num_classes: int, images_per_class: int, size: int) -> None:
    """Random images in class folders."""
    generator = torch.Generator().manual_seed(0)
    for label in range(num_classes):
        folder = root / f"class{label:03d}"
        folder.mkdir(parents=True)
        for number in range(images_per_class):
            pixels = torch.randint(256, (size, size, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")


@contextlib.contextmanager
def permissions_count() -> Iterator[None]:
    """Let files' permissions hold for this thread and those it starts, also where the superuser may ignore them."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # the version of the call, and this thread
    found = (ctypes.c_uint32 * 6)()  # twice: effective, permitted, inheritable
    assert libc.capget(header, found) == 0
    without = (ctypes.c_uint32 * 6)(*found)
    without[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    assert libc.capset(header, without) == 0
    try:
        yield
    finally:
        assert libc.capset(header, found) == 0
