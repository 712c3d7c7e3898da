"""What the tests of kernels share: without a GPU they run interpreted, unless --device says otherwise.

The ``conftest.py`` of each folder with such tests takes the hook and the fixtures from here.
"""

import ctypes
import itertools
import os
import sys

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes


def pytest_configure(config):
    # Called as soon as this file is collected, hence before the first test of any file runs. Triton decides when it
    # is imported.
    if config.getoption("--device") == "cpu":
        assert os.environ.get("TRITON_INTERPRET") == "1" or "triton" not in sys.modules
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def interpreted(quick_interpreter):
    """Tests of these folders, by an interpreter that is made quicker once for all of them."""


@pytest.fixture
def gpu(device) -> torch.device:
    """The device, for tests that make no sense without a GPU; asked for one that is missing, the suite does not start."""
    if device.type != "cuda":
        pytest.skip("needs a GPU: --device=cuda")
    return device


@pytest.fixture
def poisoned_memory(device):
    """Memory that nobody has written to holds NaN, and the largest integers."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device=device).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


class Launcher:
    """As Triton's: a function of Python that hands on to one of C."""

    global_scratch_size = 0

    def __init__(self, launch):
        self.launch = launch

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        scratch = None if not self.global_scratch_size else x * self.global_scratch_size
        self.launch(x, y, z, stream, function, metadata, launch_metadata, enter, leave, scratch, arguments)


class Compiled:
    """Takes the launches of a kernel as one that was compiled does, by tensors or their pointers, and sees that it was compiled for such arguments.

    Args:
        kernel: an interpreted one
        run: what an interpreted kernel does when it is called; None: nothing
        arguments: of the first launch
    """

    function = packed_metadata = None
    launches = directly = 0  # in all, and past Triton's own launch

    def __init__(self, kernel, run, arguments):
        self.kernel, self.interpret = kernel, run
        self.pointers = {at: each.dtype for at, each in enumerate(arguments) if isinstance(each, torch.Tensor)}
        self.compiled_for = self.specialised(arguments)
        self.run = Launcher(self.launch)

    def launch(
        self, programs, _y, _z, _stream, _function, _metadata, launch_metadata, enter, leave, scratch, arguments
    ):
        assert launch_metadata is enter is leave is scratch is None
        Compiled.directly += 1
        self[(programs, 1, 1)](*arguments)

    def specialised(self, arguments):
        """What Triton compiles a kernel for."""
        free, found = self.kernel.kwargs.get("do_not_specialize") or (), []
        for at, (name, value) in enumerate(zip(self.kernel.arg_names, arguments, strict=True)):
            if isinstance(value, torch.Tensor):
                found.append((value.dtype, value.data_ptr() % 16 == 0))
            elif at in self.pointers:  # a pointer, of which nobody knows the dtype
                found.append((self.pointers[at], value % 16 == 0))
            elif isinstance(value, int):
                found.append((-(2**31) <= value < 2**31, name in free or (value == 1, value % 16 == 0)))
            elif isinstance(value, float):  # of which only the type is compiled in
                found.append(float)
            else:
                found.append(value)
        return found

    def __getitem__(self, grid):
        def launch(*arguments):
            Compiled.launches += 1
            arguments = list(arguments)
            assert self.specialised(arguments) == self.compiled_for, self.kernel.fn.__name__
            for at, dtype in self.pointers.items():
                if isinstance(arguments[at], int):
                    buffer = (ctypes.c_byte * 8).from_address(arguments[at])
                    arguments[at] = torch.frombuffer(buffer, dtype=dtype)
            if self.interpret is not None:
                self.interpret(self.kernel, *arguments, grid=grid, warmup=False)

        return launch


