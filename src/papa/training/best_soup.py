"""The best average soup seen while training, by validation score."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from papa.training.callbacks import Callback, EpochRecord
from papa.training.loop import Training


class BestSoup(Callback):
    """Keeps the average soup of the epoch with the best validation score; ties go to the lower loss, then the earlier.

    A copy is saved with every member, so that a resumed run continues exactly on any number of processes.
    """

    def __init__(self) -> None:
        self.network: nn.Module | None = None
        """The soup; meaningful once `epoch` is above 0."""
        self._record = torch.zeros(3, dtype=torch.float64)
        """Epoch, score and loss of the soup."""

    def setup(self, training: Training) -> None:
        """Allocate the network."""
        self.network = training.current_soup()

    @property
    def epoch(self) -> int:
        """The epoch the soup is from; 0 if there is none yet."""
        return int(self._record[0])

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        """Keep the current soup if it is the best so far."""
        found, (epoch, score, loss) = record.validation.average_soup, self._record.tolist()
        sign = 1.0 if training.task.higher_is_better else -1.0
        if epoch == 0 or (sign * found.score, -found.loss) > (sign * score, -loss):
            self.network = training.current_soup()
            self._record = torch.tensor([record.epoch, found.score, found.loss], dtype=torch.float64)

    def member_state(self, index: int) -> dict[str, Tensor]:
        """The soup's state dict and its record."""
        assert self.network is not None
        return {"record": self._record, **{f"soup.{name}": value for name, value in self.network.state_dict().items()}}

    def load_member_state_(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore the soup and its record."""
        assert self.network is not None
        self._record = tensors["record"].clone()
        self.network.load_state_dict(
            {name.removeprefix("soup."): value for name, value in tensors.items() if name.startswith("soup.")}
        )
