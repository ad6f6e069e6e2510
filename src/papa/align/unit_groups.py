"""Groups of exchangeable units, and where in a network's tensors each unit lies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, fx

from papa.errors import PapaError, did_you_mean


@dataclass(frozen=True)
class TensorAxis:
    """A dimension of a tensor along which the units of a group lie."""

    tensor: str
    """The name of the parameter or buffer."""
    dim: int
    """The dimension that is permuted."""
    index: Tensor = field(repr=False)
    """Row `u` lists the indices along the dimension that belong to unit `u`, in order."""
    row_range: tuple[int, int] | None = None
    """The rows of dimension 0 (start, stop) to permute, as in one group of a grouped convolution; None for all."""

    def __str__(self) -> str:
        return f"{self.tensor} (dim {self.dim})"

    def view(self, tensor: Tensor) -> Tensor:
        """The part of the tensor that is permuted."""
        return tensor if self.row_range is None else tensor[slice(*self.row_range)]


@dataclass(frozen=True)
class UnitGroup:
    """Units that can be permuted among each other without changing the network's function."""

    name: str
    """The tensor that produces these units, with a number when it produces several groups."""
    size: int
    """The number of units."""
    axes: tuple[TensorAxis, ...]
    """All axes of parameters and buffers that have to be permuted together."""
    activations: tuple[TensorAxis, ...] = field(default=(), repr=False)
    """The units in activations: here `tensor` is the name of a node of the exported graph."""
    is_inner: bool = False
    """Whether the units lie inside one block (an attention head, a group of channels) of another group."""


@dataclass(frozen=True)
class ExportedGraph:
    """A network's graph, which runs with the tensors of any network of the same architecture."""

    module: fx.GraphModule
    """The graph that `torch.export` returned."""
    tensors: Mapping[str, str]
    """For each placeholder of a parameter or buffer, its name."""
    constants: Mapping[str, Tensor]
    """For each placeholder of a constant, its value."""


@dataclass(frozen=True)
class Symmetries:
    """All groups of units that can be permuted in a network; `Symmetries(())` keeps every unit in place."""

    groups: tuple[UnitGroup, ...]
    """Blocks and single units first, then units inside blocks."""
    graph: ExportedGraph | None = field(default=None, repr=False)
    """The graph from which they were derived; None when they were written by hand."""

    def __str__(self) -> str:
        return "\n".join(
            f"{group.name}: {group.size} units in {', '.join(str(axis) for axis in group.axes)}"
            for group in self.groups
        )

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[UnitGroup]:
        return iter(self.groups)

    def __getitem__(self, name: str) -> UnitGroup:
        for group in self.groups:
            if group.name == name:
                return group
        raise PapaError(f"no group '{name}': {did_you_mean(name, [group.name for group in self.groups])}")
