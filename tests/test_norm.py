"""The sum of squares and the scaling: cases D of the field (tests/cases.md), odd lists, and equal bits everywhere."""

import math
import threading
import tracemalloc

import pytest
import torch
from helpers import parameter, seeded, set_norm, step, warmed
from torch import nn

import zclip_ext
from zclip_ext import ops
from zclip_ext.gradients import held_by

CPU = torch.device("cpu")
DTYPES = ops.DTYPES


def norm_of(grads):
    sums = ops.local_sumsq(list(grads), CPU)
    assert sums[1] == 0
    return sums[0].sqrt().item()


def exact_norm(grads):
    wide = [g.to(torch.complex128 if g.is_complex() else torch.float64).abs() for g in grads]
    return math.sqrt(math.fsum((w * w).sum().item() for w in wide))


def random_gradient(rng, dtype, size):
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    values = torch.randn(size, dtype=wide, generator=generator)
    return (values * rng.choice([1.0, 1e-3, 300.0])).to(dtype)


def odd_lists(rng):
    """Gradients of all dtypes, sizes around the kernel's chunk and block, and all kinds of strides."""
    grads = []
    for _ in range(rng.randint(1, 10)):
        dtype = rng.choice(DTYPES)
        size = rng.choice([0, 1, 2, 63, 64, 65, 127, 2047, 2048, 2049, 5000, 131072, 131073, 280000])
        grad = random_gradient(rng, dtype, size)
        kind = rng.choice(["plain", "plain", "transposed", "sliced", "channels", "expanded", "conjugate"])
        if kind == "transposed" and size and size % 4 == 0:
            grad = grad.view(4, size // 4).t()
        elif kind == "sliced" and size > 2:
            grad = grad[::2]
        elif kind == "channels" and size and size % 64 == 0:
            grad = grad.view(1, 4, 4, size // 16).contiguous(memory_format=torch.channels_last)
        elif kind == "expanded" and size:
            grad = grad[:1].expand(7, 3)
        elif kind == "conjugate" and dtype.is_complex:
            grad = grad.conj()
        grads.append(grad)
    return grads


def copies(grads):
    """The same values and strides in memory of their own; expanded and conjugated ones stay so."""

    def copied(grad):
        if grad.is_conj():
            return copied(grad.conj()).conj()
        if 0 in grad.stride():
            return grad[:1, :1].clone().expand_as(grad)
        return torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype).copy_(grad)

    return [copied(grad) for grad in grads]


@pytest.mark.parametrize("seed", range(15))
def test_agrees_with_float64(any_backend, seed):
    grads = odd_lists(seeded(seed))
    assert norm_of(grads) == pytest.approx(exact_norm(grads), rel=1e-6)


@pytest.mark.parametrize("seed", range(15))
def test_backends_give_the_same_bits(monkeypatch, seed):
    rng = seeded(100 + seed)
    grads = odd_lists(rng)
    scale = torch.tensor(rng.choice([0.5, 1 / 3, 1e-5, 1e-20]), dtype=torch.float64)
    compiled, scaled = ops.local_sumsq(grads, CPU), copies(grads)
    strides = [grad.stride() for grad in scaled]
    ops.scale_(scaled, scale)
    monkeypatch.setattr(ops, "_compiled", None)
    assert torch.equal(ops.local_sumsq(grads, CPU), compiled)
    scaled_too = copies(grads)
    ops.scale_(scaled_too, scale)
    for first, second in zip(scaled, scaled_too, strict=True):
        assert torch.equal(first.resolve_conj(), second.resolve_conj())
    assert [grad.stride() for grad in scaled] == strides


def test_same_bits_for_any_number_of_threads():
    grads = [torch.randn(300_000), torch.randn(2_000_000).bfloat16(), *(torch.randn(7) for _ in range(3000))]
    before = torch.get_num_threads()
    try:
        sums = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            sums.append(ops.local_sumsq(grads, CPU))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(total, sums[0]) for total in sums)


def test_p49_same_bits_every_time(backend):
    grads = [torch.randn(1_000_000), torch.randn(3, 5)]  # enough for several threads
    first = ops.local_sumsq(grads, CPU)
    assert all(torch.equal(ops.local_sumsq(grads, CPU), first) for _ in range(100))


def test_p42_fp16_squares_do_not_overflow(any_backend):
    p = parameter([300.0], torch.float16)
    result = zclip_ext.ZClip(max_grad_norm=1.0).step([p])
    assert float(result) == 300.0
    assert abs(p.grad.item() - 1.0) <= 2**-10  # one ulp
    # The dtype of the first parameter says nothing of the others.
    mixed = [parameter([0.0], torch.float16), parameter([3000.0, 4000.0])]
    assert float(zclip_ext.ZClip().step(mixed)) == 5000.0


def test_p44_bf16_keeps_digits_however_it_is_split(backend):
    grads = [torch.randn(1000).bfloat16() for _ in range(1000)]
    norm = norm_of(grads)
    assert norm == pytest.approx(exact_norm(grads), rel=1e-6)
    for groups in (1, 2, 7):
        parts = [grads[index::groups] for index in range(groups)]
        assert math.sqrt(sum(norm_of(part) ** 2 for part in parts)) == pytest.approx(norm, rel=1e-6)


