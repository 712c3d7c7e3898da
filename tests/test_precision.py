"""The precision of products: put back, whoever wanted which one, and nobody waits for another."""

import threading

import pytest
import torch

from deeppcr.runtime import full_precision

CUDA = torch.device("cuda")  # the settings are there without one


def told():
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision


@pytest.fixture(params=["ieee", "tf32"])
def before(request):
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    kept = told()
    products.fp32_precision = convolutions.fp32_precision = request.param
    yield request.param
    products.fp32_precision, convolutions.fp32_precision = kept


def test_what_was_set_is_put_back(before):
    with full_precision(CUDA):
        assert told() == ("ieee", "ieee")
        with full_precision(CUDA, tf32=True):
            assert told() == ("tf32", "tf32")  # the innermost wish of a thread counts
        assert told() == ("ieee", "ieee")
    with full_precision(CUDA, tf32=True):
        assert told() == ("tf32", "tf32")
        with full_precision(CUDA):
            assert told() == ("ieee", "ieee")
        assert told() == ("tf32", "tf32")
    with pytest.raises(KeyError), full_precision(CUDA):
        raise KeyError
    assert told() == (before, before)


@pytest.mark.parametrize("tf32", [False, True])
def test_a_thread_that_is_waited_for_does_not_wait(tf32, before):
    """As autograd's, which runs a backward pass while the thread that asked for it holds on."""
    seen = []

    def backward():
        with full_precision(CUDA):
            seen.append(told())

    thread = threading.Thread(target=backward, daemon=True)
    with full_precision(CUDA, tf32=tf32):
        thread.start()
        thread.join(5)
        assert seen == [("ieee", "ieee")]
    assert told() == (before, before)


def test_many_threads(before):
    wrong = []

    def work(tf32):
        for _ in range(200):
            with full_precision(CUDA, tf32=tf32):
                if not tf32 and told() != ("ieee", "ieee"):
                    wrong.append(told())

    threads = [threading.Thread(target=work, args=(number % 2 == 1,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert told() == (before, before)
