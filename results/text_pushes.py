"""Why a push keeps so little of an ensemble's gain on text: one small transformer, many ways to push it.

`python -m results.make text TEXT`, where TEXT is a UTF-8 file.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from papa.core.soups import average_soup
from papa.errors import RunError, did_you_mean
from papa.lab.models.gpt import GPT
from results.record import FOLDER, read_file, write_records
from results.tables import markdown, mean_text

NUM_MEMBERS, NUM_POPULATIONS = 4, 3
CONTEXT, BATCH, STEPS, EVERY = 32, 16, 800, 5
TRAIN, HELD_OUT = 10_000, 20_000
"""Characters for training, and as many for validation as for testing after them."""
LR, DECAY, BETAS, WARMUP = 3e-3, 0.1, (0.9, 0.99), 40
FILE = FOLDER / "text-pushes.jsonl"
BLOCK = re.compile(r"(<!-- pushes -->\n).*?(<!-- end of pushes -->\n)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How members are coupled, and what else differs."""

    words: str
    half_life: float | None = None
    """A share of training; None for no push."""
    same_start: bool = False
    left_alone: str = ""
    """A pattern of the tensors that are not pushed."""
    pushes_moments: bool = False
    """Whether the moments of AdamW are pushed too."""
    shuffled: float = 0.0
    """The share of weights that is permuted among members after each step (WASH)."""
    parts: bool = False
    """Whether each member has a part of the text of its own."""
    same_order: bool = False
    ends: float = 1.0
    """The share of training after which members are left alone."""
    is_sgd: bool = False
    steps: int = STEPS
    size: int = NUM_MEMBERS


def same(words: str, half_life: float | None = 0.03, **more: Any) -> Variant:
    """Members with the same initial weights."""
    return Variant(words=words, half_life=half_life, same_start=True, **more)


VARIANTS = {
    "independent": Variant(words="independent"),
    "apart": Variant(words="own initial weights, a half-life of 1%", half_life=0.01),
    "same": same("**the same initial weights, a half-life of 3%**"),
    "weak": same("... 10%", 0.1),
    "moments": same("... moments of AdamW pushed too", pushes_moments=True),
    "no-embeddings": same("... embeddings left alone until the soup", left_alone="embedding|positions"),
    "no-norms": same("... norms left alone until the soup", left_alone="norm"),
    "parts": same("... each member another quarter of the text", parts=True),
    "order": same("... all members the same order of the text", same_order=True),
    "branch": same("... 0.3% in the first 30% of training, then none", 0.003, ends=0.3),
    "shuffled": same("... 0.1% of weights permuted at each step instead (WASH)", None, shuffled=0.001),
    "sgd-independent": Variant(words="SGD, independent", is_sgd=True),
    "sgd": same("SGD, the same initial weights, a half-life of 3%", is_sgd=True),
    "long": Variant(words="one network, 4 times longer", size=1, steps=4 * STEPS),
}


def keep(variant: Variant, step: int, lr_ratio: float) -> float:
    """The share of itself that a member keeps at a push."""
    if variant.half_life is None or step > variant.ends * variant.steps:
        return 1.0
    strength: float = 1.0 - 0.5 ** (EVERY / (variant.half_life * variant.steps))
    return 1.0 - strength * lr_ratio


@torch.no_grad()
def push_(members: Sequence[Tensor], share: float) -> None:
    """Move the same tensor of all members toward their mean: `share` of itself, the rest the mean."""
    mean = torch.stack(list(members)).mean(dim=0)
    for tensor in members:
        tensor.lerp_(mean, 1.0 - share)


@torch.no_grad()
def shuffle_(members: Sequence[Tensor], share: float, generator: torch.Generator) -> None:
    """Permute a share of the weights of the same tensor among all members."""
    rows = torch.stack([tensor.flatten() for tensor in members])
    columns = (torch.rand(rows.shape[1], generator=generator) < share).nonzero().squeeze(1)
    chosen = rows[:, columns]
    rows[:, columns] = chosen.gather(0, torch.rand(chosen.shape, generator=generator).argsort(dim=0))
    for tensor, row in zip(members, rows, strict=True):
        tensor.copy_(row.view_as(tensor))


def lr_ratio(step: int, steps: int) -> float:
    """Warm-up and a cosine down to a tenth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP)))


def optimizer_of(network: nn.Module, variant: Variant) -> torch.optim.Optimizer:
    """AdamW or SGD that decays matrices only."""
    groups: list[dict[str, Any]] = [
        {"params": [one for one in network.parameters() if one.dim() > 1]},
        {"params": [one for one in network.parameters() if one.dim() < 2], "weight_decay": 0.0},
    ]
    if variant.is_sgd:  # not tuned
        return torch.optim.SGD(groups, lr=0.5, momentum=0.9, weight_decay=1e-3)
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, weight_decay=DECAY)


def windows(codes: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and the characters that follow them."""
    found = codes[starts[:, None] + torch.arange(CONTEXT + 1)]
    return found[:, :-1], found[:, 1:]