def test_p45_sums_are_float64_whatever_the_gradients(any_backend):
    sums = ops.local_sumsq([torch.full((10,), 1e-20, dtype=torch.bfloat16)], CPU)
    assert sums.dtype == torch.float64
    assert sums[0].sqrt().item() == pytest.approx(1e-20 * math.sqrt(10), rel=1e-2)  # bf16 rounds 1e-20 itself


def test_p46_a_hundred_million_ones():
    # A float32 running sum stops at 2**24 = 16.8 million, a norm of 4096.
    assert norm_of([torch.ones(100_000_000)]) == 10_000.0


def test_p50_sparse_gradients(any_backend):
    def sparse():
        p = nn.Parameter(torch.zeros(4, 1))
        p.grad = torch.sparse_coo_tensor([[0, 0]], [[3.0], [4.0]], (4, 1), check_invariants=True)
        return p

    assert float(zclip_ext.ZClip().step([sparse()])) == 7.0
    p, dense = sparse(), parameter([24.0])
    result = zclip_ext.ZClip(max_grad_norm=5.0).step([p, dense])
    assert float(result) == 25.0
    assert p.grad.is_sparse
    assert p.grad.to_dense()[0].item() == pytest.approx(7 / 5, rel=1e-6)
    assert dense.grad.item() == pytest.approx(24 / 5, rel=1e-6)


def test_p50_an_embedding_trains(any_backend):
    embedding = nn.Embedding(10, 3, sparse=True)
    optimizer = zclip_ext.ZClipOptimizer(torch.optim.SparseAdam(embedding.parameters()), max_grad_norm=1.0)
    (embedding(torch.tensor([1, 1, 2])) * 100).sum().backward()
    before = embedding.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(embedding.weight, before)
    assert optimizer.zclip.metrics()["clipped_norm"] == pytest.approx(1.0)


def test_p51_complex(any_backend):
    p = parameter([3 + 4j], torch.complex64)
    assert float(zclip_ext.ZClip(max_grad_norm=1.0).step([p])) == 5.0
    assert p.grad.item() == pytest.approx(0.6 + 0.8j, rel=1e-6)


def test_p54_a_dry_run_writes_nothing(any_backend):
    zclip, p = warmed(dry_run=True, max_grad_norm=0.5)
    q = parameter([math.inf, 2.0, math.nan])
    before, version = q.grad.clone(), q.grad._version
    result = zclip.step([q])
    assert not result.is_finite
    assert torch.equal(q.grad.nan_to_num(nan=-1.0), before.nan_to_num(nan=-1.0))
    assert q.grad._version == version
    big = step(zclip, p, 40.0)
    assert big.is_spike
    assert p.grad.item() == 40.0


def test_p55_no_object_per_tensor():
    parameters = [parameter([0.001]) for _ in range(5000)]
    optimizer = zclip_ext.ZClipOptimizer(torch.optim.SGD(parameters, lr=0.1))
    optimizer.step()
    tracemalloc.start()
    try:
        optimizer.zclip.clip(held_by(optimizer))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5000 * 24  # the list of parameters is 8 bytes each; an object each would be 64 and more


def test_p56_no_copy_of_the_gradients(backend):
    grads = [torch.randn(5_000_000).bfloat16() for _ in range(10)]
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not func.is_view:
                largest.append(out.numel() * out.element_size())
            return out

    with Watch():
        ops.local_sumsq(grads, CPU)
        ops.scale_(grads, torch.tensor(0.5, dtype=torch.float64))
    assert max(largest) < 20e6


