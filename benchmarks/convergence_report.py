"""Tables and pictures of the runs of convergence.py."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

BASELINE = "fixed 1"  # what most runs use, and the paper compares with
EARLY = 100  # steps
# Student's t for an interval of 95 %, from two seeds on.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
# Okabe and Ito: told apart by colour-blind eyes.
COLOURS = {
    "none": "#000000",
    "fixed 1": "#e69f00",
    "AutoClip": "#009e73",
    "zclip 1.0.0": "#d55e00",
    "ZClip": "#0072b2",
    "ZClip, cap 1": "#56b4e9",
    "ZClip, clip_quantile": "#cc79a7",
}

Row = dict[str, Any]


class Group:
    """The runs of one regime and size, by method, learning rate and seed."""

    def __init__(self, regime: str, size: str) -> None:
        self.name = f"{regime}, {size} parameters"
        self.runs: dict[str, dict[float, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))

    def add(self, row: Row) -> None:
        settings = row["settings"]
        self.runs[settings["method"]][settings["lr"]][settings["seed"]] = row["result"]

    @property
    def methods(self) -> list[str]:
        return list(self.runs)

    @property
    def rates(self) -> list[float]:
        return sorted({rate for rates in self.runs.values() for rate in rates})

    def losses(self, method: str, rate: float) -> list[float]:
        """Of each seed at the end; inf where the run diverged."""
        runs = self.runs[method].get(rate, {})
        return [math.inf if runs[s]["diverged"] else runs[s]["held_out_loss"] for s in sorted(runs)]

    def best_rate(self, method: str) -> float:
        """The learning rate with the lowest mean of losses."""
        return min(self.runs[method], key=lambda rate: (fmean(self.losses(method, rate)), rate))

    def edge(self, method: str) -> str:
        """Says where a rate that wasn't tried may be better."""
        rates = self.runs[method]
        return " (edge)" if len(rates) > 1 and self.best_rate(method) in (min(rates), max(rates)) else ""

    def best(self, method: str) -> list[float]:
        return self.losses(method, self.best_rate(method))

    def largest_stable(self, method: str) -> str:
        """The largest learning rate up to which no seed diverged."""
        stable = "none"
        for rate in sorted(self.runs[method]):
            if math.inf in self.losses(method, rate):
                return stable
            stable = f"{rate:g}"
        return f"at least {stable}"

    def against(self, other: str, method: str) -> tuple[float, float] | None:
        """Mean difference in loss, seed by seed, each at its best learning rate, and half its 95 % interval."""
        ours, theirs = (self.runs[name][self.best_rate(name)] for name in (method, other))
        seeds = sorted(set(ours) & set(theirs))
        if len(seeds) < 2 or any(runs[seed]["diverged"] for runs in (ours, theirs) for seed in seeds):
            return None
        differences = [ours[seed]["held_out_loss"] - theirs[seed]["held_out_loss"] for seed in seeds]
        student = STUDENT[min(len(seeds) - 2, len(STUDENT) - 1)]
        return fmean(differences), student * stdev(differences) / math.sqrt(len(seeds))

    def steps_to(self, baseline: str, method: str) -> tuple[float, float] | None:
        """Mean steps until the loss at the end of the baseline's best runs, and the learning rate that is soonest."""
        if baseline not in self.runs:
            return None
        best = self.runs[baseline][self.best_rate(baseline)]
        goals = {seed: None if run["diverged"] else run["curve"][-1][1] for seed, run in best.items()}
        found = []
        for rate, runs in self.runs[method].items():
            crossings = [crossing(run["curve"], goals.get(s)) for s, run in runs.items()]
            if crossings and None not in crossings:
                found.append((fmean([step for step in crossings if step is not None]), rate))
        return min(found, default=None)

    def typical(self, method: str, name: str) -> float:
        """Mean over seeds of a measured number at the method's best learning rate."""
        return fmean([run[name] for run in self.runs[method][self.best_rate(method)].values()])


