"""Steps on a device that the host must not wait for: here one that is made of the CPU's memory and the CUDA kernels'
sources (tests/host_kernels.py), so that the way through Python is a device's.
"""

import copy
import math
import pickle
import warnings

import host_kernels
import pytest
import torch
from helpers import set_norm, usual_norms
from host_kernels import DeviceKernels
from torch import nn

import zclip_ext
from zclip_ext import cuda, ops, watch

INNER = {
    "Adam": lambda p, fused: torch.optim.Adam(p, lr=0.1, amsgrad=True, fused=fused),
    "AdamW": lambda p, fused: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=fused),
    "Adagrad": lambda p, fused: torch.optim.Adagrad(p, lr=0.1, fused=fused),
    "SGD": lambda p, fused: torch.optim.SGD(p, lr=0.1, fused=fused),
    "SGD with momentum": lambda p, fused: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=fused),
}


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(ops, "_compiled", DeviceKernels)
    monkeypatch.setattr(cuda, "serves", lambda device: True)
    monkeypatch.setattr(cuda, "device_of", lambda grads: torch.device("cpu"))
    monkeypatch.setattr(cuda, "_stream", lambda device: 0)
    monkeypatch.setattr(cuda, "_tickets", {})
    monkeypatch.setattr(watch, "host_waits_for", lambda device: True)
    monkeypatch.setattr(watch, "LOOK_EVERY", 10)  # 100 are slow here
    host_kernels.launches()
    yield
    host_kernels.use()


class Run:
    def __init__(self, name="AdamW", *, fused=True, count=2, **options):
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(5)) for _ in range(count)]
        inner = INNER[name](self.parameters, fused)
        self.optimizer = zclip_ext.ZClipOptimizer(inner, **{"warmup_steps": 3, **options})

    def step(self, norm):
        set_norm(self.parameters, norm)
        self.optimizer.step()
        return self.optimizer.zclip.last

    def everything(self):
        """Bits of the weights and of all that the optimizer keeps."""
        state = self.optimizer.inner.state
        kept = [state[p][key] for p in self.parameters for key in sorted(state[p])]
        return [tensor.clone() for tensor in (*self.parameters, *kept) if tensor is not None]


def equal(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# Whose momentum would be garbage, so that the host must be told.
TOLD = "SGD with momentum"


@pytest.mark.parametrize("name", sorted(INNER.keys() - {TOLD}))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 300.0])
def test_a_step_is_left_out_on_the_device(device, name, bad):
    run, plain = (Run(name, on_spike="skip") for _ in range(2))
    for norm in (1.0, 1.1, 0.9, 1.0):
        run.step(norm)
        plain.step(norm)
    before = run.everything()
    result = run.step(bad)
    assert result.found_inf is not None
    assert result.found_inf.item() == 1.0
    assert not result.left_out  # the host was not told
    assert run.optimizer.last_step_skipped
    assert equal(run.everything(), before)
    assert not hasattr(run.optimizer.inner, "found_inf")
    # What follows is what had followed without it.
    run.step(1.0)
    plain.step(1.0)
    assert not run.optimizer.last_step_skipped
    assert equal(run.everything(), plain.everything())


@pytest.mark.parametrize("name", INNER)
def test_a_first_step_that_is_left_out_leaves_no_garbage(device, name):
    run, plain = Run(name), Run(name)
    told = name == TOLD
    with pytest.warns(zclip_ext.ZClipWarning) if told else warnings.catch_warnings():
        result = run.step(float("nan"))
    assert result.left_out == told
    assert run.optimizer.last_step_skipped
    for norm in (1.0, 0.5):
        run.step(norm)
        plain.step(norm)
    assert equal(run.everything(), plain.everything())


