"""The CUDA kernels' sources on the CPU (tests/csrc/host_cuda), in the place of the compiled extension."""

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
SHIM = ROOT / "tests" / "csrc"
KERNELS = [ROOT / "csrc" / name for name in ("norm_cuda.cu", "rule_cuda.cu")]
FLAGS = ["-std=c++20", "-ffp-contract=off", "-fno-strict-aliasing", "-pthread", "-Wall", "-Wextra", "-Werror"]
FLAGS += ["-Wno-unknown-pragmas", f"-I{SHIM / 'host_cuda'}", f"-I{ROOT / 'csrc'}"]
DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
NEW_DRIVER, OLD_DRIVER = 13000, 12000


def compile_kernels(binary, *flags, sources):
    """The kernels with other sources, by the C++ compiler."""
    command = [os.environ.get("CXX", "c++"), *FLAGS, *flags, "-x", "c++", *KERNELS, *sources, "-o", binary]
    subprocess.run(list(map(str, command)), check=True, timeout=300)


@functools.cache
def library():
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernels.so"
        compile_kernels(binary, "-O2", "-shared", "-fPIC", sources=[SHIM / "host_kernels.cpp"])
        loaded = ctypes.CDLL(str(binary))
    for name in ("host_sum_of_squares", "host_scale", "host_decide"):
        getattr(loaded, name).restype = ctypes.c_bool
    loaded.host_workspace.restype = ctypes.c_int64
    return loaded


def use(driver=NEW_DRIVER, seed=0, fails=False):
    """The driver's version, the order in which thread blocks run (0: as numbered), and whether launches fail."""
    library().host_cuda_set(driver, ctypes.c_uint(seed), fails)


def launches():
    """How many kernels were launched since the last call."""
    return library().host_cuda_launches()


class Gradients:
    """What the extension's gather gives: tensors, each once, as C arrays of pointers, sizes and dtypes."""

    def __init__(self, tensors, place=-1):
        self.place = place
        self.tensors = list({id(tensor): tensor for tensor in tensors}.values())
        flats = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in self.tensors]
        count = len(flats)
        self.arguments = (
            count,
            (ctypes.c_void_p * count)(*(flat.data_ptr() for flat in flats)),
            (ctypes.c_int64 * count)(*(flat.numel() for flat in flats)),
            (ctypes.c_int * count)(*(DTYPES[flat.dtype] for flat in flats)),
        )

    def __len__(self):
        return len(self.tensors)


def pointer(tensor):
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


class HostKernels:
    """The operations of the extension for the CPU, by the CUDA kernels."""

    cuda = False
    place = -1  # the CPU

    @classmethod
    def gather(cls, objects, are_parameters):
        tensors = [grad for item in objects if (grad := item.grad if are_parameters else item) is not None]
        plain = all(
            tensor.device.type == "cpu"
            and not hasattr(type(tensor), "__tensor_flatten__")
            and tensor.layout == torch.strided
            and tensor.is_contiguous()
            and not tensor.is_conj()
            and not tensor._is_zerotensor()
            and (torch.view_as_real(tensor) if tensor.is_complex() else tensor).dtype in DTYPES
            for tensor in tensors
        )
        return Gradients(tensors, cls.place) if plain else None

    @classmethod
    def local_sumsq(cls, grads, out, threads):
        space = torch.empty(DeviceKernels.workspace(grads), dtype=torch.float64)
        DeviceKernels.local_sumsq_cuda(grads, space, torch.zeros(1, dtype=torch.int32), out, 0)

    @staticmethod
    def scale(grads, factor, threads):
        DeviceKernels.scale_cuda(grads, torch.tensor(factor, dtype=torch.float64), 0)

    @staticmethod
    def decide(sums, state, config, record):
        DeviceKernels.decide_cuda(sums, state, config, record, None, 0, 0)


class DeviceKernels(HostKernels):
    """The operations of the extension for a device whose memory is the CPU's."""

    cuda = True
    place = 0

    @staticmethod
    def workspace(grads):
        return library().host_workspace(*grads.arguments)

    @staticmethod
    def local_sumsq_cuda(grads, workspace, ticket, out, stream):
        done = library().host_sum_of_squares(*grads.arguments, pointer(workspace), pointer(ticket), pointer(out))
        check(done)

    @staticmethod
    def scale_cuda(grads, factor, stream):
        for tensor in grads.tensors:
            torch._C._increment_version([tensor])
        check(library().host_scale(*grads.arguments, pointer(factor)))

    @staticmethod
    def decide_cuda(sums, state, config, record, left_out, place, stream):
        flag = None if left_out is None else pointer(left_out)
        check(library().host_decide(pointer(sums), pointer(config), pointer(state), pointer(record), flag))


def check(done):
    if not done:
        raise RuntimeError("a launch failed")
