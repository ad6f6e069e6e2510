"""Convert the weights of another implementation to the names of a timm network:

python examples/rename_weights.py efficientnet-lite0.pth tf_efficientnet_lite0 lite0.safetensors

Both must have the same tensors in the same order. Then `papa run ... --model.name timm:tf_efficientnet_lite0
--model.weights lite0.safetensors` starts from them.
"""

import sys

import timm
import torch
from safetensors.torch import save_file

source, name, target = sys.argv[1:]
theirs = torch.load(source, map_location="cpu", weights_only=True)
ours = timm.create_model(name, num_classes=1000).state_dict()


def signatures(state: dict[str, torch.Tensor]) -> list[tuple[str, torch.Size]]:
    """What must be equal in both: the last part of each name (weight, running_mean), and the shape."""
    return [(name.rpartition(".")[2], tensor.shape) for name, tensor in state.items()]


for (their, found), (our, expected) in zip(
    zip(theirs, signatures(theirs), strict=True), zip(ours, signatures(ours), strict=True), strict=True
):
    if found != expected:
        sys.exit(f"{their} {tuple(found[1])} is not {our} {tuple(expected[1])}: the networks differ, nothing written")
save_file({name: tensor.contiguous() for name, tensor in zip(ours, theirs.values(), strict=True)}, target)
print(f"{target}: {len(ours)} tensors for timm:{name}")
