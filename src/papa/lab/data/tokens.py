"""Tokenizers: characters, bytes, or byte pairs of the `tokenizers` library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from papa.errors import ConfigError, DataError
from papa.packages import require
from papa.storage import json_text, parse_json


class Tokenizer(ABC):
    """Maps text to numbers and back."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The number of tokens."""

    @abstractmethod
    def encode(self, text: str) -> Tensor:
        """The tokens of a text, as int32."""

    @abstractmethod
    def decode(self, tokens: list[int]) -> str:
        """The text of some tokens."""

    @abstractmethod
    def num_bytes(self) -> list[int]:
        """The number of UTF-8 bytes that each token stands for."""

    @abstractmethod
    def to_json(self) -> str:
        """A file that `read_tokenizer` reads."""


class Characters(Tokenizer):
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
        return len(self.alphabet)

    def encode(self, text: str) -> Tensor:
        """One token for each character; an unknown one is an error."""
        unknown = sorted(set(text) - set(self.alphabet))
        if unknown:
            raise DataError(
                f"the text has the character {unknown[0]!r}, expected only the {self.vocab_size} of the tokenizer: "
                "leave it out, or train with a tokenizer of bytes"
            )
        return torch.from_numpy(np.searchsorted(self._codes, _code_points(text)).astype(np.int32))

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.alphabet[token] for token in tokens)

    def num_bytes(self) -> list[int]:
        return [len(character.encode()) for character in self.alphabet]

    def to_json(self) -> str:
        return json_text({"characters": self.alphabet})


class Bytes(Tokenizer):
    """One token for each byte: any text, in any script.

    Example:
        >>> Bytes().encode("ä").tolist()
        [195, 164]
    """

    @property
    def vocab_size(self) -> int:
        return 256

    def encode(self, text: str) -> Tensor:
        return torch.from_numpy(np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32))

    def decode(self, tokens: list[int]) -> str:
        """The text of some bytes; those that are no UTF-8 become the replacement character."""
        return bytes(tokens).decode("utf-8", "replace")

    def num_bytes(self) -> list[int]:
        return [1] * 256

    def to_json(self) -> str:
        return json_text({"bytes": 256})


class BytePairs(Tokenizer):
    """A tokenizer of the `tokenizers` library that works on bytes, such as GPT-2's."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @staticmethod
    def learned(text: str, *, vocab_size: int) -> BytePairs:
        """Learn the pairs of bytes to join, most frequent first, from a text."""
        require("tokenizers")
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=sorted(alphabet), show_progress=False, special_tokens=[]
        )
        tokenizer.train_from_iterator([text], trainer)
        return BytePairs(tokenizer)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, with special ones."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> Tensor:
        found = self._tokenizer.encode(text, add_special_tokens=False).ids
        return torch.tensor(found, dtype=torch.int32, device="cpu")

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    def num_bytes(self) -> list[int]:
        """Byte-level tokenizers write each byte as one character."""
        return [len(self._tokenizer.id_to_token(token) or "") for token in range(self.vocab_size)]

    def to_json(self) -> str:
        return str(self._tokenizer.to_str())


def _code_points(text: str) -> Any:
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)


def make_tokenizer(name: str, text: str, learned_from: str, *, vocab_size: int) -> Tokenizer:
    """A tokenizer by its name.

    `characters` are those of the text, `bpe` are byte pairs learned from the training text; other names are `bytes`,
    and the path of a file by `to_json` or by the `tokenizers` library.
    """
    if name == "characters":
        return Characters(text)
    if name == "bytes":
        return Bytes()
    if name == "bpe":
        if vocab_size < 257:
            raise ConfigError(f"the vocabulary has {vocab_size} tokens, expected more than the 256 bytes")
        return BytePairs.learned(learned_from, vocab_size=vocab_size)
    if not Path(name).is_file():
        raise ConfigError(f"the tokenizer is {name}, expected characters, bytes, bpe, or the path of a tokenizer.json")
    return read_tokenizer(Path(name).read_text(encoding="utf-8"), name)


def read_tokenizer(content: str, subject: str = "the tokenizer") -> Tokenizer:
    """A tokenizer from the content of its file."""
    try:
        value = parse_json(content.encode(), allow_control=True)
        if isinstance(value, dict) and isinstance(value.get("characters"), str):
            return Characters(value["characters"])
        if isinstance(value, dict) and "bytes" in value:
            return Bytes()
        require("tokenizers")
        from tokenizers import Tokenizer

        return BytePairs(Tokenizer.from_str(content))
    except (ConfigError, DataError):
        raise
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(f"{subject} is no tokenizer: {error}") from error
