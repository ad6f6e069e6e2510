"""The tokenizer of the lab's texts: one token for each character."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from papa.errors import ConfigError, DataError
from papa.storage import json_text, parse_json


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
