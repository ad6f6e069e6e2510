"""The population: an ordered set of networks of one architecture whose numbers form a matrix."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from papa import layout
from papa.binding import BoundMember
from papa.errors import MemberError, MixingError
from papa.group import Group, LocalGroup, as_group
from papa.mixing import check_row, check_rows, soup_row
from papa.product import is_finite


class Population:
    """Networks of one architecture, bound to the rows of a matrix.

    Row `j` holds every floating-point parameter and averaged buffer of member `j`; the member's own tensors live in
    that row. Members stay ordinary modules: train, save, copy and compile them as ever.

    Example:
        >>> population = Population([nn.Linear(4, 2) for _ in range(3)])
        >>> optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in population]
        >>> population.mix_(torch.full((3, 3), 1 / 3))  # every member becomes the mean
        >>> bool(population.distances().max() < 1e-6)
        True

    Args:
        models: the members held by this process, all of one architecture, dtype and device.
        group: where the other members live; None when they are all here. Under torchrun a process group such as
            `torch.distributed.group.WORLD`, where every rank holds members of its own, or a device mesh of
            `population` and one more dimension, along which ranks train one member together (with
            `DistributedDataParallel` or `fully_shard`); or a group of `papa.group`, such as
            `papa.group.DistributedGroup(exchange="fast")`.
        average: which tensors are averaged, as glob patterns over their names. By default all parameters are, and
            buffers that are persistent, of floating point and finite (BatchNorm statistics are, masks and
            spectral-norm vectors are not). `{"head.*": False}` leaves each member its own head.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        group: Any = None,
        *,
        average: Mapping[str, bool] | None = None,
    ) -> None:
        _check_several(models)
        if average is not None and not isinstance(average, Mapping):
            raise MemberError(
                f"`average` is {average!r}, expected patterns and whether to average: {{'head.*': False}}"
            )
        self._models = list(models)
        self._average = dict(average or {})
        self.dropped: frozenset[int] = frozenset()
        """Members that take no further part: in no mean, soup or ensemble."""
        self.group: Group = as_group(group)
        if not self._models:
            raise MemberError("a population needs at least one member, got none: pass a list of modules")
        for member, model in enumerate(self._models):
            if not isinstance(model, nn.Module):
                raise MemberError(f"member {member} is a {type(model).__name__}, expected a torch.nn.Module")
            if any(model is other for other in self._models[:member]):
                raise MemberError(f"member {member} is the same object as an earlier one: make a module for each")
        self._bind()

    def _bind(self) -> None:
        for model in self._models:
            layout.reshard_(model)
        self._layout = layout.plan(self._models, self._average)
        cure = "all members of a population must share one architecture"
        self.group.check_same({slot.name: layout.describe(slot) for slot in self._layout.slots}, cure=cure)
        # Of the same tensors in another order every column would be another number.
        self.group.check_same({f"tensor {n}": slot.name for n, slot in enumerate(self._layout.slots)}, cure=cure)
        self.matrices: dict[torch.dtype, Tensor] = {
            dtype: self.group.allocate(len(self), columns, dtype=dtype, device=self._layout.device)
            for dtype, columns in self._layout.num_columns.items()
        }
        self._first_row = first = self.group.first_row(len(self), self._layout.device)
        self._bound = [
            BoundMember(
                model,
                self._layout,
                {dtype: rows[first + index] for dtype, rows in self.matrices.items()},
                self.members[index],
            )
            for index, model in enumerate(self._models)
        ]

    def __len__(self) -> int:
        """The number of members held by this process."""
        return len(self._models)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._models)

    def __getitem__(self, index: int) -> nn.Module:
        return self._models[index]

    def __repr__(self) -> str:
        columns, rows = self.matrix.shape[1], self.size
        return f"Population({rows} x {type(self._models[0]).__name__}, {columns:,} columns, {self.matrix.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Population:
        models = [copy.deepcopy(model, memo) for model in self._models]
        twin = Population(models, self.group, average=self._average)
        twin.dropped = self.dropped
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        if not isinstance(self.group, LocalGroup):
            raise MemberError("a population over several processes cannot be pickled: save its members")
        return _rebuild, (self._models, self._average, self.dropped)

    @property
    def size(self) -> int:
        """The number of members of the whole population, wherever they live."""
        return self.group.size(len(self))

    @property
    def members(self) -> range:
        """The indices, within the whole population, of the members this process holds."""
        return self.group.members(len(self))

    @property
    def active(self) -> tuple[int, ...]:
        """The indices of all members of the whole population that were not dropped."""
        return tuple(member for member in range(self.size) if member not in self.dropped)

    @property
    def matrix(self) -> Tensor:
        """The rows in this process's memory, in the dtype that most numbers have (all dtypes: `matrices`)."""
        return self.matrices[self._layout.main_dtype]

    @property
    def averaged(self) -> tuple[str, ...]:
        """The names of the tensors that are averaged; tied tensors are named once."""
        return tuple(slot.name for slot in self._layout.slots)

    @property
    def strides(self) -> tuple[tuple[int, ...], ...]:
        """In which memory order each averaged tensor lies in its row."""
        return tuple(slot.stride for slot in self._layout.slots)

    @property
    def not_averaged(self) -> tuple[str, ...]:
        """The names of floating-point tensors that stay with their member."""
        averaged, seen, names = set(self.averaged), set(), []
        for name, _, _, _, tensor in layout.tensors_of(self._models[0]):
            is_number = tensor.is_floating_point() or tensor.is_complex()
            if is_number and id(tensor) not in seen and name not in averaged:
                names.append(name)
            seen.add(id(tensor))
        return tuple(names)

    def is_finite(self, index: int, *, only_buffers: bool = False) -> bool:
        """Whether all averaged numbers of a member held here are finite; one pass over its row.

        Args:
            index: of the member, among those held here.
            only_buffers: look at the averaged buffers alone, where the parameters are known to be finite.
        """
        row = self.group.first_row(len(self), self._layout.device) + index
        starts = {dtype: self._layout.num_parameter_columns[dtype] if only_buffers else 0 for dtype in self.matrices}
        return all(is_finite(rows[row, starts[dtype] :]) for dtype, rows in self.matrices.items())

    def stacked(self) -> dict[str, Tensor]:
        """Each averaged tensor of all members held here at once, by name: views `(len(self), *shape)` of the matrix.

        Writing to them writes to the members. They are views of `matrices` as it is now.
        """
        first = self.group.first_row(len(self), self._layout.device)
        return {
            slot.name: layout.stacked(self.matrices[slot.dtype][first : first + len(self)], slot)
            for slot in self._layout.slots
        }

    def combined(self, weights: Any) -> dict[str, Tensor]:
        """The averaged tensors of the weighted mean of all members, by name, in memory of their own.

        `W.combined(one_hot)` is a copy of one member, wherever it lives. Every process that holds members must call it.

        Args:
            weights: one for each member of the whole population, non-negative and summing to 1; a member of weight 0
                is not read.
        """
        row = self._checked_row(weights)
        self._settle_()
        rows = {dtype: self.group.combine(matrix, row) for dtype, matrix in self.matrices.items()}
        return {slot.name: layout.alias(rows[slot.dtype], slot) for slot in self._layout.slots}

    def _checked_row(self, weights: Any) -> Tensor:
        row = torch.as_tensor(weights, dtype=torch.float64, device="cpu")
        if row.shape != (self.size,):
            raise MixingError(f"weights have shape {tuple(row.shape)}, expected ({self.size},): one for each member")
        check_row(row, subject="the row of weights")
        return row

    def soup_buffer(self, index: int = 0) -> SoupBuffer:
        """A network of its own, to be filled with weighted means of members; it takes the memory of one network.

        Args:
            index: the member held here that it is a copy of in all that is not averaged.
        """
        self.refresh_()
        rows = {dtype: torch.zeros_like(matrix[0]) for dtype, matrix in self.matrices.items()}
        return SoupBuffer(self, layout.copy_onto(self[index], self._layout, rows), rows)

    def pour_(self, rows: Mapping[torch.dtype, Tensor], weights: Any) -> None:
        """Fill rows with the weighted mean of all members; see `combined`."""
        row = self._checked_row(weights)
        self._settle_()
        for dtype, matrix in self.matrices.items():
            self.group.combine(matrix, row, rows[dtype])

    def mix_(self, matrix: Any, *, met: bool = False) -> None:
        """`W <- A W`: every member becomes the weighted mean of all that its row of `matrix` says.

        Args:
            matrix: `(size, size)`, row-stochastic; anything `torch.as_tensor` takes.
            met: all processes have met since any member last changed, and need not wait for each other once more.
        """
        checked = check_rows(matrix, self.size)
        self._settle_()
        for rows in self.matrices.values():
            self.group.mix_(rows, checked, met=met)
            met = True
        self.mark_changed_()

    def refresh_(self) -> None:
        """Bring tensors that something moved out of the matrix back into it.

        `module.to(memory_format=...)`, `self.buffer = new` and the like unbind silently; every operation on the
        matrix calls this first. What cannot be brought back without hiding a mistake raises a `MemberError`.
        """
        for model in self._models:
            layout.reshard_(model)
        moved = [bound.new_strides() for bound in self._bound]
        if self.group.is_alone and moved[0] and all(strides == moved[0] for strides in moved):
            self._bind()  # all members were brought into another memory order: the matrix follows
        for bound in self._bound:
            bound.refresh_()

    def mark_changed_(self) -> None:
        """Tell autograd and autocast that the members' numbers changed, after writing to the matrix by hand."""
        for bound in self._bound:
            bound.write_back_()
        tensors = [tensor for bound in self._bound for tensor in bound.tensors if not layout.is_sharded(tensor)]
        torch.autograd.graph.increment_version(tensors)
        torch.clear_autocast_cache()

    def _settle_(self) -> None:
        """Refresh, and let ranks that train one member agree on what they do not train in step: its buffers."""
        self.refresh_()
        for dtype, rows in self.rows_here().items():
            # Up to the last buffer: what fills up the row differs between ranks with shards of different sizes.
            end = max(slot.offset + slot.numel for slot in self._layout.slots if slot.dtype == dtype)
            self.group.agree_(rows[:, self._layout.num_parameter_columns[dtype] : end])

    def rows_here(self) -> dict[torch.dtype, Tensor]:
        """The rows of the members this process holds, by dtype; as they are, without a look at the members first."""
        first = self._first_row
        return {dtype: rows[first : first + len(self)] for dtype, rows in self.matrices.items()}

    def begin_mean(self) -> tuple[dict[torch.dtype, Tensor], Callable[[], dict[torch.dtype, Tensor]]]:
        """A copy of the rows held here, and what waits for the mean of the rows of all present members as they are now.

        Training may go on meanwhile; the copy must stay as it is until the mean is there. Every process that holds
        members must call it.
        """
        self._settle_()
        snapshot = {dtype: rows.clone() for dtype, rows in self.rows_here().items()}
        weights = soup_row(self.size, self.active)
        waits = {dtype: self.group.begin_mean(rows, snapshot[dtype], weights) for dtype, rows in self.matrices.items()}
        return snapshot, lambda: {dtype: wait() for dtype, wait in waits.items()}

    def num_parameter_columns(self, dtype: torch.dtype) -> int:
        """How many of the first columns of the rows of a dtype are parameters; the others are buffers."""
        return self._layout.num_parameter_columns[dtype]

    def mean(self) -> Tensor:
        """The mean row of `matrix`: the average soup as one vector."""
        self._settle_()
        return self.group.combine(self.matrix, soup_row(self.size, self.active))

    def distances(self) -> Tensor:
        """The Euclidean distance of each member's parameters to the population's mean, one per member of all."""
        self.refresh_()
        squares = [
            self.group.squared_distances(rows[:, : self._layout.num_parameter_columns[dtype]])
            for dtype, rows in self.matrices.items()
        ]
        total = torch.stack(squares).sum(dim=0)
        return (self.group.sum_over_shards(total) if self.is_sharded else total).sqrt()

    @property
    def is_sharded(self) -> bool:
        """Whether members are under `fully_shard`, and this process holds shards of them."""
        return self._bound[0].is_sharded

    def to(self, *args: Any, **kwargs: Any) -> Population:
        """Move or convert every member, as `nn.Module.to` does, and the matrix with them."""
        for model in self._models:
            model.to(*args, **kwargs)
        self._bind()
        return self


