"""Compiles and links the whole extension with CUDA, on a machine that needs no GPU, and tells what each kernel uses.

    python tests/build_cuda.py FOLDER_OF_A_CUDA_BUILD_OF_TORCH

The sources and flags are those of a real build; that torch is only compiled and linked against, so that it need not
import. Fails on a warning, on a register that spills to memory, and on a symbol that no library has.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CAPABILITIES = (80, 90, 100)  # A100, H100 and H200, B200
KERNEL = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


def build_module():
    spec = importlib.util.spec_from_file_location("zclip_ext_build", ROOT / "zclip_ext" / "_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command):
    """What the command printed."""
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}")
    return result.stdout + result.stderr


def name_of(symbol):
    """`sum_blocks<1536>` of the name that the compiler made of it."""
    readable = run("c++filt", symbol).strip() if shutil.which("c++filt") else symbol
    found = re.search(r"(\w+(?:<\d+>)?)\(", readable)
    return found.group(1) if found else readable


def kernels(report):
    """Name, capability, registers, stack, spilled and shared bytes of each kernel that ptxas speaks of."""
    rows = []
    for line in report.splitlines():
        if found := KERNEL.search(line):
            rows.append([name_of(found.group(1)), found.group(2)])
        elif found := SPILLS.search(line):
            stack, stored, loaded = map(int, found.groups())
            rows[-1] += [stack, stored + loaded]
        elif found := USED.search(line):
            shared = SHARED.search(line)
            rows[-1] += [int(found.group(1)), int(shared.group(1)) if shared else 0]
    return [(name, sm, registers, stack, spilled, shared) for name, sm, stack, spilled, registers, shared in rows]


def missing(binary, libraries):
    """Symbols that the binary wants and no library has. Python's own are in the process that loads it."""
    wanted = {line.split()[-1].split("@")[0] for line in run("nm", "-D", "--undefined-only", binary).splitlines()}
    for library in libraries:
        wanted -= {line.split()[-1].split("@")[0] for line in run("nm", "-D", "--defined-only", library).splitlines()}
    weak = {line.split()[-1] for line in run("nm", "-D", binary).splitlines() if line.split()[-2] == "w"}
    return sorted(symbol for symbol in wanted - weak if not symbol.startswith(("Py", "_Py")))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", type=Path, help="the folder that holds its include/ and lib/")
    torch = parser.parse_args().torch
    build = build_module()
    toolkit = build.toolkit()
    if not (torch / "lib" / "libtorch_cuda.so").exists():
        parser.error(f"argument torch: got {torch}, expected the folder torch/ of a CUDA build")
    if toolkit is None:
        parser.error("nvcc is not there: install the CUDA toolkit")
    nvcc = toolkit / "bin" / "nvcc"
    parameters = build.parameters(cuda=True)
    compiler = os.environ.get("CXX", "c++")
    generate = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in CAPABILITIES]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for source in map(Path, parameters["sources"]):
            target = Path(folder) / f"{source.name}.o"
            objects.append(target)
            if source.suffix == ".cu":
                strict = ["-std=c++17", "-Xcompiler", "-fPIC,-Werror", "--Werror", "all-warnings", "-Xptxas", "-v"]
                rows += kernels(run(nvcc, *build.CUDA_FLAGS, *strict, *generate, "-c", source, "-o", target))
                continue
            include = [f"-I{sysconfig.get_path('include')}"]
            for headers in (torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include"):
                include += ["-isystem", headers]
            flags = ["-std=c++20", "-fPIC", "-Werror", *parameters["cxx"]]
            run(compiler, *flags, *include, "-c", source, "-o", target)
        binary = Path(folder) / f"{build.NAME}.so"
        libraries = [f"-L{torch / 'lib'}", "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
        run(compiler, "-shared", *objects, *parameters["link"], *libraries, "-lcudart", "-o", binary)
        system = [
            Path(run(compiler, f"-print-file-name={name}").strip())
            for name in (
                "libstdc++.so.6",
                "libc.so.6",
                "libm.so.6",
                "libgcc_s.so.1",
                "libgomp.so.1",
                "ld-linux-x86-64.so.2",
            )
        ]
        cudart = list(toolkit.glob("lib*/libcudart.so"))
        absent = missing(binary, [*(torch / "lib").glob("lib*.so"), *cudart, *system])
        size = binary.stat().st_size
    print(f"{'kernel':24} sm  registers  stack  spilled  shared memory")
    for name, sm, registers, stack, spilled, shared in rows:
        print(f"{name:24} {sm:>3} {registers:>8} {stack:>7} {spilled:>7} {shared:>10}")
    spilling = [row[0] for row in rows if row[4]]
    kinds = {"decide_once", "scale_blocks<184>", "scale_blocks<1536>", "sum_blocks<184>", "sum_blocks<1536>"}
    if {row[0] for row in rows} != kinds or len(rows) != len(kinds) * len(CAPABILITIES):
        sys.exit(f"expected the kernels {', '.join(sorted(kinds))} for each of {CAPABILITIES}")
    if spilling or absent:
        sys.exit(f"registers spill in: {spilling or 'no kernel'}; no library has: {absent or 'nothing'}")
    print(f"compiled and linked for compute capabilities {', '.join(map(str, CAPABILITIES))}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
