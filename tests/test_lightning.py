"""The Lightning adapter in the real Trainer. Run as a script it is one rank of `test_many_ranks`."""

import importlib
import json
import logging
import math
import os
import sys
import types
import warnings

import launchers
import lightning.pytorch as pl
import pytest
import torch
import zclip as upstream
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from zclip_ext import NonFiniteGradientError, ZClip, ZClipConfig, ZClipOptimizer, ZClipWarning
from zclip_ext.integrations import lightning as adapter
from zclip_ext.integrations.lightning import ZClipCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
OPTIONS = {"warmup_steps": 10}
SPIKE = 14
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "devices": 1,
}

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def made_batches(count=20, sizes=None, *, seed=7):
    """Inputs, and what the loss of each batch is multiplied by, as its gradient then is."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {SPIKE: 10.0} if sizes is None else sizes
    return [(torch.randn(8, 6, generator=generator), torch.tensor(sizes.get(index, 1.0))) for index in range(count)]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def loss_of(model, batch):
    inputs, size = batch
    return (model(inputs) - inputs[:, :3]).square().mean() * size


class Module(pl.LightningModule):
    def __init__(self, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)):
        super().__init__()
        self.net, self.make = net(), optimizer

    def training_step(self, batch, index):
        return loss_of(self.net, batch)

    def configure_optimizers(self):
        return self.make(self.parameters())


class Manual(Module):
    """What `Module` does, by hand."""

    def __init__(self, every=1):
        super().__init__()
        self.automatic_optimization, self.every = False, every

    def training_step(self, batch, index):
        self.manual_backward(loss_of(self.net, batch) / self.every)
        if (index + 1) % self.every == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Watch(pl.Callback):
    """What each step of the optimizer was judged to be."""

    def __init__(self, zclip_of):
        self.zclip_of, self.seen = zclip_of, []

    def on_train_batch_end(self, *_):
        zclip = self.zclip_of()
        if zclip.last is not None and (not self.seen or zclip.state_dict()["steps"] > self.seen[-1]["steps"]):
            self.seen.append({**zclip.metrics(), "steps": zclip.state_dict()["steps"]})


def fit(module, batches=None, callbacks=(), ckpt_path=None, **arguments):
    trainer = pl.Trainer(callbacks=list(callbacks), **{**QUIET, "max_epochs": 1, **arguments})
    trainer.fit(module, DataLoader(batches or made_batches(), batch_size=None), ckpt_path=ckpt_path)
    return trainer


def watched(module, batches=None, *, options=OPTIONS, **arguments):
    """A run with the callback: what it saw."""
    callback = ZClipCallback(**options)
    watch = Watch(lambda: callback.zclips[0])
    fit(module, batches, [callback, watch], **arguments)
    return watch.seen


def plain(batches=None, *, every=1, dtype=None, scaler=None, options=OPTIONS):
    """The same training without Lightning: what ZClip saw, and the model."""
    model = net()
    optimizer = ZClipOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), **options)
    seen = []
    for index, batch in enumerate(batches or made_batches()):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None, cache_enabled=False):
            loss = loss_of(model, batch) / every
        (loss if scaler is None else scaler.scale(loss)).backward()
        if (index + 1) % every == 0:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            if not seen or optimizer.zclip.metrics()["steps"] > seen[-1]["steps"]:
                seen.append(optimizer.zclip.metrics())
    return seen, model


def assert_same(seen, wanted):
    assert len(seen) == len(wanted)
    for step, (one, other) in enumerate(zip(seen, wanted, strict=True)):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-5), step


def weights(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", [Module, Manual])
def test_a_run_is_that_of_plain_pytorch(kind):
    module = kind()
    seen = watched(module)
    wanted, model = plain()
    assert_same(seen, wanted)
    spike = seen[SPIKE]
    assert spike["grad_norm"] > 5 * spike["threshold"]
    assert spike["clipped_norm"] == pytest.approx(spike["threshold"])
    for p, q in zip(module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["automatic", "manual"])
def test_accumulated_gradients_are_one_sample(kind):
    batches = made_batches(40, {28: 10.0, 29: 10.0})
    if kind == "automatic":
        seen = watched(Module(), batches, accumulate_grad_batches=2)
    else:
        seen = watched(Manual(every=2), batches)
    assert_same(seen, plain(batches, every=2)[0])
    assert [step["samples"] for step in seen] == list(range(1, 21))
    assert seen[-1]["spikes"] > 0


def test_bf16_mixed():
    assert_same(watched(Module(), precision="bf16-mixed"), plain(dtype=torch.bfloat16)[0])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("manual", [False, True])
def test_fp16_mixed_sees_gradients_in_their_own_units(fused, manual):
    """An overflow is left out by the scaler and is no sample, as with a ZClipOptimizer."""
    batches = made_batches(20, {3: 1e6, SPIKE: 10.0})
    module = Manual() if manual else Module()
    module.make = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    seen = watched(module, batches, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    other = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    assert_same(seen, plain(batches, dtype=torch.float16, scaler=other)[0])
    assert scaler.get_scale() == other.get_scale() == 2.0**9
    assert seen[-1]["samples"] == 19
    assert seen[-1]["nonfinite"] == 0
    assert seen[-1]["spikes"] > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", [Module, Manual])
def test_a_bad_batch_changes_nothing(kind, bad):
    module = kind()
    states = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            moments = trainer.optimizers[0].state.values()
            states.append([*weights(module).values(), *(v.clone() for m in moments for v in m.values())])

    callback = ZClipCallback(**OPTIONS)
    with pytest.warns(ZClipWarning, match="left out a step"):
        fit(module, made_batches(20, {12: bad}), [callback, Look()])
    assert all(torch.equal(a, b) for a, b in zip(states[11], states[12], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(states[12], states[13], strict=True))
    state = callback.zclips[0].state_dict()
    assert (state["steps"], state["samples"], state["skipped"]) == (20, 19, 1)


@pytest.mark.filterwarnings("ignore:ZClip left out:zclip_ext.ZClipWarning")
def test_a_spike_can_be_left_out():
    seen = watched(Module(), options={**OPTIONS, "on_spike": "skip"})
    assert seen[-1]["skipped"] == seen[-1]["spikes"] > 0


def test_an_error_stops_the_run():
    with pytest.raises(NonFiniteGradientError):
        fit(Module(), made_batches(20, {12: math.nan}), [ZClipCallback(on_nonfinite="raise")])


def test_a_step_without_a_loss_is_no_sample():
    class Absent(Module):
        def training_step(self, batch, index):
            return super().training_step(batch, index) if index != 5 else None

    with pytest.warns(ZClipWarning, match="no gradient"):
        seen = watched(Absent())
    assert (seen[-1]["samples"], seen[-1]["zero_norm"]) == (19, 1)


@pytest.mark.parametrize("wrapper", [False, True])
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_resumed_run_is_bit_equal(tmp_path, wrapper, weights_only):
    def go(folder, ckpt_path=None):
        module = Module()
        if wrapper:
            module.make = lambda parameters: ZClipOptimizer(torch.optim.AdamW(parameters, lr=1e-3), **OPTIONS)
        callback = ZClipCallback(**OPTIONS)
        keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        callbacks = [keep] if wrapper else [callback, keep]
        trainer = pl.Trainer(callbacks=callbacks, **{**QUIET, "enable_checkpointing": True}, max_epochs=2)
        data = DataLoader(made_batches(), batch_size=None)
        trainer.fit(module, data, ckpt_path=ckpt_path, weights_only=weights_only)
        [zclip] = [trainer.optimizers[0].zclip] if wrapper else callback.zclips
        return zclip.state_dict(), weights(module)

    state, model = go(tmp_path / "straight")
    resumed, resumed_model = go(tmp_path / "resumed", tmp_path / "straight" / "epoch=0.ckpt")
    assert state == resumed
    assert equal(model, resumed_model)
    assert (state["steps"], state["warm"]) == (40, 1)


def test_a_checkpoint_without_statistics_is_told_of(tmp_path):
    trainer = fit(Module())
    trainer.save_checkpoint(tmp_path / "without.ckpt")
    callback = ZClipCallback(**OPTIONS)
    with pytest.warns(ZClipWarning, match="the checkpoint holds no ZClip statistics"):
        fit(Module(), callbacks=[callback], ckpt_path=tmp_path / "without.ckpt", max_epochs=2)
    assert callback.zclips[0].state_dict()["steps"] == 20


def test_states_that_do_not_fit_are_refused():
    callback = ZClipCallback(**OPTIONS)
    fit(Module(), callbacks=[callback])
    before = callback.state_dict()
    with pytest.raises(ValueError, match=r"state_dict\['optimizers'\]: got NoneType, expected a list"):
        callback.load_state_dict({})
    with pytest.raises(ValueError, match="missing field"):
        callback.load_state_dict({"optimizers": [before["optimizers"][0], {"version": 1}]})
    assert callback.state_dict() == before
    other = ZClipCallback(**OPTIONS)
    other.load_state_dict({"optimizers": 2 * before["optimizers"]})
    with pytest.raises(ValueError, match=r"got ZClip statistics of 2 optimizer\(s\), but Module has 1"):
        fit(Module(), callbacks=[other])


def test_a_new_run_starts_with_fresh_statistics():
    callback = ZClipCallback(**OPTIONS)
    fit(Module(), callbacks=[callback])
    first = callback.state_dict()
    fit(Module(), callbacks=[callback])
    assert callback.state_dict() == first


class Gan(pl.LightningModule):
    """The generator's loss leaves gradients in the discriminator, too."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator, self.discriminator = nn.Linear(6, 6), nn.Linear(6, 1)

    def training_step(self, batch, index):
        inputs, size = batch
        first, second = self.optimizers()
        self.manual_backward(self.discriminator(self.generator(inputs)).mean())
        first.step()
        second.zero_grad()
        self.manual_backward(self.discriminator(self.generator(inputs).detach()).square().mean() * size)
        second.step()
        first.zero_grad()
        second.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=1e-2) for part in (self.generator, self.discriminator)]


