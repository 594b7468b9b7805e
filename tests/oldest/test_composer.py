"""ZClip in Composer's own Trainer, in the environment of `make test-oldest`. As a script, it is one of two ranks."""

import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import composer.core.state
import pytest
import torch
import yaml
from composer import Trainer
from composer.algorithms import SAM, GradientClipping
from composer.core import Algorithm, Event, Precision
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.utils.data import DataLoader, TensorDataset

import zclip_ext
from zclip_ext.integrations.composer import ZClip

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from launchers import free_port, run

STEPS, BATCH = 40, 8
WARMUP = 15
SPIKE = 30
SCRIPTS = Path(__file__).resolve().parent.parent.parent / "integrations"
pytestmark = pytest.mark.filterwarnings("ignore", "error::zclip_ext.ZClipWarning")


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.net[0]._fsdp_wrap = True

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return (batch[2] * (outputs - batch[1]).square()).mean()


def batches(weights=None, steps=STEPS):
    """The same samples each time; a batch's weight multiplies its gradient."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps * BATCH, 8, generator=generator)
    y = x.sum(1, keepdim=True) + torch.randn(steps * BATCH, 1, generator=generator)
    weight = torch.ones(steps * BATCH, 1)
    for step, value in (weights or {}).items():
        weight[step * BATCH : (step + 1) * BATCH] = value
    return TensorDataset(x, y, weight)


def loader(weights=None, steps=STEPS, ranks=1):
    data = batches(weights, steps)
    if ranks == 1:
        return DataLoader(data, BATCH)
    sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
    return DataLoader(data, BATCH // ranks, sampler=sampler)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)


class Run:
    """A run of the Trainer, with all that a test may ask of it."""

    def __init__(
        self, zclip=None, *, weights=None, until=STEPS, optimizer=None, more=(), ranks=1, prepare=None, **options
    ):
        self.model, self.log, self.zclip = Model(), InMemoryLogger(), zclip
        self.optimizer = (optimizer or adam)(self.model)
        self.trainer = Trainer(
            model=self.model,
            train_dataloader=loader(weights, ranks=ranks),
            max_duration=f"{until}ba",
            optimizers=self.optimizer,
            algorithms=[*more, *([zclip] if zclip is not None else [])],
            loggers=[self.log],
            device="cpu",
            progress_bar=False,
            **options,
        )
        if prepare is not None:
            prepare(self.trainer)
        self.trainer.fit()
        self.trainer.close()

    @property
    def norms(self):
        return self.logged("grad_norm")

    def logged(self, name):
        return [value for _, value in self.log.data[f"zclip/{name}"]]

    @property
    def weights(self):
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def plain(weights=None, steps=STEPS, **options):
    """The same without a trainer: norms and metrics of each step, and the weights at the end."""
    model = Model()
    optimizer = zclip_ext.ZClipOptimizer(adam(model), **options)
    metrics = []
    for batch in loader(weights, steps):
        optimizer.zero_grad()
        model.loss(model(batch), batch).backward()
        optimizer.step()
        metrics.append(optimizer.zclip.metrics())
    return metrics, [parameter.detach() for parameter in model.parameters()]


def column(metrics, name):
    return [row[name] for row in metrics]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("microbatch", [None, 2])
def test_norms_and_the_threshold_of_a_spike_are_those_of_plain_pytorch(microbatch):
    run = Run(ZClip(warmup_steps=WARMUP), weights={SPIKE: 10.0}, device_train_microbatch_size=microbatch)
    metrics, weights = plain({SPIKE: 10.0}, warmup_steps=WARMUP)
    assert run.norms == pytest.approx(column(metrics, "grad_norm"), rel=1e-5)
    assert run.logged("samples") == list(range(1, STEPS + 1))
    assert run.logged("scale")[SPIKE] < 0.5
    assert run.logged("threshold")[SPIKE] == pytest.approx(metrics[SPIKE]["threshold"], rel=1e-5)
    assert run.logged("clipped_norm")[SPIKE] == pytest.approx(metrics[SPIKE]["threshold"], rel=1e-5)
    for mine, other in zip(run.weights, weights, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_p83_metrics_reach_the_logger_once_a_batch():
    run = Run(ZClip(warmup_steps=WARMUP))
    for name in run.zclip.zclip.metrics():
        assert len(run.logged(name)) == STEPS
    assert [int(time.batch) for time, _ in run.log.data["zclip/grad_norm"]] == list(range(STEPS))
    assert {key for key in run.log.data if key.startswith("zclip/")} == {
        f"zclip/{k}" for k in run.zclip.zclip.metrics()
    }


class Watch(Algorithm):
    """Weights and moments before a batch, after it, and after the next."""

    def __init__(self, step):
        self.steps, self.seen = range(step, step + 3), []

    def match(self, event, state):
        return event == Event.BATCH_START and int(state.timestamp.batch) in self.steps

    def apply(self, event, state, logger):
        optimizer = getattr(state.optimizers[0], "base_optimizer", state.optimizers[0])
        parameters = optimizer.param_groups[0]["params"]
        moments = [value.clone() for p in parameters for value in optimizer.state[p].values()]
        self.seen.append([p.detach().clone() for p in parameters] + moments)


@pytest.mark.parametrize("microbatch", [None, 2])
@pytest.mark.parametrize(("weight", "options"), [(math.nan, {}), (math.inf, {}), (10.0, {"on_spike": "skip"})])
def test_p82_a_step_left_out_changes_neither_weights_nor_moments(weight, options, microbatch):
    watch, zclip = Watch(SPIKE), ZClip(warmup_steps=WARMUP, **options)
    with pytest.warns(zclip_ext.ZClipWarning, match="left out a step"):
        run = Run(zclip, weights={SPIKE: weight}, more=[watch], device_train_microbatch_size=microbatch)
    before, after, later = watch.seen
    assert same(before, after)
    assert not same(after, later)
    assert run.logged("skipped")[-1] == 1
    assert run.logged("samples")[-1] == STEPS - (0 if options else 1)
    assert all(value.isfinite().all() for value in run.weights)


def test_on_nonfinite_raise_stops_the_trainer():
    with pytest.raises(zclip_ext.NonFiniteGradientError):
        Run(ZClip(on_nonfinite="raise"), weights={SPIKE: math.nan})


class Twice(torch.optim.Adam):
    """Runs each batch twice, as Composer does after an out-of-memory error."""

    def step(self, closure=None):
        closure()
        return super().step(closure)


def test_p82_a_batch_that_is_run_twice_is_one_sample():
    weights = {SPIKE: 10.0}
    twice = Run(ZClip(warmup_steps=WARMUP), weights=weights, optimizer=lambda model: Twice(model.parameters(), lr=1e-2))
    once = Run(ZClip(warmup_steps=WARMUP), weights=weights)
    assert twice.zclip.zclip.state_dict() == once.zclip.zclip.state_dict()
    assert same(twice.weights, once.weights)
    assert twice.logged("scale")[::2] == twice.logged("scale")[1::2] == once.logged("scale")


@pytest.mark.parametrize("interval", [1, 3])
def test_p82_sam_gives_one_sample_a_batch(interval):
    run = Run(ZClip(warmup_steps=WARMUP), weights={SPIKE: 10.0}, more=[SAM(interval=interval)])
    assert run.logged("samples") == list(range(1, STEPS + 1))
    assert run.logged("scale")[SPIKE] < 0.5
    without = Run(None, more=[SAM(interval=interval)])
    watched = Run(ZClip(dry_run=True), more=[SAM(interval=interval)])
    assert same(without.weights, watched.weights)


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize(("weight", "options"), [(math.nan, {}), (10.0, {"on_spike": "skip"})])
def test_p82_sam_stays_where_it_is_in_a_step_left_out(weight, options, interval):
    watch, zclip = Watch(SPIKE), ZClip(warmup_steps=WARMUP, **options)
    with pytest.warns(zclip_ext.ZClipWarning, match="left out a step"):
        run = Run(zclip, weights={SPIKE: weight}, more=[SAM(interval=interval), watch])
    for before, after in zip(*watch.seen[:2], strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=1e-7)  # SAM adds e(w) and takes it away
    assert run.logged("skipped")[-1] == 1
    assert all(value.isfinite().all() for value in run.weights)


def test_p82_what_sam_left_in_a_checkpoint_moves_nothing():
    """SAM without ZClip keeps the e(w) of its last step."""

    def leave(trainer):
        optimizer = trainer.state.optimizers[0]
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter]["e_w"] = torch.ones_like(parameter)

    runs = [Run(ZClip(), until=5, more=[SAM()], prepare=prepare) for prepare in (None, leave)]
    assert same(runs[0].weights, runs[1].weights)
    assert runs[0].norms == runs[1].norms


@pytest.mark.parametrize("until", [13, 20])
@pytest.mark.parametrize("options", [{}, {"robust_warmup": True}, {"log_space": True}])
def test_p81_a_resumed_run_has_the_same_bits(tmp_path, until, options):
    options = {"warmup_steps": WARMUP, **options}
    whole = Run(ZClip(**options), weights={SPIKE: 10.0})
    first = Run(ZClip(**options), until=until, save_folder=str(tmp_path), save_interval=f"{until}ba")
    path = str(tmp_path / f"ep0-ba{until}-rank0.pt")
    second = Run(ZClip(**options), weights={SPIKE: 10.0}, load_path=path)
    assert second.norms == whole.norms[until:]
    assert second.zclip.zclip.state_dict() == whole.zclip.zclip.state_dict()
    assert same(second.weights, whole.weights)
    saved = dict(torch.load(path, weights_only=False)["state"]["algorithms"])["ZClip"]
    assert saved == first.zclip.state_dict()
    assert saved["repr"] == repr(first.zclip)
    json.dumps(saved)  # plain numbers


def test_p81_autoresume(tmp_path):
    options = {"run_name": "it", "save_folder": str(tmp_path), "save_interval": "13ba", "autoresume": True}
    whole = Run(ZClip(warmup_steps=WARMUP))
    Run(ZClip(warmup_steps=WARMUP), until=13, **options)
    second = Run(ZClip(warmup_steps=WARMUP), **options)
    assert second.zclip.zclip.state_dict() == whole.zclip.zclip.state_dict()
    assert same(second.weights, whole.weights)


def test_p81_a_checkpoint_without_statistics(tmp_path):
    Run(None, until=5, save_folder=str(tmp_path), save_interval="5ba")
    run = Run(ZClip(warmup_steps=WARMUP), load_path=str(tmp_path / "ep0-ba5-rank0.pt"))
    assert run.logged("samples")[-1] == STEPS - 5
    with pytest.warns(zclip_ext.ZClipWarning, match="no ZClip statistics"):
        run.zclip.load_state_dict({"repr": "ZClip()"})
    assert run.zclip.zclip.metrics()["samples"] == 0
    with pytest.raises(ValueError, match="missing field"):
        run.zclip.load_state_dict({"zclip_ext": {"version": 1}})


def test_one_algorithm_in_two_trainers_counts_on():
    zclip = ZClip(warmup_steps=WARMUP)
    Run(zclip, until=1)
    Run(zclip, until=1)  # batch 0 again, but another one
    assert zclip.zclip.metrics()["samples"] == 2


def test_p81_two_of_it_are_refused():
    with pytest.raises(ValueError, match="got 2 of ZClip, allowed is one"):
        Run(ZClip(), more=[ZClip()])
    with pytest.raises(ValueError, match="beside a ZClipOptimizer"):
        Run(ZClip(), optimizer=lambda model: zclip_ext.ZClipOptimizer(adam(model)))


def test_p83_gradient_clipping_beside_it_is_reported():
    clipping = GradientClipping("norm", 0.1)
    with pytest.warns(zclip_ext.ZClipWarning, match="sees norms that are clipped already"):
        wrong = Run(None, more=[ZClip(), clipping], until=3)
    assert max(wrong.norms) == pytest.approx(0.1, rel=1e-3)
    with pytest.warns(zclip_ext.ZClipWarning, match="both clip"):
        right = Run(None, more=[clipping, ZClip()], until=3)
    assert min(right.norms) > 0.5


def test_options_and_their_errors():
    config = zclip_ext.ZClipConfig(z_thresh=2.0)
    assert ZClip(config).zclip.config == ZClip(z_thresh=2.0).zclip.config == config
    assert repr(ZClip(z_thresh=2.0)) == "ZClip(z_thresh=2.0)"
    with pytest.raises(ValueError, match="did you mean 'z_thresh'"):
        ZClip(z_tresh=2.0)


def test_parameters_that_no_optimizer_has_do_not_count():
    half = Run(ZClip(warmup_steps=WARMUP), optimizer=lambda model: torch.optim.Adam(model.net[2].parameters(), lr=1e-2))
    assert half.norms[-1] < 2 * half.norms[0]  # gradients that nobody zeroes would add up


def test_zclip_optimizer_in_the_trainer(tmp_path):
    def wrapped(model):
        return zclip_ext.ZClipOptimizer(adam(model), warmup_steps=WARMUP)

    weights = {SPIKE: 10.0}
    whole = Run(None, weights=weights, optimizer=wrapped)
    metrics, expected = plain(weights, warmup_steps=WARMUP)
    assert whole.optimizer.zclip.metrics() == pytest.approx(metrics[-1], rel=1e-4)
    for mine, other in zip(whole.weights, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    Run(None, until=13, optimizer=wrapped, save_folder=str(tmp_path), save_interval="13ba")
    second = Run(None, weights=weights, optimizer=wrapped, load_path=str(tmp_path / "ep0-ba13-rank0.pt"))
    assert second.optimizer.zclip.state_dict() == whole.optimizer.zclip.state_dict()
    assert same(second.weights, whole.weights)


def with_grad_scaler(trainer):
    """Composer allows fp16 on GPUs alone; its way through a step is the same with a scaler for CPUs."""
    trainer.state._precision = Precision.AMP_FP16
    trainer.state.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)


@pytest.mark.parametrize("inside", [False, True])
def test_p82_gradients_are_unscaled_in_the_fp16_path(inside):
    def wrapped(model):
        return zclip_ext.ZClipOptimizer(adam(model), warmup_steps=WARMUP) if inside else adam(model)

    zclip = None if inside else ZClip(warmup_steps=WARMUP)
    weights = {SPIKE: 10.0, SPIKE + 4: math.inf}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Run(zclip, weights=weights, optimizer=wrapped, prepare=with_grad_scaler)
        metrics, _ = plain(weights, warmup_steps=WARMUP)
    assert run.trainer.state.scaler.get_scale() == 512.0  # it has seen the overflow
    mine = run.optimizer.zclip.metrics() if inside else zclip.zclip.metrics()
    if inside:  # GradScaler leaves out the step before it comes to the wrapper
        assert mine["steps"] == STEPS - 1
    else:
        assert mine["skipped"] == 1
    assert mine["samples"] == STEPS - 1
    assert [mine["mean"], mine["grad_norm"]] == pytest.approx([metrics[-1]["mean"], metrics[-1]["grad_norm"]], rel=1e-3)


def test_llm_foundry_finds_it_by_its_yaml():
    """By llm-foundry's own registry; the rest of it, which needs a hundred packages, is not imported."""
    points = importlib.metadata.entry_points(group="llmfoundry_algorithms", name="zclip")
    assert [point.load() for point in points] == [ZClip]
    (file,) = (file for file in importlib.metadata.files("llm-foundry") if file.name == "registry_utils.py")
    spec = importlib.util.spec_from_file_location("registry_utils", file.locate())
    foundry = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(foundry)
    registry = foundry.create_registry("llmfoundry", "algorithms", generic_type=type[Algorithm], entry_points=True)
    config = yaml.safe_load((SCRIPTS / "llmfoundry_zclip.yaml").read_text(encoding="utf-8"))["algorithms"]
    ((name, options),) = config.items()
    built = foundry.construct_from_registry(name, registry, True, Algorithm, None, options)
    assert type(built) is ZClip
    assert built.zclip.config == zclip_ext.ZClipConfig(z_thresh=2.5)


