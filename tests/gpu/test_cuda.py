"""What only a GPU shows: the kernels on it, graphs, streams, waits.

benchmarks/gpu_check.sh runs this file. `make test`, which needs no GPU, runs the kernels' sources on the CPU instead.
"""

import copy
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from helpers import RuleRun, random_options, rule_steps, seeded, usual_norms

import zclip_ext
from zclip_ext import norm, ops

CUDA = torch.device("cuda", 0)
# Of steps that are left out on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::zclip_ext.ZClipWarning")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
SIZES = [1, 2, 63, 64, 65, 2047, 2048, 2049, 131072, 131073, 3_000_001]


@pytest.fixture(autouse=True, scope="module")
def kernels():
    assert torch.cuda.is_available(), "these tests want a GPU"
    assert zclip_ext.backend("cuda") == "compiled", "the extension was built without CUDA"


def bits(tensor):
    return tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8)


def sums_of(tensors):
    return ops.local_sumsq(tensors, tensors[0].device)


def equal(first, second):
    return torch.equal(bits(first), bits(second))


def some(dtype, size, *, start=0, seed=0):
    rng = torch.Generator().manual_seed(seed)
    whole = torch.randn(start + size, generator=rng, dtype=torch.float64).to(dtype)
    return whole, whole[start:]


@pytest.mark.parametrize("start", [0, 1, 3])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_the_cpu(dtype, size, start):
    whole, part = some(dtype, size, start=start)
    on_device = whole.to(CUDA)[start:]
    assert equal(sums_of([on_device]), sums_of([part]))
    out = torch.empty(2, dtype=torch.float64, device=CUDA)
    norm.sum_of_squares([on_device], out)  # torch's own operations on the device
    assert equal(out, sums_of([part]))
    scale = torch.tensor(1 / 3, dtype=torch.float64)
    ops.scale_([part], scale)
    ops.scale_([on_device], scale.to(CUDA))
    assert equal(on_device, part)


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
def test_agrees_with_float64(dtype):
    tensors = [some(dtype, size, seed=size)[1].to(CUDA) for size in SIZES]
    exact = math.sqrt(math.fsum(tensor.double().square().sum().item() for tensor in tensors))
    assert sums_of(tensors)[0].sqrt().item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("value", [1e-38, 1e-25, 1e20, 3e38, math.inf, math.nan])
def test_extreme_values(value):
    tensor = torch.full((5000,), value, dtype=torch.float32)
    sums = sums_of([tensor.to(CUDA)]).cpu()
    torch.testing.assert_close(sums, sums_of([tensor]), rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**31 + 1])
def test_p46_more_elements_than_a_32_bit_number_counts(size):
    if torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.fail("6 GiB of GPU memory are needed")
    ones = torch.ones(size, dtype=torch.bfloat16, device=CUDA)
    assert sums_of([ones]).tolist() == [size, 0.0]
    ops.scale_([ones], torch.tensor(0.5, dtype=torch.float64, device=CUDA))
    assert ones[-1].item() == 0.5


def test_zeros_among_others():
    mixed = torch.zeros(1_000_003, dtype=torch.float32)
    mixed[::70_000] = 3.0
    mixed[5] = 1e-38
    assert equal(sums_of([mixed.to(CUDA)]), sums_of([mixed]))
    assert not sums_of([torch.full((5000,), -0.0, device=CUDA)]).any()


def test_pure_torch_waits_for_nothing_either(monkeypatch):
    monkeypatch.setattr(ops, "_compiled", None)
    run = Run()
    for _ in range(3):
        run.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for factor in FACTORS:
            run.step(factor)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.optimizer.zclip.metrics()["nonfinite"] == 1


def test_half_precision_of_every_pattern():
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        tensor = patterns.view(dtype)
        finite = tensor[tensor.isfinite()].contiguous()
        for values in (tensor, finite):
            assert equal(sums_of([values.to(CUDA)])[1], sums_of([values])[1])
        assert equal(sums_of([finite.to(CUDA)]), sums_of([finite]))


def test_thousands_of_tensors_of_all_kinds():
    tensors = [some(DTYPES[index % 6], index % 300, seed=index)[1] for index in range(5000)]
    tensors[1] = some(torch.float32, 3_000_000)[1].view(3, 1000, 1000).transpose(0, 2)
    on_device = [tensor.to(CUDA) for tensor in tensors]
    assert equal(sums_of(on_device), sums_of(tensors))


def test_p49_same_bits_every_time():
    tensors = [some(torch.bfloat16, size, seed=size)[1].to(CUDA) for size in (30_000_001, 7, 500_000)]
    first = bits(sums_of(tensors))
    assert all(torch.equal(bits(sums_of(tensors)), first) for _ in range(50))


