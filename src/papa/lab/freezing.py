"""Fine-tuning: train the new head alone first."""

from __future__ import annotations

from torch import nn

from papa.lab.models import freeze_all_but_head_, unfreeze_
from papa.training.loop import Callback, Training


class FrozenBody(Callback):
    """Keeps everything but the head frozen for the first `share` of training.

    A head that is still random sends random gradients into a body that knows something; the paper lets it settle for
    4% of training first.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self._frozen: list[list[nn.Parameter]] = []

    def before_step(self, training: Training) -> None:
        """Freeze at the start (or after a resume), thaw when the time has come."""
        is_frozen_now = training.step < round(self.share * training.length.num_steps)
        if is_frozen_now and not self._frozen:
            self._frozen = [freeze_all_but_head_(model) for model in training.population]
        if not is_frozen_now and self._frozen:
            for parameters in self._frozen:
                unfreeze_(parameters)
            self._frozen = []
