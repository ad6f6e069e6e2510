"""Fine-tuning: train only the new head at first."""

from torch import nn

from papa.lab.models import freeze_all_but_head_, unfreeze_
from papa.training import Callback, Training


class FrozenBody(Callback):
    """Freezes everything but the head for the first `share` of training.

    A head with random weights sends random gradients into a pretrained body; the paper trains it alone for 4% of
    training first.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self._frozen: list[nn.Parameter] = []

    def on_step_begin(self, training: Training) -> None:
        """Freeze at the start or after a resume, unfreeze when it is time."""
        is_frozen_now = training.step < round(self.share * training.length.num_steps)
        if is_frozen_now and not self._frozen:
            self._frozen = [parameter for model in training.population for parameter in freeze_all_but_head_(model)]
        elif not is_frozen_now:
            unfreeze_(self._frozen)
            self._frozen = []