class SoupBuffer:
    """A network that lives in a row of its own, into which means of members are written without a detour.

    Example:
        >>> population = Population([nn.Linear(4, 2) for _ in range(3)])
        >>> soup_buffer = population.soup_buffer()
        >>> soup_buffer.fill_([0.0, 0.0, 1.0])
        >>> torch.equal(soup_buffer.network.weight, population[2].weight)
        True

    Args:
        population: whose members' means it gets.
        network: the network.
        rows: where its averaged tensors live, by dtype.
    """

    def __init__(self, population: Population, network: nn.Module, rows: dict[torch.dtype, Tensor]) -> None:
        self.network = network
        self._population, self._rows = population, rows
        self._strides = population.strides
        self._tensors = layout.named_tensors(network, population.averaged)

    @torch.no_grad()
    def fill_(self, weights: Any) -> None:
        """The network becomes the weighted mean of all members. Every process that holds members must call it."""
        population = self._population
        population.refresh_()
        if population.strides == self._strides:
            population.pour_(self._rows, weights)
            torch.autograd.graph.increment_version(list(self._tensors.values()))
        else:  # members were brought into another memory order meanwhile
            for name, tensor in population.combined(weights).items():
                self._tensors[name].copy_(tensor)
        torch.clear_autocast_cache()


def _check_several(models: object) -> None:
    """A sequential network can be gone through too, but its layers are no members."""
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
        raise MemberError(f"a population is made of several modules, got one {type(models).__name__}: pass a list")


def _rebuild(models: list[nn.Module], average: dict[str, bool], dropped: frozenset[int]) -> Population:
    population = Population(models, LocalGroup(), average=average)
    population.dropped = dropped
    return population
