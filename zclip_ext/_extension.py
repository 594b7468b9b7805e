"""The compiled extension: its sources and flags, and how it is found: prebuilt, then built on first import, then none.

``setup.py`` reads :func:`build_parameters` from this file without the package, so nothing heavy is imported on top.
"""

from __future__ import annotations

import contextlib
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

NAME = "_C"
REMEDY = (
    "install a C++17 compiler (g++) and ninja for the compiled one, or set ZCLIP_BACKEND=torch to choose this one "
    "without a warning"
)

_PACKAGE = Path(__file__).resolve().parent
_SOURCES = ("bindings.cpp", "norm_cpu.cpp")


def source_folder() -> Path:
    """csrc/ beside the package in a checkout, inside it where it is installed."""
    inside = _PACKAGE / "csrc"
    return inside if inside.is_dir() else _PACKAGE.parent / "csrc"


def build_parameters() -> dict[str, Any]:
    """What both setup.py and the build on first import hand to torch's build helpers."""
    folder = source_folder()
    compile_args = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-g0", "-Wall", "-Wextra"]
    link_args = []
    openmp = _torch_openmp()
    if openmp is not None:
        # Torch's own OpenMP library, so that its threads are used and no second pool is made.
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
        return _checked(_prebuilt() or _built())
    except Exception as reason:
        text = f"zclip_ext runs in pure torch: its compiled extension could not be loaded ({_brief(reason)})"
        if wanted == "compiled":
            raise ImportError(f"ZCLIP_BACKEND=compiled, but the extension could not be loaded: {reason}") from reason
        warnings.warn(f"{text}; results are the same, steps are slower. Remedy: {REMEDY}.", stacklevel=2)
        return None


def _brief(reason: Exception) -> str:
    lines = [line for line in str(reason).splitlines() if line.strip()]
    telling = [line for line in lines if "error:" in line] or lines or [type(reason).__name__]
    return telling[0].strip()[:300]


def _checked(module: ModuleType) -> ModuleType:
    """Refuses a binary whose layout of the state isn't this package's."""
    from . import rule

    expected = [list(rule.CONFIG_FIELDS), list(rule.STATE_FIELDS), list(rule.RECORD_FIELDS)]
    if module.layout() != expected:
        raise ImportError(f"{module.__file__} was built from other sources than this zclip_ext; build it again")
    return module


def _prebuilt() -> ModuleType | None:
    path = _PACKAGE / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    return _from_file(path) if path.exists() else None


def _from_file(path: Path) -> ModuleType:
    import torch  # noqa: F401  (the libraries that the extension links to)

    spec = importlib.util.spec_from_file_location(f"zclip_ext.{NAME}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _built() -> ModuleType:
    """From the cache, or built into it: by one process, while others that import at the same time wait for it."""
    folder = _cache_folder() / _key()
    binary = folder / f"{NAME}.so"
    if not binary.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder / "lock"):
            if not binary.exists():
                return _build(binary)
    return _from_file(binary)


def _build(binary: Path) -> ModuleType:
    from torch.utils import cpp_extension

    print(f"zclip_ext: building its C++ extension, once, into {binary.parent} ...", file=sys.stderr, flush=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=binary.parent) as scratch:
        parameters = build_parameters()
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
def _one_at_a_time(path: Path) -> Iterator[None]:
    import fcntl

    with open(path, "w") as file:
        # A file system without locks costs a second build, nothing else. A lock ends with its process.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cache_folder() -> Path:
    """TORCH_EXTENSIONS_DIR where set, as for any extension of torch; else the user's cache, else a temporary folder."""
    if root := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(root) / "zclip_ext"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    existing = next(path for path in (home, *home.parents) if path.exists())
    if os.access(existing, os.W_OK):
        return home / "zclip_ext"
    return Path(tempfile.gettempdir()) / f"zclip_ext-{os.getuid()}"


def _key() -> str:
    """Names a build by all that it depends on."""
    import torch

    digest = hashlib.sha256()
    for path in sorted(source_folder().glob("*")):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + path.read_bytes())
    parameters = build_parameters()
    flags = parameters["extra_compile_args"] + parameters["extra_link_args"]
    compiler = os.environ.get("CXX", "")
    digest.update(repr((flags, compiler, sysconfig.get_config_var("EXT_SUFFIX"), platform.machine())).encode())
    return f"torch{torch.__version__}-{digest.hexdigest()[:16]}"


def _torch_openmp() -> Path | None:
    """The OpenMP library that torch has loaded, where it is GCC's and so is the compiler; else the loops are serial."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or sys.platform != "linux":
        return None
    compiler = shutil.which(os.environ.get("CXX", "c++")) or ""
    if "clang" in os.path.basename(os.path.realpath(compiler)):
        return None
    root = Path(spec.origin).parent
    found = sorted([*root.glob("lib/libgomp*.so*"), *root.parent.glob("torch.libs/libgomp*.so*")])
    return found[0] if found else None
