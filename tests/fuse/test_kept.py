"""What was written of steps is found on the disk by their graphs, and by nothing that is not theirs."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from deeppcr.fuse import compiled, kept, program, tile_program
from deeppcr.fuse.compiled import kernels_of
from deeppcr.fuse.trace import one_row
from deeppcr.sequence.layout import Layout
from fuse.compared import compare

Z, X = torch.zeros(2, 3), torch.zeros(2, 3)
TABLE = torch.tensor([0.5, 0.25, 0.125])


def mixing(z, x):
    return 0.3 * torch.sin(z).cumsum(-1) + 0.7 * x * z


def elementwise(z, x):
    return 0.3 * torch.tanh(z) + 0.7 * x


def wide(z, x):
    return 0.3 * torch.tanh(z.flip(-1)) * 1.7 + 0.7 * x


STEPS = {"narrow": (mixing, Z), "elementwise": (elementwise, Z), "tiles": (wide, torch.zeros(2, 12))}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(kept, "_folder", lambda: tmp_path / "kernels")
    monkeypatch.setattr(kept.tempfile, "tempdir", str(tmp_path))
    return tmp_path / "kernels"


def made(step, z, x=None):
    x = torch.zeros_like(z) if x is None else x
    layout = Layout.of(z, None)
    return kernels_of(one_row(step, layout, x), layout)


def sources(kernels):
    return kernels.forward_source, kernels.backward_source, list(kernels.program.code.numbers)


def by_process(step, z, x=None):
    """Its kernels as a process makes them that launches all of them; what it has imported another one would not have."""
    kernels = made(step, z, x)
    found = sources(kernels)
    kernels.roll, kernels.sweep  # noqa: B018 - which puts them on the disk
    return found


@pytest.mark.parametrize("what", STEPS)
@pytest.mark.parametrize("differentiated", [False, True])
def test_a_later_process_derives_nothing(what, differentiated, folder, monkeypatch):
    """Neither what was launched nor what was only written, to see how long it is."""
    kernels = made(*STEPS[what])
    first = sources(kernels)
    kernels.sweep if differentiated else kernels.roll  # noqa: B018
    assert len(list(folder.glob("deeppcr_graph_*.json"))) == 2
    for module in (program, tile_program):
        for name in ("tangent_graph", "adjoint_graph", "cotangent_graph"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *_: pytest.fail("it is derived again"))
    assert sources(made(*STEPS[what])) == first


@pytest.mark.parametrize("what", STEPS)
@pytest.mark.parametrize("lost", ["forward", "backward"])
def test_one_of_both_is_written_again(what, lost, folder):
    """Numbers keep their places, which the other one counts on. (A sum may have its terms in another order.)"""
    first = by_process(*STEPS[what])
    (folder / f"{kept.key_of(made(*STEPS[what]).program)}_{lost}.json").unlink()
    again = sources(made(*STEPS[what]))
    assert again[0] == first[0]
    assert again[2] == first[2]
    assert by_process(*STEPS[what]) == sources(made(*STEPS[what]))


def test_gradients_that_are_written_later_are_right(folder, device):
    """By numbers whose places the forward kernels of an earlier process have."""
    step, rows = STEPS["narrow"][0], torch.linspace(-1, 1, 6, dtype=torch.float64, device=device).view(2, 3)
    by_process(step, rows)
    (folder / f"{kept.key_of(made(step, rows).program)}_backward.json").unlink()
    compare(step, rows, rows.sin().expand(9, 2, 3).clone(), (), chunk=4)


OTHERS = {
    "number": (lambda z, x: 0.3 * torch.sin(z).cumsum(-1) + 0.6 * x * z, Z, X),
    "operation": (lambda z, x: 0.3 * torch.cos(z).cumsum(-1) + 0.7 * x * z, Z, X),
    "order": (lambda z, x: 0.7 * torch.sin(z).cumsum(-1) + 0.3 * x * z, Z, X),
    "dtype": (mixing, Z.double(), X.double()),
    "dtype of inputs": (mixing, Z, X.bfloat16()),
    "width": (mixing, torch.zeros(2, 4), torch.zeros(2, 4)),
    "rows of inputs": (mixing, Z, X[0]),
    "dims of rows": (mixing, torch.zeros(2, 2, 3), torch.zeros(2, 2, 3)),
    "table": (lambda z, x: z.flip(-1) * torch.tensor([0.5, 0.25, 0.125]) + x, Z, X),
    "another table": (lambda z, x: z.flip(-1) * torch.tensor([0.5, 0.25, 0.375]) + x, Z, X),
    "closure": (lambda z, x: z.flip(-1) * TABLE + x, Z, X),
}


def test_whatever_differs_is_another_graph():
    keys = {name: kept.key_of(made(*given).program) for name, given in OTHERS.items()}
    keys["itself"] = kept.key_of(made(mixing, Z).program)
    assert len(set(keys.values())) == len(keys)
    assert keys["itself"] == kept.key_of(made(mixing, torch.ones(5, 3), torch.ones(5, 3)).program)


def test_who_writes_is_part_of_it(monkeypatch):
    before = kept.key_of(made(mixing, Z).program)
    monkeypatch.setattr(kept, "_writer", lambda: "another version")
    assert kept.key_of(made(mixing, Z).program) != before


def test_a_file_that_is_no_text_is_replaced(folder):
    path = kept.put("deeppcr_some.py", "text")
    path.write_bytes(b"\xff\xfe")
    assert kept.put("deeppcr_some.py", "text") == path
    assert path.read_text() == "text"


def of_no_use(path, how):
    record = json.loads(path.read_text())
    module = path.parent / f"{record['module']}.py"
    if how == "half a record":
        path.write_text(path.read_text()[:20])
    elif how == "no record":
        path.write_text("[1, 2]")
    elif how == "other numbers":
        path.write_text(json.dumps({**record, "numbers": [3.0]}))
    elif how == "no text":
        module.write_bytes(b"\xff\xfe")
    elif how == "a changed module":
        module.write_text(module.read_text() + "\n# and more\n")
    else:
        module.unlink()


@pytest.mark.parametrize(
    "how", ["half a record", "no record", "other numbers", "no text", "a changed module", "no module"]
)
def test_what_is_not_whole_is_written_again(how, folder):
    first = by_process(*STEPS["narrow"])
    for path in folder.glob("deeppcr_graph_*.json"):
        of_no_use(path, how)
    assert sources(made(*STEPS["narrow"])) == first


def test_what_another_user_could_change_is_not_read(folder, monkeypatch):
    by_process(*STEPS["narrow"])
    key = f"{kept.key_of(made(*STEPS['narrow']).program)}_forward"
    for others in (0o777, 0o770, 0o702):
        assert kept.recalled(key) is not None
        folder.chmod(others)
        assert kept.recalled(key) is None
        folder.chmod(0o700)
    me = kept.os.getuid()
    monkeypatch.setattr(kept.os, "getuid", lambda: me + 1)
    assert kept.recalled(key) is None


def test_a_disk_that_is_only_read_is_read(folder, monkeypatch):
    first = by_process(*STEPS["narrow"])
    monkeypatch.setattr(kept.os, "utime", lambda *_: (_ for _ in ()).throw(PermissionError("read-only file system")))
    kernels = made(*STEPS["narrow"])
    assert sources(kernels) == first
    assert not kernels._made


def test_graphs_are_not_kept_for_ever(folder, monkeypatch):
    """A number that changes at every call makes one each."""
    monkeypatch.setattr(kept, "_MOST", 6)
    for number in range(5):
        by_process(lambda z, x, number=number: (0.3 + number) * torch.sin(z).cumsum(-1) + x, Z)
    assert len(list(folder.glob("deeppcr_graph_*.json"))) <= 6


def test_nothing_is_left_on_the_disk_by_who_only_looks(folder):
    assert made(mixing, Z).forward_source.startswith('"""A step')
    assert not folder.exists()


def test_a_disk_that_is_full_leaves_nothing_behind(folder, monkeypatch):
    kernels, replace = made(mixing, Z), kept.os.replace
    sources(kernels)

    def full(source, target):
        if target.suffix == ".json":
            raise OSError("no space left")
        replace(source, target)

    monkeypatch.setattr(kept.os, "replace", full)
    assert kernels.roll is compiled.module_of(kernels.forward_source).roll
    assert {path.suffix for path in folder.iterdir()} == {".py"}
    assert sources(made(mixing, Z)) == sources(kernels)


def test_threads_that_launch_at_once_remember_it_once(folder, monkeypatch):
    kernels = made(mixing, Z)
    sources(kernels)
    remember, seen = kept.remember, []
    monkeypatch.setattr(compiled, "remember", lambda *given: (time.sleep(0.02), seen.append(given), remember(*given)))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(kernels._module, [kernels.forward_source] * 4))
    assert len(set(map(id, found))) == 1
    assert len(seen) == 2
