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
    loaded.host_cuda_ticket.restype = ctypes.c_uint
    return loaded


def use(driver=NEW_DRIVER, seed=0, fails=False):
    """The driver's version, the order in which thread blocks run (0: as numbered), and whether launches fail."""
    library().host_cuda_set(driver, ctypes.c_uint(seed), fails)


def launches():
    """How many kernels were launched since the last call."""
    return library().host_cuda_launches()


class Gradients:
    """What the extension's gather gives: tensors, each once, as C arrays of pointers, sizes and dtypes."""

    place = -1  # the CPU

    def __init__(self, tensors):
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
    """The operations of the extension by the CUDA kernels."""

    cuda = False

    @staticmethod
    def gather(objects, are_parameters):
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
        return Gradients(tensors) if plain else None

    @staticmethod
    def local_sumsq(grads, out, threads):
        assert library().host_sum_of_squares(*grads.arguments, pointer(out))

    @staticmethod
    def scale(grads, factor, threads):
        for tensor in grads.tensors:
            torch._C._increment_version([tensor])
        assert library().host_scale(*grads.arguments, ctypes.byref(ctypes.c_double(factor)))

    @staticmethod
    def decide(sums, state, config, record, left_out=None):
        flag = None if left_out is None else pointer(left_out)
        assert library().host_decide(pointer(sums), pointer(config), pointer(state), pointer(record), flag)