@pytest.mark.filterwarnings("ignore:ZClip left out:zclip_ext.ZClipWarning")
def test_two_optimizers_have_a_zclip_each():
    callback, module = ZClipCallback(**OPTIONS), Gan()
    batches = made_batches(20, {12: math.nan, SPIKE: 10.0})
    trainer = fit(module, batches, [callback], log_every_n_steps=1)
    model = Gan()
    zclips = [ZClip(**OPTIONS), ZClip(**OPTIONS)]
    parts = model.generator, model.discriminator
    optimizers = model.configure_optimizers()
    for inputs, size in batches:
        for index in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            made = model.generator(inputs)
            if index == 0:
                model.discriminator(made).mean().backward()
            else:
                (model.discriminator(made.detach()).square().mean() * size).backward()
            zclips[index].step(parts[index])
            optimizers[index].step()
    assert [zclip.metrics() for zclip in callback.zclips] == [pytest.approx(zclip.metrics()) for zclip in zclips]
    assert [zclip.metrics()["skipped"] for zclip in zclips] == [0, 1]
    for p, q in zip(module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    for index, zclip in enumerate(callback.zclips):
        assert float(trainer.callback_metrics[f"zclip_{index}/grad_norm"]) == pytest.approx(
            zclip.metrics()["grad_norm"]
        )
    assert len(callback.state_dict()["optimizers"]) == 2


def test_metrics_reach_the_logger(tmp_path):
    callback = ZClipCallback(**OPTIONS)
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    fit(Module(), callbacks=[callback], logger=logger, log_every_n_steps=5)
    header, *rows = (line.split(",") for line in (tmp_path / logger.log_dir / "metrics.csv").read_text().splitlines())
    rows = [dict(zip(header, row, strict=True)) for row in rows]
    assert {f"zclip/{name}" for name in callback.zclips[0].metrics()} < set(header)
    assert [float(row["zclip/steps"]) for row in rows] == [5, 10, 15, 20]
    assert float(rows[-1]["zclip/grad_norm"]) == pytest.approx(callback.zclips[0].metrics()["grad_norm"])


def test_a_second_clip_is_told_of():
    with pytest.warns(ZClipWarning, match=r"gradient_clip_val=0\.5\): Lightning clips to it what ZClip has clipped"):
        fit(Module(), callbacks=[ZClipCallback()], gradient_clip_val=0.5)

    class Clipping(Module):
        def configure_gradient_clipping(self, optimizer, *_, **__):
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

    with pytest.warns(ZClipWarning, match=r"Clipping\.configure_gradient_clipping runs after ZClip"):
        fit(Clipping(), callbacks=[ZClipCallback()])


def test_two_that_clip_are_refused():
    class Mine(ZClipCallback):
        pass

    with pytest.raises(ValueError, match="callbacks: got Mine beside ZClipCallback, allowed is one that clips"):
        fit(Module(), callbacks=[ZClipCallback(), Mine()])
    with pytest.raises(ValueError, match="callbacks: got ZClipLightningCallback beside ZClipCallback"):
        fit(Module(), callbacks=[ZClipCallback(), upstream.ZClipLightningCallback()])
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `ZClipCallback`"):  # Lightning's
        fit(Module(), callbacks=[ZClipCallback(), ZClipCallback()])
    module = Module(lambda parameters: ZClipOptimizer(torch.optim.SGD(parameters, lr=1e-2)))
    with pytest.raises(ValueError, match=r"optimizers\[0\]: got a ZClipOptimizer beside ZClipCallback"):
        fit(module, callbacks=[ZClipCallback()])


def test_an_optimizer_of_many_gradients_is_refused():
    with pytest.raises(ValueError, match=r"optimizers\[0\]: got LBFGS, which evaluates its closure several times"):
        fit(Module(torch.optim.LBFGS), callbacks=[ZClipCallback()])


def test_deepspeed_is_refused(monkeypatch):
    from lightning.pytorch.strategies import DeepSpeedStrategy  # imports deepspeed

    for name in ("setup_environment", "teardown"):  # which want CUDA
        monkeypatch.setattr(DeepSpeedStrategy, name, lambda self: None)
    with pytest.raises(
        ValueError, match=r"strategy: got DeepSpeed.* import zclip_ext\.integrations\.deepspeed"
    ) as error:
        fit(Module(), callbacks=[ZClipCallback()], strategy=DeepSpeedStrategy())
    assert '"zclip": {"enabled": true}' in str(error.value)


def test_zclip_optimizer_works_by_itself():
    module = Module(lambda parameters: ZClipOptimizer(torch.optim.AdamW(parameters, lr=1e-3), **OPTIONS))
    watch = Watch(lambda: module.trainer.optimizers[0].zclip)
    fit(module, callbacks=[watch])
    assert_same(watch.seen, plain()[0])


def test_p84_a_clip_in_training_step_is_told_of():
    """It runs before backward: at first on nothing, later on what is left of the last step."""

    class Early(Module):
        def __init__(self):
            super().__init__()
            self.zclip = ZClip()

        def training_step(self, batch, index):
            self.zclip.step(self.net)
            return super().training_step(batch, index)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Early())
    told = [str(one.message) for one in caught if one.category is ZClipWarning]
    assert told == ["no gradient: was ZClip called before backward(), or after zero_grad()?"]


