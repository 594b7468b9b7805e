"""ZClipOptimizer as a torch.optim.Optimizer: cases C of the field (tests/cases.md) and what else a run needs of one."""

import pytest
import torch
from helpers import parameter, set_norm, usual_norms
from networks import adamw, assert_same, loss_of, model, train, weights
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import zclip_ext
from zclip_ext import ZClipOptimizer


def test_without_spikes_it_is_the_inner_optimizer():
    plain, clipped = model(), model()
    inner = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    train(plain, inner, range(20))
    train(clipped, adamw(clipped), range(20))
    assert_same(weights(plain), weights(clipped))


def test_a_spike_is_clipped_before_the_step():
    net = model()
    optimizer = ZClipOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), warmup_steps=10)
    train(net, optimizer, range(20))
    before = weights(net)
    train(net, optimizer, [20], spikes={20})
    metrics = optimizer.zclip.metrics()
    assert metrics["spikes"] >= 1
    assert metrics["clipped_norm"] < metrics["grad_norm"] / 5
    moved = torch.cat([(a - b).flatten() for a, b in zip(weights(net), before, strict=True)]).norm().item()
    assert moved == pytest.approx(0.1 * metrics["clipped_norm"], rel=1e-4)


@pytest.mark.parametrize("inner", [nn.Linear(1, 1), None, [1]])
def test_the_inner_one_is_an_optimizer(inner):
    with pytest.raises(TypeError, match="inner: got .*expected a torch.optim.Optimizer"):
        ZClipOptimizer(inner)


def test_p36_lbfgs_is_refused():
    with pytest.raises(TypeError, match="LBFGS evaluates its closure several times"):
        ZClipOptimizer(torch.optim.LBFGS([parameter([1.0])]))


def test_further_arguments_reach_the_inner_step():
    class Scaled(torch.optim.SGD):
        def step(self, closure=None, factor=1.0, *, shift=0.0):
            self.seen = (closure, factor, shift)

    inner = Scaled([parameter([1.0])], lr=0.1)
    optimizer = ZClipOptimizer(inner)
    assert optimizer.step(lambda: 3.0, 2.0, shift=5.0) == 3.0
    assert inner.seen == (None, 2.0, 5.0)
    assert optimizer.step(closure=lambda: 4.0) == 4.0
    assert inner.seen == (None, 1.0, 0.0)


def test_a_wrapper_is_not_wrapped():
    net = model()
    with pytest.raises(TypeError, match="clips already"):
        ZClipOptimizer(adamw(net))


def test_p36_a_closure_is_evaluated_once_with_grad():
    net, calls = model(), []
    optimizer = adamw(net)

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = loss_of(net, 0)
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() > 0
    assert calls == [True]
    assert optimizer.zclip.metrics()["samples"] == 1


def test_p28_schedulers_reach_the_inner_groups():
    net = model()
    optimizer = adamw(net)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    train(net, optimizer, range(1))
    scheduler.step()
    assert optimizer.inner.param_groups[0]["lr"] == 5e-3
    state = optimizer.state_dict()
    other = model()
    resumed = adamw(other)
    resumed_scheduler = torch.optim.lr_scheduler.LambdaLR(resumed, lambda epoch: 0.5**epoch)
    resumed.load_state_dict(state)
    resumed_scheduler.load_state_dict(scheduler.state_dict())
    train(other, resumed, range(1))
    resumed_scheduler.step()
    assert resumed.inner.param_groups[0]["lr"] == 2.5e-3
    resumed.param_groups = [dict(group, lr=1.0) for group in resumed.param_groups]
    assert resumed.inner.param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2),
                torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            ],
            [2],
        ),
    ],
)
def test_schedulers_do_as_with_the_inner_optimizer(make):
    def rates(wrap):
        net = model()
        optimizer = adamw(net) if wrap else torch.optim.AdamW(net.parameters(), lr=1e-2)
        scheduler, seen = make(optimizer), []
        for index in range(6):
            train(net, optimizer, [index])
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(1.0)
            else:
                scheduler.step()
            seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
        return seen

    assert rates(True) == rates(False)


def test_live_properties():
    net = model()
    optimizer = adamw(net)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.inner.param_groups
    assert optimizer.state is optimizer.inner.state
    assert optimizer.defaults is optimizer.inner.defaults
    optimizer.state = optimizer.defaults = {"a": 1}
    assert optimizer.inner.state == optimizer.inner.defaults == {"a": 1}


