"""Why a push keeps so little of an ensemble's gain on text: one small transformer, many ways to push it.

    python -m results.text_pushes run TEXT [VARIANT ...]   train variants that have no record yet
    python -m results.text_pushes write                    write the table into docs/language-models.md

TEXT is a UTF-8 file. All populations of a variant train in one vectorised call, with an AdamW that is written out here,
so that also its moments can be pushed.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.nn import functional as F

from papa.lab.models.gpt import GPT
from papa.storage import write_atomically
from results.tables import markdown

NUM_MEMBERS, NUM_POPULATIONS = 4, 3
CONTEXT, BATCH, STEPS, EVERY = 32, 16, 4000, 5
TRAIN, HELD_OUT = 25_000, 20_000
"""Characters for training, and as many for validation as for testing after them."""
LR, DECAY, BETAS, WARMUP = 3e-3, 0.1, (0.9, 0.99), 200
SHAPE: dict[str, Any] = {"context": CONTEXT, "num_layers": 2, "num_heads": 2, "width": 32, "dropout": 0.1}
FOLDER = Path(__file__).parent / "text"
PAGE = Path(__file__).parent.parent / "docs/language-models.md"
BLOCK = re.compile(r"(<!-- pushes -->\n).*?(<!-- end of pushes -->\n)", re.DOTALL)

State = dict[str, Tensor]
"""Tensors of all members, by name; the first dimension counts them."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How members are coupled, and what else differs."""

    words: str
    half_life: float | None = None
    """A share of training; None for no push."""
    scales: bool = True
    """Whether the push weakens with the learning rate."""
    same_start: bool = False
    left_alone: str = ""
    """A pattern of the tensors that are not pushed."""
    pushes_moments: bool = False
    """Whether the moments of AdamW are pushed too."""
    parts: bool = False
    """Whether each member has a part of the text of its own."""
    same_order: bool = False
    decay: float = DECAY
    lr: float = LR
    dropout: float = 0.1
    starts: float = 0.0
    """The share of training before the first push."""
    is_sgd: bool = False
    momentum: float = 0.9
    steps: int = STEPS
    size: int = NUM_MEMBERS


VARIANTS: dict[str, Variant] = {
    "independent": Variant(words="independent"),
    "long": Variant(words="one network, 4 times longer", size=1, steps=4 * STEPS),
    **{
        f"push-{share:g}": Variant(words=f"a half-life of {100 * share:g}%", half_life=share)
        for share in (0.003, 0.01, 0.03, 0.1, 0.2)
    },
    **{
        f"same-{share:g}": Variant(
            words=f"a half-life of {100 * share:g}%, the same initial weights", half_life=share, same_start=True
        )
        for share in (0.01, 0.1, 0.3)
    },
    "constant-0.1": Variant(words="10%, as strong at the end as at the start", half_life=0.1, scales=False),
    "moments-0.1": Variant(words="10%, moments pushed too", half_life=0.1, pushes_moments=True),
    "no-embeddings-0.1": Variant(
        words="10%, embeddings left alone until the soup", half_life=0.1, left_alone="embedding|positions|head"
    ),
    "no-norms-0.1": Variant(words="10%, norms left alone until the soup", half_life=0.1, left_alone="norm"),
    "parts-0.1": Variant(words="10%, each member another quarter of the text", half_life=0.1, parts=True),
    "order-0.1": Variant(words="10%, the same order of the text", half_life=0.1, same_order=True),
    "late-0.03": Variant(words="3%, from the second half of training on", half_life=0.03, starts=0.5, same_start=True),
    "decay-0.1": Variant(words="10%, five times the weight decay", half_life=0.1, decay=5 * DECAY),
    "decay-independent": Variant(words="independent, five times the weight decay", decay=5 * DECAY),
    "sgd-independent": Variant(words="independent, SGD", is_sgd=True, lr=0.5, decay=1e-3),
    "sgd-0.03": Variant(words="3%, SGD", half_life=0.03, is_sgd=True, lr=0.5, decay=1e-3),
}


def keep(variant: Variant, step: int, lr_ratio: float) -> float:
    """The share of itself that a member keeps at a push."""
    if variant.half_life is None or step < variant.starts * variant.steps:
        return 1.0
    strength: float = 1.0 - 0.5 ** (EVERY / (variant.half_life * variant.steps))
    return 1.0 - strength * (lr_ratio if variant.scales else 1.0)


