"""Jobs that write distributed checkpoints with `torch.distributed.checkpoint`."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def whole_state(seed: int) -> dict[str, Tensor]:
    """What the ranks save together."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(7, 5, generator=generator),
        "columns": torch.randn(4, 6, generator=generator),
        "bias": torch.randn(3, generator=generator),
        "count": torch.tensor(seed),
    }


def save_sharded(rank: int, folder: str) -> None:
    """Save two checkpoints with tensors that are split by rows, by columns and not at all."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for seed in range(2):
        state = whole_state(seed)
        sharded = {
            **state,
            "rows": distribute_tensor(state["rows"], mesh, [Shard(0)]),
            "columns": distribute_tensor(state["columns"], mesh, [Shard(1)]),
        }
        dcp.save({"model": sharded, "step": 3}, checkpoint_id=Path(folder) / f"sharded-{seed}")
    dist.destroy_process_group()
