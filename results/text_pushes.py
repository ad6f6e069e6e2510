"""Why a push keeps so little of an ensemble's gain on text: one small transformer, many ways to push it.

    python -m results.text_pushes run TEXT [VARIANT ...]   train variants that have no record yet
    python -m results.text_pushes moments TEXT             the recipe text-gpt-mini, with moments of AdamW pushed too
    python -m results.text_pushes write                    write the table into docs/language-models.md

TEXT is a UTF-8 file. All members of all populations are one network, whose weights have one more dimension.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from torch.func import stack_module_state
from torch.nn import functional as F

from papa import Averaging, Callback
from papa.errors import PapaError, RunError, did_you_mean
from papa.lab.config import DiversityConfig
from papa.lab.launch import RunSpec, execute
from papa.lab.models.gpt import GPT
from papa.lab.recipes import find
from papa.storage import write_atomically
from papa.training import Training
from results.record import FOLDER, read_file, write_records
from results.tables import markdown

NUM_MEMBERS, NUM_POPULATIONS = 4, 3
CONTEXT, BATCH, STEPS, EVERY = 32, 16, 800, 5
TRAIN, HELD_OUT = 10_000, 20_000
"""Characters for training, and as many for validation as for testing after them."""
LR, DECAY, BETAS, WARMUP = 3e-3, 0.1, (0.9, 0.99), 40
NUM_LAYERS, NUM_HEADS, WIDTH = 2, 2, 48
FILE = FOLDER / "text-pushes.jsonl"
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
    decay: float = DECAY
    lr: float = LR
    dropout: float = 0.1
    ends: float = 1.0
    """The share of training after which members are left alone."""
    is_sgd: bool = False
    steps: int = STEPS
    size: int = NUM_MEMBERS


VARIANTS: dict[str, Variant] = {
    "independent": Variant(words="independent"),
    "apart": Variant(words="own initial weights, a half-life of 1%", half_life=0.01),
    "same": Variant(words="**the same initial weights, a half-life of 3%**", same_start=True, half_life=0.03),
    "weak": Variant(words="... 10%", same_start=True, half_life=0.1),
    "moments": Variant(words="... moments of AdamW pushed too", same_start=True, half_life=0.03, pushes_moments=True),
    "no-embeddings": Variant(
        words="... embeddings left alone until the soup",
        same_start=True,
        half_life=0.03,
        left_alone="embedding|positions",
    ),
    "no-norms": Variant(
        words="... norms left alone until the soup", same_start=True, half_life=0.03, left_alone="norm"
    ),
    "parts": Variant(words="... each member another quarter of the text", same_start=True, half_life=0.03, parts=True),
    "order": Variant(
        words="... all members the same order of the text", same_start=True, half_life=0.03, same_order=True
    ),
    "branch": Variant(
        words="... 0.3% in the first 30% of training, then none", same_start=True, half_life=0.003, ends=0.3
    ),
    "shuffled": Variant(
        words="... 0.1% of weights permuted at each step instead (WASH)", same_start=True, shuffled=0.001
    ),
    "sgd-independent": Variant(words="SGD, independent", is_sgd=True, lr=0.5, decay=1e-3),
    "sgd": Variant(
        words="SGD, the same initial weights, a half-life of 3%",
        same_start=True,
        half_life=0.03,
        is_sgd=True,
        lr=0.5,
        decay=1e-3,
    ),
    "long": Variant(words="one network, 4 times longer", size=1, steps=4 * STEPS),
}


def keep(variant: Variant, step: int, lr_ratio: float) -> float:
    """The share of itself that a member keeps at a push."""
    if variant.half_life is None or step > variant.ends * variant.steps:
        return 1.0
    strength: float = 1.0 - 0.5 ** (EVERY / (variant.half_life * variant.steps))
    return 1.0 - strength * lr_ratio


@torch.no_grad()
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
    try:
        words = path.read_text(encoding="utf-8", errors="replace")[5_000 : 5_000 + TRAIN + 2 * HELD_OUT]
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    if len(words) < TRAIN + 2 * HELD_OUT:
        raise RunError(f"{path} is too short: {5_000 + TRAIN + 2 * HELD_OUT:,} characters are needed")
    known = sorted(set(words))
    return torch.tensor([known.index(one) for one in words]), len(known)


def windows(codes: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and the characters that follow them."""
    found = codes[starts[..., None] + torch.arange(CONTEXT + 1)]
    return found[..., :-1], found[..., 1:]


