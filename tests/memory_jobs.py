"""Jobs that measure the memory of each process for operations on many members."""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import small_training
from papa import (
    AlignMerges,
    Averager,
    Independent,
    MergeAll,
    Push,
    align_all_,
    aligned_soups,
    average_soup,
    greedy_soup,
    repair_,
    symmetries,
)
from papa.distributed.group import DistributedGroup
from papa.distributed.shared_memory import SharedMemoryGroup
from papa.lab import analysis
from papa.repair import RepairMerges
from papa.training import Training
from papa.training.checkpoints import (
    CheckpointWriter,
    expected_states,
    load_checkpoint,
    load_state_,
    member_states,
    shared_state,
)
from papa.training.data import Data, as_source

SIZE, UNITS = 4, 32


class Wide(nn.Module):
    """Many parallel layers with few units each: many weights, little compute, and no tensor that is most of them."""

    def __init__(self, num_layers: int, num_inputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(num_inputs, UNITS) for _ in range(num_layers)])
        self.head = nn.Linear(UNITS * num_layers, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.cat([layer(inputs).relu() for layer in self.layers], dim=1))


def make_data(num_inputs: int) -> Data:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(16, num_inputs, generator=generator), torch.arange(16) % 3
    part = as_source((inputs[:8], targets[:8]))
    return Data(train=as_source((inputs, targets)), validation=part, test=part)


def operations(training: Training, folder: Path) -> dict[str, Callable[[], Any]]:
    """The measured operations."""
    population = training.population
    batches = training.batches.plain(2)
    groups = symmetries(population[0], batches[0])

    def score(network: nn.Module) -> float:
        return float(network(batches[0])[:, 0].sum().detach())

    def repaired(network: nn.Module, row: Tensor) -> object:
        return repair_(network, population, batches, row)

    def merged(hooks: Any) -> object:
        return Averager(population, MergeAll(every_steps=1), merge_hooks=hooks).step()

    def save() -> None:
        with CheckpointWriter(folder, group=training.group, num_members=SIZE, background=False) as writer:
            assert writer.save(0, member_states(training), shared_state(training), lambda: None) is None
            assert writer.settle() is None

    def analysed() -> object:
        with pytest.MonkeyPatch.context() as patch:  # fewer points of each line
            patch.setattr(analysis, "curve_between", functools.partial(analysis.curve_between, num_points=3))
            return analysis.analyse(training)

    def resume() -> None:
        found = load_checkpoint(folder / "step-00000000", expected_states(training), num_members=SIZE)
        load_state_(training, found.step, found.state, found.members)

    return {
        "push": lambda: Averager(population, Push(alpha=0.9, every_steps=1)).step(),
        "average soup": lambda: average_soup(population),
        "greedy soup": lambda: greedy_soup(population, score),
        "greedy soup, repaired": lambda: greedy_soup(population, score, after=repaired),
        "evaluation and ensemble": lambda: training.evaluate_population(training.data.validation),
        "REPAIR": lambda: merged(RepairMerges(lambda member: batches)),
        "alignment by activations": lambda: align_all_(population, batches, symmetries=groups),
        "alignment by weights": lambda: merged(AlignMerges(batches[0], by="weights", symmetries=groups)),
        "aligned soups": lambda: aligned_soups(population, score, batches, symmetries=groups, repair_batches=batches),
        "aligned soups by weights": lambda: aligned_soups(
            population, score, batches[0], by="weights", symmetries=groups
        ),
        "deriving symmetries": lambda: symmetries(population[0], batches[0]),
        "analysis": analysed,
        "checkpoint in the foreground": save,
        "resume": resume,
        "three networks too many": lambda: [average_soup(population) for _ in range(3)],
    }


def make_training(num_layers: int, num_inputs: int) -> Training:
    training = small_training(
        make_model=lambda: Wide(num_layers, num_inputs),
        data=make_data(num_inputs),
        num_members=SIZE,
        batch_size=4,
        rule=Independent(),
        group=DistributedGroup(),
    )
    for network, optimizer in zip(training.population, training.optimizers, strict=True):
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # creates the momentum, which goes into checkpoints
        optimizer.zero_grad()
    return training


def peaks(group: SharedMemoryGroup, num_layers: int, num_inputs: int, folder: Path) -> dict[str, Any]:
    """The largest increase in memory of any process for each operation, in bytes."""
    # Large tensors go back to the system at once, so that resident memory is used memory.
    ctypes.CDLL(None).mallopt(-3, 1 << 17)
    for operation in operations(make_training(2, 4), folder / "small").values():
        operation()  # loads what is kept after the first call
    training = make_training(num_layers, num_inputs)
    training.population.mix_(torch.full((SIZE, SIZE), 1 / SIZE))  # allocates the buffers of the exchange
    average_soup(training.population)
    tensors = list(training.population[0].parameters())
    measured = operations(training, folder / "large")
    return {
        "network": sum(tensor.nbytes for tensor in tensors),
        "largest": max(tensor.nbytes for tensor in tensors),
        "peaks": {name: max(group.all_gather([peak_of(operation)])) for name, operation in measured.items()},
    }


def peak_of(operation: Callable[[], Any]) -> int:
    """The increase in resident memory of this process, as Linux reports it."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    result = operation()
    found = status("VmHWM") - before
    del result
    return found


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