# The example.

# Many command lines in one process, since imports dominate.
EXAMPLES = f"""
import json, sys
sys.path.insert(0, {str(SCRIPTS)!r})
import train_composer
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["train_composer.py", *arguments]
    code = 0
    try:
        train_composer.main()
    except SystemExit as error:
        code = error.code
    print("END", code, flush=True)
"""
SMALL = ["--batch", "2", "--length", "16", "--print-every", "1", "--max-grad-norm", "0.5"]


def test_the_example_goes_on_to_the_same_bits(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port()]
    ranks = run(
        *launcher, SCRIPTS / "train_composer.py", *SMALL, "--steps", 5, "--save", tmp_path, folder=tmp_path, timeout=120
    )
    assert ranks.returncode == 0, ranks.stdout + ranks.stderr
    resume = ["--resume", str(tmp_path)]
    commands = [
        [*SMALL, "--steps", "8"],
        [*SMALL, "--steps", "8", *resume],
        [*SMALL, "--steps", "8", *resume, "--seed", "1"],
        [*SMALL, "--steps", "4", *resume],
        [*SMALL, "--resume", str(tmp_path / "none")],
        ["--help"],
    ]
    alone = run("-c", EXAMPLES, json.dumps(commands), folder=tmp_path, timeout=120)
    output = alone.stdout.split("END ")
    assert [part[0] for part in output[1:]] == ["0", "0", "2", "2", "2", "0"], alone.stdout + alone.stderr
    first, whole, second = (
        [line for line in part.splitlines() if line.startswith(("step ", "zclip:"))]
        for part in (ranks.stdout, *output[:2])
    )
    assert first[:5] + second == whole
    assert len(whole) == 9
    assert "scale 1.000" not in "".join(whole[:8])
    assert "--seed: got 1, but the checkpoint has 0" in alone.stderr
    assert "--steps: got 4" in alone.stderr
    assert "--resume: no checkpoint" in alone.stderr