def logits_of(weights: State, tokens: Tensor, *, dropout: float = 0.0) -> Tensor:
    """What `GPT` says to `(member, batch, time)` tokens, for all members at once; `dropout` 0 to evaluate."""
    num_nets, batch, time_ = tokens.shape
    embedding = weights["embedding.weight"]
    first = embedding.shape[1] * torch.arange(num_nets)[:, None, None]
    x = F.embedding(tokens + first, embedding.flatten(0, 1)) + weights["positions.weight"][:, None, :time_]
    x = F.dropout(x.flatten(1, 2), dropout)

    def linear(name: str, inputs: Tensor) -> Tensor:
        return torch.baddbmm(weights[f"{name}.bias"][:, None], inputs, weights[f"{name}.weight"].mT)

    def norm(name: str, inputs: Tensor) -> Tensor:
        scaled = F.layer_norm(inputs, inputs.shape[-1:])
        return torch.addcmul(weights[f"{name}.bias"][:, None], scaled, weights[f"{name}.weight"][:, None])

    for block in (f"blocks.{index}" for index in range(NUM_LAYERS)):
        qkv = linear(f"{block}.attention.qkv", norm(f"{block}.attention_norm", x))
        q, k, v = qkv.view(num_nets * batch, time_, 3, NUM_HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).reshape(num_nets, batch * time_, -1)
        x = x + F.dropout(linear(f"{block}.attention.out", y), dropout)
        hidden = F.gelu(linear(f"{block}.mlp.up", norm(f"{block}.mlp_norm", x)))
        x = x + F.dropout(linear(f"{block}.mlp.out", hidden), dropout)
    return torch.bmm(norm("norm", x), embedding.mT).view(num_nets, batch, time_, -1)


def initial_weights(variant: Variant, vocab_size: int) -> State:
    """Those of separate networks, or of one for each population."""
    shape: dict[str, Any] = {"num_layers": NUM_LAYERS, "num_heads": NUM_HEADS, "width": WIDTH, "context": CONTEXT}
    nets = [GPT(vocab_size=vocab_size, **shape) for _ in range(NUM_POPULATIONS * variant.size)]
    if variant.same_start:
        nets = [nets[index - index % variant.size] for index in range(len(nets))]
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in stack_module_state(nets)[0].items()}


def optimizer_of(weights: State, variant: Variant) -> torch.optim.Optimizer:
    """AdamW or SGD that decays matrices only."""
    matrices = [tensor for tensor in weights.values() if tensor.dim() > 2]
    others = [tensor for tensor in weights.values() if tensor.dim() <= 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": variant.decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if variant.is_sgd:
        return torch.optim.SGD(groups, lr=variant.lr, momentum=0.9)
    return torch.optim.AdamW(groups, lr=variant.lr, betas=BETAS, fused=True)


def trained(variant: Variant, codes: Tensor, vocab_size: int, *, seed: int = 1) -> dict[str, Any]:
    """The losses of members, ensemble and soup of every population, on validation and on test text."""
    torch.manual_seed(seed)
    weights = initial_weights(variant, vocab_size)
    optimizer = optimizer_of(weights, variant)
    generator = torch.Generator().manual_seed(seed)
    begin, last = time.process_time(), 0.0
    for step in range(variant.steps):
        ratio = lr_ratio(step, variant.steps)
        for group in optimizer.param_groups:
            group["lr"] = variant.lr * ratio
        inputs, targets = windows(codes, starts_of(variant, generator))
        logits = logits_of(weights, inputs, dropout=variant.dropout)
        loss = F.cross_entropy(logits.flatten(0, 2), targets.flatten()) * len(inputs)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        clip_(list(weights.values()))
        optimizer.step()
        if (step + 1) % EVERY == 0 and (share := keep(variant, step + 1, ratio)) < 1.0:
            moments = [
                {name: optimizer.state[tensor][key] for name, tensor in weights.items()}
                for key in (("exp_avg", "exp_avg_sq") if variant.pushes_moments else ())
            ]
            push_([weights, *moments], share, variant)
        if variant.shuffled:
            shuffle_(weights, variant, generator)
        last = 0.99 * last + 0.01 * float(loss.detach()) / len(inputs)
    found = {"train": round(last / (1 - 0.99**variant.steps), 4), "seconds": round(time.process_time() - begin)}
    for part, start in (("validation", TRAIN), ("test", TRAIN + HELD_OUT)):
        found |= {part: _scores(weights, variant, codes[start : start + HELD_OUT])}  # type: ignore[dict-item]
    return found


def starts_of(variant: Variant, generator: torch.Generator) -> Tensor:
    """Where the windows of a step begin, `(member, batch)`."""
    size = TRAIN // variant.size if variant.parts else TRAIN
    shape = (NUM_POPULATIONS, 1 if variant.same_order else variant.size, BATCH)
    starts = torch.randint(size - CONTEXT - 1, shape, generator=generator).expand(-1, variant.size, -1)
    if variant.parts:
        starts = starts + size * torch.arange(variant.size)[:, None]
    return starts.flatten(0, 1)


@torch.no_grad()
def clip_(weights: Sequence[Tensor]) -> None:
    """Gradients to a norm of 1, each member's own."""
    gradients = [tensor.grad for tensor in weights if tensor.grad is not None]
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    scale = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.view(-1, *[1] * (gradient.dim() - 1)))


