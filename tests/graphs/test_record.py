"""How a function becomes a CUDA graph."""

import gc

import pytest
import torch

from deeppcr.graphs.record import capture, no_collection, on_stream


def test_no_garbage_is_collected_in_a_capture():
    assert gc.isenabled()
    with no_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()  # as it was before
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_capture_that_fails_leaves_the_streams_as_they_were():
    outer, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.ones(3, device="cuda")

    def asks():
        return float((2 * x).sum())

    with on_stream(stream):
        assert torch.cuda.current_stream() == stream
        assert asks() == 6
    for _ in range(2):
        with pytest.raises(RuntimeError):
            capture(asks, stream)
        assert torch.cuda.current_stream() == outer
        assert gc.isenabled()
    replay, found = capture(lambda: 2 * x, stream)
    x.fill_(5)
    replay()
    assert found.tolist() == [10, 10, 10]


def test_nothing_is_captured_where_memory_is_not_cached(monkeypatch):
    """PyTorch finds that out inside, and then draws no more random numbers."""
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    with pytest.raises(RuntimeError, match="a graph has its memory from PyTorch's cache"):
        capture(lambda: pytest.fail("it was called"), None)  # type: ignore[arg-type]
