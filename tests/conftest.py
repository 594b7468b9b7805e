import os

import pytest
from host_kernels import HostKernels

from zclip_ext import ops


@pytest.fixture(autouse=True)
def environment():
    """What a trainer writes into it (ports, ranks) is not for the processes that later tests start."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


def run_on(name, monkeypatch):
    assert ops.backend() == "compiled", "the tests need a compiler"
    if name == "torch":
        monkeypatch.setattr(ops, "_compiled", None)
    if name == "kernels":
        monkeypatch.setattr(ops, "_compiled", HostKernels)


@pytest.fixture(params=["compiled", "torch"])
def backend(request, monkeypatch):
    """Runs a test on each backend, in one process."""
    run_on(request.param, monkeypatch)
    return request.param


@pytest.fixture(params=["compiled", "torch", "kernels"])
def any_backend(request, monkeypatch):
    """As `backend`, and on the CUDA kernels' sources, which are slow on the CPU."""
    run_on(request.param, monkeypatch)
    return request.param
