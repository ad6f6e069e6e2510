"""Networks by name: small ones for 8x8 and 32x32 images, UNet for segmentation, and all networks of timm."""

from papa.lab.models.head import freeze_all_but_head_, head_of, head_parameters, unfreeze_
from papa.lab.models.registry import input_size_of, make_model, model_names, normalization_of
from papa.lab.models.resnet import ResNet, resnet18, resnet20
from papa.lab.models.small import DigitsCNN, Linear
from papa.lab.models.unet import UNet
from papa.lab.models.vgg import VGG
from papa.lab.models.weights import load_weights_

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