def test_the_authors_arguments_do_the_same():
    arguments = {
        "alpha": 0.95,
        "z_thresh": 2.0,
        "max_grad_norm": None,
        "eps": 1e-6,
        "warmup_steps": 10,
        "mode": "zscore",
        "clip_option": "adaptive_scaling",
        "clip_factor": 1.0,
        "skip_update_on_spike": True,
    }
    first, second = Module(), Module()
    fit(first, callbacks=[upstream.ZClipLightningCallback(**arguments)])
    callback = adapter.ZClipLightningCallback(**arguments)
    fit(second, callbacks=[callback])
    assert callback.zclips[0].metrics()["spikes"] > 0
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    assert ZClipCallback(mode="percentile").config.clip_option == "max"


def test_options_are_checked_at_once():
    config = ZClipConfig(z_thresh=3.0)
    assert ZClipCallback(config).config is config
    assert repr(ZClipCallback(config)) == "ZClipCallback(z_thresh=3.0)"
    with pytest.raises(ValueError, match="unknown ZClip option 'z_tresh'; did you mean 'z_thresh'"):
        ZClipCallback(z_tresh=3.0)
    with pytest.raises(TypeError, match="options: got z_thresh beside a config"):
        ZClipCallback(config, z_thresh=3.0)
    with pytest.raises(TypeError, match="config: got dict, expected a ZClipConfig"):
        ZClipCallback({"z_thresh": 3.0})