@torch.no_grad()
def shuffle_(weights: State, variant: Variant, generator: torch.Generator) -> None:
    """Permute a share of the weights among the members of each population."""
    for tensor in weights.values():
        rows = tensor.view(NUM_POPULATIONS, variant.size, -1)
        columns = (torch.rand(rows.shape[-1], generator=generator) < variant.shuffled).nonzero().squeeze(1)
        chosen = rows[..., columns]
        orders = torch.rand(chosen.shape, generator=generator).argsort(dim=1)
        rows[..., columns] = chosen.gather(1, orders)


@torch.no_grad()
def _scores(weights: State, variant: Variant, codes: Tensor) -> dict[str, list[float]]:
    """Mean loss of members, loss of the mean of their probabilities, and of their soup, by population."""
    inputs, targets = windows(codes, torch.arange(0, len(codes) - CONTEXT - 1, CONTEXT))

    def log_probabilities(own: State) -> Tensor:
        return logits_of({name: one[None] for name, one in own.items()}, inputs[None])[0].log_softmax(dim=-1)

    def loss(found: Tensor) -> float:
        return float(F.nll_loss(found.flatten(0, 1), targets.flatten()))

    soups = soup_of(weights, variant)
    rows: dict[str, list[float]] = {"mean": [], "ensemble": [], "average_soup": []}
    for population in range(NUM_POPULATIONS):
        members = range(population * variant.size, (population + 1) * variant.size)
        outputs = [log_probabilities({name: tensor[one] for name, tensor in weights.items()}) for one in members]
        rows["mean"].append(fmean(map(loss, outputs)))
        rows["ensemble"].append(loss(torch.stack(outputs).logsumexp(dim=0) - math.log(len(outputs))))
        rows["average_soup"].append(loss(log_probabilities({name: soups[name][population] for name in soups})))
    return {key: [round(value, 4) for value in values] for key, values in rows.items()}


def run(path: Path, names: Sequence[str]) -> None:
    """Train what has no record yet."""
    for name in names:
        if name not in VARIANTS:
            raise RunError(f"there is no variant {name}: {did_you_mean(name, list(VARIANTS))}")
    torch.set_num_threads(1)
    codes, vocab_size = codes_of(path)
    for name in names or VARIANTS:
        if name not in read_file(FILE):
            found = trained(VARIANTS[name], codes, vocab_size)
            write_records(FILE.stem, {name: found}, FILE.parent)
            sys.stdout.write(f"{name}: {found}\n")


class PushMoments(Callback):
    """Pushes the moments of AdamW as far as the weights were pushed; for members in one process."""

    @torch.no_grad()
    def on_averaging(self, training: Training, averaging: Averaging) -> None:
        """Move the moments of each parameter toward their mean over members."""
        assert averaging.alpha is not None
        states = (
            [optimizer.state[parameter] for group in optimizer.param_groups for parameter in group["params"]]
            for optimizer in training.optimizers
        )
        for same in zip(*states, strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                moments = [state[key] for state in same]
                mean = torch.stack(moments).mean(dim=0)
                for moment in moments:
                    moment.lerp_(mean, 1.0 - averaging.alpha)


def with_moments(path: Path, out: Path) -> dict[str, float]:
    """Validation scores of the best push of `text-gpt-mini` with moments pushed too; the seed is that of all trials."""
    config = replace(find("text-gpt-mini").config(), method="papa", seed=11, diversity=DiversityConfig(same_init=True))
    config = replace(
        config,
        average=replace(config.average, half_life=0.03),
        data=replace(config.data, root=str(path)),
    )
    found = execute(RunSpec(config=config, path=out, workers=1, resume=True, callbacks=[PushMoments()]))
    return {key: round(found["validation"][key], 4) for key in ("mean", "ensemble", "average_soup")}


def table() -> str:
    """One row for each variant that was run."""
    rows, records = [], read_file(FILE)
    for name, variant in VARIANTS.items():
        if found := records.get(name):
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
        case ["moments", path]:
            sys.stdout.write(f"{with_moments(Path(path), Path('runs/small/text-moments'))}\n")
        case ["write"]:
            page = PAGE.read_text()
            write_atomically(PAGE, BLOCK.sub(lambda match: f"{match[1]}\n{table()}\n\n{match[2]}", page))
        case _:
            sys.stderr.write(__doc__ or "")
            return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PapaError as error:
        sys.stderr.write(f"text_pushes: {error}\n")
        sys.exit(1)
