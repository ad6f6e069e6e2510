"""The population: networks of one architecture whose weights form a matrix `W`, one row per member."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from papa.core import layout
from papa.core.binding import BoundMember, Places
from papa.core.columns import Columns, chosen_columns
from papa.core.group import Group, LocalGroup, as_group
from papa.core.mixing import check_row, check_rows, soup_row
from papa.core.product import is_finite, row_sums
from papa.errors import MemberError, MixingError
from papa.streams import global_stream


class MemberRows:
    """The local members of a population, bound to their rows.

    `average` maps patterns over names to whether matching tensors are averaged.
    """

    def __init__(self, models: list[nn.Module], group: Group, average: Mapping[str, bool]) -> None:
        self._models = models
        self._average = dict(average)
        self.group = group
        self._bind()

    def _bind(self) -> None:
        for model in self._models:
            layout.reshard_(model)
        self._layout = layout.plan(self._models, self._average)
        cure = "all members of a population must share one architecture"
        self.group.check_same({slot.name: layout.describe(slot) for slot in self._layout.slots}, cure=cure)
        # With the same tensors in another order, columns would not correspond.
        self.group.check_same({f"tensor {n}": slot.name for n, slot in enumerate(self._layout.slots)}, cure=cure)
        self.matrices: dict[torch.dtype, Tensor] = {
            dtype: self.group.allocate(len(self), columns, dtype=dtype, device=self._layout.device)
            for dtype, columns in self._layout.num_columns.items()
        }
        starts = self._layout.num_parameter_columns
        self._parameter_rows = {dtype: rows[:, : starts[dtype]] for dtype, rows in self.matrices.items()}
        # Up to the last buffer: the padding differs between ranks with shards of different sizes.
        ends = {
            dtype: max(slot.offset + slot.numel for slot in self._layout.slots if slot.dtype == dtype)
            for dtype in starts
        }
        self._buffer_columns = {
            dtype: slice(start, ends[dtype]) for dtype, start in starts.items() if start < ends[dtype]
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
        self._places = Places(self._bound)
        self._whole_tensors = [tensor for bound in self._bound for tensor in bound.whole_tensors]
        self._sharded_modules = [module for bound in self._bound for module in bound.sharded_modules]

    def __len__(self) -> int:
        """The number of local members."""
        return len(self._models)

    @property
    def size(self) -> int:
        """The number of members of the whole population, on all processes."""
        return self.group.size(len(self))

    @property
    def members(self) -> range:
        """The indices of the local members within the whole population."""
        return self.group.members(len(self))

    @property
    def matrix(self) -> Tensor:
        """The local rows in the dtype of most weights; `matrices` has all dtypes."""
        return self.matrices[self._layout.main_dtype]

    @property
    def _strides(self) -> tuple[tuple[int, ...], ...]:
        """The memory order of each averaged tensor in its row."""
        return tuple(slot.stride for slot in self._layout.slots)

    def refresh_(self) -> None:
        """Copy tensors that were moved out of the matrix back into it.

        `module.to(memory_format=...)`, `self.buffer = new` and the like move tensors silently, so every operation on
        the matrix calls this first. Raises a `MemberError` if copying back would hide a mistake, such as a replaced
        Parameter.
        """
        for module in self._sharded_modules:  # a forward pass under `fully_shard` left their parameters unsharded
            module.reshard()  # type: ignore[operator]
        if self._places.are_unchanged():
            return
        moved = [bound.new_strides() for bound in self._bound]
        if self.group.is_local and moved[0] and all(strides == moved[0] for strides in moved):
            self._bind()  # all members were converted to another memory order: the matrix follows
        for bound in self._bound:
            bound.refresh_()

    def mark_changed_(self) -> None:
        """Tell autograd and autocast that weights changed; call it after writing to the matrix yourself."""
        if self._is_sharded:
            for bound in self._bound:
                bound.write_back_()
        torch.autograd.graph.increment_version(self._whole_tensors)
        torch.clear_autocast_cache()

    def _settle_(self) -> None:
        """Refresh, and make buffers equal on ranks that train one member together."""
        self.refresh_()
        self._share_buffers_()

    def _share_buffers_(self) -> None:
        if self.group.is_local:
            return
        local = self._local_rows()
        for dtype, columns in self._buffer_columns.items():
            self.group.broadcast_(local[dtype][:, columns])

    def _local_rows(self) -> dict[torch.dtype, Tensor]:
        """The rows of the local members, by dtype, without refreshing them first."""
        first = self._first_row
        return {dtype: rows[first : first + len(self)] for dtype, rows in self.matrices.items()}

    def _chosen(self, columns: Mapping[torch.dtype, Columns]) -> dict[torch.dtype, Tensor]:
        """Some columns of the local rows; copies of lines."""
        local = self._local_rows()
        return {dtype: chosen_columns(local[dtype], chosen) for dtype, chosen in columns.items()}

    def _stacked(self) -> dict[str, Tensor]:
        """Each averaged tensor of all local members, by name: views `(len(self), *shape)` of the matrix.

        Writing to them writes to the members.
        """
        first = self.group.first_row(len(self), self._layout.device)
        return {
            slot.name: layout.stacked(self.matrices[slot.dtype][first : first + len(self)], slot)
            for slot in self._layout.slots
        }

    def _num_parameter_columns(self, dtype: torch.dtype) -> int:
        """The number of leading columns of a dtype that hold parameters; the others hold buffers."""
        return self._layout.num_parameter_columns[dtype]

    def _is_finite(self, index: int, *, chosen: Mapping[torch.dtype, Tensor] | None = None) -> bool:
        """Whether all averaged weights of a local member are finite, or the chosen ones; one pass over its row."""
        return all(is_finite(rows[index]) for rows in (chosen or self._local_rows()).values())

    def _row_sums(self, *, only_buffers: bool) -> list[Tensor]:
        """The sums of the local rows, by dtype: finite if all their numbers are, unless a sum overflows.

        With `only_buffers`, those of the averaged buffers alone, if the parameters are known to be finite.
        """
        if only_buffers and not self._buffer_columns:
            return []
        local = self._local_rows()
        if only_buffers:
            return [row_sums(local[dtype][:, columns]) for dtype, columns in self._buffer_columns.items()]
        return [row_sums(rows) for rows in local.values()]

    @property
    def _is_sharded(self) -> bool:
        """Whether members are under `fully_shard`, so that this process holds shards of them."""
        return self._bound[0].is_sharded


class Population(MemberRows):
    """Networks of one architecture, whose weights are the rows of one matrix.

    Row `j` holds every floating-point parameter and averaged buffer of member `j`; the member's tensors share its
    memory. Members stay ordinary modules: train, save, copy and compile them as usual.

    Example:
        >>> population = Population([nn.Linear(4, 2) for _ in range(3)])
        >>> optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in population]
        >>> population.mix_(torch.full((3, 3), 1 / 3))  # every member becomes the mean
        >>> bool(population.distances().max() < 1e-6)
        True

    Args:
        models: the members of this process, all of one architecture, dtype and device.
        group: the processes that hold the other members; None if all members are local. Under torchrun, a process
            group such as `torch.distributed.group.WORLD`, where every rank holds its own members; or a device mesh of
            `population` and one more dimension, along which ranks train one member together (with
            `DistributedDataParallel` or `fully_shard`); or a group of `papa.distributed`, such as
            `papa.distributed.group.DistributedGroup(exchange="fast")`.
        average: which tensors are averaged, as glob patterns over their names. By default all parameters are, and
            buffers that are persistent, floating-point and finite (BatchNorm statistics are; masks and spectral-norm
            vectors are not). `{"head.*": False}` gives each member its own head.
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
        if not isinstance(models, Iterable):
            raise MemberError(f"a population is made of modules, got a {type(models).__name__}: pass a list of modules")
        members = list(models)
        self.dropped: frozenset[int] = frozenset()
        """Members that take no further part in means, soups and ensembles."""
        self._before_soup: Callable[[], Callable[[], None] | None] = lambda: None
        """Refers to the check that an averager of these members makes before a soup, while there is one."""
        if not members:
            raise MemberError("a population needs at least one member, got none: pass a list of modules")
        for member, model in enumerate(members):
            if not isinstance(model, nn.Module):
                raise MemberError(f"member {member} is a {type(model).__name__}, expected a torch.nn.Module")
            if any(model is other for other in members[:member]):
                raise MemberError(f"member {member} is the same object as an earlier one: make a module for each")
        processes = as_group(group)
        processes.check_models(members)
        super().__init__(members, processes, average or {})

    @classmethod
    def build(
        cls,
        make_model: Callable[[], nn.Module],
        size: int,
        *,
        seed: int = 1,
        group: Any = None,
        average: Mapping[str, bool] | None = None,
    ) -> Population:
        """Make members with initial weights of their own, those that `papa.train` would make with this seed.

        Example:
            >>> population = Population.build(lambda: nn.Linear(4, 2), 3, seed=1)

        Args:
            make_model: makes one member; called once for each, with torch's generators seeded for it.
            size: the number of members, on all processes.
            seed: of the members' weights; those of a member depend on the seed and its index only.
            group: as for `Population`.
            average: as for `Population`.
        """
        if isinstance(make_model, nn.Module) or not callable(make_model):
            raise MemberError(
                f"make_model is a {type(make_model).__name__}, expected a function that makes a new member when called"
            )
        group = as_group(group)
        models = []
        for member in group.local_range(size):
            with global_stream(seed, "init", member):
                models.append(make_model())
        return cls(models, group, average=average)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._models)

    def __getitem__(self, index: int) -> nn.Module:
        return self._models[index]

    def __repr__(self) -> str:
        first, slots = self._models[0], self._layout.slots
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.matrices)
        parts = [
            f"{self.size} x {type(first).__name__}",
            f"{sum(slot.numel for slot in slots):,} averaged numbers each",
        ]
        parts += [f"{dtypes} on {self._layout.device}"]
        if len(self) < self.size:
            parts.append(f"members {self.members.start} to {self.members.stop - 1} here")
        if self.dropped:
            parts.append(f"without {', '.join(map(str, sorted(self.dropped)))}")
        return f"Population({', '.join(parts)})"

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
    def active(self) -> tuple[int, ...]:
        """The indices of all members, on all processes, that were not dropped."""
        return tuple(member for member in range(self.size) if member not in self.dropped)

    @property
    def averaged(self) -> tuple[str, ...]:
        """The names of the tensors that are averaged; tied tensors are named once."""
        return tuple(slot.name for slot in self._layout.slots)

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

    def _combined(self, weights: Any) -> dict[str, Tensor]:
        """The averaged tensors of a weighted mean of all members, by name, in new memory.

        With a one-hot vector this is a copy of one member. All processes must call it.

        Args:
            weights: one for each member of the whole population, non-negative, with a sum of 1. A member of weight 0
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

    def _soup_buffer(self, index: int = 0) -> SoupBuffer:
        """A separate network to be filled with weighted means of members; takes the memory of one network.

        Args:
            index: the local member to copy tensors from that are not averaged.
        """
        self.refresh_()
        rows = {dtype: torch.zeros_like(matrix[0]) for dtype, matrix in self.matrices.items()}
        return SoupBuffer(self, layout.copy_onto(self[index], self._layout, rows), rows)

    def _write_mean_(self, rows: Mapping[torch.dtype, Tensor], weights: Any) -> None:
        """Write a weighted mean of all members into rows; see `combined`."""
        row = self._checked_row(weights)
        self._settle_()
        for dtype, matrix in self.matrices.items():
            self.group.combine(matrix, row, rows[dtype])

    def mix_(self, matrix: Any, *, synchronised: bool = False, signed: bool = False) -> None:
        """`W <- A W`: every member becomes a weighted mean of all members.

        Args:
            matrix: the weights `A`, `(size, size)`, with rows that sum to 1; anything `torch.as_tensor` takes.
            synchronised: all processes have synchronised since any member last changed, so no barrier is needed.
            signed: allow negative weights.
        """
        self.refresh_()
        self._mix_refreshed_(matrix, synchronised=synchronised, signed=signed)

    def _mix_refreshed_(self, matrix: Any, *, synchronised: bool = False, signed: bool = False) -> None:
        """`mix_` right after `refresh_`."""
        checked = check_rows(matrix, self.size, signed=signed)
        self._share_buffers_()
        for rows in self.matrices.values():
            self.group.mix_(rows, checked, synchronised=synchronised)
            synchronised = True
        self.mark_changed_()

    def _push_refreshed_(self, keep: float, *, synchronised: bool = False) -> None:
        """Push each member toward the mean, of which it takes the share `1 - keep`, right after `refresh_`."""
        self._share_buffers_()
        for rows in self.matrices.values():
            self.group.push_(rows, keep, synchronised=synchronised)
            synchronised = True
        self.mark_changed_()

    def mean(self) -> Tensor:
        """The mean of the rows of `matrix`: the average soup as one vector."""
        self._settle_()
        return self.group.combine(self.matrix, soup_row(self.size, self.active))

    def distances(self) -> Tensor:
        """The Euclidean distance of each member's parameters to the population mean, for all members."""
        self.refresh_()
        return self._distances().cpu()

    def _distances(self) -> Tensor:
        """`distances` right after `refresh_`, on the device if one process holds all members."""
        by_dtype = list(self._parameter_rows.values())
        squares = [self.group.squared_distances(rows) for rows in by_dtype if rows.shape[1]]
        squares = squares or [self.group.squared_distances(by_dtype[0])]  # members without parameters
        total = torch.stack(squares).sum(dim=0) if len(squares) > 1 else squares[0]
        return (self.group.sum_over_shards(total) if self._is_sharded else total).sqrt_()

    def train(self, mode: bool = True) -> Population:
        """Put every local member in training mode, or in evaluation mode if `mode` is False."""
        for model in self._models:
            model.train(mode)
        return self

    def eval(self) -> Population:
        """Put every local member in evaluation mode."""
        return self.train(False)

    def state_dict(self) -> dict[str, Any]:
        """The state of every local member, as of an `nn.ModuleList`: names begin with the member's index."""
        return {
            f"{member}.{name}": value
            for member, model in zip(self.members, self._models, strict=True)
            for name, value in model.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load what `state_dict` returned, on this or on any number of processes."""
        parts: dict[str, dict[str, Any]] = {}
        for name, value in state.items():
            prefix, _, rest = name.partition(".")
            parts.setdefault(prefix, {})[rest] = value
        expected = {str(member) for member in self.members}
        unknown = sorted(parts.keys() - {str(member) for member in range(self.size)})
        missing = sorted(expected - parts.keys())
        if missing or unknown:
            found = f"no member {', '.join(missing)}" if missing else f"'{unknown[0]}', which is no member"
            raise MemberError(
                f"the state has {found}, expected that of a population of {self.size}: names such as '0.weight'"
            )
        for member, model in zip(self.members, self._models, strict=True):
            model.load_state_dict(parts[str(member)], strict=strict)

    def to(self, *args: Any, **kwargs: Any) -> Population:
        """Move or convert every member, as `nn.Module.to` does, and the matrix with them."""
        for model in self._models:
            model.to(*args, **kwargs)
        self._bind()
        return self


class SoupBuffer:
    """A network in a separate row, into which weighted means of members are written directly.

    Example:
        >>> population = Population([nn.Linear(4, 2) for _ in range(3)])
        >>> soup_buffer = population._soup_buffer()
        >>> soup_buffer.fill_([0.0, 0.0, 1.0])
        >>> torch.equal(soup_buffer.network.weight, population[2].weight)
        True
    """

    def __init__(self, population: Population, network: nn.Module, rows: dict[torch.dtype, Tensor]) -> None:
        self.network = network
        self._population, self._rows = population, rows
        self._strides = population._strides
        self._tensors = layout.named_tensors(network, population.averaged)

    @torch.no_grad()
    def fill_(self, weights: Any) -> None:
        """Set the network to a weighted mean of all members. All processes must call it."""
        population = self._population
        population.refresh_()
        if population._strides == self._strides:
            population._write_mean_(self._rows, weights)
            torch.autograd.graph.increment_version(list(self._tensors.values()))
        else:  # members were converted to another memory order meanwhile
            for name, tensor in population._combined(weights).items():
                self._tensors[name].copy_(tensor)
        torch.clear_autocast_cache()


def _check_several(models: object) -> None:
    """Refuse a single module: iterating over a Sequential would give its layers."""
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
        raise MemberError(f"a population is made of several modules, got one {type(models).__name__}: pass a list")


def _rebuild(models: list[nn.Module], average: dict[str, bool], dropped: frozenset[int]) -> Population:
    population = Population(models, LocalGroup(), average=average)
    population.dropped = dropped
    return population
