"""Networks by name: small ones for 8x8 and 32x32 images, UNet for segmentation, and all networks of timm."""

from papa.lab.models.head import freeze_all_but_head_, head_of, unfreeze_
from papa.lab.models.networks import VGG, DigitsCNN, UNet, resnet18, resnet20
from papa.lab.models.registry import input_size_of, make_model, normalization_of
from papa.lab.models.weights import load_weights_

__all__ = [
    "VGG",
    "DigitsCNN",
    "UNet",
    "freeze_all_but_head_",
    "head_of",
    "input_size_of",
    "load_weights_",
    "make_model",
    "normalization_of",
    "resnet18",
    "resnet20",
    "unfreeze_",
]
