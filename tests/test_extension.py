"""How the extension is found and built, what happens without one."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

import zclip_ext
from zclip_ext import _build, _extension, ops, rule

ROOT = Path(__file__).resolve().parent.parent
REPORT = """
import sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import zclip_ext
    ours = [str(w.message) for w in caught if "zclip_ext" in str(w.message)]
print(zclip_ext.backend(), len(ours), "torch.utils.cpp_extension" in sys.modules, *ours, sep="|")
"""


def run(code=REPORT, *, path=ROOT, **environment):
    """A new process that imports the package from `path`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ZCLIP_")}
    variables = {**clean, "PYTHONPATH": str(path), **{name: str(value) for name, value in environment.items()}}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=variables,
        cwd=path,  # which -c puts before PYTHONPATH
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(process):
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return out.strip().split("|"), error


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache that four processes filled at the same time."""
    folder = tmp_path_factory.mktemp("cache")
    results = [outcome(process) for process in [run(TORCH_EXTENSIONS_DIR=folder) for _ in range(4)]]
    assert [fields[:2] for fields, _ in results] == [["compiled", "0"]] * 4
    assert sum("building its C++ extension" in error for _, error in results) == 1
    assert sum("zclip_ext: built in" in error for _, error in results) == 1
    return folder


def test_a_later_import_builds_nothing(cache):
    (name, warned, built_again), error = outcome(run(TORCH_EXTENSIONS_DIR=cache))
    assert (name, warned, built_again, error) == ("compiled", "0", "False", "")


def test_a_build_that_was_killed_leaves_nothing_in_the_way(cache, tmp_path):
    # What a killed process leaves: the lock file, whose lock has gone with it, and half a build.
    (key,) = (cache / "zclip_ext").iterdir()
    left = tmp_path / "zclip_ext" / key.name
    (left / "tmp123").mkdir(parents=True)
    (left / "lock").touch()
    (left / "tmp123" / "lock").touch()
    fields, _ = outcome(run(TORCH_EXTENSIONS_DIR=tmp_path))
    assert fields[0] == "compiled"


def test_without_a_compiler_it_runs_in_torch(tmp_path):
    no_compiler = {"PATH": str(tmp_path), "CXX": str(tmp_path / "none"), "TORCH_EXTENSIONS_DIR": tmp_path / "cache"}
    fields, _ = outcome(run(**no_compiler))
    assert fields[:2] == ["torch", "1"]
    assert "could not be loaded" in fields[3]
    assert "Remedy: install a C++ compiler" in fields[3]
    quiet, _ = outcome(run(ZCLIP_BACKEND="torch", **no_compiler))
    assert quiet[:2] == ["torch", "0"]
    process = run(ZCLIP_BACKEND="compiled", **no_compiler)
    _, error = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "ImportError: ZCLIP_BACKEND=compiled, but the extension could not be loaded" in error


def test_a_build_that_fails_is_told_with_its_reason(tmp_path):
    for name in ("zclip_ext", "csrc"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (tmp_path / "csrc" / "norm_cpu.cpp").write_text("this is no C++\n")
    fields, _ = outcome(run(path=tmp_path, TORCH_EXTENSIONS_DIR=tmp_path / "cache"))
    assert fields[:2] == ["torch", "1"]
    assert "norm_cpu.cpp:1:1: error: " in fields[3]


def test_the_backend_is_one_of_two():
    process = run(ZCLIP_BACKEND="cuda")
    _, error = process.communicate(timeout=300)
    assert "ValueError: ZCLIP_BACKEND: got 'cuda', allowed is 'compiled', 'torch' or unset" in error


def test_where_it_is_built(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "deep" / "cache"))
    assert _extension._binary(cuda=False).parent.parent == tmp_path / "deep" / "cache" / "zclip_ext"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "chosen"))
    assert _extension._binary(cuda=False).parent.parent == tmp_path / "chosen" / "zclip_ext"
    # Root may write anywhere, so a file stands where the folder should be.
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    alone = [_extension._binary(cuda=False).parent for _ in range(2)]
    assert alone[0] != alone[1]
    for folder in alone:
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.rmdir()


def test_a_binary_of_other_sources_is_built_again(cache, tmp_path):
    (key,) = (cache / "zclip_ext").iterdir()
    for name in ("zclip_ext", "csrc"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    with open(tmp_path / "csrc" / "norm_cpu.h", "a") as header:
        header.write("// changed\n")
    # The old binary as if it were prebuilt.
    prebuilt = f"{_build.NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    shutil.copy2(key / f"{_build.NAME}.so", tmp_path / "zclip_ext" / prebuilt)
    fields, error = outcome(run(path=tmp_path, TORCH_EXTENSIONS_DIR=tmp_path / "cache"))
    assert fields[:2] == ["compiled", "0"]
    assert "building its C++ extension" in error


def test_a_binary_that_does_not_load_is_built_again(cache, tmp_path):
    (key,) = (cache / "zclip_ext").iterdir()
    broken = tmp_path / "zclip_ext" / key.name
    broken.mkdir(parents=True)
    (broken / f"{_build.NAME}.so").write_text("no library")
    fields, _ = outcome(run(TORCH_EXTENSIONS_DIR=tmp_path))
    assert fields[:2] == ["compiled", "0"]
    (_, _, built_again), _ = outcome(run(TORCH_EXTENSIONS_DIR=tmp_path))
    assert built_again == "False"


def test_a_process_that_built_it_may_load_it_again_or_build_another(tmp_path):
    # As when the package is reloaded, when a cache is emptied, and with CUDA that fails after a build without it.
    code = f"""
