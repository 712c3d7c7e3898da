"""What the tests of kernels share: without a GPU they run interpreted, unless --device says otherwise.

The ``conftest.py`` of each folder with such tests takes the hook and the fixtures from here.
"""

import ctypes
import dataclasses
import itertools
import math
import os
import sys
from types import SimpleNamespace

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
def quick_interpreter(pytestconfig):
    """Triton's interpreter without what it does again at every call; kernels compute what they did, bit by bit."""
    if pytestconfig.getoption("--device") != "cpu":
        yield
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.ScanOps, "generic_scan", _scan_by_doubling)
        patch.setattr(interpreter.InterpretedFunction, "run", _untraced(interpreter.InterpretedFunction.run))
        with pytest.MonkeyPatch.context() as quicker:
            try:
                scope = _quicken(quicker, interpreter, check_integers=pytestconfig.getoption("--all"))
            except AttributeError:  # another Triton than 3.7 to 3.9: as it is
                quicker.undo()
                scope = None
            yield
            if scope is not None:
                scope.restore()


def _quicken(patch, interpreter, *, check_integers):
    """What only saves time. Returns what undoes the part that is Triton's own."""
    tl, builder = interpreter.tl, interpreter.interpreter_builder
    patch.setattr(interpreter, "_get_np_dtype", _remembered(interpreter._get_np_dtype, tl))
    _share_types(patch, tl)
    _skip_what_changes_nothing(patch, type(interpreter.interpreter_semantic), tl)
    # Overflow of integers is looked for with --all only: that makes each of their operations five.
    patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=check_integers))
    if not check_integers:  # nor is every result held against the size of its type
        patch.setattr(interpreter.TensorHandle, "__post_init__", lambda self: None)
    # Every call of a function from another looks through the whole language anew: a third of all time.
    patch.setattr(interpreter, "_patch_attr", _patch_directly)
    patch_lang, scope_of_nothing = interpreter._patch_lang, interpreter._LangPatchScope
    patch.setattr(interpreter, "_patch_lang", lambda function: scope_of_nothing())
    return patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))


def _scan_by_doubling(self, inputs):
    """Interpreted scans go element by element: a thousand times too slow, and kinder to products than a GPU is."""
    np = pytest.importorskip("numpy")
    values, stride = [one.handle.data for one in inputs], 1
    places = np.indices(values[0].shape)[self.axis]
    while stride < values[0].shape[self.axis]:
        earlier = [np.roll(value, stride, self.axis) for value in values]
        tensors = [self.to_tensor(v, one.dtype) for v, one in zip(earlier + values, inputs * 2, strict=True)]
        joined = self.combine_fn.fn(*tensors)
        values = [np.where(places < stride, v, new.handle.data) for v, new in zip(values, joined, strict=True)]
        stride *= 2
    return [self.to_tensor(value, one.dtype) for value, one in zip(values, inputs, strict=True)]


def _untraced(run):
    """Kernels are left out of the coverage report anyway, and to trace the interpreter takes as long as to interpret."""

    def run_untraced(*arguments, **options):
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            return run(*arguments, **options)
        finally:
            sys.settrace(tracer)

    return run_untraced


def _remembered(np_dtype_of, tl):
    """The dtype of NumPy for one of Triton's, of which there are few."""
    known = {}

    def look_up(dtype):
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        name = "pointer" if isinstance(scalar, tl.pointer_type) else scalar.name
        if name not in known:
            known[name] = np_dtype_of(dtype)
        return known[name]

    return look_up


def _patch_directly(obj, name, member, builder, scope):
    """``_patch_attr`` of the interpreter, whose functions call each other three times on the way."""
    from triton.runtime.interpreter import interpreter_semantic

    function = getattr(member, "__wrapped__", member)

    def call(*arguments, **options):
        options["_semantic"] = interpreter_semantic
        return function(*arguments, **options)

    scope.set_attr(obj, name, call)


