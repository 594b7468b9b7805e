"""Pictures of logged runs: the loss of each, and what ZClip saw and did in one of them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

# Okabe and Ito: told apart by colour-blind eyes, and each by its lightness in print.
_COLOURS = ("#7f7f7f", "#e69f00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9")
_SPIKE = "#d55e00"
_DASHES = ("-", (0, (5, 1.5)), "-", (0, (2, 1)))
_LOSS_FIELDS = ("step", "loss")
_NORM_FIELDS = ("grad_norm", "clipped_norm", "spike_level", "is_spike")


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a JSONL log, one a step. Half a line at the end, of a run that still writes, is left out.

    Raises:
        OSError: the file can't be read.
        ValueError: a line is no JSON object; names the file and the line.
    """
    rows = []
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: got {type(row).__name__}, expected a JSON object")
        rows.append(row)
    return rows


def plot_runs(logs: Mapping[str, Sequence[Row]], path: str | os.PathLike[str], *, focus: str) -> None:
    """Draws the training loss of all runs, and below it the gradient norm of one with the level it was judged by.

    Args:
        logs: rows by the name of the run, as :func:`read_log` gives them. Of each row ``step`` and ``loss`` are read,
            and ``bad`` where it is there: a batch known to be bad, which is marked and left out of the loss.
        path: where the picture goes; its ending says which kind, such as ``.png`` or ``.svg``.
        focus: the run of the lower panel. Its rows hold ``grad_norm``, ``clipped_norm``, ``spike_level`` (all in the
            gradient's own units) and ``is_spike`` as well. ``None`` stands for what is not finite.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: a run has no rows, a row lacks a field, or there is no run ``focus``; names it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('pictures need matplotlib: pip install "zclip-ext[plot]"') from error
    _check(logs, focus)
    # Without pyplot: nothing global is set, and no window system is asked for.
    figure = Figure(figsize=(10, 7.4), layout="constrained")
    FigureCanvasAgg(figure)
    losses, norms = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.15))
    for axes in (losses, norms):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.margins(x=0.02)
        bad = [row["step"] for row in logs[focus] if row.get("bad")]
        # In points, since a step is thinner than can be seen.
        for number, step in enumerate(bad):
            label = f"bad batch ({len(bad)})" if axes is norms and number == 0 else None
            axes.axvline(step, color="#dedede", linewidth=3, zorder=0.5, label=label)
    _draw_losses(losses, logs)
    _draw_norms(norms, logs[focus], focus)
    figure.align_ylabels()
    figure.savefig(path, dpi=150)


def _check(logs: Mapping[str, Sequence[Row]], focus: str) -> None:
    if focus not in logs:
        raise ValueError(
            f"focus: got {focus!r}, allowed is a run in logs: {', '.join(map(repr, logs)) or 'none there'}"
        )
    for name, rows in logs.items():
        if not rows:
            raise ValueError(f"logs[{name!r}]: has no rows")
        for index, row in enumerate(rows):
            for field in _LOSS_FIELDS + (_NORM_FIELDS if name == focus else ()):
                if field not in row:
                    raise ValueError(f"logs[{name!r}][{index}]: lacks the field {field!r}")


def _draw_losses(axes: Any, logs: Mapping[str, Sequence[Row]]) -> None:
    window = max(1, max(map(len, logs.values())) // 20)
    top, bottom = -math.inf, math.inf
    for index, (name, rows) in enumerate(logs.items()):
        good = [row for row in rows if not row.get("bad") and row["loss"] is not None]
        if not good:
            continue
        steps, raw = _column(good, "step"), _column(good, "loss")
        smooth = [sum(raw[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(raw))]
        colour, dashes = _COLOURS[index % len(_COLOURS)], _DASHES[index % len(_DASHES)]
        axes.plot(steps, raw, color=colour, alpha=0.16, linewidth=0.7)
        label = f"{name}  {smooth[-1]:.2f}"
        axes.plot(steps, smooth, color=colour, linestyle=dashes, linewidth=2, label=label)
        # The fall from the start would flatten all that comes after it.
        top = max(top, smooth[min(len(smooth) - 1, 2 * window)])
        bottom = min(bottom, *raw)
    if top > bottom:
        axes.set_ylim(bottom - 0.04 * (top - bottom), top)
    axes.set_ylabel("training loss")
    axes.set_title(f"Training loss, mean of the last {window} good batches", loc="left", fontsize=11)
    axes.legend(title="run, last value", loc="lower left", edgecolor="none", framealpha=0.9)


def _draw_norms(axes: Any, rows: Sequence[Row], name: str) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    steps = _column(rows, "step")
    spikes = [row for row in rows if row["is_spike"]]
    clipped = [row for row in spikes if row["clipped_norm"] < row["grad_norm"]]
    axes.plot(steps, _column(rows, "grad_norm"), color="#8a8a8a", linewidth=0.9, label="gradient norm")
    level = _column(rows, "spike_level")
    axes.plot(steps, level, color=_COLOURS[2], linewidth=2, label="spike level, adapts")
    at, before, after = (_column(clipped, field) for field in ("step", "grad_norm", "clipped_norm"))
    axes.vlines(at, after, before, color=_SPIKE, linewidth=1.2, zorder=3)
    style = {"linestyle": "none", "color": _SPIKE, "zorder": 4}
    peaks = _column(spikes, "step"), _column(spikes, "grad_norm")
    axes.plot(*peaks, marker="^", markersize=7, label=f"spike ({len(spikes)})", **style)
    label = f"after the clip ({len(clipped)})"
    axes.plot(at, after, marker="o", markersize=5, markerfacecolor="white", label=label, **style)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("gradient norm (L2)")
    axes.set_title(f"Gradient norm in the run {name!r}", loc="left", fontsize=11)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=5, frameon=False)


def _column(rows: Sequence[Row], field: str) -> list[float]:
    return [math.nan if row[field] is None else float(row[field]) for row in rows]
