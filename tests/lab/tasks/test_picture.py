import io

import numpy as np
import pytest
import torch
from PIL import Image

from papa.lab.tasks.picture import GAP, WIDTH, palette, panels_of, side_by_side


def some_tile(height: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    labels = torch.randint(3, (height, width), dtype=torch.uint8)
    labels[0, 0] = 255
    return torch.randint(256, (3, height, width), dtype=torch.uint8), labels, torch.randint(3, (height, width))


def test_image_labels_and_prediction_are_side_by_side() -> None:
    image, labels, prediction = some_tile(6, 10)
    found = panels_of(image, labels, prediction, 3)
    assert found.shape == (6, 3 * 10 + 2 * GAP, 3)
    assert torch.equal(found[:, :10], image.permute(1, 2, 0))
    shown = found[:, 10 + GAP : 20 + GAP], found[:, 20 + 2 * GAP :]
    for part, classes in zip(shown, (labels, prediction), strict=True):
        assert not part[0, 0].any()
        assert torch.equal(part[1:], palette(3)[classes[1:].long()])


@pytest.mark.parametrize("size", [(8, 20), (30, 400), (2, 2000)])
def test_pictures_have_about_the_same_width_for_any_tile(size: tuple[int, int]) -> None:
    png = side_by_side(*some_tile(*size), classes=["land", "water", "grüner Weg, 道"])
    picture = np.asarray(Image.open(io.BytesIO(png)))
    assert WIDTH / 2 < picture.shape[1] <= WIDTH
    legend = picture[-24:].reshape(-1, 3)
    for color in palette(3).tolist():
        assert (legend == color).all(axis=1).any()


def test_every_class_has_a_different_color() -> None:
    assert len({tuple(color) for color in palette(12).tolist()}) == 13
