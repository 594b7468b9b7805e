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
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    # From its file: the package itself would load, and so build, the extension.
    path = ROOT / "zclip_ext" / "_extension.py"
    spec = importlib.util.spec_from_file_location("zclip_ext_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parameters = module.build_parameters()
    parameters["sources"] = [os.path.relpath(source, ROOT) for source in parameters["sources"]]
    return {
        "ext_modules": [CppExtension(f"zclip_ext.{module.NAME}", **parameters)],  # type: ignore[no-untyped-call]
        "cmdclass": {"build_ext": BuildExtension, "build_py": BuildWithSources},
    }


if os.environ.get("ZCLIP_PREBUILD", "0") == "1":
    setup(**extension())
else:
    setup(cmdclass={"build_py": BuildWithSources})
