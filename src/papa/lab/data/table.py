"""Tables: rows of numbers with a class each, from scikit-learn or from a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from papa.errors import DataError
from papa.lab.data.splits import limit, split_classes
from papa.packages import require
from papa.streams import stream
from papa.training.data import Arrays, Data

SKLEARN = {"breast-cancer": "load_breast_cancer", "wine": "load_wine"}
"""Tables that scikit-learn ships, and their functions."""
TABLES = (*SKLEARN, "table")
"""The names of tables; `table` is a CSV file of your own."""
TEST_SHARE = 0.25
"""Of the rows, if the config does not say."""
MAX_VALUES = 100
"""The largest number of different words in a column."""


@dataclass(frozen=True, kw_only=True)
class TableSet:
    """Rows of features, and the class of each."""

    features: Tensor
    """Float32 `(rows, features)`, not scaled."""
    targets: Tensor
    classes: tuple[str, ...]
    max_train: int | None = None
    max_test: int | None = None

    def split(self, validation: float, test_share: float, *, seed: int) -> tuple[Data, Tensor, Tensor]:
        """Training, validation and test rows, balanced over classes, and the mean and standard deviation that scale
        them, which are those of the training rows. The split depends on the seed alone.
        """
        order = torch.randperm(len(self.targets), generator=stream(seed, "table-split"))
        targets = self.targets[order]
        rest, test = (order[part] for part in split_classes(targets, test_share))
        kept, held_out = (rest[part] for part in split_classes(self.targets[rest], validation / (1.0 - test_share)))
        features = self.features[kept]
        mean, std = features.mean(0), features.std(0, correction=0)
        std = torch.where(std > 0, std, 1.0)

        def rows(chosen: Tensor) -> Arrays:
            return Arrays((self.features[chosen] - mean) / std, self.targets[chosen])

        data = Data(
            train=limit(rows(kept), self.max_train, part="train"),
            validation=rows(held_out),
            test=limit(rows(test), self.max_test, part="test"),
        )
        return data, mean, std


def load_table(
    name: str, root: str | Path = "data", *, max_train: int | None = None, max_test: int | None = None
) -> TableSet:
    """Load a table by name: `breast-cancer` or `wine`, or `table` for the CSV file `root` (see `read_csv`).

    At most `max_train` and `max_test` rows are used: a fixed selection, balanced over classes.

    Example:
        >>> table = load_table("wine")
        >>> tuple(table.features.shape), table.classes
        ((178, 13), ('class_0', 'class_1', 'class_2'))
    """
    if name == "table":
        features, targets, classes = read_csv(Path(root))
    else:
        require("sklearn")
        import sklearn.datasets  # slow to import, and needed only here

        found = getattr(sklearn.datasets, SKLEARN[name])()
        features, targets = torch.from_numpy(found.data).float(), torch.from_numpy(found.target).long()
        classes = tuple(str(word) for word in found.target_names)
    return TableSet(features=features, targets=targets, classes=classes, max_train=max_train, max_test=max_test)


def read_csv(path: Path) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Features, targets and class names of a CSV file with a header.

    The last column is the class. A column of numbers is one feature; a column of words has a feature for each word.
    """
    if not path.exists():
        raise DataError(f"--data.root is {path}, and there is no such file: expected a CSV file in UTF-8")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = list(csv.reader(file)) or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a table: {error}. Expected a CSV file in UTF-8") from error
    rows = [row for row in rows if row]
    if len(header) < 2 or len(rows) < 2:
        raise DataError(f"{path} has {len(header)} columns and {len(rows)} rows, expected at least two of each")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise DataError(f"{path} has {len(row)} values in line {number}, expected {len(header)} as in its header")
        if "" in row:
            column = header[row.index("")]
            raise DataError(f"{path} has no value in line {number}, column {column!r}: fill it in, or leave it out")
    *columns, labels = zip(*rows, strict=True)
    classes = tuple(sorted(set(labels)))
    targets = torch.tensor([classes.index(label) for label in labels])
    features = [_features(column, f"{path}, column {name!r}") for name, column in zip(header, columns, strict=False)]
    return torch.cat(features, dim=1), targets, classes


def _features(column: Sequence[str], subject: str) -> Tensor:
    """A column of numbers as it is, a column of words as one feature for each word."""
    try:
        numbers = torch.tensor([float(value) for value in column])
    except ValueError:
        words = sorted(set(column))
        if len(words) > MAX_VALUES:
            raise DataError(
                f"{subject} has {len(words)} different words, expected numbers or at most {MAX_VALUES} words"
            ) from None
        return torch.tensor([[float(value == word) for word in words] for value in column])
    if not numbers.isfinite().all():
        raise DataError(f"{subject} has a value that is not finite, expected numbers")
    return numbers.unsqueeze(1)
