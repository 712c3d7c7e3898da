"""The source of a step's kernels, for all that ``solve`` takes."""

import multiprocessing
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import deeppcr
from deeppcr.fuse import compiled, kept, source
from deeppcr.fuse.expressions import NotCovered


def step(z, x):
    return 0.5 * torch.sin(z) + x


Z0, XS = torch.zeros(2, 3), torch.zeros(9, 2, 3)


def layers(count, kind=nn.Tanh):
    return nn.ModuleList(nn.Sequential(nn.Linear(3, 3), kind()) for _ in range(count))


def test_any_length_has_the_same():
    text = source(step, Z0, XS)
    assert "sin(" in text
    assert text == source(step, Z0, XS[:5]) == source(step, Z0, XS, length=9) == source(deeppcr.rowwise(step), Z0, XS)
    assert source(torch.cos, Z0) == source(torch.cos, Z0, length=7)


@pytest.mark.parametrize("backward", [False, True])
def test_rows_of_different_lengths_are_held_where_they_are(backward):
    lengths = torch.tensor([4, 9])
    text, plain = source(step, Z0, XS, lengths=lengths, backward=backward), source(step, Z0, XS, backward=backward)
    assert text != plain
    assert text.count("where(") > plain.count("where(")
    assert "sin(" in text or backward
    assert "sin(" in source(torch.sin, Z0, length=9, lengths=lengths)


@pytest.mark.parametrize("count", [1, 2, 20])
def test_a_list_of_modules_that_are_alike_is_one_step(count):
    assert "tanh" in source(layers(count), Z0)
    assert "tanh" in source(list(layers(count)), Z0, length=count)
    assert "tanh" in source(layers(count), Z0, lengths=torch.tensor([0, count]))


def test_what_is_wrong_is_named():
    with pytest.raises(NotCovered, match="a list of steps that are not alike is not covered"):
        source([*layers(2), *layers(2, nn.Sigmoid)], Z0)
    with pytest.raises(ValueError, match="lengths differ: length has 4, xs has 9"):
        source(step, Z0, XS, length=4)
    with pytest.raises(ValueError, match="lengths: expected numbers from 0 to L = 9"):
        source(step, Z0, XS, lengths=torch.tensor([4, 10]))
    with pytest.raises(ValueError, match="length: there are no xs"):
        source(torch.cos, Z0, lengths=torch.tensor([4, 10]))


def test_what_another_user_could_change_is_not_imported(tmp_path, monkeypatch):
    """Not from a folder of somebody else's, whatever it holds when it is looked at; one that is made is nobody else's to write to."""
    pytest.importorskip("triton")
    monkeypatch.setattr(kept, "_folder", lambda: tmp_path / "theirs")
    monkeypatch.setattr(kept.tempfile, "tempdir", str(tmp_path / "temporary"))
    path = kept.put("deeppcr_step_of_mine.py", "ours = 1\n")
    assert path.parent == tmp_path / "theirs"
    assert path.parent.stat().st_mode & 0o077 == 0
    me = os.getuid()
    monkeypatch.setattr(kept.os, "getuid", lambda: me + 1)  # now they belong to another user
    with pytest.raises(PermissionError, match="another user"):
        kept.put("deeppcr_step_of_mine.py", "ours = 1\n")


def _import_at_once(barrier, folder, text):
    kept._folder = lambda: folder
    barrier.wait()
    sys.exit(0 if compiled.module_of(text).LAST == 1 else 1)


def test_eight_processes_write_and_import_the_same_source_at_once(tmp_path):
    """As ranks of one machine do where nothing was compiled before: nobody reads half of it."""
    text = "\n".join(f"NUMBER_{at} = {at}" for at in range(20_000)) + "\nLAST = 1\n"
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(8)
    processes = [context.Process(target=_import_at_once, args=(barrier, tmp_path / "kernels", text)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 8
    assert [path.name for path in (tmp_path / "kernels").glob("*.py")] == [f"{kept.module_name(text)}.py"]


def test_threads_read_a_module_once_and_to_its_end(tmp_path, monkeypatch):
    """One that another thread has just begun to read has nothing in it."""
    monkeypatch.setattr(kept, "_folder", lambda: tmp_path)
    source = f"import time\ntime.sleep(0.2)\nLAST = {time.time()}\n"
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(compiled.module_of, [source] * 4))
    assert {id(module) for module in found} == {id(found[0])}
    assert all(hasattr(module, "LAST") for module in found)


def test_a_module_whose_reading_was_interrupted_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "_folder", lambda: tmp_path)
    monkeypatch.setenv("DEEPPCR_TEST_INTERRUPTS", "1")
    source = "import os\nif 'DEEPPCR_TEST_INTERRUPTS' in os.environ:\n    raise KeyboardInterrupt\nLAST = 1\n"
    with pytest.raises(KeyboardInterrupt):
        compiled.module_of(source)
    monkeypatch.delenv("DEEPPCR_TEST_INTERRUPTS")
    assert compiled.module_of(source).LAST == 1