# Two ranks.


def distributed_cases():
    from composer.utils import dist

    dist.initialize_dist("cpu", timeout=60)
    # FSDP1 on CPUs: Composer takes the device from CUDA, and torch frees what it "offloads" from the CPU to the CPU.
    torch.cuda.current_device = lambda: torch.device("cpu")
    composer.core.state.StateDictOptions = lambda cpu_offload, **options: StateDictOptions(**options)
    rank = dist.get_global_rank()
    fsdp = {"fsdp": {"sharding_strategy": "FULL_SHARD", "use_orig_params": True}}
    weights = {SPIKE: 10.0, SPIKE + 4: math.nan}
    report = {}

    def run(name, **options):
        done = Run(ZClip(warmup_steps=WARMUP), ranks=2, **options)
        done.zclip.zclip.check_consistency()
        state = {key: repr(value) for key, value in done.zclip.zclip.state_dict().items()}
        report[name] = {"norms": done.norms, "scales": done.logged("scale"), "state": state}

    def wrapped(model):
        return zclip_ext.ZClipOptimizer(adam(model), model=model, warmup_steps=WARMUP)

    def run_wrapped(name, **options):
        done = Run(None, optimizer=wrapped, ranks=2, **options)
        done.optimizer.zclip.check_consistency()
        report[name] = {key: repr(value) for key, value in done.optimizer.zclip.state_dict().items()}

    folder = Path(sys.argv[1])
    run("ddp", weights=weights)
    run("ddp, microbatches", weights=weights, device_train_microbatch_size=2)
    run("sam", weights=weights, more=[SAM()])
    run("fsdp1", weights=weights, parallelism_config=fsdp)
    every = {"save_interval": "13ba"}
    for kind in ("full", "sharded"):
        config = {"fsdp": {**fsdp["fsdp"], "state_dict_type": kind}}
        place = str(folder / kind)
        run(f"{kind}, first", until=13, parallelism_config=config, save_folder=place, **every)
        path = f"{place}/ep0-ba13" + ("-rank0.pt" if kind == "full" else "")
        run(f"{kind}, resumed", weights=weights, parallelism_config=config, load_path=path)
        run_wrapped(f"{kind}, wrapped, first", until=13, parallelism_config=config, save_folder=place + "w", **every)
        path = f"{place}w/ep0-ba13" + ("-rank0.pt" if kind == "full" else "")
        run_wrapped(f"{kind}, wrapped, resumed", weights=weights, parallelism_config=config, load_path=path)
    os.environ["FSDP_VERSION"] = "2"
    fsdp = {"fsdp": {}}
    run("fsdp2", weights=weights, parallelism_config=fsdp)
    run("fsdp2, first", until=13, parallelism_config=fsdp, save_folder=str(folder / "fsdp2"), **every)
    run("fsdp2, resumed", weights=weights, parallelism_config=fsdp, load_path=str(folder / "fsdp2" / "ep0-ba13"))
    (folder / f"rank{rank}.json").write_text(json.dumps(report))


