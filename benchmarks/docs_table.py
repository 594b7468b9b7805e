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
        path = ROOT / "docs" / page
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        path.write_text(re.sub(pattern, lambda _: f"{begin}\n{text}\n{end}", path.read_text(), flags=re.DOTALL))