def test_no_number_comes_to_the_host(device, monkeypatch):
    run = Run(max_grad_norm=1.0)
    for norm in (*usual_norms(), 10.0):
        run.step(norm)

    def forbidden(*arguments):
        raise AssertionError("the host reads a number")

    monkeypatch.setattr(watch, "LOOK_EVERY", 1000)  # a look reads a copy that is on the host
    for method in ("item", "tolist", "__bool__", "__float__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, method, forbidden)
    for norm in (1.0, 10.0, 0.0, float("nan"), 1.0):
        run.step(norm)


@pytest.mark.parametrize(
    ("fused", "options"),
    [(False, {}), (True, {"on_nonfinite": "raise"}), (False, {"on_nonfinite": "pass", "on_spike": "skip"})],
)
def test_else_the_host_reads_one_flag(device, fused, options):
    run = Run(fused=fused, **options)
    for norm in (1.0, 1.1, 0.9, 1.0):
        assert run.step(norm).found_inf is None
    if options.get("on_nonfinite") == "raise":
        before = run.everything()
        with pytest.raises(zclip_ext.NonFiniteGradientError):
            run.step(float("nan"))
    else:
        before = run.everything()
        with pytest.warns(zclip_ext.ZClipWarning, match="left out a step"):
            result = run.step(300.0 if options else float("nan"))
        assert result.left_out
    assert equal(run.everything(), before)


def test_where_nothing_is_left_out_nothing_is_read(device):
    for options in ({"on_nonfinite": "pass"}, {"dry_run": True}):
        run = Run(**options)
        assert run.step(1.0).found_inf is None
        before = run.everything()
        run.step(2.0)
        assert not run.optimizer.last_step_skipped
        assert not equal(run.everything(), before)


def test_the_user_hears_of_it_late(device):
    run = Run()
    for step in range(1, 41):
        # Left out are step 5 and steps 11 to 19; looks are at 10, 20, ... and show what was at the look before.
        said = {20: "left out a step: .* so far: 1", 30: "left out 9 steps: .* so far: 10"}.get(step)
        with pytest.warns(zclip_ext.ZClipWarning, match=said) if said else warnings.catch_warnings():
            run.step(float("nan") if step == 5 or 11 <= step <= 19 else 1.0)


def test_late_warnings_are_as_rare_as_others(device):
    run = Run()
    said = []
    for step in range(1, 121):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.step(1.0 if step % 2 else float("nan"))
        said += [str(warning.message) for warning in caught]
    # 5 at the look at 20, 10 at 30, 50 at 110.
    assert [text.split("so far: ")[1] for text in said] == ["5)", "10)"]


def test_a_run_that_recovered_goes_on(device):
    run = Run(max_consecutive_skips=5)
    with pytest.warns(zclip_ext.ZClipWarning, match="left out 8 steps"):
        for step in range(1, 31):
            run.step(float("nan") if 3 <= step <= 10 else 1.0)


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_a_dry_run_leaves_nothing_out_and_says_nothing(where, request):
    if where == "device":
        request.getfixturevalue("device")
    run = Run(dry_run=True, max_consecutive_skips=3)
    for _ in range(30):
        run.step(float("nan"))
    assert run.optimizer.zclip.metrics()["nonfinite"] == 30


def test_an_error_is_not_told_twice():
    run = Run(on_nonfinite="raise")
    with pytest.raises(zclip_ext.NonFiniteGradientError):
        run.step(float("nan"))
    assert run.optimizer.zclip.metrics()["skipped"] == 1


def test_an_optimizer_that_is_no_longer_fused(device):
    run = Run()
    run.step(1.0)
    run.optimizer.load_state_dict(Run(fused=False).optimizer.state_dict())
    assert run.step(1.0).found_inf is None


def test_gradients_on_two_kinds_of_device_are_told_to_the_host(device, monkeypatch):
    monkeypatch.setattr(ops, "kinds_of_device", lambda grads: {"cpu", "cuda"})
    assert Run().step(1.0).found_inf is None


def test_gradients_that_are_never_finite_stop_the_run_late(device):
    run = Run(max_consecutive_skips=5)
    run.step(1.0)
    before = run.everything()
    for _ in range(2, 20):
        run.step(float("nan"))
    with (
        pytest.warns(zclip_ext.ZClipWarning, match="left out 9 steps"),
        pytest.raises(zclip_ext.NonFiniteGradientError, match="at step 20, steps left out in a row: 19"),
    ):
        run.step(float("nan"))
    assert equal(run.everything(), before)


def test_a_cap_that_decides_most_steps_is_told_late(device):
    run = Run(max_grad_norm=0.5)
    with pytest.warns(zclip_ext.ZClipWarning, match="max_grad_norm=0.5 scaled down 100% of the last steps"):
        for _ in range(120):
            run.step(1.0)


def test_copies_of_a_run_look_for_themselves(device):
    run = Run()
    for step in range(15):
        run.step(float("nan") if step == 3 else 1.0)
    with pytest.warns(zclip_ext.ZClipWarning, match="left out a step"):
        run.optimizer.zclip.metrics()
    for copied in (copy.deepcopy(run), pickle.loads(pickle.dumps(run.optimizer))):
        optimizer = copied.optimizer if isinstance(copied, Run) else copied
        assert optimizer.zclip.metrics() == run.optimizer.zclip.metrics()
        assert optimizer.zclip._watch._late._copy is None
    loaded = Run()
    loaded.optimizer.load_state_dict(run.optimizer.state_dict())
    with warnings.catch_warnings():
        for _ in range(30):  # what the other run left out is known from its checkpoint
            loaded.step(1.0)


def test_what_a_graph_can_and_cannot_hold(device, monkeypatch):
    fused, plain, passing = Run(), Run(fused=False), Run(fused=False, on_nonfinite="pass")
    for run in (fused, plain, passing):
        run.step(1.0)
    monkeypatch.setattr(cuda, "is_capturing", lambda: True)
    for _ in range(2 * watch.LOOK_EVERY):
        fused.step(1.0)
        passing.step(1.0)
    with pytest.raises(RuntimeError, match="which a CUDA graph can't. Put an optimizer with fused=True"):
        plain.step(1.0)
    assert plain.optimizer.zclip.metrics()["steps"] == 1
    for parameter in passing.parameters:  # a warning would have to know whether other ranks have some
        parameter.grad = None
    passing.optimizer.step()
    monkeypatch.setattr(ops, "_compiled", None)
    with pytest.raises(RuntimeError, match="it takes the compiled kernels"):
        fused.step(1.0)


def test_what_replays_left_out_is_told_with_the_metrics(device):
    run = Run()
    run.step(1.0)
    zclip = run.optimizer.zclip
    for _ in range(3):  # the host doesn't see them
        ops.decide_(torch.tensor([math.nan, 1.0], dtype=torch.float64), zclip._state, zclip._numbers)
    with pytest.warns(zclip_ext.ZClipWarning, match="left out 3 steps"):
        assert zclip.metrics()["skipped"] == 3
    zclip.metrics()  # once


def test_a_loaded_state_takes_the_memory_that_a_graph_knows(device):
    run = Run()
    run.step(1.0)
    zclip = run.optimizer.zclip
    address, state = zclip._state.data_ptr(), zclip.state_dict()
    run.step(1.0)
    zclip.load_state_dict(state)
    assert zclip.metrics()["steps"] == 1
    zclip.reset()
    assert zclip.metrics()["steps"] == 0
    assert zclip._state.data_ptr() == address


def test_a_share_without_gradients_waits_for_nothing():
    # Whose value nobody could read.
    ops.scale_(ops.of([]), torch.empty((), dtype=torch.float64, device="meta"))


def test_a_graph_has_tickets_of_its_own(device, monkeypatch):
    run = Run()
    run.step(1.0)
    (ticket,) = cuda._tickets.values()
    monkeypatch.setattr(cuda, "is_capturing", lambda: True)
    seen = []
    launch = DeviceKernels.local_sumsq_cuda
    monkeypatch.setattr(
        DeviceKernels,
        "local_sumsq_cuda",
        staticmethod(lambda grads, space, ticket, *rest: (seen.append(ticket), launch(grads, space, ticket, *rest))),
    )
    run.step(1.0)
    assert seen[0] is not ticket
    assert list(cuda._tickets.values()) == [ticket]


def test_a_launch_that_failed_leaves_no_ticket(device):
    run = Run()
    run.step(1.0)
    host_kernels.use(fails=True)
    with pytest.raises(RuntimeError, match="a launch failed"):
        run.step(1.0)
    assert not cuda._tickets  # it may have counted some
    host_kernels.use()
    assert run.step(2.0).grad_norm.item() == pytest.approx(2.0)
    assert [ticket.item() for ticket in cuda._tickets.values()] == [0]


def test_steps_are_those_of_the_cpu(device, monkeypatch):
    norms = [1.0, 1.1, 0.9, 1.0, 30.0, 1.0, 0.0, float("nan"), 2.0, 1.0]
    run = Run(on_spike="clip", max_grad_norm=1.05)
    records = [run.step(norm).record for norm in norms]
    assert host_kernels.launches() == 3 * len(norms)
    monkeypatch.undo()
    plain = Run(on_spike="clip", max_grad_norm=1.05)
    with pytest.warns(zclip_ext.ZClipWarning):
        wanted = [plain.step(norm).record for norm in norms]
    for ours, theirs in zip(records, wanted, strict=True):
        assert torch.equal(ours.view(torch.int64), theirs.view(torch.int64))
    assert equal(run.everything(), plain.everything())
