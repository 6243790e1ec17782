"""The figures of a chart or a table as CSV, in the address of a link: the page needs no other file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from urllib.parse import quote


def csv_link(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A ``data:`` address. None is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows(rows)
    return "data:text/csv;charset=utf-8," + quote(text.getvalue(), errors="replace")