import os
from zclip_ext import _extension, ops
again = _extension.load()
os.environ.update(TORCH_EXTENSIONS_DIR={str(tmp_path / "b")!r}, CXX="g++")
other = _extension.load()
print(ops.backend(), again.fingerprint == other.fingerprint, again.__file__ == ops._compiled.__file__, other.__file__)
"""
    (fields,), error = outcome(run(code, TORCH_EXTENSIONS_DIR=tmp_path / "a"))
    name, same, again, other = fields.split()
    assert (name, same, again) == ("compiled", "True", "True")
    assert other.startswith(str(tmp_path / "b"))
    assert error.count("building its C++ extension") == 2
    fields, error = outcome(run(TORCH_EXTENSIONS_DIR=tmp_path / "b", CXX="g++"))  # what the second left is whole
    assert (fields[0], error) == ("compiled", "")


def test_ninja_is_found_beside_python(tmp_path):
    # As in an environment that is not activated, on a machine without a ninja of its own.
    for tool in ("c++", "g++", "cc", "gcc", "as", "ld", "ld.bfd", "sh", "which", "uname"):
        if shutil.which(tool):
            (tmp_path / tool).symlink_to(shutil.which(tool))
    fields, _ = outcome(run(PATH=str(tmp_path), TORCH_EXTENSIONS_DIR=tmp_path / "cache"))
    assert fields[:2] == ["compiled", "0"]


def test_layouts_agree():
    layout = [list(rule.CONFIG_FIELDS), list(rule.STATE_FIELDS), list(rule.RECORD_FIELDS)]
    assert ops._compiled.layout() == layout


def test_kernels_use_the_threads_of_torch():
    flags = _build.parameters(cuda=False)
    if "clang" in os.path.realpath(shutil.which(os.environ.get("CXX", "c++"))):
        assert "-fopenmp" not in flags["cxx"]
    else:
        assert "-fopenmp" in flags["cxx"]
        assert any("omp" in flag for flag in flags["link"])


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"ZCLIP_CUDA": "yes"}, "ValueError: ZCLIP_CUDA: got 'yes', allowed is '0', '1' or unset"),
        ({"ZCLIP_CUDA": "1"}, "ImportError: ZCLIP_CUDA=1, but the extension could not be loaded: this torch is built"),
    ],
)
def test_cuda_that_is_demanded_and_not_there_is_an_error(environment, said):
    process = run(**environment)
    _, error = process.communicate(timeout=300)
    assert process.returncode != 0
    assert said in error


def test_a_card_without_a_toolkit_is_one_warning(monkeypatch):
    monkeypatch.delenv("ZCLIP_BACKEND", raising=False)
    monkeypatch.delenv("ZCLIP_CUDA", raising=False)
    monkeypatch.setattr(_extension, "_sees_a_card", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.warns(UserWarning, match=r"pure torch on CUDA: .*nvcc, of CUDA 13.0 as this torch\)"):
        module = _extension.load()
    assert module.fingerprint == ops._compiled.fingerprint
    assert not module.cuda
    monkeypatch.setenv("ZCLIP_CUDA", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not _extension.load().cuda


def test_a_toolkit_of_another_release_is_told(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert _build.why_not_cuda() == "the CUDA toolkit is of release 12, this torch of CUDA 13.0"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert _build.why_not_cuda() is None


def test_cuda_code_that_does_not_compile_costs_no_cpu_kernels(monkeypatch, tmp_path, capfd):
    """Nor do the ranks of one launch try it one after another."""
    monkeypatch.delenv("ZCLIP_BACKEND", raising=False)
    monkeypatch.delenv("ZCLIP_CUDA", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(_extension, "_sees_a_card", lambda: True)
    monkeypatch.setattr(_build, "why_not_cuda", lambda: None)
    # Where torch has no CUDA its JIT takes the sources all the same, and fails.
    with pytest.warns(UserWarning, match="pure torch on CUDA"):
        module = _extension.load()
    assert not module.cuda
    assert module.fingerprint == _build.fingerprint()
    failure = _extension._binary(cuda=True).parent / "failed"
    later = failure.stat().st_mtime + 1000  # as if another process had failed while this one waits
    os.utime(failure, (later, later))
    capfd.readouterr()
    with pytest.raises(RuntimeError):
        _extension._built(cuda=True)
    assert "building" not in capfd.readouterr().err


def test_a_binary_without_cuda_is_not_taken_for_one_with(cache):
    (binary,) = cache.rglob("*.so")
    assert _extension._from_file(binary, cuda=False) is not None
    assert _extension._from_file(binary, cuda=True) is None


def test_cuda_code_is_built_for_the_cards_that_torch_runs_on(monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    built_for, known = (
        "sm_50 sm_80 sm_120 sm_90 sm_90a sm_100 compute_120",
        "compute_50 compute_80 compute_90 compute_120",
    )
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: built_for, raising=False)
    monkeypatch.setattr(_build, "_nvcc", lambda question: known.replace(" ", "\n"))  # it doesn't know of 100
    flags = _build.parameters(cuda=True)
    assert [flag for flag in flags["nvcc"] if "arch" in flag] == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_120,code=sm_120",
        "-gencode=arch=compute_120,code=compute_120",
    ]
    assert "--fmad=false" in flags["nvcc"]
    assert {Path(source).name for source in flags["sources"]} >= {"norm_cuda.cu", "rule_cuda.cu", "norm_cpu.cpp"}
    assert _build.key(cuda=True) != _build.key(cuda=False)
    # Torch reads it by itself, and another choice is another build.
    key = _build.key(cuda=True)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert not any("arch" in flag for flag in _build.parameters(cuda=True)["nvcc"])
    assert _build.key(cuda=True) != key


def build_wheel(tmp_path, **environment):
    source = tmp_path / "source"
    wanted = ("zclip_ext", "csrc", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
    source.mkdir()
    for name in wanted:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        source,
    ]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr + result.stdout
    (wheel,) = tmp_path.glob("zclip_ext-*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    return wheel, tmp_path / "installed"


def test_a_plain_wheel_needs_no_torch_and_ships_the_sources(cache, tmp_path):
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "torch.py").write_text("raise ImportError('no torch at build time')\n")
    wheel, installed = build_wheel(tmp_path, PYTHONPATH=str(tmp_path / "blocked"), ZCLIP_PREBUILD="0")
    assert wheel.name.endswith("py3-none-any.whl")
    assert {path.name for path in (installed / "zclip_ext" / "csrc").iterdir()} >= {
        "bindings.cpp",
        "zclip_rule.h",
        "rule_cuda.cu",
    }
    # The same sources, so the binary in the cache is its own.
    fields, _ = outcome(run(path=installed, TORCH_EXTENSIONS_DIR=cache))
    assert fields[:3] == ["compiled", "0", "False"]


def test_a_prebuilt_wheel_needs_no_compiler(tmp_path):
    wheel, installed = build_wheel(tmp_path, ZCLIP_PREBUILD="1")
    assert platform.machine() in wheel.name
    fields, error = outcome(
        run(path=installed, PATH=str(tmp_path), CXX=str(tmp_path / "none"), TORCH_EXTENSIONS_DIR=tmp_path / "cache")
    )
    assert (fields[:3], error) == (["compiled", "0", "False"], "")


def test_backend_is_told():
    assert zclip_ext.backend() == "compiled"
    assert zclip_ext.backend("cuda") == ("compiled" if ops._compiled.cuda else "torch")
    assert zclip_ext.backend(torch.device("meta")) == "torch"
