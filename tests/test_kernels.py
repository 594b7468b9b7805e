"""The kernels below Python: the same bits from every instruction set and from the CUDA sources, run on the CPU
(tests/csrc/host_cuda); clean under sanitizers.
"""

import math
import mmap
import os
import platform
import subprocess

import host_kernels
import pytest
import torch
from helpers import RuleRun, random_options, rule_steps, seeded
from host_kernels import NEW_DRIVER, OLD_DRIVER, ROOT, SHIM, DeviceKernels, Gradients, HostKernels

import zclip_ext
from zclip_ext import ops, rule

SANITIZED = ["-O1", "-g", "-fno-sanitize-recover=all"]


@pytest.fixture(autouse=True)
def defaults():
    yield
    host_kernels.use()


def output_of(binary, *arguments):
    environment = {**os.environ, "LD_PRELOAD": ""}
    for prefix in ([], ["setarch", platform.machine(), "-R"]):
        command = [*prefix, binary, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
        # Older thread sanitizers can't do with addresses as random as some kernels make them.
        if "unexpected memory mapping" not in result.stderr:
            break
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def cpu_bits(folder, *flags):
    binary = folder / "norm_bits"
    sources = [SHIM / "norm_bits.cpp", ROOT / "csrc" / "norm_cpu.cpp"]
    common = ["-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fopenmp", f"-I{ROOT / 'csrc'}"]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *common, *flags, *sources, "-o", binary], check=True, timeout=120)
    return output_of(binary)


def cuda_bits(folder, *flags, arguments=()):
    binary = folder / "cuda_norm_bits"
    host_kernels.compile_kernels(binary, "-DZCLIP_HOST_CUDA", *flags, sources=[SHIM / "norm_bits.cpp"])
    return output_of(binary, *arguments)


@pytest.fixture(scope="module")
def bits(tmp_path_factory):
    return cpu_bits(tmp_path_factory.mktemp("bits"), "-O3")


def test_all_instruction_sets_give_the_same_bits(bits, tmp_path):
    assert bits.count("\n") > 200
    assert cpu_bits(tmp_path, "-O1", "-DZCLIP_ISA=") == bits
    if platform.machine() == "x86_64":
        assert cpu_bits(tmp_path, "-O3", "-DZCLIP_ISA=", "-march=haswell") == bits


def test_cuda_gives_the_same_bits(bits, tmp_path):
    assert cuda_bits(tmp_path, "-O2") == bits


def test_cpu_kernels_are_clean_under_sanitizers(tmp_path):
    cpu_bits(tmp_path, *SANITIZED, "-DZCLIP_ISA=", "-fsanitize=address,undefined")


def test_cuda_kernels_keep_to_their_memory(tmp_path):
    cuda_bits(tmp_path, *SANITIZED, "-fsanitize=address,undefined")


def test_cuda_kernels_do_not_race(tmp_path):
    cuda_bits(tmp_path, *SANITIZED, "-fsanitize=thread", arguments=["two sizes"])


def cpu_sums(tensors):
    out = torch.empty(2, dtype=torch.float64)
    ops._compiled.local_sumsq(ops._compiled.gather(tensors, False), out, 1)
    return out


def cuda_sums(tensors):
    out = torch.full((2,), math.nan, dtype=torch.float64)
    HostKernels.local_sumsq(Gradients(tensors), out, 1)
    return out


def test_the_order_in_which_blocks_end_does_not_matter():
    rng = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=rng) for size in (700_001, 3, 140_000, 2048)]
    wanted = cpu_sums(tensors)
    for seed in range(20):
        host_kernels.use(seed=seed)
        assert torch.equal(cuda_sums(tensors), wanted)


@pytest.mark.parametrize(("driver", "count", "tables"), [(OLD_DRIVER, 500, 3), (NEW_DRIVER, 1800, 2)])
def test_more_tensors_than_one_table_holds(driver, count, tables):
    rng = torch.Generator().manual_seed(1)
    dtypes = list(host_kernels.DTYPES)
    tensors = [torch.randn(index % 9, generator=rng).to(dtypes[index % 4]) for index in range(count)]
    tensors[7] = torch.randn(200_000, generator=rng)
    filled = [tensor for tensor in tensors if tensor.numel()]
    host_kernels.use(driver=driver, seed=1)
    host_kernels.launches()
    assert torch.equal(cuda_sums(tensors), cpu_sums(tensors))
    assert host_kernels.launches() == tables
    scaled, wanted = [tensor.clone() for tensor in filled], [tensor.clone() for tensor in filled]
    HostKernels.scale(Gradients(scaled), 0.3, 1)
    ops._compiled.scale(ops._compiled.gather(wanted, False), 0.3, 1)
    assert host_kernels.launches() == tables
    assert all(torch.equal(a, b) for a, b in zip(scaled, wanted, strict=True))


def test_three_launches_for_a_thousand_tensors(monkeypatch):
    monkeypatch.setattr(ops, "_compiled", HostKernels)
    model = [torch.nn.Parameter(torch.zeros(8)) for _ in range(1000)]
    for parameter in model:
        parameter.grad = torch.ones(8)
    zclip = zclip_ext.ZClip(max_grad_norm=1.0)  # so that the scale is not 1.0, which Python sees on the CPU
    host_kernels.launches()
    zclip.step(model)
    assert host_kernels.launches() == 3
    assert model[0].grad[0] == pytest.approx(1 / math.sqrt(8000))


def test_nothing_is_written_at_a_scale_of_one():
    memory = mmap.mmap(-1, 1 << 20, prot=mmap.PROT_READ)  # a write would end the process
    with pytest.warns(UserWarning, match="not writable"):
        tensor = torch.frombuffer(memory, dtype=torch.float32)
    HostKernels.scale(Gradients([tensor]), 1.0, 1)
    assert not cuda_sums([tensor]).any()


def test_a_launch_that_fails_is_an_error():
    host_kernels.use(fails=True)
    grads = Gradients([torch.ones(5)])
    with pytest.raises(RuntimeError, match="a launch failed"):
        HostKernels.local_sumsq(grads, torch.empty(2, dtype=torch.float64), 1)
    with pytest.raises(RuntimeError, match="a launch failed"):
        HostKernels.scale(grads, 0.5, 1)
    assert torch.equal(grads.tensors[0], torch.ones(5))


@pytest.mark.parametrize("log_space", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_the_rule_on_cuda_is_the_rule(seed, log_space):
    rng = seeded(9000 + seed)
    config = zclip_ext.ZClipConfig(**{**random_options(rng), "log_space": log_space})
    left_out = torch.empty(1)

    def on_cuda(*tensors):
        DeviceKernels.decide_cuda(*tensors, left_out, 0, 0)

    compiled, kernel = RuleRun(config, ops._compiled.decide), RuleRun(config, on_cuda)
    for sums in rule_steps(rng):
        for first, second in zip(compiled.step(sums), kernel.step(sums), strict=True):
            assert torch.equal(first.view(torch.int64), second.view(torch.int64)), (sums, config)
        verdict = compiled.record[rule.RECORD_FIELDS.index("verdict")]
        assert left_out.item() == float(verdict != rule.STEP)
