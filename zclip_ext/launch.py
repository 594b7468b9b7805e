"""Runs a training script that can't be edited with ZClip's DeepSpeed hook in place.

    python -m zclip_ext.launch train.py --deepspeed_config ds.json
    torchrun --nproc-per-node 2 -m zclip_ext.launch train.py --deepspeed_config ds.json
    deepspeed --module zclip_ext.launch train.py --deepspeed_config ds.json

-m package.module takes the place of train.py as it does with python. The "zclip" block of the DeepSpeed config turns
ZClip on; without one the script runs as ever.

DeepSpeed is imported before the script starts, so what the script itself writes into os.environ for it, such as
CUDA_VISIBLE_DEVICES or DS_ACCELERATOR, comes too late: set it for the whole command. Processes that the script spawns
afresh run without the hook.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import runpy
import sys
import types

__all__ = ["main"]

# What launchers put before the name of the script that they take this module for.
_LOCAL_RANK = ("--local_rank=", "--local-rank=")


def main() -> None:
    """Runs the script that the command line names, as ``__main__``. Its exceptions and its exit code go through."""
    given = sys.argv[1:]
    ranks = list(itertools.takewhile(lambda argument: argument.startswith(_LOCAL_RANK), given))
    parser = _parser()
    options = parser.parse_args(given[len(ranks) :])
    if options.script is None:
        parser.error("SCRIPT: got none, expected a Python file, or -m and the name of a module")
    problem = _module_problem(options.script) if options.is_module else _file_problem(options.script)
    if problem:
        parser.error(problem)

    import zclip_ext.integrations.deepspeed  # noqa: F401  (puts the hook in place)

    _follow_main()
    arguments = [*ranks, *options.arguments]
    if options.is_module:
        sys.argv = [options.script, *arguments]  # runpy puts the module's file in place of the name
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        path = os.path.abspath(options.script)  # as python makes __file__, so that the script may change folders
        sys.argv = [path, *arguments]
        if not getattr(sys.flags, "safe_path", False):  # of Python 3.11 on
            sys.path[0] = os.path.dirname(os.path.realpath(path))
        runpy.run_path(path, run_name="__main__")


def _follow_main() -> None:
    """What processes that the script spawns send back names its classes by this module, which is fixed too early."""
    alias = types.ModuleType("__mp_main__")
    alias.__getattr__ = lambda name: getattr(sys.modules["__main__"], name)  # type: ignore[method-assign]
    sys.modules["__mp_main__"] = alias


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zclip_ext.launch",
        usage="%(prog)s [-h] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="a Python file")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="go on to the script")
    return parser


def _file_problem(path: str) -> str | None:
    return None if os.path.isfile(path) else f"SCRIPT: got {path!r}, expected a Python file that is there"


def _module_problem(name: str) -> str | None:
    reason = "it isn't there"
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            reason = "a package without __main__"
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:
        spec, reason = None, str(error)
    return None if spec is not None else f"-m: got {name!r}, expected a module that can be run ({reason})"


if __name__ == "__main__":
    main()
