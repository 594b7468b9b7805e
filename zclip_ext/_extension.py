"""The compiled extension: its sources and flags, and how it is found: prebuilt, then built on first import, then none.

``setup.py`` reads :func:`build_parameters` from this file without the package, so nothing heavy is imported on top.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "_zclip_C"

_PACKAGE = Path(__file__).resolve().parent
_SOURCES = ("bindings.cpp", "norm_cpu.cpp")


def source_folder() -> Path:
    """csrc/ beside the package in a checkout, inside it where it is installed."""
    inside = _PACKAGE / "csrc"
    return inside if inside.is_dir() else _PACKAGE.parent / "csrc"


def build_parameters() -> dict[str, Any]:
    """What both setup.py and the build on first import hand to torch's build helpers. Imports torch."""
    folder = source_folder()
    compile_args = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-g0", "-Wall", "-Wextra"]
    compile_args.append(f"-DZCLIP_FINGERPRINT={_fingerprint()}")
    link_args = []
    openmp = _openmp_of_torch()
    if openmp is not None:
        # The library that torch has loaded, so that its threads are used and no second pool is made.
        compile_args.append("-fopenmp")
        link_args += [f"-L{openmp.parent}", f"-l:{openmp.name}"]
    return {
        "sources": [str(folder / source) for source in _SOURCES],
        "extra_compile_args": compile_args,
        "extra_link_args": link_args,
    }


def load() -> ModuleType | None:
    """The extension, or None where pure torch is to be used.

    ``ZCLIP_BACKEND`` in the environment: ``torch`` asks for None, ``compiled`` raises where the extension can't be had;
    without it a failure is one warning that tells the reason and the remedy.
    """
    wanted = os.environ.get("ZCLIP_BACKEND", "")
    if wanted not in ("", "compiled", "torch"):
        raise ValueError(f"ZCLIP_BACKEND: got {wanted!r}, allowed is 'compiled', 'torch' or unset")
    if wanted == "torch":
        return None
    try:
        return _prebuilt() or _built()
    except Exception as reason:
        if wanted == "compiled":
            raise ImportError(f"ZCLIP_BACKEND=compiled, but the extension could not be loaded: {reason}") from reason
        warnings.warn(
            f"zclip_ext runs in pure torch: its compiled extension could not be loaded ({_brief(reason)}); results are "
            "the same, steps are slower. Remedy: install a C++ compiler (g++) and ninja, or set ZCLIP_BACKEND=torch to "
            "choose this without a warning.",
            stacklevel=2,
        )
        return None


def _brief(reason: Exception) -> str:
    lines = [line for line in str(reason).splitlines() if line.strip()]
    telling = [line for line in lines if "error:" in line] or lines or [type(reason).__name__]
    return telling[0].strip()[:300]


def _from_file(path: Path) -> ModuleType | None:
    """The module in a file; None where the file was built from other sources, for another torch, or doesn't load."""
    import torch  # noqa: F401  (the libraries that the extension links to)

    spec = importlib.util.spec_from_file_location(f"zclip_ext.{NAME}", path)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError:
        return None
    return module if module.fingerprint == _fingerprint() else None


def _prebuilt() -> ModuleType | None:
    path = _PACKAGE / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    return _from_file(path) if path.exists() else None


def _built() -> ModuleType:
    """From the cache, or built into it: by one process, while others that import at the same time wait for it."""
    folder = _cache_folder()
    binary = folder / f"{NAME}.so"
    module = _from_file(binary) if binary.exists() else None
    if module is not None:
        return module
    with _one_at_a_time(folder / "lock"):
        # Another process may have built it by now. One that is there and doesn't load is built again.
        module = _from_file(binary) if binary.exists() else None
        return module if module is not None else _build(binary)


def _build(binary: Path) -> ModuleType:
    from torch.utils import cpp_extension

    print(f"zclip_ext: building its C++ extension, once, into {binary.parent} ...", file=sys.stderr, flush=True)
    start = time.perf_counter()
    parameters = build_parameters()
    with tempfile.TemporaryDirectory(dir=binary.parent) as scratch, _ninja_on_path():
        module: ModuleType = cpp_extension.load(
            name=NAME,
            sources=parameters["sources"],
            extra_cflags=parameters["extra_compile_args"],
            extra_ldflags=parameters["extra_link_args"],
            build_directory=scratch,
        )
        # Renaming is atomic: a process without the lock sees the whole file or none.
        os.replace(Path(scratch) / f"{NAME}.so", binary)
    print(f"zclip_ext: built in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    return module


@contextlib.contextmanager
def _ninja_on_path() -> Iterator[None]:
    """ninja is a dependency, but its script is found only where the environment is activated."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([before, sysconfig.get_path("scripts")])
    try:
        yield
    finally:
        os.environ["PATH"] = before


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    import fcntl

    with open(path, "w") as file:
        # A file system without locks costs a second build, nothing else. A lock ends with its process.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cache_folder() -> Path:
    """This build's folder, which can be written: in TORCH_EXTENSIONS_DIR where set, as for any extension of torch; else
    in the user's cache; else a new one for this process alone.
    """
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "zclip_ext" / _key()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / f"{NAME}.so").exists():
            return folder
        with open(folder / "lock", "a"):
            return folder
    except OSError:
        # Not a fixed name in a folder that others can write to: they could lay their own binary there.
        return Path(tempfile.mkdtemp(prefix="zclip_ext-"))


def _key() -> str:
    """Names a build by all that it depends on."""
    parameters = build_parameters()
    flags = parameters["extra_compile_args"] + parameters["extra_link_args"]
    choices = (flags, os.environ.get("CXX", ""), sysconfig.get_config_var("EXT_SUFFIX"), platform.machine())
    return f"{_fingerprint()}-{hashlib.sha256(repr(choices).encode()).hexdigest()[:8]}"


@functools.cache
def _fingerprint() -> str:
    """The sources and the torch that a binary is for; compiled into it."""
    import torch

    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(source_folder().glob("*")):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + path.read_bytes())
    return f"z{digest.hexdigest()[:16]}"  # one word, which needs no quotes on its way through the compiler


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
