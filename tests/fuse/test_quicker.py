"""The interpreter of the tests computes what Triton's semantics do: bit by bit, in the same types, the second time as the first."""

import ast
import functools
import importlib
import inspect
import itertools
import operator

import pytest

np = pytest.importorskip("numpy")
tl = pytest.importorskip("triton.language")
interpreter = pytest.importorskip("triton.runtime.interpreter")
semantic = interpreter.interpreter_semantic

#: Operators, and what Triton makes of them.
OPERATORS = {
    operator.add: lambda one, other: semantic.add(one, other, True),
    operator.sub: lambda one, other: semantic.sub(one, other, True),
    operator.mul: lambda one, other: semantic.mul(one, other, True),
    operator.truediv: semantic.truediv,
    # By the language's own, as before anybody makes it quicker: some versions make a tensor of a number first, and compare in a wider type.
    **{
        getattr(operator, name): functools.partial(getattr(tl.core.tensor, f"__{name}__"), _semantic=semantic)
        for name in ("lt", "le", "gt", "ge", "eq", "ne")
    },
    operator.and_: semantic.and_,
    operator.or_: semantic.or_,
}
#: What kernels call by name, as it is before anybody makes it quicker.
PLAIN = {name: getattr(tl, name) for name in ("abs", "exp", "maximum", "minimum", "full")}
#: How it reads a kernel, likewise.
REWRITER = interpreter.FunctionRewriter
PLACE, TRANSFORM = REWRITER._get_jit_fn_file_line, REWRITER._transform_ast
NUMBERS = (3, 0.0, -0.0, 0.5, float("inf"), float("nan"))
TYPES = (tl.float32, tl.float64, tl.int32, tl.int64, tl.float16, tl.int1)
POINTER = tl.pointer_type(tl.float32)


@pytest.fixture(autouse=True)
def only_interpreted(device):
    if device.type != "cpu":
        pytest.skip("looks into the interpreter: --device=cpu")


def tensor(values, dtype):
    data = np.array(values, dtype=interpreter._get_np_dtype(dtype))
    handle = interpreter.TensorHandle(np.atleast_1d(data), dtype)
    return tl.core.tensor(handle, tl.block_type(dtype, [*data.shape]) if data.shape else dtype)


def told(function, *arguments):
    """All that there is to know of a result: its types, its shape and its bits."""
    with np.errstate(all="ignore"):
        try:
            found = function(*arguments)
        except Exception as error:  # as Triton refuses it
            return type(error)
    handle = found.handle
    return (
        str(found.type),
        str(found.dtype),
        str(handle.dtype),
        handle.data.dtype,
        handle.data.shape,
        handle.data.tobytes(),
    )


def blocks(dtype):
    return [tensor(values, dtype) for values in (7, [1, 2, 0, 5], [[3], [4]], [[0, 1, 2, 3], [4, 5, 6, 7]])]


@pytest.mark.parametrize("operation", OPERATORS, ids=lambda operation: operation.__name__)
def test_operators(operation):
    mine = [each for dtype in (*TYPES, POINTER) for each in blocks(dtype)]
    pairs = [*itertools.product(mine, mine), *itertools.product(mine, NUMBERS), *itertools.product(NUMBERS, mine)]
    if operation not in (operator.add, operator.sub, operator.mul, operator.truediv):  # those have no other side
        pairs = [pair for pair in pairs if not isinstance(pair[0], (int, float))]
    for pair in pairs:
        expected = told(OPERATORS[operation], *pair)
        for _ in range(2):  # first as a kind that is new, then as one that is known
            assert told(operation, *pair) == expected, [getattr(each, "type", each) for each in pair]


def unusual(dtype):
    """More blocks where these are floating: signs, zeros with one, and what is no number."""
    if dtype not in (tl.float32, tl.float64):
        return []
    return [tensor(values, dtype) for values in ([-0.0, float("inf"), float("-nan"), -3.5], [[-1.5], [float("nan")]])]


@pytest.mark.parametrize("name", ["abs", "exp"])
def test_functions_of_one(name):
    for each in (each for dtype in TYPES for each in blocks(dtype) + unusual(dtype)):
        expected = told(lambda x: PLAIN[name](x, _semantic=semantic), each)
        for _ in range(2):
            assert told(getattr(tl, name), each) == expected, each.type


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_functions_of_two(name):
    mine = [each for dtype in TYPES[:4] for each in blocks(dtype) + unusual(dtype)]
    for pair in (*itertools.product(mine, mine), *itertools.product(mine, NUMBERS)):
        expected = told(lambda *both: PLAIN[name](*both, _semantic=semantic), *pair)
        for _ in range(2):
            assert told(getattr(tl, name), *pair) == expected, [getattr(each, "type", each) for each in pair]


