"""Plain text tables."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(head), *cells]) for i in range(len(head))]
    numeric = [all(_number(row[i]) for row in cells) and bool(cells) for i in range(len(head))]
    lines = [list(head), ["-" * width for width in widths], *cells]
    return "\n".join("  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(line, widths, numeric)).rstrip() for line in lines)


def _number(text: str) -> bool:
    return text.replace(".", "", 1).replace("-", "", 1).isdigit()