@pytest.mark.parametrize("value", [1e20, 1e-25, 1e38, 1e-40])
def test_extreme_values_are_finite_and_right(any_backend, value):
    p = parameter([value, value, 0.0])
    norm = exact_norm([p.grad])
    result = zclip_ext.ZClip(max_grad_norm=norm / 7).step([p])
    assert result.is_finite
    assert float(result) == pytest.approx(norm, rel=1e-6)
    assert exact_norm([p.grad]) == pytest.approx(norm / 7, rel=1e-5 if value > 1e-30 else 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("size", [1, 100, 5000, 140_000])
def test_counts_what_is_not_finite(any_backend, dtype, bad, size):
    grad = torch.ones(size, dtype=dtype)
    grad[size // 2] = bad
    grad[-1] = bad
    assert ops.local_sumsq([torch.ones(3), grad], CPU)[1] == (1 if size == 1 else 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_among_others_and_smallest_numbers(any_backend, dtype):
    """A chunk of zeros is known as one, a chunk of numbers whose squares vanish in float32 is no such chunk."""
    mixed = torch.zeros(20_001, dtype=dtype)
    mixed[:3] = 2.0
    mixed[5000] = -0.0
    assert norm_of([mixed]) == math.sqrt(12.0)
    tiny = torch.zeros(20_001, dtype=dtype)
    tiny[-1] = max(torch.finfo(dtype).smallest_normal, 1e-150)
    assert norm_of([tiny]) == pytest.approx(tiny[-1].abs().item(), rel=1e-15)
    assert norm_of([torch.full((5000,), -0.0, dtype=dtype)]) == 0.0


def test_chunks_whose_squares_leave_float32_are_not_called_infinite(any_backend):
    grad = torch.full((2048,), 3e19)  # each square is 9e38, above the largest float32
    sums = ops.local_sumsq([grad], CPU)
    assert sums[1] == 0
    assert sums[0].sqrt().item() == pytest.approx(3e19 * math.sqrt(2048), rel=1e-6)


def test_a_gradient_that_autograd_holds_without_memory(any_backend):
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch._efficientzerotensor(3)
    assert float(zclip_ext.ZClip(max_grad_norm=1.0).step([p, parameter([3.0])])) == 3.0
    assert (p.grad + torch.zeros(3)).tolist() == [0.0] * 3


def test_memory_that_is_shared_until_written_stays_the_others(any_backend):
    x = torch.ones(4)
    p = nn.Parameter(torch.zeros(4))
    p.grad = torch._lazy_clone(x)
    zclip_ext.ZClip(max_grad_norm=0.1).step([p])
    assert x.tolist() == [1.0] * 4
    assert p.grad.norm().item() == pytest.approx(0.1)


def test_subnormal_halves_count_where_subnormal_floats_are_flushed(any_backend):
    p = parameter([1e-6] * 10, torch.float16)
    norm = exact_norm([p.grad])
    assert torch.set_flush_denormal(True)
    try:
        assert float(zclip_ext.ZClip(max_grad_norm=norm / 2).step([p])) == pytest.approx(norm, rel=1e-6)
    finally:
        torch.set_flush_denormal(False)
    assert exact_norm([p.grad]) == pytest.approx(norm / 2, rel=0.1)  # few bits are left of such small numbers


def test_empty_scalar_and_missing_gradients(any_backend):
    empty, scalar, missing = parameter([]), parameter(3.0), nn.Parameter(torch.zeros(2))
    result = zclip_ext.ZClip(max_grad_norm=1.0).step([empty, scalar, missing])
    assert float(result) == 3.0
    assert scalar.grad.item() == pytest.approx(1.0, rel=1e-6)
    assert missing.grad is None


def test_p41_a_tied_parameter_counts_once(any_backend):
    p = parameter([3.0])
    assert float(zclip_ext.ZClip(max_grad_norm=1.0).step([p, p])) == 3.0
    assert p.grad.item() == pytest.approx(1.0, rel=1e-6)


def test_p41_shared_memory_is_scaled_once(any_backend):
    flat = torch.tensor([1.0, 2.0, 2.0, 4.0])
    first, second, third = (nn.Parameter(torch.zeros(n)) for n in (2, 2, 3))
    first.grad, second.grad, third.grad = flat[:2], flat[2:], flat[1:]
    ops.scale_([first.grad, second.grad, third.grad], torch.tensor(0.5, dtype=torch.float64))
    assert flat.tolist() == [0.5, 1.0, 1.0, 2.0]


def test_an_expanded_gradient_is_scaled_once(any_backend):
    p = nn.Parameter(torch.zeros(2, 2))
    p.grad = torch.tensor([[3.0]]).expand(2, 2)
    assert float(zclip_ext.ZClip(max_grad_norm=3.0).step([p])) == 6.0
    assert p.grad.tolist() == [[1.5, 1.5], [1.5, 1.5]]


def test_scaling_is_seen_by_autograd(any_backend):
    p = parameter([30.0])
    version = p.grad._version
    zclip_ext.ZClip(max_grad_norm=1.0).step([p])
    assert p.grad._version > version


def test_a_normal_step_writes_no_gradient(any_backend):
    zclip, p = warmed()
    set_norm([p], 1.0)
    version = p.grad._version
    assert zclip.step([p]).scale == 1.0
    assert p.grad._version == version
    assert p.grad.item() == 1.0


@pytest.mark.parametrize(
    ("grad", "problem"),
    [
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "float8_e4m3fn"),
        (torch.zeros(2, 2).to_sparse_csr(), "sparse_csr"),
        (torch.zeros(2, device="meta"), "meta"),
    ],
)
def test_an_unsupported_gradient_is_named(any_backend, grad, problem):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fine = parameter([1.0])
            self.odd = nn.Parameter(torch.zeros_like(grad, memory_format=torch.preserve_format), requires_grad=False)
            self.odd.grad = grad

    model, zclip = Model(), zclip_ext.ZClip()
    with pytest.raises(TypeError, match=rf"parameter 'odd'.*{problem}"):
        zclip.step(model)
    with pytest.raises(TypeError, match=rf"parameter 1 .*{problem}"):
        zclip.step(list(model.parameters()))
    assert zclip.state_dict()["steps"] == 0


def test_threads_of_the_caller_do_not_mix():
    grads = [[torch.full((50_000,), float(index))] for index in range(8)]
    found = {}

    def run(index):
        found[index] = [norm_of(grads[index]) for _ in range(20)]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for index in range(8):
        assert found[index] == [pytest.approx(index * math.sqrt(50_000), rel=1e-6)] * 20
