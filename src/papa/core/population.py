"""The population: networks of one architecture whose weights form a matrix `W`, one row per member.

What reads or writes rows of several members goes through a `papa.core.group`, which knows where these rows are.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from papa.core import layout
from papa.core.binding import BoundMember
from papa.core.group import LocalGroup, as_group
from papa.core.mixing import check_row, check_rows, soup_row
from papa.core.product import is_finite
from papa.errors import MemberError, MixingError
from papa.streams import global_stream


class Population:
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
        self.before_soup: Callable[[], Callable[[], None] | None] = lambda: None
        """Returns `Diagnostics.before_soup` of the averager of these members; None if there is none (any more)."""
        if not members:
            raise MemberError("a population needs at least one member, got none: pass a list of modules")
        for member, model in enumerate(members):
            if not isinstance(model, nn.Module):
                raise MemberError(f"member {member} is a {type(model).__name__}, expected a torch.nn.Module")
            if any(model is other for other in members[:member]):
                raise MemberError(f"member {member} is the same object as an earlier one: make a module for each")
        self.group = as_group(group)
        self.group.check_models(members)
        self._models, self._average = members, dict(average or {})
        self._bind()

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

    def _bind(self) -> None:
        """Lay out the matrix, and move the members' tensors into their rows."""
        for model in self._models:
            layout.reshard_(model)
        self.layout = layout.plan(self._models, self._average)
        """Which columns hold which tensor."""
        cure = "all members of a population must share one architecture"
        self.group.check_same({slot.name: layout.describe(slot) for slot in self.layout.slots}, cure=cure)
        # With the same tensors in another order, columns would not correspond.
        self.group.check_same({f"tensor {n}": slot.name for n, slot in enumerate(self.layout.slots)}, cure=cure)
        self.matrices: dict[torch.dtype, Tensor] = {
            dtype: self.group.allocate(len(self), columns, dtype=dtype, device=self.layout.device)
            for dtype, columns in self.layout.num_columns.items()
        }
        """By dtype, the rows of the local members, or of all members where memory is shared."""
        self.size = self.group.size(len(self))
        """The number of members of the whole population, on all processes."""
        self.members = self.group.members(len(self))
        """The indices of the local members within the whole population."""
        first = self.group.first_row(len(self), self.layout.device)
        self.rows = {dtype: matrix[first : first + len(self)] for dtype, matrix in self.matrices.items()}
        """By dtype, the rows of the local members: call `refresh_` before reading, `mark_changed_` after writing."""
        ends = self.layout.num_parameter_columns
        self._parameters = [matrix[:, : ends[dtype]] for dtype, matrix in self.matrices.items() if ends[dtype]]
        self.buffers = [self.rows[dtype][:, columns] for dtype, columns in self.layout.buffer_columns.items()]
        """The averaged buffers of the local members, by dtype: columns of `rows`."""
        self._bound = [
            BoundMember(model, self.layout, {dtype: rows[index] for dtype, rows in self.rows.items()}, member)
            for index, (member, model) in enumerate(zip(self.members, self._models, strict=True))
        ]
        self.is_sharded = self._bound[0].is_sharded
        """Whether members are under `fully_shard`, so that this process holds shards of them."""
        self._places = Places(self._bound)
        self._whole_tensors = [tensor for bound in self._bound for tensor in bound.whole_tensors]
        self._sharded_modules = [module for bound in self._bound for module in bound.sharded_modules]

    def __len__(self) -> int:
        """The number of local members."""
        return len(self._models)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._models)

    def __getitem__(self, index: int) -> nn.Module:
        return self._models[index]

    def __repr__(self) -> str:
        first, slots = self._models[0], self.layout.slots
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.matrices)
        parts = [
            f"{self.size} x {type(first).__name__}",
            f"{sum(slot.numel for slot in slots):,} averaged numbers each",
        ]
        parts += [f"{dtypes} on {self.layout.device}"]
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
    def matrix(self) -> Tensor:
        """The rows in the dtype of most weights; `matrices` has all dtypes."""
        return self.matrices[self.layout.main_dtype]

    @property
    def active(self) -> tuple[int, ...]:
        """The indices of all members, on all processes, that were not dropped."""
        return tuple(member for member in range(self.size) if member not in self.dropped)

    @property
    def averaged(self) -> tuple[str, ...]:
        """The names of the tensors that are averaged; tied tensors are named once."""
        return tuple(slot.name for slot in self.layout.slots)

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

    def share_buffers_(self) -> None:
        """Make averaged buffers equal on processes that train one member together."""
        for buffers in () if self.group.is_local else self.buffers:
            self.group.broadcast_(buffers)

    def mark_changed_(self) -> None:
        """Tell autograd and autocast that weights changed; call it after writing to the matrix yourself."""
        if self.is_sharded:
            for bound in self._bound:
                bound.write_back_()
        torch.autograd.graph.increment_version(self._whole_tensors)
        torch.clear_autocast_cache()

    def mix_(self, matrix: Any, *, signed: bool = False, fresh: bool = False) -> None:
        """`W <- A W`: every member becomes a weighted mean of all members.

        Args:
            matrix: the weights `A`, `(size, size)`, with rows that sum to 1; anything `torch.as_tensor` takes.
            signed: allow negative weights.
            fresh: nothing has run since `refresh_`, and since all processes met.
        """
        if not fresh:
            self.refresh_()
        checked = check_rows(matrix, self.size, signed=signed)
        self.share_buffers_()
        for rows in self.matrices.values():
            self.group.mix_(rows, checked, synchronised=fresh)
            fresh = True
        self.mark_changed_()

    def push_(self, keep: float, *, fresh: bool = False) -> None:
        """`w_j <- a w_j + (1 - a) mean`: every member keeps the share `a` of itself; `fresh` is as for `mix_`."""
        if not fresh:
            self.refresh_()
        self.share_buffers_()
        for rows in self.matrices.values():
            self.group.push_(rows, keep, synchronised=fresh)
            fresh = True
        self.mark_changed_()

    def combined(self, weights: Any, out: Mapping[torch.dtype, Tensor] | None = None) -> dict[str, Tensor]:
        """The averaged tensors of a weighted mean of all members, by name, in new memory or in a row by dtype.

        With a one-hot vector this is a copy of one member. All processes must call it.

        Args:
            weights: one for each member of the whole population, non-negative, with a sum of 1. A member of weight 0
                is not read.
            out: for each dtype, memory of a row's length.
        """
        row = torch.as_tensor(weights, dtype=torch.float64, device="cpu")
        if row.shape != (self.size,):
            raise MixingError(f"weights have shape {tuple(row.shape)}, expected ({self.size},): one for each member")
        check_row(row, subject="the row of weights")
        self.refresh_()
        self.share_buffers_()
        rows = {
            dtype: self.group.combine(matrix, row, None if out is None else out[dtype])
            for dtype, matrix in self.matrices.items()
        }
        return {slot.name: layout.alias(rows[slot.dtype], slot) for slot in self.layout.slots}

    def stacked(self) -> dict[str, Tensor]:
        """Each averaged tensor of all local members, by name: views `(len(self), *shape)` of the matrix.

        Writing to them writes to the members.
        """
        return {slot.name: layout.stacked(self.rows[slot.dtype], slot) for slot in self.layout.slots}

    def is_finite(self, index: int) -> bool:
        """Whether all averaged weights of a local member are finite; one pass over its row."""
        return all(is_finite(rows[index]) for rows in self.rows.values())

    def mean(self) -> Tensor:
        """The mean of the rows of `matrix`: the average soup as one vector."""
        self.refresh_()
        self.share_buffers_()
        return self.group.combine(self.matrix, soup_row(self.size, self.active))

    def distances(self) -> Tensor:
        """The Euclidean distance of each member's parameters to the population mean, for all members."""
        self.refresh_()
        return self.measure_distances().cpu()

    def measure_distances(self) -> Tensor:
        """`distances` right after `refresh_`, not read from the device if one process holds all members."""
        squares = [self.group.squared_distances(rows) for rows in self._parameters or [self.matrix[:, :0]]]
        total = torch.stack(squares).sum(dim=0) if len(squares) > 1 else squares[0]
        return (self.group.sum_over_shards(total) if self.is_sharded else total).sqrt_()

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