def _compile(patch, *, interpret):
    """From now on interpreted kernels return something that can be launched again, and nothing was launched before."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    from deeppcr import launch

    interpreted = interpreter.InterpretedFunction.run

    def run(*arguments, **options):
        with _disable_current_modes():  # a GPU's kernels are no operations of PyTorch
            return interpreted(*arguments, **options)

    def first(kernel, *arguments, grid, warmup, **options):
        Compiled.launches += 1
        if interpret:
            run(kernel, *arguments, grid=grid, warmup=warmup, **options)
        return Compiled(kernel, run if interpret else None, arguments)

    patch.setattr(interpreter.InterpretedFunction, "run", first)
    patch.setattr(launch, "current_stream", lambda device: 0)
    for cache in ("_compiled", "_noted"):
        patch.setattr(launch, cache, {})
    patch.setattr(sys.modules["deeppcr.linear.solve"], "_prepared", {})  # the name is also that of the function


@pytest.fixture
def compiled(device, monkeypatch):
    """Kernels are launched again as they were compiled, without a GPU too. A function: how many were, past Triton's launch."""
    if device.type == "cpu":
        _compile(monkeypatch, interpret=True)
    before = Compiled.directly
    return lambda: Compiled.directly - before


class Launches:
    """Counts launches."""

    def __enter__(self):
        self.count = -Compiled.launches
        return self

    def __exit__(self, *exception):
        self.count += Compiled.launches


@pytest.fixture
def uncomputed(device, monkeypatch):
    """Kernels are launched and do nothing, on a CPU as if it were a GPU: what is left is the host's part of a call."""
    from deeppcr.linear.fused import Fused

    if device.type != "cpu":
        pytest.skip("counts launches by pretending: --device=cpu")
    _compile(monkeypatch, interpret=False)
    monkeypatch.setattr(Fused, "refusal", lambda self, couplings: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)


def thorough(*values):
    """Parameters of a test for ``make test-all`` and the GPU: further sizes of what the others show already."""
    return [
        pytest.param(*value, marks=pytest.mark.thorough)
        if isinstance(value, tuple)
        else pytest.param(value, marks=pytest.mark.thorough)
        for value in values
    ]


def pairwise(**axes):
    """Parameters of a test by name, as a decorator: in ``make test`` every pair of values of two axes, each combination thorough.

    Lines are for one value or for two that meet: a full product runs each of them many times.

    Args:
        axes: the values of a parameter, or a dictionary of them by the names that they have in the test's id
    """
    named = [axis if isinstance(axis, dict) else {str(value): value for value in axis} for axis in axes.values()]
    pairs = {each: set(itertools.combinations(enumerate(each), 2)) for each in itertools.product(*named)}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(pairs, key=lambda each: len(pairs[each] & missing)))
        missing -= pairs[chosen[-1]]
    every = [
        pytest.param(
            *(axis[name] for axis, name in zip(named, each, strict=True)),
            id="-".join(each),
            marks=[] if each in chosen else [pytest.mark.thorough],
        )
        for each in pairs
    ]
    return pytest.mark.parametrize(list(axes), every)


def strided(tensor):
    """The same values, every other element of a larger tensor, dimensions laid out backwards, not from its start."""
    backwards = tensor.permute(*reversed(range(tensor.ndim)))
    room = torch.full((2 * tensor.numel() + 3,), float("nan"), dtype=tensor.dtype, device=tensor.device)
    spread = room[3::2].unflatten(0, backwards.shape).copy_(backwards)
    return spread.permute(*reversed(range(tensor.ndim)))


def offset(tensor):
    """The same values in a tensor that starts and whose rows start at odd places."""
    room = torch.full((tensor.shape[0] + 1, tensor[0].numel() + 1), float("nan")).to(tensor)
    rows = room[1:, 1:].unflatten(-1, tensor.shape[1:])
    return rows.copy_(tensor)


def misaligned(tensor):
    """The same values, contiguous, in a tensor that starts at an odd place."""
    room = torch.full((tensor.numel() + 1,), float("nan")).to(tensor)
    return room[1:].unflatten(0, tensor.shape).copy_(tensor)


def error(actual, expected) -> float:
    """In norm, relative to what was expected."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))
