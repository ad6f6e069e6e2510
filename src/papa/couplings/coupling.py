"""The base of rules that act on some columns, or that have rows of their own: anchors and momenta.

Extra rows live in matrices of their own, with the columns of the members. A row that there is once for the whole
population is held by the first member's process, and saved with that member.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from papa.core import layout, mixing
from papa.core.layout import Layout, dtype_name
from papa.core.population import Population
from papa.core.product import BlockUpdate, Columns, Lines, chosen_columns, product_with, update_blocks_, write_columns_
from papa.core.rules import AveragingContext, Memory, Rule
from papa.couplings.masks import Mask
from papa.errors import MixingError

OWN_BLOCK_WIDTH = 1 << 16


@dataclass(frozen=True)
class ExtraRow:
    """A row that belongs to a rule: an anchor or a momentum. It is saved, resumed and distributed with the members."""

    name: str
    per_member: bool = False
    """One for each member, instead of one for the whole population."""
    is_difference: bool = False
    """A difference of weights, such as a momentum: it starts at zero. Others start at the mean, or at their member."""


@dataclass(frozen=True)
class Coupling(Rule):
    """A rule for some columns (`mask`), or with rows of its own (`extra_rows`), or both."""

    @property
    def extra_rows(self) -> tuple[ExtraRow, ...]:
        """Rows of the rule's own. `matrix` then has a row and a column for each member, followed by those of each extra
        row: one, or one for each member. Rows of members and anchors sum to 1 over members and anchors, rows of
        differences to 0.
        """
        return ()

    def mask(self, context: AveragingContext, layout: Layout) -> Mask | None:
        """The columns to act on at this step; None for all.

        Must depend on its arguments and the rule's seed only: every process calls it for itself. Distances are then
        not measured, since that would read every column.
        """
        return None

    def mask_among(self, context: AveragingContext, layout: Layout, members: Sequence[int]) -> Mask | None:
        """The mask when only some members are still active; only a rule that permutes members needs its own."""
        return self.mask(context, layout)

    def own_matrix(self, context: AveragingContext) -> Tensor | None:
        """What each member does with its own rows after the members were mixed; None for nothing.

        For a rule whose extra rows are all `per_member`: `matrix` then mixes the members only, and this matrix is
        multiplied by each member and its extra rows, on its own process. Nothing but members travels.
        """
        return None

    @property
    def takes_hooks(self) -> bool:
        return not self.extra_rows

    def memory(self, population: Population) -> ExtraRows:
        return ExtraRows(population, self.extra_rows)

    def prepare(self, population: Population, context: AveragingContext) -> AveragingContext:
        """Read the columns of the mask, which are all that the health check needs to see."""
        if population.dropped:
            mask = self.mask_among(context, population.layout, population.active)
        else:
            mask = self.mask(context, population.layout)
        if mask is None:
            return context
        mask.check(population.layout, context.size)
        columns = {dtype: chosen_columns(population.rows[dtype], chosen) for dtype, chosen in mask.columns.items()}
        return replace(context, mask=mask, columns=columns)

    def whole_matrix(self, context: AveragingContext, active: Sequence[int]) -> Tensor:
        if len(active) == context.size or not self.extra_rows or self.own_matrix(context) is not None:
            return super().whole_matrix(context, active)
        matrix = self.matrix_among(context, active)
        return among_extended(matrix, active, context.size, [row.per_member for row in self.extra_rows])

    def apply_(self, population: Population, context: AveragingContext) -> float | None:
        """Multiply members and extra rows by the matrix, in the columns of the mask."""
        rows = context.memory
        assert isinstance(rows, ExtraRows)
        matrix, own = self.whole_matrix(context, population.active), self.own_matrix(context)
        rows.update_(matrix, context, own, signed=self.is_signed)
        return None


class ExtraRows(Memory):
    """The extra rows that a rule declares, if any, and updates of members together with them."""

    def __init__(self, population: Population, declared: Sequence[ExtraRow] = ()) -> None:
        self.population, self.declared = population, tuple(declared)
        self._allocate()

    def _allocate(self) -> None:
        population = self.population
        self._layout = population.layout
        self.matrices: dict[str, dict[torch.dtype, Tensor]] = {
            row.name: {
                dtype: population.group.allocate(
                    len(population), columns, dtype=dtype, device=self._layout.device, single=not row.per_member
                )
                for dtype, columns in self._layout.num_columns.items()
            }
            for row in self.declared
        }

    def _follow_(self) -> None:
        """Use the layout of the population, if it was moved or converted since."""
        if self._layout is self.population.layout:
            return
        before, old = self.matrices, self._layout
        self._allocate()
        slots = {slot.name: slot for slot in self._layout.slots}
        for name, matrices in before.items():
            for slot in old.slots:
                new = slots[slot.name]
                target = layout.stacked(self.matrices[name][new.dtype], new)
                target.copy_(layout.stacked(matrices[slot.dtype], slot))

    def _local(self, row: ExtraRow, dtype: torch.dtype) -> Tensor:
        """The rows that this process writes: those of its members, or the single row on the first process."""
        matrix, population = self.matrices[row.name][dtype], self.population
        if row.per_member:
            first = population.group.first_row(len(population), self._layout.device)
            return matrix[first : first + len(population)]
        return matrix if population.members.start == 0 else matrix[:0]

    def _points(self) -> Tensor:
        """Which rows, of members followed by extra rows, are points and not differences."""
        size = self.population.size
        found = [True] * size
        for row in self.declared:
            found += [not row.is_difference] * (size if row.per_member else 1)
        return torch.tensor(found, device="cpu")

    @property
    def _singles(self) -> list[int]:
        """The positions, after the members, of matrices with a single row."""
        return [number for number, row in enumerate(self.declared, start=1) if not row.per_member]

    def start_(self) -> None:
        """Set anchors to the mean of the active members, or to their member; and momenta to zero. A collective."""
        population = self.population
        self._follow_()
        if not self.declared:
            return
        population.refresh_()
        population.share_buffers_()
        weights = mixing.soup_row(population.size, population.active)
        for dtype, members in population.matrices.items():
            for row in self.declared:
                own = self._local(row, dtype)
                if row.is_difference:
                    own.zero_()
                elif row.per_member:
                    own.copy_(population.rows[dtype])
                else:
                    mean = population.group.combine(members, weights)
                    own.copy_(mean.expand(len(own), -1))
        population.group.barrier()

    def update_(self, matrix: Tensor, context: AveragingContext, own: Tensor | None, *, signed: bool) -> None:
        """Multiply members and extra rows by a matrix, in the columns of the context's mask.

        With an `own` matrix, `matrix` is of the members alone, and `own` is multiplied by each member and its extra
        rows afterwards. A matrix of members alone may have negative weights if `signed`.
        """
        population, synchronised = self.population, context.is_fresh
        mask: Mask | None = context.mask
        chosen = context.columns if context.is_fresh and not self.declared else None
        if not context.is_fresh:
            population.refresh_()
        if chosen is None or mask is None or any(isinstance(columns, slice) for columns in mask.columns.values()):
            population.share_buffers_()  # lines hold parameters only
        self._follow_()
        sources = None if mask is None else mask.sources
        only_members = own is not None or sources is not None
        points = self._points()
        if only_members or not self.declared:
            checked = matrix if sources is not None else mixing.check_rows(matrix, population.size, signed=signed)
        else:
            checked = check_extended(matrix, points)
        for dtype, columns in self._columns(mask):
            members = population.matrices[dtype]
            extra = [] if only_members else [self.matrices[row.name][dtype] for row in self.declared]
            if sources is not None:
                assert isinstance(columns, Lines)
                update = permutation(sources[dtype], columns.width)
            else:
                update = joint_product(checked, members, points if bool(extra) else None)
            population.group.update_(
                [members, *extra],
                update,
                columns=columns,
                singles=() if only_members else self._singles,
                chosen=None if chosen is None else [chosen[dtype]],
                synchronised=synchronised,
            )
            synchronised = True
        if own is not None:
            self._update_own_(own, mask)
        population.mark_changed_()

    def _columns(self, mask: Mask | None) -> Iterator[tuple[torch.dtype, Columns]]:
        for dtype in self.population.matrices:
            if mask is None or dtype in mask.columns:
                yield dtype, None if mask is None else mask.columns[dtype]

    def _update_own_(self, own: Tensor, mask: Mask | None) -> None:
        """Multiply each local member and its extra rows by a matrix; nothing travels."""
        points = torch.tensor([True, *[not row.is_difference for row in self.declared]], device="cpu")
        check_extended(own, points)
        for dtype, columns in self._columns(mask):
            members = self.population.rows[dtype]
            update = joint_product(own, members, points)
            parts = [members, *[self._local(row, dtype) for row in self.declared]]
            for index in range(len(members)):
                rows = [part[index : index + 1] for part in parts]
                chosen = [chosen_columns(row, columns) for row in rows]
                update_blocks_(chosen, update, width=OWN_BLOCK_WIDTH)
                for row, values in zip(rows, chosen, strict=True):
                    write_columns_(row, columns, values)

    def restart_(self, members: Collection[int]) -> None:
        """Give restarted members fresh rows: anchors from the mean of the others' anchors, and momenta of zero."""
        population = self.population
        self._follow_()
        healthy = [member for member in population.active if member not in members]
        matrix = mixing.identity(population.size)
        matrix[list(members)] = mixing.soup_row(population.size, healthy)
        for row in self.declared:
            for dtype, rows in self.matrices[row.name].items() if row.per_member else ():
                if not row.is_difference:
                    population.group.mix_(rows, matrix)
                    continue
                for index, member in enumerate(population.members):
                    if member in members:
                        self._local(row, dtype)[index].zero_()
                population.group.barrier()

    def names_of(self, member: int) -> list[str]:
        """The names of the tensors that are saved with a member."""
        rows = [row for row in self.declared if row.per_member or member == 0]
        return [f"row.{row.name}.{dtype_name(dtype)}" for row in rows for dtype in self.population.matrices]

    def templates(self) -> dict[str, Tensor]:
        rows = {dtype_name(dtype): matrix[0] for dtype, matrix in self.population.matrices.items()}
        return {f"row.{one.name}.{name}": row for one in self.declared for name, row in rows.items()}

    def tensors_of(self, index: int) -> dict[str, Tensor]:
        """The rows that are saved with a local member."""
        self._follow_()
        found = {}
        for row in self.declared:
            for dtype in self.population.matrices:
                local = self._local(row, dtype)
                if row.per_member or (index == 0 and len(local)):
                    found[f"row.{row.name}.{dtype_name(dtype)}"] = local[index if row.per_member else 0]
        return found

    def load_(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Restore the `tensors_of` each local member. A collective."""
        if not self.declared:
            return
        for index, (member, state) in enumerate(zip(self.population.members, states, strict=True)):
            missing = [name for name in self.names_of(member) if name not in state]
            if missing:
                raise MixingError(f"the state of member {member} has no {missing[0]}: it is of another rule")
            for name, row in self.tensors_of(index).items():
                row.copy_(state[name])
        self.population.group.barrier()


def joint_product(matrix: Tensor, like: Tensor, points: Tensor | None = None) -> BlockUpdate:
    """The update that multiplies the rows of all parts together by one matrix."""
    mix_block_ = product_with(matrix, like, points)

    def update(blocks: list[Tensor], _: int) -> None:
        if len(blocks) == 1:
            mix_block_(blocks[0])
            return
        joined = torch.cat(blocks)
        mix_block_(joined)
        for block, rows in zip(blocks, torch.split(joined, [len(block) for block in blocks]), strict=True):
            block.copy_(rows)

    return update


def permutation(sources: Tensor, width: int) -> BlockUpdate:
    """The update in which row `j` of each line of `width` columns takes those of row `sources[j]`."""

    def update(blocks: list[Tensor], start: int) -> None:
        for block in blocks:
            first, num_lines = start // width, block.shape[1] // width
            own = sources[:, first : first + num_lines].to(block.device)
            # Faster on a CPU than `gather`, and with half of the memory if positions in the block are int32.
            dtype = torch.int32 if block.numel() < 2**31 else torch.int64
            places = torch.add(torch.arange(num_lines, dtype=dtype, device=block.device), own, alpha=num_lines)
            lines = block.flatten() if width == 1 else block.reshape(-1, width)
            block.copy_(lines.index_select(0, places.flatten()).view_as(block))

    return update


def among_extended(matrix: Tensor, members: Sequence[int], size: int, per_member: Sequence[bool]) -> Tensor:
    """Extend a matrix for some members, followed by their extra rows, to all `size` members.

    All other members become the mean of `members`, and their extra rows stay unchanged. `per_member` says of each extra
    row whether there is one for each member.
    """
    places = list(members)
    num_rows = size
    for is_per_member in per_member:
        places += [num_rows + member for member in members] if is_per_member else [num_rows]
        num_rows += size if is_per_member else 1
    whole = mixing.identity(num_rows)
    whole[:size, :size] = mixing.among(mixing.identity(len(members)), members, size)
    index = torch.tensor(places, device="cpu")
    whole[index[:, None], index] = matrix
    return whole


def check_extended(matrix: Tensor, points: Tensor) -> Tensor:
    """A matrix of members and extra rows, or a `MixingError`; weights may be negative.

    `points` says which rows are points, not differences of points. With a 1 for every point and a 0 for every
    difference, `A u = u`: if all members and anchors were shifted by the same vector, so would be the result, and
    momenta would not change.
    """
    matrix = torch.as_tensor(matrix, dtype=torch.float64, device="cpu")
    if matrix.shape != (len(points), len(points)):
        raise MixingError(
            f"mixing matrix has shape {tuple(matrix.shape)}, expected ({len(points)}, {len(points)}): one row and one "
            "column for each member and each extra row"
        )
    if not torch.isfinite(matrix).all():
        raise MixingError("the mixing matrix has non-finite weights, expected finite ones")
    shift = points.double()
    found = matrix @ shift
    for row, (total, expected) in enumerate(zip(found.tolist(), shift.tolist(), strict=True)):
        if abs(total - expected) > mixing.ROW_SUM_TOLERANCE:
            raise MixingError(
                f"row {row} of the mixing matrix sums to {total:.6g} over members and anchors, expected {expected:g}"
            )
    return matrix