def reloaded(monkeypatch, **modules):
    """The adapter as it is where only these are there."""
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, adapter.__name__)
    return importlib.import_module(adapter.__name__)


def test_without_lightning_the_extra_is_named(monkeypatch):
    with pytest.raises(ImportError, match=r"pip install 'zclip-ext\[lightning\]'"):
        reloaded(monkeypatch, **{"lightning.pytorch": None, "pytorch_lightning": None})


def test_pytorch_lightning_by_its_older_name(monkeypatch):
    class Callback:
        pass

    older = types.SimpleNamespace(Callback=Callback)
    there = reloaded(monkeypatch, **{"lightning.pytorch": None, "pytorch_lightning": older})
    assert issubclass(there.ZClipCallback, Callback)


# Two ranks, in one launch


def ranks_main(folder):
    """Reports what each strategy came to on this rank: uninterrupted, and resumed after the first of two epochs."""
    import deepspeed
    import lightning.pytorch.strategies.deepspeed as with_deepspeed
    import torch.distributed as dist
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    class Fsdp2(Module):
        def configure_model(self):
            fully_shard(self.net[0])
            fully_shard(self.net)

    class CpuFsdp(FSDPStrategy):
        """Lightning refuses the class itself on CPUs, and torch wants to be told of them."""

        def _setup_model(self, model):
            return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)

    class CpuDeepSpeed(with_deepspeed.DeepSpeedStrategy):
        """Lightning lets it run on CUDA alone."""

        root_device = torch.device("cpu", 0)

    importlib.import_module("zclip_ext.integrations.deepspeed")  # all that a script needs for it
    with_deepspeed.CUDAAccelerator = CPUAccelerator
    with_deepspeed._validate_device_index_selection = lambda devices: None
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    gloo = {"process_group_backend": "gloo"}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 2},
        "zclip": {"enabled": True, **OPTIONS},
    }

    def wrapped(module):
        def make(parameters):
            inner = torch.optim.AdamW(parameters, lr=1e-3)
            return ZClipOptimizer(inner, model=module.trainer.model, **OPTIONS)

        module.make = make
        return module

    kinds = {
        "ddp": (Module, lambda: DDPStrategy(**gloo)),
        "ddp manual": (Manual, lambda: DDPStrategy(**gloo)),
        "fsdp2": (Fsdp2, lambda: ModelParallelStrategy(**gloo)),
        "fsdp2 wrapped": (lambda: wrapped(Fsdp2()), lambda: ModelParallelStrategy(**gloo)),
        "fsdp1": (Module, lambda: CpuFsdp(auto_wrap_policy={nn.Linear}, state_dict_type="sharded", **gloo)),
        "fsdp1 wrapped": (
            lambda: wrapped(Module()),
            lambda: CpuFsdp(auto_wrap_policy={nn.Linear}, state_dict_type="sharded", **gloo),
        ),
        "deepspeed": (Module, lambda: CpuDeepSpeed(config=dict(config), **gloo)),
    }
    rank = int(os.environ["RANK"])
    mine = [(inputs.chunk(2)[rank], size) for inputs, size in made_batches()]
    for name, (kind, strategy) in kinds.items():

        def go(part, ckpt_path=None, name=name, kind=kind, strategy=strategy):
            module, callback = kind(), ZClipCallback(**OPTIONS)

            def zclip_of():
                if name == "deepspeed":
                    return module.trainer.strategy.model.zclip
                return module.trainer.optimizers[0].zclip if "wrapped" in name else callback.zclips[0]

            watch = Watch(zclip_of)
            keep = ModelCheckpoint(os.path.join(folder, name, part), filename="{epoch}", save_top_k=-1)
            callbacks = [watch, keep] if name == "deepspeed" or "wrapped" in name else [callback, watch, keep]
            several = {"devices": 2, "strategy": strategy(), "use_distributed_sampler": False, "max_epochs": 2}
            fit(module, mine, callbacks, ckpt_path, enable_checkpointing=True, **several)
            zclip_of().check_consistency()
            return watch.seen, zclip_of().state_dict()

        seen, state = go("straight")
        resumed, resumed_state = go("resumed", os.path.join(folder, name, "straight", "epoch=0.ckpt"))
        same = resumed_state == state and resumed == seen[-len(resumed) :] and len(resumed) == len(mine)
        print("SEEN " + json.dumps([name, rank, seen, state, same]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What two ranks saw, by strategy."""
    folder = tmp_path_factory.mktemp("ranks")
    ended = launchers.run(*launchers.TORCHRUN, __file__, folder, folder=folder, timeout=150)
    return {(name, rank): report for name, rank, *report in launchers.reports(ended)}, ended.stderr


@pytest.mark.parametrize(
    "strategy", ["ddp", "ddp manual", "fsdp2", "fsdp2 wrapped", "fsdp1", "fsdp1 wrapped", "deepspeed"]
)
def test_many_ranks(two_ranks, strategy):
    """The norm is that of one process on the whole batch, with the same bits on both ranks, and when resumed."""
    reports, errors = two_ranks
    assert (strategy, 0) in reports, errors[-3000:]
    seen, state, same = reports[strategy, 0]
    wanted, _ = plain(made_batches() * 2)
    assert wanted[-1]["spikes"] > 0
    assert_same(seen, wanted)
    assert same
    assert reports[strategy, 1] == [seen, state, same]


if __name__ == "__main__":
    ranks_main(sys.argv[1])