def test_p29_no_endless_delegation():
    empty = ZClipOptimizer.__new__(ZClipOptimizer)
    for name in ("inner", "anything", "__deepcopy__"):
        with pytest.raises(AttributeError, match=name):
            getattr(empty, name)


def test_what_an_inner_optimizer_has_beyond_torch_is_reached():
    class Scheduled(torch.optim.SGD):
        def train_mode(self):
            return "on"

    optimizer = ZClipOptimizer(Scheduled([parameter([1.0])], lr=0.1))
    assert optimizer.train_mode() == "on"
    with pytest.raises(AttributeError, match="no attribute 'eval_mode'"):
        optimizer.eval_mode()


def test_p32_groups_that_are_added_are_clipped():
    first, second = parameter([3.0]), parameter([4.0])
    optimizer = ZClipOptimizer(torch.optim.SGD([first], lr=0.1), max_grad_norm=1.0)
    optimizer.add_param_group({"params": [second], "lr": 0.2})
    optimizer.step()
    assert float(optimizer.zclip.last) == 5.0
    assert (first.grad.item(), second.grad.item()) == (pytest.approx(0.6), pytest.approx(0.8))
    optimizer.zero_grad(set_to_none=False)
    assert first.grad.item() == 0.0
    optimizer.zero_grad()
    assert first.grad is None


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_p33_grad_scaler(fused, unscale_first):
    net = model()
    optimizer = ZClipOptimizer(torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    loss = loss_of(net, 0)
    loss.backward()
    true_norm = torch.cat([p.grad.flatten() for p in net.parameters()]).norm().item()

    def step(scale=1.0):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, 0, scale)).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    step()
    assert float(optimizer.zclip.last) == pytest.approx(true_norm, rel=1e-5)
    before, scale = weights(net), scaler.get_scale()
    step(scale=float("inf"))
    assert_same(before, weights(net))
    assert optimizer.zclip.metrics()["steps"] == 1  # the scaler left the step out itself
    assert scaler.get_scale() == scale / 2


def test_p33_the_scaler_hands_no_scaled_gradients():
    fused = torch.optim.AdamW(model().parameters(), fused=True)
    assert fused._step_supports_amp_scaling
    optimizer = ZClipOptimizer(fused)
    assert optimizer._step_supports_amp_scaling is False
    assert optimizer._step_supports_amp_closure is False


def test_p35_an_optimizer_inside_backward_is_refused():
    net = model()
    inner = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}

    def step_now(p):
        inner[p].step()
        p.grad = None

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step_now)
    optimizer = adamw(net)
    loss_of(net, 0).backward()
    with pytest.warns(zclip_ext.ZClipWarning, match="no gradient"):  # so far it may be a step without any
        optimizer.step()
    loss_of(net, 1).backward()
    with pytest.raises(RuntimeError, match="steps inside backward"):
        optimizer.step()


def test_hooks_that_only_look_are_no_trouble():
    net, seen = model(), []
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
    optimizer = adamw(net)
    with pytest.warns(zclip_ext.ZClipWarning, match="no gradient"):
        optimizer.step()  # as some do before their scheduler's first step
    optimizer.step()
    train(net, optimizer, range(2))
    assert len(seen) == 8


def test_p37_two_optimizers_have_two_trackers():
    generator, discriminator = parameter([1.0]), parameter([50.0])
    first = ZClipOptimizer(torch.optim.SGD([generator], lr=0.0), max_grad_norm=0.5)
    second = ZClipOptimizer(torch.optim.SGD([discriminator], lr=0.0))
    for _ in range(25):
        set_norm([generator], 1.0)
        set_norm([discriminator], 50.0)
        first.step()
        assert discriminator.grad.item() == 50.0
        assert generator.grad.item() == pytest.approx(0.5)
        second.step()
    assert (first.zclip.metrics()["mean"], second.zclip.metrics()["mean"]) == (1.0, 50.0)


def test_p38_a_call_for_each_micro_batch_is_warned_of():
    p = parameter([2.0, 0.0])
    zclip = zclip_ext.ZClip()
    zclip.step([p])
    p.grad += torch.tensor([0.0, 2.0])  # the second backward of an accumulation
    with pytest.warns(zclip_ext.ZClipWarning, match="called twice before the optimizer stepped"):
        zclip.step([p])


