"""The precision of products: put back, whoever wanted which one, and nobody waits for another."""

import threading

import pytest
import torch

from deeppcr.runtime import full_precision

CUDA = torch.device("cuda")  # the settings are there without one
SETTINGS = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn
FULL, TF32 = ("ieee",) * 3, ("tf32",) * 3


def told():
    return tuple(each.fp32_precision for each in SETTINGS)


def told_in_the_old_way():
    """Each by itself: where what was set in the new way is something else, PyTorch refuses to tell."""
    found = []
    for ask in (torch.get_float32_matmul_precision, lambda: torch.backends.cudnn.allow_tf32):
        try:
            found.append(ask())
        except RuntimeError:
            found.append(None)
    return found


def let(precisions):
    for each, precision in zip(SETTINGS, precisions, strict=True):
        each.fp32_precision = precision


@pytest.fixture(
    params=[FULL, TF32, ("ieee", "tf32", "tf32"), ("ieee", "ieee", "tf32"), ("tf32", "tf32", "ieee")], ids="-".join
)
def before(request):
    """The last three of these PyTorch cannot tell in its old way, but of the first of them what holds for cuDNN."""
    kept = told()
    let(request.param)
    yield request.param
    let(kept)


def test_what_was_set_is_put_back(before):
    in_the_old_way, on_a_cpu = told_in_the_old_way(), torch.backends.mkldnn.matmul.fp32_precision
    with full_precision(CUDA):
        assert told() == FULL
        inside = [
            None if known is None else full for known, full in zip(in_the_old_way, ("highest", False), strict=True)
        ]
        assert [each for each, known in zip(told_in_the_old_way(), inside, strict=True) if known is not None] == [
            each for each in inside if each is not None
        ]
        with full_precision(CUDA, tf32=True):
            assert told() == TF32  # the innermost wish of a thread counts
        assert told() == FULL
    with full_precision(CUDA, tf32=True):
        assert told() == TF32
        with full_precision(CUDA):
            assert told() == FULL
        assert told() == TF32
    with pytest.raises(KeyError), full_precision(CUDA):
        raise KeyError
    assert told() == before
    assert told_in_the_old_way() == in_the_old_way
    assert torch.backends.mkldnn.matmul.fp32_precision == on_a_cpu, "which the old way changes, too"


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
        assert seen == [FULL]
    assert told() == before


def test_many_threads(before):
    wrong = []

    def work(tf32):
        for _ in range(200):
            with full_precision(CUDA, tf32=tf32):
                if not tf32 and told() != FULL:
                    wrong.append(told())

    threads = [threading.Thread(target=work, args=(number % 2 == 1,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert told() == before