def crossing(curve: Sequence[tuple[int, float | None]], goal: float | None) -> float | None:
    """The step at which a curve first is at or under the goal, on straight lines between its points."""
    before: tuple[int, float] | None = None
    for step, loss in curve:
        if loss is None or goal is None:
            return None
        if loss <= goal:
            if before is None:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - goal) / (before[1] - loss)
        before = (step, loss)
    return None


def groups_of(rows: Iterable[Row]) -> list[Group]:
    groups: dict[tuple[str, str], Group] = {}
    for row in rows:
        names = row["settings"]["regime"], row["settings"]["size"]
        groups.setdefault(names, Group(*names)).add(row)
    return list(groups.values())


def summary_table(group: Group) -> str:
    titles = [
        "method",
        "held-out loss",
        "at lr",
        f"less than {BASELINE}",
        "largest stable lr",
        f"steps to {BASELINE}'s best",
        "loss spikes (of the text)",
        "steps clipped",
        "clip / rest of the step",
    ]
    rows = []
    for method in sorted(group.methods, key=lambda name: fmean(group.best(name))):
        difference = group.against(BASELINE, method) if BASELINE in group.runs and method != BASELINE else None
        soonest = group.steps_to(BASELINE, method)
        cells = [
            method,
            spread(group.best(method)),
            f"{group.best_rate(method):g}{group.edge(method)}",
            "" if difference is None else f"{-difference[0]:+.3f} ± {difference[1]:.3f}",
            group.largest_stable(method),
            "never" if soonest is None else f"{soonest[0]:.0f} (lr {soonest[1]:g})",
            f"{group.typical(method, 'loss_spikes'):.1f} ({group.typical(method, 'loss_spikes_of_frequencies'):.1f})",
            f"{group.typical(method, 'clip_rate'):.0%}",
            f"{group.typical(method, 'clip_share'):.1%}",
        ]
        rows.append(cells)
    return table(titles, rows)


def corrupted_table(group: Group) -> str:
    """What each method did to corrupted batches and to the others, at its best learning rate; "" if none was."""
    titles = [
        "method",
        f"corrupted, scaled down in the first {EARLY} steps",
        "later",
        "their norm then, in usual norms",
        "others, scaled down",
    ]
    rows = []
    for method in group.methods:
        runs = group.runs[method][group.best_rate(method)].values()
        bad = [(*entry, run["norm"]["median"]) for run in runs for entry in run["bad_steps"]]
        if not bad:
            continue
        left = [after / usual for _, _, after, usual in bad if after is not None and usual]
        cells = [
            method,
            caught([entry for entry in bad if entry[0] < EARLY]),
            caught([entry for entry in bad if entry[0] >= EARLY]),
            f"{median(left):.1f}" if left else "",
            f"{fmean([run['false_alarms'] for run in runs]):.1%}",
        ]
        rows.append(cells)
    return table(titles, rows) if rows else ""


def caught(bad: Sequence[tuple[Any, ...]]) -> str:
    scaled = [after < before * (1 - 1e-5) for _, before, after, _ in bad if before is not None and after is not None]
    return f"{sum(scaled)} of {len(bad)}"