def test_p38_accumulated_gradients_are_one_sample():
    p = nn.Parameter(torch.zeros(2))
    optimizer = ZClipOptimizer(torch.optim.SGD([p], lr=1.0), max_grad_norm=1.0)
    for gradient in ([2.0, 0.0], [0.0, 2.0]):
        (p * torch.tensor(gradient)).sum().backward()
    optimizer.step()
    assert float(optimizer.zclip.last) == pytest.approx(8**0.5)
    assert optimizer.zclip.metrics()["samples"] == 1
    assert p.tolist() == pytest.approx([-(0.5**0.5)] * 2)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_p38_a_proper_loop_is_not_warned_of(set_to_none):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    zclip = zclip_ext.ZClip()
    for index in range(5):
        optimizer.zero_grad(set_to_none=set_to_none)
        for part in range(2):
            loss_of(net, 2 * index + part).backward()
        zclip.step(net)
        optimizer.step()
    assert zclip.metrics()["samples"] == 5


def test_p39_a_generator_is_read_once():
    first, second = model(), model()
    for net in (first, second):
        loss_of(net, 0).backward()
    parameters = first.parameters()
    zclip_ext.ZClip(max_grad_norm=1e-3).step(parameters)
    zclip_ext.ZClip(max_grad_norm=1e-3).step(list(second.parameters()))
    assert_same([p.grad for p in first.parameters()], [p.grad for p in second.parameters()])
    with pytest.warns(UserWarning, match="no parameters"):
        zclip_ext.ZClip().step(parameters)


def test_p40_gradients_are_not_parameters(backend):
    with pytest.raises(ValueError, match=r"parameters\[0\]: got a tensor without requires_grad"):
        zclip_ext.ZClip().step([torch.ones(3)])
    with pytest.raises(TypeError, match=r"parameters\[1\]: got float, expected a torch.nn.Parameter"):
        zclip_ext.ZClip().step([parameter([1.0]), 2.0])
    with pytest.raises(TypeError, match=r"parameters\[0\]: got dict"):
        zclip_ext.ZClip().step([{"params": []}])
    with pytest.raises(TypeError, match="model: got int"):
        zclip_ext.ZClip().step(3)


def test_hooks():
    net, order = model(), []
    optimizer = adamw(net)
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: order.append(("before", opt is optimizer)))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: order.append(("after", opt is optimizer)))
    optimizer.inner.register_step_pre_hook(lambda *_: order.append("inner"))
    everywhere = register_optimizer_step_pre_hook(lambda *_: order.append("global"))
    try:
        train(net, optimizer, [0])
    finally:
        everywhere.remove()
    assert order == [("before", True), "global", "inner", ("after", True)]
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: ((opt, lambda: 7.0), kwargs))
    assert optimizer.step() == 7.0  # a hook may replace the arguments, as torch's may
    optimizer.register_state_dict_post_hook(lambda opt, state: state.update(extra=1))
    assert optimizer.state_dict()["extra"] == 1


@pytest.mark.parametrize("what", ["step", "loop"])
def test_torch_compile_around_the_step(what):
    plain, compiled = model(), model()
    first, second = adamw(plain, warmup_steps=3), adamw(compiled, warmup_steps=3)
    train(plain, first, range(8), spikes={5})
    if what == "step":
        step = torch.compile(second.step, backend="eager")
        for index in range(8):
            second.zero_grad(set_to_none=False)
            loss_of(compiled, index, 30.0 if index == 5 else 1.0).backward()
            step()
    else:

        @torch.compile(backend="eager")
        def one(index, scale):
            second.zero_grad()
            loss = loss_of(compiled, index, scale)
            loss.backward()
            second.step()

        for index in range(8):
            one(index, 30.0 if index == 5 else 1.0)
    assert second.zclip.metrics()["spikes"] == first.zclip.metrics()["spikes"] >= 1
    for a, b in zip(weights(plain), weights(compiled), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert second.zclip.metrics()["samples"] == 8


def test_usual_norms_warm_up_as_described():
    p = nn.Parameter(torch.zeros(1))
    optimizer = ZClipOptimizer(torch.optim.SGD([p], lr=0.0))
    for norm in usual_norms():
        set_norm([p], norm)
        optimizer.step()
    assert optimizer.zclip.metrics()["mean"] == pytest.approx(0.998, rel=1e-6)
    assert repr(optimizer) == "ZClipOptimizer(SGD, ZClip())"
