"""The compiled extension, as it is found: prebuilt, then from the cache or built into it, then none."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from . import _build

_PACKAGE = Path(__file__).resolve().parent
_NO_CUDA = (
    "zclip_ext runs in pure torch on CUDA: its kernels could not be had ({reason}); decisions are the same, steps are "
    "slower. Remedy: install the CUDA toolkit that this torch is for, or set ZCLIP_CUDA=0 to choose this without a "
    "warning."
)
_NO_EXTENSION = (
    "zclip_ext runs in pure torch: its compiled extension could not be loaded ({reason}); results are the same, steps "
    "are slower. Remedy: install a C++ compiler (g++) and ninja, or set ZCLIP_BACKEND=torch to choose this without a "
    "warning."
)


def load() -> ModuleType | None:
    """The extension, or None where pure torch is to be used.

    ``ZCLIP_BACKEND`` in the environment: ``torch`` asks for None, ``compiled`` raises where the extension can't be had;
    without it a failure is one warning that tells the reason and the remedy. ``ZCLIP_CUDA``: 1 raises where the
    extension can't be had with CUDA kernels, 0 asks for none; without it they are wanted where there is a card, and a
    failure is a warning.
    """
    wanted = os.environ.get("ZCLIP_BACKEND", "")
    if wanted not in ("", "compiled", "torch"):
        raise ValueError(f"ZCLIP_BACKEND: got {wanted!r}, allowed is 'compiled', 'torch' or unset")
    demands_cuda = _build.wanted_cuda()
    if wanted == "torch":
        return None
    if demands_cuda is None and _sees_a_card():
        try:
            return _find(cuda=True)
        except Exception as reason:
            warnings.warn(_NO_CUDA.format(reason=_brief(reason)), stacklevel=2)
    try:
        return _find(cuda=bool(demands_cuda))
    except Exception as reason:
        if wanted == "compiled" or demands_cuda:
            demand = "ZCLIP_CUDA=1" if demands_cuda else "ZCLIP_BACKEND=compiled"
            raise ImportError(f"{demand}, but the extension could not be loaded: {reason}") from reason
        warnings.warn(_NO_EXTENSION.format(reason=_brief(reason)), stacklevel=2)
        return None


def _sees_a_card() -> bool:
    """Without starting CUDA, which no process that forks later could use."""
    import torch

    return torch.version.cuda is not None and torch.cuda.device_count() > 0


def _brief(reason: Exception) -> str:
    lines = [line for line in str(reason).splitlines() if line.strip()]
    telling = [line for line in lines if "error:" in line] or lines or [type(reason).__name__]
    return telling[0].strip()[:300]


def _find(*, cuda: bool) -> ModuleType:
    return _prebuilt(cuda=cuda) or _built(cuda=cuda)


def _from_file(path: Path, *, cuda: bool) -> ModuleType | None:
    """The module in a file.

    None where it was built from other sources, for another torch, without the CUDA that is wanted, or doesn't load.
    """
    try:
        module = _import(path)
    except ImportError:
        return None
    return module if module.fingerprint == _build.fingerprint() and (module.cuda or not cuda) else None


def _import(path: Path) -> ModuleType:
    import torch  # noqa: F401  (the libraries that the extension links to)

    # pybind11 gives one module for each full name: two builds in a process must not be mistaken for one another.
    spec = importlib.util.spec_from_file_location(f"zclip_ext.{path.parent.name}.{_build.NAME}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _prebuilt(*, cuda: bool) -> ModuleType | None:
    path = _PACKAGE / f"{_build.NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    return _from_file(path, cuda=cuda) if path.exists() else None


def _built(*, cuda: bool) -> ModuleType:
    """From the cache, or built into it: by one process, while others that import at the same time wait for it."""
    binary = _binary(cuda=cuda)
    folder, arrived = binary.parent, time.time()
    module = _from_file(binary, cuda=cuda) if binary.exists() else None
    if module is not None:
        return module
    problem = _build.why_not_cuda() if cuda else None
    if problem is not None:
        raise RuntimeError(problem)
    with _one_at_a_time(folder / "lock"):
        # Another process may have built it by now. One that is there and doesn't load is built again.
        module = _from_file(binary, cuda=cuda) if binary.exists() else None
        if module is not None:
            return module
        failure = folder / "failed"
        if failure.exists() and failure.stat().st_mtime >= arrived:  # while this one waited: it would fail here too
            raise RuntimeError(failure.read_text())
        try:
            return _build_into(binary, cuda=cuda)
        except Exception as reason:
            with contextlib.suppress(OSError):
                failure.write_text(str(reason))
            raise


def _build_into(binary: Path, *, cuda: bool) -> ModuleType:
    from torch.utils import cpp_extension

    language = "C++ and CUDA" if cuda else "C++"
    print(f"zclip_ext: building its {language} extension, once, into {binary.parent} ...", file=sys.stderr, flush=True)
    start = time.perf_counter()
    parameters = _build.parameters(cuda=cuda)
    with tempfile.TemporaryDirectory(dir=binary.parent) as scratch, _ninja_on_path():
        # Not imported from here: pybind11 lets a module start once, and it is to be known by the name it keeps.
        cpp_extension.load(
            name=binary.stem,
            sources=parameters["sources"],
            extra_cflags=parameters["cxx"],
            extra_cuda_cflags=parameters["nvcc"],
            extra_ldflags=parameters["link"],
            build_directory=scratch,
            with_cuda=cuda,
            is_python_module=False,
        )
        # A process that builds a second time has it under a name that torch numbers.
        (built,) = Path(scratch).glob("*.so")
        # Renaming is atomic: a process without the lock sees the whole file or none.
        os.replace(built, binary)
    print(f"zclip_ext: built in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    return _import(binary)


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


def _binary(*, cuda: bool) -> Path:
    """Where the cache has this build, or is to have it."""
    name = f"{_build.NAME}.so"
    return _cache_folder(name, cuda=cuda) / name


def _cache_folder(name: str, *, cuda: bool) -> Path:
    """This build's folder, which can be written: in TORCH_EXTENSIONS_DIR where set, as for any extension of torch; else
    in the user's cache; else a new one for this process alone.
    """
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "zclip_ext" / _build.key(cuda=cuda)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / name).exists():
            return folder
        with open(folder / "lock", "a"):
            return folder
    except OSError:
        # Not a fixed name in a folder that others can write to: they could lay their own binary there.
        return Path(tempfile.mkdtemp(prefix="zclip_ext-"))
