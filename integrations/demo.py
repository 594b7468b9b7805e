"""What the example scripts share: the model, the text, the settings of a run, and how a command line is read."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

from stdlib_text import StdlibText

from zclip_ext import ZClip

MODEL: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4}
WARMUP_STEPS = 50  # of the learning rate, constant from there on: so a run can be made longer later
BAD_AFTER = 50


class SettingError(ValueError):
    """Arguments that don't go together with what is there."""


def build_model(length: int, shape: dict[str, Any] = MODEL) -> Any:
    """A Llama that reads bytes, ``length`` of them at most."""
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds, which --help can do without

    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=length, use_cache=False, **shape))


def text_of(args: argparse.Namespace, batch: int | None = None) -> StdlibText:
    """The batches of a run: the same in every script that is given the same."""
    shape = {"batch": args.batch if batch is None else batch, "length": args.length}
    return StdlibText(**shape, bad_share=args.bad_share, bad_after=BAD_AFTER, seed=args.seed)


def settings_of(args: argparse.Namespace, names: Sequence[str], data: StdlibText) -> dict[str, Any]:
    """What a run can't go on without having the same of: the arguments of these names, the text and the model."""
    settings = {name: getattr(args, name.strip("-").replace("-", "_")) for name in names}
    return {**settings, "the data, Python's standard library": data.fingerprint, "the model": MODEL}


def check_settings(
    settings: dict[str, Any], saved: dict[str, Any], path: object, *, instead: str = "another --out"
) -> None:
    """A run goes on only with the settings that it was saved with at ``path``; ``instead`` is another way out."""
    for name, value in settings.items():
        had = saved.get(name)
        if had != value:
            raise SettingError(f"{name}: got {value}, but {path} has {had}; give the same, or {instead}")


def check_steps(steps: int, at: int, path: object) -> None:
    """A run goes on only to a later step than the one that it was saved at."""
    if at > steps:
        raise SettingError(f"--steps: got {steps}, but {path} is at step {at} already")


def check_shares(batch: int, ranks: int) -> None:
    if batch % ranks:
        raise SettingError(f"--batch: got {batch}, which can't be shared out evenly to {ranks} ranks")


def log_line(row: dict[str, Any]) -> str:
    """A row of the log as strict JSON, which has no inf and no NaN: null."""
    strict = {name: value if math.isfinite(value) else None for name, value in row.items()}
    return json.dumps(strict, allow_nan=False) + "\n"


def open_log(path: Path, step: int) -> TextIO:
    """The log, cut back to its first ``step`` rows: those that a checkpoint knows of."""
    with path.open("rb+" if step else "wb+") as file:
        for _ in range(step):
            if not file.readline().endswith(b"\n"):
                raise SettingError(f"--resume: {path} has fewer rows than the {step} steps of its checkpoint")
        file.truncate(file.tell())
    return path.open("a", buffering=1, encoding="utf-8")  # whole rows, for who follows it


def print_metrics(zclip: ZClip) -> None:
    print("zclip:", ", ".join(f"{name} {value:.4g}" for name, value in zclip.metrics().items()))


Value = TypeVar("Value", int, float)


def checked(kind: Callable[[str], Value], fits: Callable[[Value], bool], allowed: str) -> Callable[[str], Value]:
    """A type of argument, with an error that says what is allowed."""

    def parse(text: str) -> Value:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if fits(value):
                return value
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed is {allowed}")

    return parse


def whole(low: int, high: int) -> Callable[[str], int]:
    return checked(int, lambda value: low <= value <= high, f"a whole number from {low} to {high}")


def real(low: float, high: float, *, include_low: bool = False) -> Callable[[str], float]:
    allowed = f"a number in {'[' if include_low else '('}{low:g}, {high:g})"
    return checked(float, lambda value: low < value < high or (include_low and value == low), allowed)


def new_parser(doc: str | None) -> argparse.ArgumentParser:
    """With the first and the last part of a script's docstring around its arguments."""
    first, *_, last = (doc or "").strip().split("\n\n")
    return argparse.ArgumentParser(
        description=first, epilog=last, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """What `text_of` reads, less the batch, which is another thing in each trainer."""
    add = parser.add_argument
    add("--length", type=whole(2, 4096), default=128, help="bytes in a window")
    bad = f"of steps from {BAD_AFTER} on that train on byte code instead"
    add("--bad-share", type=real(0, 1, include_low=True), default=0.05, help=bad)
    add("--seed", type=whole(0, 2**31 - 1), default=0, help="of the model and the data")


def make_folder(parser: argparse.ArgumentParser, path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: {error}")


def run(parser: argparse.ArgumentParser, args: argparse.Namespace, train: Callable[[argparse.Namespace], None]) -> None:
    try:
        train(args)
    except SettingError as error:
        parser.error(str(error))