def population(variant: Variant, codes: Tensor, vocab_size: int, seed: int) -> tuple[list[nn.Module], float]:
    """Trained members of a population, and their smoothed training loss at the end."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "width": 48, "context": CONTEXT, "dropout": 0.1}
    networks: list[nn.Module] = [GPT(vocab_size=vocab_size, **shape) for _ in range(variant.size)]
    if variant.same_start:
        for network in networks:
            network.load_state_dict(networks[0].state_dict())
    optimizers = [optimizer_of(network, variant) for network in networks]
    generator, last = torch.Generator().manual_seed(seed), 0.0
    length = TRAIN // variant.size if variant.parts else TRAIN
    for step in range(variant.steps):
        ratio = lr_ratio(step, variant.steps)
        starts = torch.randint(length - CONTEXT - 1, (variant.size, BATCH), generator=generator)
        for member, (network, optimizer) in enumerate(zip(networks, optimizers, strict=True)):
            first = member * length if variant.parts else 0
            inputs, targets = windows(codes, first + starts[0 if variant.same_order else member])
            loss = F.cross_entropy(network(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * ratio
            optimizer.step()
            last += 0.01 * (loss.item() - last) / variant.size
        share = keep(variant, step + 1, ratio) if (step + 1) % EVERY == 0 else 1.0
        names = [name for name, _ in networks[0].named_parameters()]
        for name, *members in zip(names, *(network.parameters() for network in networks), strict=True):
            if share < 1.0 and not (variant.left_alone and re.search(variant.left_alone, name)):
                push_(members, share)
                for key in ("exp_avg", "exp_avg_sq") if variant.pushes_moments else ():
                    push_([one.state[tensor][key] for one, tensor in zip(optimizers, members, strict=True)], share)
            if variant.shuffled:
                shuffle_(members, variant.shuffled, generator)
    return networks, last / (1 - 0.99**variant.steps)


def trained(variant: Variant, codes: Tensor, vocab_size: int, *, seed: int = 1) -> dict[str, Any]:
    """The losses of members, ensemble and soup of every population, on validation and on test text."""
    begin, losses = time.process_time(), []
    found: dict[str, Any] = {"validation": {}, "test": {}}
    for number in range(NUM_POPULATIONS):
        networks, last = population(variant, codes, vocab_size, seed + number)
        losses.append(last)
        for part, start in (("validation", TRAIN), ("test", TRAIN + HELD_OUT)):
            for key, loss in scores(networks, codes[start : start + HELD_OUT]).items():
                found[part].setdefault(key, []).append(round(loss, 4))
    return {"train": round(fmean(losses), 4), "seconds": round(time.process_time() - begin), **found}


@torch.no_grad()
def scores(networks: Sequence[nn.Module], codes: Tensor) -> dict[str, float]:
    """Mean loss of members, loss of the mean of their probabilities, and of their soup."""
    inputs, targets = windows(codes, torch.arange(0, len(codes) - CONTEXT - 1, CONTEXT))

    def loss(found: Tensor) -> float:
        return float(F.nll_loss(found.flatten(0, 1), targets.flatten()))

    *outputs, soup = [one.eval()(inputs).log_softmax(dim=-1) for one in (*networks, average_soup(networks))]
    ensemble = torch.stack(outputs).logsumexp(dim=0) - math.log(len(outputs))
    return {"mean": fmean(map(loss, outputs)), "ensemble": loss(ensemble), "average_soup": loss(soup)}


def run(path: Path, names: Sequence[str]) -> int:
    """Train what has no record yet."""
    for name in names:
        if name not in VARIANTS:
            raise RunError(f"there is no variant {name}: {did_you_mean(name, list(VARIANTS))}")
    needed = TRAIN + 2 * HELD_OUT
    try:
        words = path.read_text(encoding="utf-8", errors="replace")[5_000:][:needed]
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    if len(words) < needed:
        raise RunError(f"{path} is too short: {5_000 + needed:,} characters are needed")
    known = sorted(set(words))
    codes = torch.tensor([known.index(one) for one in words])
    torch.set_num_threads(1)
    for name in names or VARIANTS:
        if name not in read_file(FILE):
            found = trained(VARIANTS[name], codes, len(known))
            write_records(FILE.stem, {name: found}, FILE.parent)
            sys.stdout.write(f"{name}: {found}\n")
    return 0


def table() -> str:
    """One row for each variant that was run."""
    rows, records = [], read_file(FILE)
    for name, variant in VARIANTS.items():
        if found := records.get(name):
            cells = (mean_text(found["test"][key], 3) for key in ("mean", "ensemble", "average_soup"))
            rows.append((variant.words, f"{found['train']:.3f}", *cells))
    return markdown(("members", "training loss", "mean of members", "ensemble", "average soup"), rows)


def filled(page: str) -> str:
    """The page on language models with its table filled in."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{table()}\n\n{match[2]}", page)