@pytest.mark.parametrize("log_space", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_the_rule_is_the_cpus(seed, log_space):
    rng = seeded(11000 + seed)
    options = {**random_options(rng), "log_space": log_space}
    if log_space:  # a last bit must not decide whether a norm is above a threshold that it equals
        options |= {"min_rel_std": 0.01, "clip_option": "reciprocal"}
    config = zclip_ext.ZClipConfig(**options)

    def decide(sums, state, numbers, record):
        record.copy_(ops.decide_(sums, state, numbers))

    here, there = RuleRun(config, decide), RuleRun(config, decide, CUDA)
    for sums in rule_steps(rng):
        for ours, theirs in zip(there.step(sums), here.step(sums), strict=True):
            if log_space:  # log and exp differ in the last bit between libraries
                torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-12, atol=1e-12, equal_nan=True)
            else:
                assert torch.equal(ours.cpu().nan_to_num(nan=-7.0), theirs.nan_to_num(nan=-7.0)), (sums, config)


class Run:
    """A small model on the device and the wrapper around an optimizer of it."""

    def __init__(self, *, fused=True, capturable=False, lr=0.01, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to(CUDA)
        self.batch = torch.randn(16, 32, device=CUDA)
        self.factor = torch.ones((), device=CUDA)
        inner = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=fused, capturable=capturable)
        self.optimizer = zclip_ext.ZClipOptimizer(inner, **{"warmup_steps": 5, **options})

    def work(self):
        self.optimizer.zero_grad(set_to_none=False)
        (self.model(self.batch).square().mean() * self.factor).backward()
        self.optimizer.step()

    def step(self, factor=1.0):
        self.factor.fill_(factor)
        self.work()

    def everything(self):
        state = self.optimizer.inner.state
        kept = [state[p][key] for p in self.model.parameters() for key in sorted(state[p])]
        return [bits(tensor) for tensor in (*self.model.parameters(), *kept, self.optimizer.zclip._state)]


FACTORS = [1.0, 1.1, 0.9, 1.0, 1.05, 1.0, 40.0, 1.0, 0.0, 1.0, math.nan, 1.0, 300.0, 1.0]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}, {"on_spike": "skip"}])
def test_p52_a_step_waits_for_nothing(options):
    run = Run(**options)
    for _ in range(3):
        run.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for factor in FACTORS * 20:  # over several looks
            run.step(factor)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.optimizer.zclip.metrics()["steps"] == 3 + 20 * len(FACTORS)


def test_a_bad_step_is_left_out_on_the_device():
    run = Run()
    for factor in FACTORS[:6]:
        run.step(factor)
    before = run.everything()[:-1]
    run.step(math.nan)
    assert run.optimizer.last_step_skipped
    assert same(run.everything()[:-1], before)
    run.step()
    assert not run.optimizer.last_step_skipped


def test_without_fused_the_host_reads_one_flag():
    run = Run(fused=False)
    for factor in FACTORS[:6]:
        run.step(factor)
    before = run.everything()[:-1]
    with pytest.warns(zclip_ext.ZClipWarning, match="left out a step"):
        run.step(math.nan)
    assert run.optimizer.zclip.last.left_out
    assert same(run.everything()[:-1], before)


def test_p55_three_launches_for_a_thousand_tensors():
    parameters = [nn.Parameter(torch.zeros(50, device=CUDA)) for _ in range(1000)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.01)
    zclip = zclip_ext.ZClip(on_nonfinite="pass")
    zclip.clip(parameters)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        zclip.clip(parameters)
        torch.cuda.synchronize()
    launched = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [name for name in launched if not name.startswith(("Memcpy", "Memset"))]
    assert len(kernels) == 3, launched
    assert not any(name.startswith("Memcpy") for name in launched), launched


def test_p56_a_normal_step_takes_next_to_no_memory():
    parameters = [nn.Parameter(torch.zeros(10_000_000, dtype=torch.bfloat16, device=CUDA)) for _ in range(10)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-4)
    zclip = zclip_ext.ZClip()
    zclip.clip(parameters)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    zclip.clip(parameters)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