class Places:
    """Where the tensors of all members are; looked at in every averaging, so in one list for each thing to compare."""

    def __init__(self, members: Sequence[BoundMember]) -> None:
        attributes = [(member, one) for member in members for one in member.attributes]
        children = [child for member in members for child in member.children]
        self._is_sharded = any(member.is_sharded for member in members)
        self._registries = [registry for member in members for registry in member.registries]
        self._num_parts = list(map(len, self._registries))
        self._dicts: list[Any] = [*(one.registry for _, one in attributes), *(parent for parent, _, _ in children)]
        self._keys = [*(one.key for _, one in attributes), *(key for _, key, _ in children)]
        self._values = [*(member.tensors[one.number] for member, one in attributes), *(child for *_, child in children)]
        self._tensors = [tensor for member in members for tensor in member.tensors]
        self._pointers = [pointer for member in members for pointer in member.pointers]
        # A tensor of one dimension has no other order of its numbers.
        self._ordered = [tensor for tensor in self._tensors if tensor.dim() > 1]
        self._strides = [stride for member in members for stride in member.strides if len(stride) > 1]

    def are_unchanged(self) -> bool:
        """Whether all members have the tensors that were bound, in their rows; then there is nothing to refresh."""
        return (
            not self._is_sharded
            and list(map(len, self._registries)) == self._num_parts
            and all(map(operator.is_, map(dict.get, self._dicts, self._keys), self._values))
            and list(map(Tensor.data_ptr, self._tensors)) == self._pointers
            and list(map(Tensor.stride, self._ordered)) == self._strides
        )


def _check_several(models: object) -> None:
    """Refuse a single module: iterating over a Sequential would give its layers."""
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
        raise MemberError(f"a population is made of several modules, got one {type(models).__name__}: pass a list")


def _rebuild(models: list[nn.Module], average: dict[str, bool], dropped: frozenset[int]) -> Population:
    population = Population(models, LocalGroup(), average=average)
    population.dropped = dropped
    return population