def rates_table(group: Group) -> str:
    titles = ["method", *(f"lr {rate:g}" for rate in group.rates)]
    rows = [
        [method, *(", ".join(shown(loss) for loss in group.losses(method, rate)) for rate in group.rates)]
        for method in group.methods
    ]
    return table(titles, rows)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown: the first column to the left, numbers to the right."""
    lines = [titles, ["---"] + ["---:"] * (len(titles) - 1), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def shown(loss: float) -> str:
    return f"{loss:.3f}" if math.isfinite(loss) else "diverged"


def spread(losses: Sequence[float]) -> str:
    if not all(map(math.isfinite, losses)):
        return f"{sum(map(math.isinf, losses))} of {len(losses)} diverged"
    return f"{fmean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"


def write(rows: list[Row], path: Path) -> str:
    """Writes ``path``.md, .png and _lr.png; returns the summary in Markdown."""
    groups = groups_of(rows)
    summaries = [f"### {group.name}\n\n{summary_table(group)}" for group in groups]
    corrupted = {group.name: corrupted_table(group) for group in groups}
    summaries += [f"### {name}: corrupted batches\n\n{table}" for name, table in corrupted.items() if table]
    each = [f"### {group.name}: each seed\n\n{rates_table(group)}" for group in groups]
    head = (
        "Held-out loss at the end, nats per byte: mean (lowest to highest seed), each method at its best learning rate."
    )
    summary = "\n\n".join([head, *summaries])
    path.with_suffix(".md").write_text("\n\n".join([summary, *each]) + "\n")
    draw_best(groups, path.with_suffix(".png"))
    over_rates = [group for group in groups if len(group.rates) > 1]
    if over_rates:
        draw_rates(over_rates, path.with_name(f"{path.name}_lr.png"))
    return summary


def panels(groups: list[Group], width: float, height: float) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(groups))
    rows = math.ceil(len(groups) / columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[len(groups) :]:
        unused.remove()
    axes = axes[: len(groups)]
    for one, group in zip(axes, groups, strict=True):
        one.set_title(group.name, loc="left", fontsize=11)
        one.spines[["top", "right"]].set_visible(False)
        one.grid(axis="both", color="#e6e6e6", linewidth=0.7)
        one.set_axisbelow(True)
    return figure, axes


def draw_best(groups: list[Group], path: Path) -> None:
    """Each method at its best learning rate: a dot for each seed, a bar for the mean."""
    most = max(len(group.methods) for group in groups)
    figure, axes = panels(groups, 6.0, 1.2 + 0.32 * most)
    for one, group in zip(axes, groups, strict=True):
        order = sorted(group.methods, key=lambda name: -fmean(group.best(name)))
        for place, method in enumerate(order):
            losses = [loss for loss in group.best(method) if math.isfinite(loss)]
            colour = COLOURS.get(method, "#8a8a8a")
            one.plot(losses, [place] * len(losses), "o", color=colour, alpha=0.55, markersize=6)
            if losses:
                one.plot([fmean(losses)], [place], "|", color=colour, markersize=18, markeredgewidth=2.5)
        one.set_yticks(range(len(order)), [f"{name}  (lr {group.best_rate(name):g})" for name in order])
        one.set_xlabel("held-out loss, nats per byte (lower is better)")
    figure.suptitle("Each method at its best learning rate: seeds (dots) and their mean (bar)", fontsize=11)
    figure.savefig(path, dpi=150)


def draw_rates(groups: list[Group], path: Path) -> None:
    """The loss at the end over the learning rate, for the methods that have a colour."""
    figure, axes = panels(groups, 5.6, 4.6)
    for one, group in zip(axes, groups, strict=True):
        lowest = min((fmean(group.best(method)) for method in group.methods), default=0.0)
        for method in group.methods:
            if method not in COLOURS:
                continue
            rates = sorted(group.runs[method])
            means = [fmean(group.losses(method, rate)) for rate in rates]
            one.plot(
                rates,
                [value if math.isfinite(value) else math.nan for value in means],
                color=COLOURS[method],
                linewidth=1.8,
                label=method,
            )
            for rate in rates:
                losses = [loss for loss in group.losses(method, rate) if math.isfinite(loss)]
                one.plot([rate] * len(losses), losses, "o", color=COLOURS[method], alpha=0.4, markersize=4)
        one.set_xscale("log")
        if math.isfinite(lowest):
            one.set_ylim(lowest - 0.08, lowest + 1.0)
        one.set_xlabel("learning rate")
        one.set_ylabel("held-out loss, nats per byte")
    axes[0].legend(frameon=False, fontsize=9)
    figure.suptitle("Held-out loss over the learning rate; a line ends where a seed diverged", fontsize=11)
    figure.savefig(path, dpi=150)
