"""Networks by name: small ones for 8x8 and 32x32 images, UNet for segmentation, and every network of timm."""

from papa.models.head import freeze_all_but_head_, head_of, head_parameters, unfreeze_
from papa.models.registry import input_size_of, make_model, model_names, normalization_of
from papa.models.resnet import ResNet, resnet18, resnet20
from papa.models.small import DigitsCNN, Linear
from papa.models.unet import UNet
from papa.models.vgg import VGG
from papa.models.weights import load_weights_

__all__ = [
    "VGG",
    "DigitsCNN",
    "Linear",
    "ResNet",
    "UNet",
    "freeze_all_but_head_",
    "head_of",
    "head_parameters",
    "input_size_of",
    "load_weights_",
    "make_model",
    "model_names",
    "normalization_of",
    "resnet18",
    "resnet20",
    "unfreeze_",
]