def test_signs_and_truths():
    mine = [each for dtype in TYPES for each in blocks(dtype)]
    mine += [each < 3 for each in blocks(tl.float32)]  # as a comparison labels them
    for (operation, plain), each in itertools.product(
        ((operator.neg, semantic.minus), (operator.invert, semantic.invert)), mine
    ):
        expected = told(plain, each)
        for _ in range(2):
            assert told(operation, each) == expected, each.type


def test_conversions():
    mine = [each for dtype in TYPES for each in blocks(dtype)] + [each < 3 for each in blocks(tl.float64)]
    for each, dtype in itertools.product([*mine, *unusual(tl.float32), *unusual(tl.float64)], TYPES):
        expected = told(semantic.cast, each, dtype)
        for _ in range(2):
            assert told(each.to, dtype) == expected, (each.type, dtype)


def test_constants():
    for value, dtype in itertools.product((0, 0.0, -0.0, 1, 1.0, float("nan")), TYPES[:4]):
        expected = told(lambda *given: semantic.splat(semantic.make_scalar(*given), [4]), value, dtype)
        for _ in range(2):
            assert told(tl.full, (4,), value, dtype) == expected


@pytest.mark.parametrize("pointed", TYPES[:5])
def test_stores(pointed):
    """What has the type that is pointed to, and what has to become it."""
    allowed = [[1, 0, 1, 1], [0, 1, 1, 0]]
    for dtype, masked in itertools.product(TYPES[:4], (True, False)):
        value = tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype)
        for _ in range(2):
            memory = np.zeros((2, 4), interpreter._get_np_dtype(pointed))
            at = memory.ctypes.data + memory.itemsize * np.arange(8).reshape(2, 4)
            mask = (tensor(allowed, tl.int1),) * masked
            tl.store(tensor(at, tl.pointer_type(pointed)), value, *mask)
            assert np.array_equal(memory, value.handle.data * (np.array(allowed) if masked else 1))


def test_choices():
    conditions = [tensor(values, tl.int1) for values in (1, [1, 0, 0, 1], [[1], [0]])]
    sides = [*NUMBERS, *(each for dtype in (tl.float32, tl.int64, tl.int1) for each in blocks(dtype))]
    for one, other in itertools.product(sides, sides):
        for condition in conditions:
            expected = told(semantic.where, condition, one, other)
            for _ in range(2):
                assert told(tl.where, condition, one, other) == expected


@pytest.mark.parametrize("dtype", TYPES)
def test_loads(dtype):
    memory = np.arange(1, 9).astype(interpreter._get_np_dtype(dtype))
    places = tensor(memory.ctypes.data + memory.itemsize * np.arange(8).reshape(2, 4), tl.pointer_type(dtype))
    mask = tensor([[1, 0, 1, 1], [0, 1, 1, 0]], tl.int1)
    for other in (None, 0, -0.0, 2.0, 0, None):
        found = tl.load(places, mask) if other is None else tl.load(places, mask, other=other)
        expected = np.where(mask.handle.data, memory.reshape(2, 4), memory.dtype.type(other or 0))
        assert found.dtype == dtype
        assert np.array_equal(found.handle.data, expected)


def test_further_dimensions():
    for block in blocks(tl.float32)[1:]:
        for index in ((slice(None), None), (None, slice(None)), (None, slice(None), slice(None))):
            if index.count(slice(None)) == len(block.shape):
                for _ in range(2):
                    assert block[index].handle.data.shape == block.handle.data[index].shape
                    assert [size.value for size in block[index].shape] == [*block.handle.data[index].shape]


@pytest.mark.parametrize("name", ["linear.kernels.diagonal", "linear.kernels.block_diagonal", "linear.kernels.dense"])
def test_kernels_are_read_as_triton_reads_them(name):
    """The same lines become the same program, every part of it at its place in the file."""
    kernels = [
        each
        for each in vars(importlib.import_module(f"deeppcr.{name}")).values()
        if isinstance(each, interpreter.InterpretedFunction)
    ]
    assert len(kernels) >= 2
    for kernel in kernels:
        lines = inspect.getsourcelines(kernel.fn)
        assert interpreter.inspect.getsourcelines(kernel.fn) == lines
        rewriter = kernel.rewriter
        place = rewriter.filename, rewriter.def_file_lineno = rewriter._get_jit_fn_file_line()
        assert place == PLACE(rewriter)
        rewriter.def_lineno = rewriter._find_def(lines[0])
        source = rewriter._prepare_source(lines[0])
        found, right = (
            ast.dump(read(rewriter, source), include_attributes=True) for read in (REWRITER._transform_ast, TRANSFORM)
        )
        assert found == right


def test_functions_that_stand_in_another_one_are_read_as_python_reads_them():
    def kernel():
        """Whose lines are indented, and end where those around it go on."""

    assert interpreter.inspect.getsourcelines(kernel) == inspect.getsourcelines(kernel)