def push_(states: Sequence[State], share: float, variant: Variant) -> None:
    """Move members of each population toward its mean: `share` of itself, the rest the mean."""
    for state in states:
        for name, tensor in state.items():
            if variant.left_alone and re.search(variant.left_alone, name):
                continue
            members = tensor.view(-1, variant.size, *tensor.shape[1:])
            members.lerp_(members.mean(dim=1, keepdim=True).expand_as(members), 1.0 - share)


def soup_of(weights: State, variant: Variant) -> State:
    """The mean of each population."""
    return {name: tensor.view(-1, variant.size, *tensor.shape[1:]).mean(dim=1) for name, tensor in weights.items()}


def lr_ratio(step: int, steps: int) -> float:
    """Warm-up and a cosine down to a tenth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP)))


def codes_of(path: Path) -> tuple[Tensor, int]:
    """The characters of a text as numbers, and how many different ones there are."""
    words = path.read_text(encoding="utf-8", errors="replace")[5_000 : 5_000 + TRAIN + 2 * HELD_OUT]
    known = sorted(set(words))
    return torch.tensor([known.index(one) for one in words]), len(known)


def windows(codes: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and the characters that follow them."""
    found = codes[starts[..., None] + torch.arange(CONTEXT + 1)]
    return found[..., :-1], found[..., 1:]


