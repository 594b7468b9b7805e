import os

import pytest

from zclip_ext import ops


@pytest.fixture(autouse=True)
def environment():
    """What a trainer writes into it (ports, ranks) is not for the processes that later tests start."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(params=["compiled", "torch"])
def backend(request, monkeypatch):
    """Runs a test on each backend, in one process."""
    assert ops.backend() == "compiled", "the tests need a compiler"
    if request.param == "torch":
        monkeypatch.setattr(ops, "_compiled", None)
    return request.param