def test_p53_a_captured_step_adapts_when_it_is_replayed():
    eager, captured = Run(capturable=True), Run(capturable=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for factor in FACTORS[:3]:
            captured.step(factor)
    torch.cuda.current_stream().wait_stream(side)
    for factor in FACTORS[:3]:
        eager.step(factor)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.work()
    for factor in FACTORS[3:]:
        captured.factor.fill_(factor)
        graph.replay()
        eager.step(factor)
        last, wanted = captured.optimizer.zclip.last, eager.optimizer.zclip.last
        assert equal(last.record.nan_to_num(nan=-7.0), wanted.record.nan_to_num(nan=-7.0))
    assert same(captured.everything(), eager.everything())
    metrics = captured.optimizer.zclip.metrics()
    assert metrics["spikes"] >= 2
    assert metrics["nonfinite"] == 1


def test_p53_what_a_graph_cannot_hold_is_named():
    run = Run(fused=False, capturable=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run.step()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="which a CUDA graph can't"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        run.work()


def test_p48_other_streams():
    wanted = None
    for stream in [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(3))]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run = Run()
            for factor in FACTORS:
                run.step(factor)
        stream.synchronize()
        wanted = wanted or run.everything()
        assert same(run.everything(), wanted)


def test_two_trackers_on_two_streams_at_once():
    tensors = [some(torch.float32, 5_000_000, seed=seed)[1].to(CUDA) for seed in range(2)]
    wanted = [bits(sums_of([tensor])) for tensor in tensors]
    streams = [torch.cuda.Stream() for _ in tensors]
    torch.cuda.synchronize()
    found = [[], []]
    for _ in range(30):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[index].append(sums_of([tensors[index]]))
    torch.cuda.synchronize()
    for index, sums in enumerate(found):
        assert all(torch.equal(bits(one), wanted[index]) for one in sums)


def test_p66_gradients_on_the_cpu_and_on_the_device():
    here, there = nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(3000, device=CUDA))
    both = zclip_ext.ZClip(max_grad_norm=1.0), zclip_ext.ZClip(max_grad_norm=1.0)
    for order, zclip in zip(([here, there], [there, here]), both, strict=True):
        here.grad, there.grad = torch.full_like(here, 0.3), torch.full_like(there, 0.4)
        result = zclip.clip(order)
        assert result.grad_norm.device == order[0].device
        assert result.grad_norm.item() == pytest.approx(math.sqrt(1000 * 0.09 + 3000 * 0.16), rel=1e-6)
        total = math.sqrt(here.grad.square().sum().item() + there.grad.square().sum().item())
        assert total == pytest.approx(1.0, rel=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_p48_a_model_on_two_devices():
    parameters = [nn.Parameter(torch.zeros(5000, device=f"cuda:{index % 2}")) for index in range(4)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.1)
    with torch.cuda.device(1):
        result = zclip_ext.ZClip(max_grad_norm=1.0).clip(parameters)
        assert torch.cuda.current_device() == 1
    assert result.grad_norm.item() == pytest.approx(math.sqrt(20000 * 0.01), rel=1e-6)
    assert all(p.grad[0].item() == pytest.approx(0.1 / math.sqrt(200), rel=1e-5) for p in parameters)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_in_a_process_group(backend, tmp_path):
    alone = Run()
    for factor in FACTORS:
        alone.step(factor)
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        run = Run(group=dist.group.WORLD)
        for factor in FACTORS:
            run.step(factor)
        run.optimizer.zclip.check_consistency()
    finally:
        dist.destroy_process_group()
    assert same(run.everything(), alone.everything())


def one_of_two(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    run = Run()
    for factor in FACTORS:
        run.step(factor)
    run.optimizer.zclip.check_consistency()
    torch.save(run.everything(), f"{folder}/{rank}")
    dist.destroy_process_group()


def test_two_ranks_on_one_device(tmp_path):
    alone = Run()
    for factor in FACTORS:
        alone.step(factor)
    torch.multiprocessing.spawn(one_of_two, (tmp_path,), nprocs=2)
    for rank in range(2):
        assert same(torch.load(tmp_path / str(rank)), alone.everything())


def test_amp_with_a_grad_scaler():
    run = Run()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**15)
    for _ in range(20):
        run.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = run.model(run.batch).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(run.optimizer)
        scaler.step(run.optimizer)
        scaler.update()
    metrics = run.optimizer.zclip.metrics()
    assert metrics["samples"] > 10
    assert metrics["grad_norm"] < 100  # unscaled


def test_checkpoints_carry_the_statistics():
    run = Run()
    for factor in FACTORS[:8]:
        run.step(factor)
    state = copy.deepcopy(run.optimizer.state_dict())
    other = Run()
    other.model.load_state_dict(run.model.state_dict())
    other.optimizer.load_state_dict(state)
    for factor in FACTORS[8:]:
        run.step(factor)
        other.step(factor)
    assert same(run.everything(), other.everything())


def test_a_compiled_step():
    run = Run()
    compiled = torch.compile(run.work)
    plain = Run()
    for factor in FACTORS[:6]:
        for each, step in ((run, compiled), (plain, plain.work)):
            each.factor.fill_(factor)
            step()
    assert run.optimizer.zclip.metrics()["samples"] == 6
    assert float(run.optimizer.zclip.last) == pytest.approx(float(plain.optimizer.zclip.last), rel=1e-3)


def test_the_usual_spike():
    p = nn.Parameter(torch.zeros(1, device=CUDA))
    zclip = zclip_ext.ZClip()
    for value in [*usual_norms(), 40.0]:
        p.grad = torch.full_like(p, value)
        result = zclip.step([p])
    assert result.is_spike
    assert p.grad.item() == pytest.approx(result.threshold.item())
