"""Training data that is on every machine: Python's standard library, as text and, for bad batches, as byte code."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "turtledemo"}  # test data and programs that come along
_SKIPPED |= {"site-packages", "dist-packages"}  # not the standard library
_SKIPPED |= {"encodings", "pydoc_data"}  # tables
_MAX_TEXT = 6_000_000  # bytes
_HELD_OUT = 12  # every 12th file
_COMPILED = 20  # every 20th file

# What `import` writes to a .pyc file, less its header. In a process of its own, with a fixed seed of hashes: what was
# imported before, and the order of sets, change bytes of it.
_COMPILE = """
import marshal, pathlib, sys
for name in sys.argv[1:]:
    code = compile(pathlib.Path(name).read_bytes(), name, "exec", dont_inherit=True)
    sys.stdout.buffer.write(marshal.dumps(code))
"""


class StdlibText:
    """Batches of bytes: Python sources, and at a seeded share of the steps byte code in their place, a real bad batch.

    The batch of a step depends on the seed and the step alone, so that all runs see the same data, and one that is
    resumed needs nothing but its step.

    Args:
        batch: windows in a batch.
        length: bytes in a window.
        bad_share: how many of the steps get a bad batch, in [0, 1).
        bad_after: the first step that may.
        seed: of the choice of steps and windows.

    Raises:
        FileNotFoundError: this Python has no sources of its standard library.
    """

    def __init__(self, *, batch: int, length: int, bad_share: float, bad_after: int, seed: int) -> None:
        self.batch, self.length, self.bad_share, self.bad_after, self.seed = batch, length, bad_share, bad_after, seed
        root = Path(sysconfig.get_paths()["stdlib"])
        names = _sources(root)
        kept = [name for index, name in enumerate(names) if index % _HELD_OUT]
        parts = (
            b"".join((root / name).read_bytes() for name in kept)[:_MAX_TEXT],
            b"".join((root / name).read_bytes() for name in names[::_HELD_OUT]),
            _compile(root, kept[::_COMPILED]),
        )
        self.text, self.held_out, self.byte_code = (_tensor(part) for part in parts)
        #: Tells this data from that of another Python.
        self.fingerprint = hashlib.sha256(b"".join(parts)).hexdigest()[:16]

    def train_batch(self, step: int) -> tuple[Tensor, bool]:
        """Tokens, int64 of shape (batch, length) in [0, 256), and whether they are a bad batch."""
        chance = random.Random(f"{self.seed}:{step}")
        bad = chance.random() < self.bad_share and step >= self.bad_after
        source = self.byte_code if bad else self.text
        starts = [chance.randrange(len(source) - self.length) for _ in range(self.batch)]
        return self._windows(source, starts), bad

    def held_out_batches(self, count: int) -> list[Tensor]:
        """``count`` batches of the same shape from files that no training batch comes from, evenly spaced."""
        total = count * self.batch
        spacing = (len(self.held_out) - self.length) / total
        starts = [int(index * spacing) for index in range(total)]
        return [
            self._windows(self.held_out, starts[first : first + self.batch]) for first in range(0, total, self.batch)
        ]

    def _windows(self, source: Tensor, starts: list[int]) -> Tensor:
        return torch.stack([source[start : start + self.length] for start in starts]).long()


def _sources(root: Path) -> list[Path]:
    names = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    names = [name for name in names if not _SKIPPED.intersection(name.parts)]
    if len(names) < _HELD_OUT * _COMPILED:
        raise FileNotFoundError(f"the standard library's sources: {len(names)} .py files in {root}, expected hundreds")
    return names


def _compile(root: Path, names: list[Path]) -> bytes:
    command = [sys.executable, "-S", "-W", "ignore", "-c", _COMPILE, *map(str, names)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    return subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, check=True).stdout


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
