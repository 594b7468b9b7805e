"""A table that a script makes, printed, and with --write put into the page of the docs that shows it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(description: str | None, make: Callable[[], str], *, page: str, name: str) -> None:
    """Reads the command line, makes the table and shows it.

    Args:
        description: for --help.
        make: returns the table in Markdown.
        page: in docs/.
        name: the table goes between the marks ``<!-- name: begin -->`` and ``<!-- name: end -->`` of the page.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put the table into docs/{page}")
    arguments = parser.parse_args()
    text = make()
    print(text)
    if arguments.write:
        put(text, page=page, name=name)


def put(text: str, *, page: str, name: str) -> None:
    """Puts the text between the marks of the page. ``ValueError``: the page has no such marks."""
    path = ROOT / "docs" / page
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    new, count = re.subn(pattern, lambda _: f"{begin}\n{text}\n{end}", path.read_text(), flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"docs/{page}: expected one pair of marks {begin} and {end}, got {count}")
    path.write_text(new)
