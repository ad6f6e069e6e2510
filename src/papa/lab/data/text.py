"""Text: UTF-8 files as one sequence of characters, one token for each, split by position, read in windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from papa.errors import ConfigError, DataError
from papa.storage import json_text, parse_json
from papa.streams import stream
from papa.training.data import Data


class Characters:
    """One token for each character of an alphabet.

    Example:
        >>> tokenizer = Characters("to be or not to be")
        >>> tokenizer.encode("bee"), tokenizer.decode([4, 1, 5])
        (tensor([1, 2, 2], dtype=torch.int32), 'obr')
    """

    def __init__(self, alphabet: str) -> None:
        self.alphabet = "".join(sorted(set(alphabet)))
        self._codes = _code_points(self.alphabet)

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return len(self.alphabet)

    def encode(self, text: str) -> Tensor:
        """The tokens of a text, as int32; an unknown character is an error."""
        unknown = sorted(set(text) - set(self.alphabet))
        if unknown:
            raise DataError(
                f"the text has the character {unknown[0]!r}, expected only the {self.vocab_size} of the training text"
            )
        return torch.from_numpy(np.searchsorted(self._codes, _code_points(text)).astype(np.int32))

    def decode(self, tokens: list[int]) -> str:
        """The text of some tokens."""
        return "".join(self.alphabet[token] for token in tokens)

    def num_bytes(self) -> list[int]:
        """The number of UTF-8 bytes that each token stands for."""
        return [len(character.encode()) for character in self.alphabet]

    def to_json(self) -> str:
        """A file that `read_tokenizer` reads."""
        return json_text({"characters": self.alphabet})


def _code_points(text: str) -> Any:
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)


def read_tokenizer(content: str, subject: str = "the tokenizer") -> Characters:
    """A tokenizer from the content of its file."""
    value = parse_json(content.encode(), allow_control=True)
    if not isinstance(value, dict) or not isinstance(value.get("characters"), str):
        raise ConfigError(f"{subject} is no tokenizer of papa, expected its characters")
    return Characters(value["characters"])


class Windows:
    """A sequence of tokens in windows of equal length; the targets of a window are its tokens, one further.

    Window `i` begins at token `i * context`. In training, the windows of an epoch are shifted together by fewer than
    `context` tokens, which depends on the seed of the epoch alone: every epoch reads the text once, cut differently.

    Example:
        >>> inputs, targets = Windows(torch.arange(100), context=4).batch(torch.tensor([0, 2]))
        >>> inputs.tolist(), targets.tolist()
        ([[0, 1, 2, 3], [8, 9, 10, 11]], [[1, 2, 3, 4], [9, 10, 11, 12]])
    """

    def __init__(self, tokens: Tensor, *, context: int) -> None:
        self.tokens, self.context = tokens, context
        if not len(self):
            raise DataError(
                f"a part of the text has {len(tokens)} tokens, expected more than the context of {context}: use a "
                "longer text, a larger share of it, or a shorter context"
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The windows at these indices, not shifted."""
        return self._at(indices * self.context)

    def stream(self, index_batches: Iterable[Tensor], *, seed: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Training batches of an epoch: windows shifted as the seed says; the last one is cut off at the end."""
        shift = int(torch.randint(self.context, (), generator=stream(seed, "shift")))
        latest = len(self.tokens) - 1 - self.context
        return (self._at((indices * self.context + shift).clamp(max=latest)) for indices in index_batches)

    def _at(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        places = starts.unsqueeze(1) + torch.arange(self.context + 1, device="cpu")
        found = self.tokens[places].long()
        return found[:, :-1], found[:, 1:]


@dataclass(frozen=True, kw_only=True)
class TextSet:
    """A text as tokens, and the tokenizer that made them."""

    tokens: Tensor
    tokenizer: Characters
    context: int
    test_share: float
    """The share of the text, at its end, for testing; 0 for none."""
    max_train: int | None = None
    """The largest number of training tokens; None for all."""
    max_test: int | None = None
    """The same for validation, and for testing."""

    def split(self, validation: float, *, seed: int = 0) -> Data:
        """Training, validation and test data: the beginning of the text, what follows, and its end; for every seed."""
        num_test = round(len(self.tokens) * self.test_share)
        num_train = len(self.tokens) - num_test - round(len(self.tokens) * validation)
        train, held_out, test = torch.tensor_split(self.tokens, [num_train, len(self.tokens) - num_test])
        return Data(
            train=Windows(train[: self.max_train], context=self.context),
            validation=Windows(held_out[: self.max_test], context=self.context),
            test=Windows(test[: self.max_test], context=self.context) if num_test else None,
        )


def load_text(
    root: str | Path,
    *,
    context: int,
    test_share: float = 0.1,
    max_train: int | None = None,
    max_test: int | None = None,
) -> TextSet:
    """Read a UTF-8 file, or all `.txt` files in a folder in the order of their names, as one text.

    Share and limits are as for `TextSet`.
    """
    text = read_text(Path(root))
    tokenizer = Characters(text)
    return TextSet(
        tokens=tokenizer.encode(text),
        tokenizer=tokenizer,
        context=context,
        test_share=test_share,
        max_train=max_train,
        max_test=max_test,
    )


def read_text(path: Path) -> str:
    """The text of a file, or of all `.txt` files in a folder and its subfolders, in the order of their paths."""
    if not path.exists():
        raise DataError(f"--data.root is {path}, and there is none: expected a UTF-8 file, or a folder of .txt files")
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path} holds no text, expected a UTF-8 file, or a folder with files that end in .txt")
    return "".join(_read(file) for file in files)


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 ({error.reason} at byte {error.start}): convert it first") from error
