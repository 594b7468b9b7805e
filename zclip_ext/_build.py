"""How the extension is built: its sources and flags, with CUDA or without, and what a binary depends on.

``setup.py`` reads this file without the package, so nothing but torch is imported on top of the standard library.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

NAME = "_zclip_C"  # as bindings.cpp has it

_PACKAGE = Path(__file__).resolve().parent
_CPU_SOURCES = ("bindings.cpp", "norm_cpu.cpp")
_CUDA_SOURCES = ("norm_cuda.cu", "rule_cuda.cu")
#: No contraction, here and for nvcc: all kernels give the same bits.
CXX_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-g0", "-Wall", "-Wextra")
CUDA_FLAGS = ("-O3", "--fmad=false", "-Xcompiler", "-Wall,-Wextra")
#: Compute capability 7.0: older cards take fewer parameters of a kernel.
OLDEST_CAPABILITY = 70


def source_folder() -> Path:
    """csrc/ beside the package in a checkout, inside it where it is installed."""
    inside = _PACKAGE / "csrc"
    return inside if inside.is_dir() else _PACKAGE.parent / "csrc"


def parameters(*, cuda: bool) -> dict[str, Any]:
    """Sources and flags, by language, for torch's build helpers. Imports torch."""
    folder = source_folder()
    compile_args = [*CXX_FLAGS, f"-DZCLIP_FINGERPRINT={fingerprint()}"]
    link_args = []
    openmp = _openmp_of_torch()
    if openmp is not None:
        # The library that torch has loaded, so that its threads are used and no second pool is made.
        compile_args.append("-fopenmp")
        link_args += [f"-L{openmp.parent}", f"-l:{openmp.name}"]
    nvcc_args = []
    if cuda:
        nvcc_args = [*CUDA_FLAGS, *_architectures()]
        compile_args.append("-DZCLIP_WITH_CUDA")
        link_args += [f"-L{path}" for path in _libraries(toolkit() or Path())]
    return {
        "sources": [str(folder / source) for source in _CPU_SOURCES + (_CUDA_SOURCES if cuda else ())],
        "cxx": compile_args,
        "nvcc": nvcc_args,
        "link": link_args,
    }


def key(*, cuda: bool) -> str:
    """Names a build by all that it depends on."""
    names = ("CXX", *(("TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH") if cuda else ()))
    flags = (CXX_FLAGS, CUDA_FLAGS if cuda else None)
    choices = (flags, _openmp_of_torch(), [os.environ.get(name, "") for name in names])
    machine = (sysconfig.get_config_var("EXT_SUFFIX"), platform.machine())
    return f"{fingerprint()}-{hashlib.sha256(repr((choices, machine)).encode()).hexdigest()[:8]}"


@functools.cache
def fingerprint() -> str:
    """The sources and the torch that a binary is for; compiled into it."""
    import torch

    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(source_folder().glob("*")):
        if path.suffix in (".h", ".cpp", ".cu"):
            digest.update(path.name.encode() + path.read_bytes())
    return f"z{digest.hexdigest()[:16]}"  # one word, which needs no quotes on its way through the compiler


def toolkit() -> Path | None:
    """The folder of the CUDA toolkit: what ``CUDA_HOME`` names, else nvcc's, else the usual one.

    The one on the PATH may be a link or a script that stands elsewhere than the toolkit's libraries.
    """
    home, found = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"), shutil.which("nvcc")
    folders = [Path(home)] if home else [Path("/usr/local/cuda")]
    if not home and found is not None:
        folders.insert(0, Path(found).resolve().parent.parent)
    folders = [folder for folder in folders if (folder / "bin" / "nvcc").exists()]
    return next((folder for folder in folders if _libraries(folder)), folders[0] if folders else None)


def _libraries(folder: Path) -> list[Path]:
    """Where a toolkit keeps the runtime to link against."""
    return [path for name in ("lib64", "lib") if ((path := folder / name) / "libcudart.so").exists()]


def why_not_cuda() -> str | None:
    """Why CUDA code can't be built here: no toolkit, or a torch that is for none or another. None where it can."""
    import torch

    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if toolkit() is None:
        return f"no CUDA toolkit was found: nvcc, of CUDA {torch.version.cuda} as this torch"
    release = re.search(r"release (\d+)", _nvcc("--version"))
    if release is not None and release.group(1) != torch.version.cuda.split(".")[0]:
        return f"the CUDA toolkit is of release {release.group(1)}, this torch of CUDA {torch.version.cuda}"
    return None


def _nvcc(question: str) -> str:
    command = [str((toolkit() or Path()) / "bin" / "nvcc"), question]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


def wanted_cuda() -> bool | None:
    """What ``ZCLIP_CUDA`` says: 1 demands CUDA, 0 forbids it; None where it isn't set."""
    value = os.environ.get("ZCLIP_CUDA", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"ZCLIP_CUDA: got {value!r}, allowed is '0', '1' or unset")
    return None if value == "" else value == "1"


def _architectures() -> list[str]:
    """The flags that say what CUDA code is for; none where ``TORCH_CUDA_ARCH_LIST`` does, which torch reads.

    All that torch itself runs on and nvcc knows: a build that looked at the cards of this machine only would not run on
    the next one that shares the cache. The last is added as PTX too, for cards to come.
    """
    if os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return []
    known = set(re.findall(r"compute_(\d+)\b", _nvcc("--list-gpu-arch")))
    numbers = sorted(int(number) for number in _capabilities_of_torch() & known if int(number) >= OLDEST_CAPABILITY)
    flags = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in numbers]
    return flags + [f"-gencode=arch=compute_{number},code=compute_{number}" for number in numbers[-1:]]


def _capabilities_of_torch() -> set[str]:
    """Without starting CUDA, as torch.cuda.get_arch_list() did up to 2.7."""
    import torch

    built_for = getattr(torch._C, "_cuda_getArchFlags", str)()
    return set(re.findall(r"sm_(\d+)\b", built_for or ""))


def _openmp_of_torch() -> Path | None:
    """The OpenMP library that torch has loaded, where the compiler is GCC, whose calls all of them answer.

    None: there is none, and the loops are serial.
    """
    import torch

    compiler = shutil.which(os.environ.get("CXX", "c++")) or ""
    if sys.platform != "linux" or "clang" in os.path.basename(os.path.realpath(compiler)):
        return None
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {Path(line.split()[-1]) for line in lines if line.endswith((".so", ".so.1", ".so.5")) or ".so." in line}
    found = sorted(path for path in paths if path.name.startswith(("libgomp", "libiomp", "libomp")))
    root = Path(torch.__file__).parent.parent
    return next((path for path in found if path.is_relative_to(root)), found[0] if found else None)