def _share_types(patch, tl):
    """Types of blocks, and the shapes of tensors, are made once and not for every tensor anew: half of the time."""
    block_type, tensor = tl.core.block_type, tl.core.tensor
    make_type, make_tensor = block_type.__init__, tensor.__init__
    types, shapes, tensors = {}, {}, {}

    def make_known_type(self, element_ty, shape):
        sizes = tuple([getattr(size, "value", size) for size in shape])
        known = types.get((element_ty.name, sizes))
        if known is None:
            make_type(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            known = types[element_ty.name, sizes] = vars(self).copy()
        self.__dict__.update(known)
        self.element_ty = element_ty

    def make_known_tensor(self, handle, type):
        shape = id(type.shape) if type.is_block() else None
        known = tensors.get(shape)
        if known is None:
            make_tensor(self, handle, type)
            known = tensors[shape] = vars(self).copy()
        self.__dict__.update(known)
        self.handle, self.type, self.dtype = handle, type, type.scalar

    patch.setattr(block_type, "__init__", make_known_type)
    patch.setattr(tensor, "__init__", make_known_tensor)


def _skip_what_changes_nothing(patch, semantic, tl):
    """Most tensors have the type and the shape that is asked for: then they are the result, as after all checks."""
    cast, broadcast, promote = semantic.cast, semantic.broadcast_impl_value, semantic.computation_type_impl
    check, unwrap = semantic.binary_op_type_checking_impl, tl.core._unwrap_if_constexpr
    tensor, shapes, types, constants = tl.core.tensor, {}, {}, {}
    stay = {"int32", "int64", "fp32", "fp64"}  # two of one of these remain what they are in every operation

    def cast_if_other(self, input, dst_ty, *options):
        return input if input.type.scalar is dst_ty.scalar else cast(self, input, dst_ty, *options)

    def broadcast_if_other(self, lhs, rhs):
        if not (lhs.type.is_block() and rhs.type.is_block()):
            return broadcast(self, lhs, rhs)
        pair = id(lhs.type.shape), id(rhs.type.shape)  # of which each is there once
        if pair not in shapes:
            shapes[pair] = broadcast(self, lhs, rhs)[0].type.shape
        return stretched(self, lhs, shapes[pair]), stretched(self, rhs, shapes[pair])

    def stretched(self, tensor, shape):
        if tensor.type.shape is shape:
            return tensor
        handle = self.builder.create_broadcast(tensor.handle, [*shape])
        return self.tensor(handle, tl.core.block_type(tensor.type.scalar, shape))

    def promote_once(self, *kinds):
        named = tuple([getattr(kind, "name", kind) for kind in kinds])
        if named not in types:
            types[named] = promote(self, *kinds)
        return types[named]

    def check_if_other(self, lhs, rhs, *options, **named):
        """Of two tensors, or of a tensor and a number, which becomes one of the same shape."""
        first = isinstance(lhs, tensor)
        if first and isinstance(rhs, tensor):
            if lhs.dtype.name == rhs.dtype.name and lhs.dtype.name in stay:
                return broadcast_if_other(self, lhs, rhs)
            return check(self, lhs, rhs, *options, **named)
        given, number = (lhs, rhs) if first else (rhs, lhs)
        if not isinstance(given, tensor) or type(number) not in (int, float) or number != number:
            return check(self, lhs, rhs, *options, **named)
        shape = id(given.type.shape) if given.type.is_block() else None
        key = (type(number), number, math.copysign(1, number), given.dtype.name, shape, first, options, *named.items())
        if key not in constants:
            pair = check(self, lhs, rhs, *options, **named)
            if pair[not first] is not given:  # it was converted, too
                return pair
            if len(constants) > 10_000:
                constants.clear()
            constants[key] = pair[first]
            constants[key].handle.data.setflags(write=False)
        return (given, constants[key]) if first else (constants[key], given)

    def unwrap_if_other(value):
        return value if type(value) is tensor else unwrap(value)

    patch.setattr(tl.core, "_unwrap_if_constexpr", unwrap_if_other)
    patch.setattr(semantic, "binary_op_type_checking_impl", check_if_other)
    patch.setattr(semantic, "cast", cast_if_other)
    patch.setattr(semantic, "broadcast_impl_value", broadcast_if_other)
    patch.setattr(semantic, "computation_type_impl", promote_once)


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

    def run(self, programs, _y, _z, _stream, _function, _metadata, launch_metadata, enter, leave, *arguments):
        assert launch_metadata is enter is leave is None
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
