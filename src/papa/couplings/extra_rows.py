"""Extra rows: anchors and momenta that belong to a rule, next to the rows of the members.

They live in matrices of their own, with the columns of the members. A row that there is once for the whole population
is held by the first member's process, and saved with that member.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from papa.core import layout, mixing
from papa.core.columns import Columns, Lines, chosen_columns, write_columns_
from papa.core.layout import dtype_name
from papa.core.population import Population
from papa.core.product import joint_product, permutation, update_blocks_
from papa.core.rules import ExtraRow
from papa.couplings.masks import Mask
from papa.errors import MixingError

OWN_BLOCK_WIDTH = 1 << 16


class ExtraRows:
    """The extra rows that a rule declares, if any, and updates of members together with them."""

    def __init__(self, population: Population, declared: Sequence[ExtraRow] = ()) -> None:
        self.population, self.declared = population, tuple(declared)
        self._allocate()

    def _allocate(self) -> None:
        population = self.population
        self._layout = population._layout
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
        if self._layout is self.population._layout:
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
            return matrix[population._first_row : population._first_row + len(population)]
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
        population._settle_()
        weights = mixing.soup_row(population.size, population.active)
        for dtype, members in population.matrices.items():
            for row in self.declared:
                own = self._local(row, dtype)
                if row.is_difference:
                    own.zero_()
                elif row.per_member:
                    own.copy_(population._local_rows()[dtype])
                else:
                    mean = population.group.combine(members, weights)
                    own.copy_(mean.expand(len(own), -1))
        population.group.barrier()

    def update_(
        self,
        matrix: Tensor,
        mask: Mask | None = None,
        own: Tensor | None = None,
        *,
        signed: bool = False,
        synchronised: bool = False,
        chosen: Mapping[torch.dtype, Tensor] | None = None,
    ) -> None:
        """Multiply members and extra rows by a matrix, in the columns of a mask.

        With an `own` matrix, `matrix` is of the members alone, and `own` is multiplied by each member and its extra
        rows afterwards. A matrix of members alone may have negative weights if `signed`. `chosen` are the columns of
        the local members, if they were read already from refreshed members.
        """
        population, is_permuted = self.population, mask is not None and mask.sources is not None
        if chosen is None:
            population._settle_()
        self._follow_()
        only_members = own is not None or is_permuted
        points = self._points()
        if only_members or not self.declared:
            checked = matrix if is_permuted else mixing.check_rows(matrix, population.size, signed=signed)
        else:
            checked = mixing.check_extended(matrix, points)
        for dtype, columns in self._columns(mask):
            members = population.matrices[dtype]
            extra = [] if only_members else [self.matrices[row.name][dtype] for row in self.declared]
            if mask is not None and mask.sources is not None:
                assert isinstance(columns, Lines)
                update = permutation(mask.sources[dtype], columns.width)
            else:
                update = joint_product(checked, members, points if bool(extra) else None)
            population.group.update_(
                [members, *extra],
                update,
                columns=columns,
                singles=() if only_members else self._singles,
                chosen=None if chosen is None or extra else [chosen[dtype]],
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
        mixing.check_extended(own, points)
        for dtype, columns in self._columns(mask):
            members = self.population._local_rows()[dtype]
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
