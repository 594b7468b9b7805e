import pytest

from zclip_ext import ops


@pytest.fixture(params=["compiled", "torch"])
def backend(request, monkeypatch):
    """Runs a test on each backend, in one process."""
    assert ops.backend() == "compiled", "the tests need a compiler"
    if request.param == "torch":
        monkeypatch.setattr(ops, "_compiled", None)
    return request.param
