"""`Table`: the numbers of a figure as rows of text, for readers who cannot or will not hover."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Column titles and rows of finished text, not escaped: whoever makes HTML or a terminal line of it escapes."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def make_table(columns: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> Table:
    """A `Table` with every cell as text; a row of another length than the columns is an error of the caller."""
    made = tuple(tuple(str(cell) for cell in row) for row in rows)
    if any(len(row) != len(columns) for row in made):
        raise ValueError(f"a row has another length than the {len(columns)} columns {', '.join(columns)}")
    return Table(tuple(columns), made, caption)