def trained(variant: Variant, codes: Tensor, vocab_size: int, *, seed: int = 1) -> dict[str, Any]:
    """The losses of members, ensemble and soup of every population, on validation and on test text."""
    torch.manual_seed(seed)
    num_nets = NUM_POPULATIONS * variant.size
    shape = {**SHAPE, "dropout": variant.dropout}
    nets = [GPT(vocab_size=vocab_size, **shape) for _ in range(num_nets)]
    skeleton = GPT(vocab_size=vocab_size, **shape).to("meta")
    weights: State = {name: tensor.detach().clone() for name, tensor in stack_module_state(nets)[0].items()}
    if variant.same_start:
        weights = {name: one[:: variant.size].repeat_interleave(variant.size, 0) for name, one in weights.items()}
    is_matrix = {name: tensor.dim() > 2 for name, tensor in weights.items()}
    moments: tuple[State, State] = tuple(
        {name: torch.zeros_like(tensor) for name, tensor in weights.items()} for _ in range(2)
    )  # type: ignore[assignment]

    def loss(own: State, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = functional_call(skeleton, own, (inputs,))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    gradients_of = vmap(grad_and_value(loss), randomness="different")
    begin, last, generator = time.process_time(), 0.0, torch.Generator().manual_seed(seed)
    size = TRAIN // variant.size if variant.parts else TRAIN
    for step in range(variant.steps):
        ratio = lr_ratio(step, variant.steps)
        shape_of = (NUM_POPULATIONS, 1 if variant.same_order else variant.size, BATCH)
        starts = torch.randint(size - CONTEXT - 1, shape_of, generator=generator)
        starts = starts.expand(NUM_POPULATIONS, variant.size, BATCH).clone()
        if variant.parts:
            starts += size * torch.arange(variant.size)[:, None]
        inputs, targets = windows(codes, starts.flatten(0, 1))
        with torch.no_grad():  # gradients are those of torch.func
            gradients, losses = gradients_of(weights, inputs, targets)
        _clip_(gradients)
        update = sgd_ if variant.is_sgd else adamw_
        update(weights, gradients, moments, variant, lr=variant.lr * ratio, step=step + 1, is_matrix=is_matrix)
        if (step + 1) % EVERY == 0 and (share := keep(variant, step + 1, ratio)) < 1.0:
            push_([weights, *(moments if variant.pushes_moments else ())], share, variant)
        last = 0.99 * last + 0.01 * float(losses.mean())
    skeleton.eval()
    found = {"train": round(last / (1 - 0.99**variant.steps), 4), "seconds": round(time.process_time() - begin)}
    for part, start in (("validation", TRAIN), ("test", TRAIN + HELD_OUT)):
        found |= {part: _scores(skeleton, weights, variant, codes[start : start + HELD_OUT])}  # type: ignore[dict-item]
    return found


def _clip_(gradients: State) -> None:
    """To a norm of 1, each member's own."""
    norms = torch.stack([tensor.flatten(1).norm(dim=1) for tensor in gradients.values()]).norm(dim=0)
    scale = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    for tensor in gradients.values():
        tensor.mul_(scale.view(-1, *[1] * (tensor.dim() - 1)))


def adamw_(
    weights: State, gradients: State, moments: tuple[State, State], variant: Variant,
    *, lr: float, step: int, is_matrix: Mapping[str, bool],
) -> None:  # fmt: skip
    """A step of AdamW that decays matrices only."""
    for name, weight in weights.items():
        first, second = (kind[name] for kind in moments)
        first.lerp_(gradients[name], 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(gradients[name], gradients[name], value=1 - BETAS[1])
        weight.mul_(1 - lr * variant.decay if is_matrix[name] else 1.0)
        size = (second / (1 - BETAS[1] ** step)).sqrt_().add_(1e-8)
        weight.addcdiv_(first, size, value=-lr / (1 - BETAS[0] ** step))


def sgd_(
    weights: State, gradients: State, moments: tuple[State, State], variant: Variant,
    *, lr: float, step: int, is_matrix: Mapping[str, bool],
) -> None:  # fmt: skip
    """A step of SGD with momentum that decays matrices only."""
    for name, weight in weights.items():
        gradient = gradients[name].add(weight, alpha=variant.decay if is_matrix[name] else 0.0)
        moments[0][name].mul_(variant.momentum).add_(gradient)
        weight.sub_(moments[0][name], alpha=lr)


@torch.no_grad()
def _scores(skeleton: GPT, weights: State, variant: Variant, codes: Tensor) -> dict[str, list[float]]:
    """Mean loss of members, loss of the mean of their probabilities, and of their soup, by population."""
    starts = torch.arange(0, len(codes) - CONTEXT - 1, CONTEXT)
    inputs, targets = windows(codes, starts)

    def log_probabilities(own: State) -> Tensor:
        logits: Tensor = functional_call(skeleton, own, (inputs,))
        return logits.log_softmax(dim=-1)

    def losses(found: Tensor) -> float:
        return float(F.nll_loss(found.flatten(0, 1), targets.flatten()))

    soups = soup_of(weights, variant)
    rows: dict[str, list[float]] = {"mean": [], "ensemble": [], "average_soup": []}
    for population in range(NUM_POPULATIONS):
        members = range(population * variant.size, (population + 1) * variant.size)
        outputs = [log_probabilities({name: tensor[one] for name, tensor in weights.items()}) for one in members]
        rows["mean"].append(fmean(map(losses, outputs)))
        rows["ensemble"].append(losses(torch.stack(outputs).logsumexp(dim=0) - math.log(len(outputs))))
        rows["average_soup"].append(
            losses(log_probabilities({name: tensor[population] for name, tensor in soups.items()}))
        )
    return {key: [round(value, 4) for value in values] for key, values in rows.items()}


def run(path: Path, names: Sequence[str]) -> None:
    """Train what has no record yet."""
    torch.set_num_threads(1)
    codes, vocab_size = codes_of(path)
    FOLDER.mkdir(exist_ok=True)
    for name in names or VARIANTS:
        if not (FOLDER / f"{name}.json").exists():
            found = trained(VARIANTS[name], codes, vocab_size)
            write_atomically(FOLDER / f"{name}.json", json.dumps(found) + "\n")
            sys.stdout.write(f"{name}: {found}\n")


def table() -> str:
    """One row for each variant that was run."""
    rows = []
    for name, variant in VARIANTS.items():
        if (FOLDER / f"{name}.json").exists():
            found = json.loads((FOLDER / f"{name}.json").read_text())
            cells = (_text(found["test"][key]) for key in ("mean", "ensemble", "average_soup"))
            rows.append((variant.words, f"{found['train']:.3f}", *cells))
    return markdown(("members", "training loss", "mean of members", "ensemble", "average soup"), rows)


def _text(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f} ({stdev(values):.3f})"


def main(arguments: Sequence[str]) -> int:
    """Run variants, or write the table."""
    match list(arguments):
        case ["run", path, *names]:
            run(Path(path), names)
        case ["write"]:
            page = PAGE.read_text()
            write_atomically(PAGE, BLOCK.sub(lambda match: f"{match[1]}\n{table()}\n\n{match[2]}", page))
        case _:
            sys.stderr.write(__doc__ or "")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