@pytest.fixture(scope="module")
def ranks():
    port = str(free_port())
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(2):
            where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            where |= {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, folder]
            log = (Path(folder) / f"rank{rank}.log").open("w")
            processes.append(subprocess.Popen(command, env={**os.environ, **where}, stdout=log, stderr=log))
        try:
            codes = [process.wait(timeout=120) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if codes != [0, 0]:
            pytest.fail("\n".join((Path(folder) / f"rank{rank}.log").read_text()[-3000:] for rank in range(2)))
        return [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(2)]


CASES = ["ddp", "ddp, microbatches", "sam", "fsdp1", "full, resumed", "sharded, resumed", "fsdp2", "fsdp2, resumed"]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_same_bits(ranks, case):
    assert repr(ranks[0][case]) == repr(ranks[1][case])


@pytest.mark.parametrize("case", ["ddp", "ddp, microbatches", "fsdp1", "fsdp2"])
def test_two_ranks_see_the_norms_of_one(ranks, case):
    with pytest.warns(zclip_ext.ZClipWarning, match="left out"):
        metrics, _ = plain({SPIKE: 10.0, SPIKE + 4: math.nan}, warmup_steps=WARMUP)
    factor = 2 if case == "fsdp2" else 1  # with torch 2.7 and gloo it adds up the ranks' gradients, for their mean
    norms = [factor * norm for norm in column(metrics, "grad_norm")]
    assert ranks[0][case]["norms"] == pytest.approx(norms, rel=1e-4, nan_ok=True)
    assert ranks[0][case]["scales"] == pytest.approx(column(metrics, "scale"), rel=1e-4)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_p81_fsdp1_resumes_to_the_same_bits(ranks, kind):
    assert ranks[0][f"{kind}, resumed"]["state"] == ranks[0]["fsdp1"]["state"]


def test_p81_fsdp2_resumes_to_the_same_bits(ranks):
    assert ranks[0]["fsdp2, resumed"]["state"] == ranks[0]["fsdp2"]["state"]


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_fsdp1_resumes_a_zclip_optimizer(ranks, kind):
    expected = ranks[0]["fsdp1"]["state"]
    assert ranks[0][f"{kind}, wrapped, resumed"] == ranks[1][f"{kind}, wrapped, resumed"] == expected


def test_p82_sam_on_two_ranks(ranks):
    assert ranks[0]["sam"]["state"]["samples"] == str(STEPS - 1)
    assert ranks[0]["sam"]["state"]["skipped"] == "1"
    assert ranks[0]["sam"]["scales"][SPIKE] < 0.5


if __name__ == "__main__":
    distributed_cases()
