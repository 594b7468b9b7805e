"""The benchmark that trains: its rules, what it measures, that it goes on where it was, and its report."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import clip_rules  # noqa: E402
import convergence  # noqa: E402
import convergence_report  # noqa: E402

BOOK = json.loads((ROOT / "benchmarks" / "convergence.json").read_text())
TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TRAINING = {
    "batch": 4,
    "length": 16,
    "steps": 8,
    "warmup": 2,
    "beta2": 0.99,
    "weight_decay": 0.1,
    "bad_share": 0.5,
    "one_place": False,
    "shapes": {"4": [2, 16], "6": [4, 32]},
}


def settings(rules, **training):
    return {"seed": 0, "lr": 0.01, "model": TINY, "rules": rules, "training": {**TRAINING, **training}}


def norms_after(rules, norms):
    """What becomes of gradients of these norms, one step each, on one parameter."""
    clip, model = clip_rules.build(rules), nn.Linear(1, 1, bias=False)
    after = []
    for norm in norms:
        model.weight.grad = torch.full((1, 1), float(norm))
        clip(model)
        after.append(model.weight.grad.item())
    return after


def test_a_fixed_limit_has_its_time():
    rule = {"rule": "fixed", "max_norm": 1.0, "from_step": 1, "until_step": 3}
    assert norms_after([rule], [2, 2, 2, 2]) == pytest.approx([2, 1, 1, 2], rel=1e-5)  # torch adds 1e-6 to the norm


def test_autoclip_is_a_percentile_of_all_norms_so_far():
    norms = [4.0, 1.0, 2.0, 8.0, 3.0]
    limits = [float(torch.quantile(torch.tensor(norms[: n + 1]), 0.5)) for n in range(len(norms))]
    after = norms_after([{"rule": "autoclip", "percentile": 50}], norms)
    assert after == pytest.approx([min(pair) for pair in zip(norms, limits, strict=True)], rel=1e-5)
    assert limits[-1] == 3.0


def test_adagc_limits_each_parameter_by_its_own_past():
    clip = clip_rules.build([{"rule": "adagc", "relative": 1.5, "beta": 0.5, "start": 1, "absolute": 100.0}])
    model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(2)])
    for norms, expected in (((2.0, 1.0), (2.0, 1.0)), ((9.0, 1.0), (3.0, 1.0)), ((9.0, 9.0), (3.75, 1.5))):
        for parameter, norm in zip(model, norms, strict=True):
            parameter.grad = torch.full((1,), norm)
        clip(model)
        assert [parameter.grad.item() for parameter in model] == pytest.approx(expected)


def test_ours_leaves_out_what_is_not_finite():
    model = nn.Linear(1, 1)
    model.weight.grad = torch.full((1, 1), math.nan)
    with pytest.warns(UserWarning, match="left out a step"):
        assert not clip_rules.build([{"rule": "zclip"}])(model)


def test_peers_limit_a_spike():
    for name in ("zclip 1.0.0", "ZClip", "ZClip, cap 1", "AutoClip", "fixed 1"):
        after = norms_after(BOOK["methods"][name], [0.5, 0.6] * 20 + [40.0])
        assert after[:3] == pytest.approx([0.5, 0.6, 0.5], rel=0.2), name
        assert after[-1] <= 1.0 + 1e-5, name


@pytest.mark.parametrize("plan", BOOK["plans"])
def test_plans_name_what_there_is(plan):
    runs = list(convergence.settings_of(plan, BOOK))
    assert len({convergence.key(run) for run in runs}) == len(runs) > 0
    for run in runs:
        clip_rules.build(run["rules"])


def test_a_plan_with_an_unknown_name_is_told():
    grid = {**BOOK["plans"]["quick"][0], "method": ["none", "nothing"]}
    with pytest.raises(SystemExit, match="plan 'p': unknown method 'nothing', known are none, "):
        list(convergence.settings_of("p", {**BOOK, "plans": {"p": [grid]}}))


def test_batches_change_their_shape_and_some_are_corrupted():
    data, again = (convergence.Data({**TRAINING, "bad_share": 0.25}, seed) for seed in (3, 3))
    batches = [data.batch(step) for step in range(400)]
    assert [tuple(batches[step][0].shape) for step in (0, 3, 4, 5, 6)] == [(4, 16)] * 2 + [(2, 16)] * 2 + [(4, 32)]
    assert sum(bad for _, bad in batches) == pytest.approx(100, abs=30)  # 3.5 standard deviations
    assert all(torch.equal(tokens, again.batch(step)[0]) for step, (tokens, _) in enumerate(batches))
    # Text has few bytes above 127; any bytes have half of theirs there, byte code some.
    high = [float((tokens > 127).float().mean()) for tokens, _ in batches]
    assert max(share for share, (_, bad) in zip(high, batches, strict=True) if not bad) < 0.3
    assert sum(share > 0.3 for share in high) == pytest.approx(50, abs=25)
    assert len(data.held_out(64)) == 16


def test_a_batch_from_one_place_is_one_piece_of_text():
    data = convergence.Data({**TRAINING, "one_place": True, "bad_share": 0.0}, 0)
    tokens, _ = data.batch(0)
    piece = bytes(tokens.flatten().tolist())
    assert piece in bytes(data.text.text.tolist())


@pytest.mark.parametrize("name", ["none", "AdaGC", "ZClip", "zclip 1.0.0"])
def test_a_run_measures_and_repeats(name):
    data = convergence.Data(TRAINING, 0)
    first, second = (convergence.train(settings(BOOK["methods"][name]), "cpu") for _ in range(2))
    assert first["held_out_loss"] == second["held_out_loss"]
    assert first["curve"][-1][0] == first["steps"] == 8
    assert (first["clip_rate"] > 0) == (name in ("AdaGC", "zclip 1.0.0"))
    assert 0 < len(first["bad_steps"]) < 8
    for step, before, after in first["bad_steps"]:
        assert data.batch(step)[1]
        assert 0 < after <= before
    assert json.loads(json.dumps(first, allow_nan=False))["diverged"] is True  # it has not learnt how often bytes are


def test_a_run_that_breaks_is_one_that_diverged():
    broken = convergence.train({**settings([]), "lr": 1e30}, "cpu")
    assert broken["diverged"]
    assert broken["held_out_loss"] is None
    assert broken["steps"] < 8


def test_learning_rate_warms_up_and_falls():
    training = {"warmup": 4, "steps": 100}
    rates = [convergence.rate_at(step, training) for step in range(101)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[52] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)


def test_what_counts_as_diverged():
    level = convergence.loss_of_frequencies()
    assert 2.5 < level < 3.5  # nats per byte of Python sources
    curve = [(4, 2.0), (8, 1.5)]
    for end, steps, expected in ((1.6, 8, False), (2.1, 8, True), (math.nan, 8, True), (1.6, 7, True)):
        assert convergence.has_diverged(end, curve, steps=steps, wanted=8) is expected
    assert convergence.has_diverged(level, [(8, level)], steps=8, wanted=8)


def test_what_counts_as_a_loss_spike():
    watch = convergence.LossWatch()
    for loss, bad in [(2.0, False)] * 3 + [(9.0, True), (2.4, False), (2.7, False), (2.8, False), (2.0, False)]:
        watch.see(loss, bad)
    assert watch.spikes == 1  # two steps in a row, one spike
    watch.see(math.nan, False)
    assert watch.spikes == 2
    assert watch.mean == pytest.approx(2.1, abs=0.1)


def test_a_study_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    grid = {"size": ["tiny"], "regime": ["short"], "lr": [0.01], "seed": [0], "method": ["none", "fixed 1"]}
    book = {
        "sizes": {"tiny": TINY},
        "regimes": {"short": TRAINING},
        "methods": BOOK["methods"],
        "plans": {"full": [grid], "quick": [grid]},
    }
    out = tmp_path / "out"
    monkeypatch.setattr(convergence, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["convergence.py", "--out", str(out), "--jobs", "1"])

    def go():
        (tmp_path / "convergence.json").write_text(json.dumps(book))
        convergence.main()
        return (out / "convergence.jsonl").read_text().splitlines(), capsys.readouterr().out

    first, said = go()
    assert len(first) == 2
    assert "2 runs, 0 of them are in" in said
    with (out / "convergence.jsonl").open("a") as file:
        file.write('{"settings": {"half')  # as a killed run leaves it
    grid["seed"] = [0, 1]
    (later, _), (unchanged, said) = go(), go()
    assert len(later) == 4
    assert later[:2] == first
    assert unchanged == later
    assert "runs," not in said
    for row in map(json.loads, later):
        assert row["settings"]["model"] == TINY
        assert {"torch", "text"} <= set(row["about"])
    assert "| none | 2 of 2 diverged |" in (out / "convergence.md").read_text()
    assert (out / "convergence.png").read_bytes().startswith(b"\x89PNG")


def row(method, rate, seed, loss, curve=((100, 3.0), (200, 2.0)), **result):
    names = {"regime": "clean", "size": "0.1M", "lr": rate, "seed": seed, "method": method}
    measured = {
        "diverged": loss is None,
        "loss_spikes": 1,
        "loss_spikes_of_frequencies": 3,
        "clip_rate": 0.25,
        "clip_share": 0.01,
        "bad_steps": [],
    }
    measured |= {"norm": {"median": 0.5}, "false_alarms": 0.125, **result}
    return {"settings": names, "result": {"held_out_loss": loss, "curve": curve, **measured}}


def test_report(tmp_path):
    rows = [row("fixed 1", 0.01, seed, 2.0 + 0.1 * seed) for seed in range(2)]
    rows += [row("fixed 1", 0.1, 0, 1.5), row("fixed 1", 0.1, 1, None)]
    rows += [row("ZClip", 0.1, seed, 1.9 + 0.12 * seed, ((100, 2.5), (200, 1.5))) for seed in range(2)]
    summary = convergence_report.write(rows, tmp_path / "r")
    fixed = "2.050 (2.000 to 2.100) | 0.01 (edge) |  | 0.01 | 200 (lr 0.01) | 1.0 (3.0) | 25% | 1.0%"
    assert f"| fixed 1 | {fixed} |" in summary
    ours = "1.960 (1.900 to 2.020) | 0.1 | +0.090 ± 0.127 | at least 0.1 | 150 (lr 0.1) | 1.0 (3.0) | 25% | 1.0%"
    assert f"| ZClip | {ours} |" in summary
    assert "| fixed 1 | 2.000, 2.100 | 1.500, diverged |" in (tmp_path / "r.md").read_text()
    assert "corrupted" not in summary
    assert (tmp_path / "r_lr.png").exists()


def test_report_of_corrupted_batches(tmp_path):
    bad_steps = [(3, 2.0, 2.0), (99, 2.0, 1.5), (100, 8.0, 1.0), (101, None, None)]
    rows = [row("ZClip", 0.1, seed, 2.0, bad_steps=bad_steps) for seed in range(2)]
    summary = convergence_report.write(rows, tmp_path / "r")
    assert "| ZClip | 2 of 4 | 2 of 4 | 3.0 | 12.5% |" in summary


@pytest.mark.parametrize(
    ("curve", "goal", "expected"),
    [
        ([(10, 3.0), (20, 2.0)], 2.5, 15),
        ([(10, 3.0), (20, 2.0)], 3.5, 10),
        ([(10, 3.0), (20, 2.0)], 1.0, None),
        ([(10, 3.0), (20, None), (30, 1.0)], 2.0, None),
        ([(10, 3.0)], None, None),
    ],
)
def test_steps_to_a_loss(curve, goal, expected):
    assert convergence_report.crossing(curve, goal) == expected
