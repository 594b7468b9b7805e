"""Ships csrc/ inside the package, and builds the extension ahead where ZCLIP_PREBUILD=1 asks for it.

Everything else stands in pyproject.toml. Without ZCLIP_PREBUILD torch is not needed to install: the extension is built
on the first import.
"""

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithSources(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "zclip_ext" / "csrc"
            target.mkdir(parents=True, exist_ok=True)
            for source in sorted((ROOT / "csrc").iterdir()):
                shutil.copy2(source, target / source.name)


def extension() -> dict[str, Any]:
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    # From its file: the package itself would load, and so build, the extension.
    path = ROOT / "zclip_ext" / "_build.py"
    spec = importlib.util.spec_from_file_location("zclip_ext_build", path)
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    problem, demanded = build.why_not_cuda(), build.wanted_cuda()
    if demanded and problem is not None:
        raise RuntimeError(f"ZCLIP_CUDA=1, but CUDA kernels can't be built: {problem}")
    cuda = problem is None if demanded is None else demanded
    parameters = build.parameters(cuda=cuda)
    kind: Any = CUDAExtension if cuda else CppExtension
    module = kind(
        f"zclip_ext.{build.NAME}",
        sources=[os.path.relpath(source, ROOT) for source in parameters["sources"]],
        extra_compile_args={"cxx": parameters["cxx"], "nvcc": parameters["nvcc"]},
        extra_link_args=parameters["link"],
    )
    return {"ext_modules": [module], "cmdclass": {"build_ext": BuildExtension, "build_py": BuildWithSources}}


if os.environ.get("ZCLIP_PREBUILD", "0") == "1":
    setup(**extension())
else:
    setup(cmdclass={"build_py": BuildWithSources})
