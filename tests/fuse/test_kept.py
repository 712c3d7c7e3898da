"""What was written of steps is found on the disk by their graphs, and by nothing that is not theirs."""

import json

import pytest
import torch

from deeppcr.fuse import compiled, kept, program, tile_program
from deeppcr.fuse.compiled import kernels_of
from deeppcr.fuse.trace import one_row
from deeppcr.sequence.layout import Layout

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
def test_a_later_process_derives_nothing(what, folder, monkeypatch):
    first = by_process(*STEPS[what])
    assert len(list(folder.glob("deeppcr_graph_*.json"))) == 2
    for module in (program, tile_program):
        for name in ("tangent_graph", "adjoint_graph", "cotangent_graph"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *_: pytest.fail("it is derived again"))
    assert sources(made(*STEPS[what])) == first


@pytest.mark.parametrize("what", STEPS)
@pytest.mark.parametrize("lost", ["forward", "backward"])
def test_one_of_both_is_written_again(what, lost, folder):
    """Numbers keep their places, which the other one counts on."""
    first = by_process(*STEPS[what])
    (folder / f"{kept.key_of(made(*STEPS[what]).program, lost)}.json").unlink()
    assert sources(made(*STEPS[what])) == first


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
    keys = {name: kept.key_of(made(*given).program, "forward") for name, given in OTHERS.items()}
    keys["itself"], keys["backward"] = (kept.key_of(made(mixing, Z).program, each) for each in ("forward", "backward"))
    assert len(set(keys.values())) == len(keys)
    assert keys["itself"] == kept.key_of(made(mixing, torch.ones(5, 3), torch.ones(5, 3)).program, "forward")


def test_who_writes_is_part_of_it(monkeypatch):
    before = kept.key_of(made(mixing, Z).program, "forward")
    monkeypatch.setattr(kept, "_writer", lambda: "another version")
    assert kept.key_of(made(mixing, Z).program, "forward") != before


def of_no_use(path, how):
    record = json.loads(path.read_text())
    module = path.parent / f"{record['module']}.py"
    if how == "half a record":
        path.write_text(path.read_text()[:20])
    elif how == "no record":
        path.write_text("[1, 2]")
    elif how == "other numbers":
        path.write_text(json.dumps({**record, "numbers": [3.0]}))
    elif how == "a changed module":
        module.write_text(module.read_text() + "\n# and more\n")
    else:
        module.unlink()


@pytest.mark.parametrize("how", ["half a record", "no record", "other numbers", "a changed module", "no module"])
def test_what_is_not_whole_is_written_again(how, folder):
    first = by_process(*STEPS["narrow"])
    for path in folder.glob("deeppcr_graph_*.json"):
        of_no_use(path, how)
    assert sources(made(*STEPS["narrow"])) == first


def test_what_another_user_could_change_is_not_read(folder, monkeypatch):
    by_process(*STEPS["narrow"])
    key = kept.key_of(made(*STEPS["narrow"]).program, "forward")
    assert kept.recalled(key) is not None
    me = kept.os.getuid()
    monkeypatch.setattr(kept.os, "getuid", lambda: me + 1)
    assert kept.recalled(key) is None


def test_graphs_are_not_kept_for_ever(folder, monkeypatch):
    """A number that changes at every call makes one each."""
    monkeypatch.setattr(kept, "_MOST", 6)
    for number in range(5):
        by_process(lambda z, x, number=number: (0.3 + number) * torch.sin(z).cumsum(-1) + x, Z)
    assert len(list(folder.glob("deeppcr_graph_*.json"))) <= 6


def test_nothing_is_left_on_the_disk_by_who_only_looks(folder):
    assert made(mixing, Z).forward_source.startswith('"""A step')
    assert not folder.exists()


def test_a_disk_that_is_full_is_no_error(folder, monkeypatch):
    kernels = made(mixing, Z)
    kernels.roll  # noqa: B018 - the module is there
    monkeypatch.setattr(kept, "put", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    monkeypatch.setattr(kernels, "_made", {"key": kept.Source(kernels.forward_source, [])})
    assert kernels._module(kernels.forward_source) is compiled.module_of(kernels.forward_source)
