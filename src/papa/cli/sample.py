"""`papa sample RUN`: what the soup, a member and the ensemble of a run of language models say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from papa.cli.options import parse_options, use_one_thread
from papa.cli.tables import FILE_WIDTH, printable

if TYPE_CHECKING:
    from torch import nn

DESCRIPTION = """Continues a prompt with the average soup, a member and the ensemble of a finished run, side by side.

All draw with the same seed, so that they differ only where their probabilities do.

examples:
  papa sample runs/text-gpt-tiny-papa-seed1 --prompt "Of Mans First"
  papa sample runs/text-gpt-tiny-papa-seed1 --prompt "Of Mans First" --temperature 0 --member 2"""


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Options of `papa sample`."""

    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
    """The directory of a finished run."""
    prompt: str = "\n"
    """The beginning of the text."""
    tokens: int = 300
    """The number of tokens to draw."""
    temperature: float = 0.8
    """Below 1, probable tokens become more probable; 0 for always the most probable one."""
    top_k: int | None = None
    """Draw among this many of the most probable tokens; None for all."""
    member: int = 0
    """The member to show."""
    seed: int = 1
    """The seed of the draws."""


def main(arguments: Sequence[str]) -> int:
    """Print samples side by side."""
    options = parse_options(SampleOptions, arguments, prog="papa sample", description=DESCRIPTION)
    from papa.lab.loading import load_ensemble, load_language_model
    from papa.lab.sampling import sample

    use_one_thread()
    soup, member = (load_language_model(options.run, which) for which in ("soup", options.member))
    networks: dict[str, nn.Module] = {
        "average soup": soup.network,
        f"member {options.member}": member.network,
        "ensemble": load_ensemble(options.run),
    }
    prompt = soup.tokenizer.encode(options.prompt)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2))
    samples = []
    for name, network in networks.items():
        drawn = sample(
            network,
            prompt,
            num_tokens=options.tokens,
            context=soup.context,
            temperature=options.temperature,
            top_k=options.top_k,
            seed=options.seed,
        )
        table.add_column(Text(name), ratio=1, overflow="fold")
        samples.append(Text(options.prompt, style="dim") + Text(printable(soup.tokenizer.decode(drawn.tolist()))))
    table.add_row(*samples)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(table)
    return 0
