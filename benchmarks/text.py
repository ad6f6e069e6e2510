"""The training speed of language models: the recipe text-gpt-mini against the loop that one would write.

Four transformers, batches of 16 windows of 64 characters, AdamW, a cosine, clipped gradients, and a push every 5 steps.
The loop cuts random windows and stacks them, as small training scripts do, and averages by state dicts. Both run in one
process with one thread, in float32, on the same networks and a generated text.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional as F

from _bench import Result, best_times, finish, parser, positive
from papa.lab.config import Config
from papa.lab.data.text import load_text
from papa.lab.domains import make_language_model
from papa.lab.recipes import find
from papa.lab.recipes.build import build
from push import push_state_dicts_

NUM_CHARACTERS = 150_000


def write_text(path: Path) -> None:
    """Random words; the speed does not depend on them."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(1, 9))) for _ in range(2000)]
    path.write_text(" ".join(draw.choices(words, k=NUM_CHARACTERS // 6)))


def papa_steps(config: Config, num_steps: int) -> Callable[[], None]:
    """A function that takes steps with the population of the recipe."""
    training = build(config)

    def run() -> None:
        for _ in range(num_steps):
            training._take_step()

    return run


def script_steps(config: Config, num_steps: int) -> Callable[[], None]:
    """A function that takes the same steps in a plain loop."""
    train, context = config.train, config.data.context
    text = load_text(config.data.root, context=context)
    tokens = text.tokens[:NUM_CHARACTERS].long()
    models = [make_language_model(config, text.tokenizer.vocab_size) for _ in range(config.members)]
    optimizers = []
    for model in models:
        groups = [[one for one in model.parameters() if (one.dim() > 1) == is_matrix] for is_matrix in (True, False)]
        decayed = [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}]
        optimizers.append(torch.optim.AdamW(decayed, lr=train.lr, betas=(0.9, 0.99)))
    step = 0

    def run() -> None:
        nonlocal step
        for _ in range(num_steps):
            lr = train.min_lr + 0.5 * (train.lr - train.min_lr) * (1.0 + math.cos(math.pi * step / 2000))
            for model, optimizer in zip(models, optimizers, strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = lr
                starts = torch.randint(len(tokens) - context, (train.batch_size,)).tolist()
                inputs = torch.stack([tokens[start : start + context] for start in starts])
                targets = torch.stack([tokens[start + 1 : start + 1 + context] for start in starts])
                optimizer.zero_grad(set_to_none=True)
                logits = model(inputs)
                F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            step += 1
            if step % config.average.every_steps == 0:
                push_state_dicts_(models)

    return run


def main() -> None:
    """Run the benchmark."""
    options_parser = parser(__doc__.splitlines()[0])
    options_parser.add_argument("--steps", type=positive, default=10, help="number of steps to time in each round")
    options = options_parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        write_text(path)
        config = find("text-gpt-mini").config()
        config = replace(config, data=replace(config.data, root=str(path)), device="cpu")
        config = replace(config, train=replace(config.train, precision="float32"))
        contenders = {"the loop one would write": script_steps, "papa": papa_steps}
        best = best_times(
            {name: make(config, options.steps) for name, make in contenders.items()}, rounds=options.rounds
        )
    num_tokens = config.members * config.train.batch_size * config.data.context * options.steps
    script, papa = best.values()
    results = [
        *(
            Result(name=name, seconds=seconds, note=f"{num_tokens / seconds:.0f} tokens/s")
            for name, seconds in best.items()
        ),
        Result(name="papa against the loop", ratio=papa / script, target=1.0),
    ]
    finish(results, options, title=f"Training {config.members} transformers, {options.steps} steps")


if __name__ == "__main__":
    main()
