"""The interpreter of the tests computes what Triton's semantics do: bit by bit, in the same types, the second time as the first."""

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
    operator.lt: semantic.less_than,
    operator.le: semantic.less_equal,
    operator.gt: semantic.greater_than,
    operator.ge: semantic.greater_equal,
    operator.eq: semantic.equal,
    operator.ne: semantic.not_equal,
    operator.and_: semantic.and_,
    operator.or_: semantic.or_,
}
NUMBERS = (3, -0.0, 0.5, float("inf"), float("nan"))
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
    if operation not in (operator.add, operator.sub, operator.mul):  # those have no other side
        pairs = [pair for pair in pairs if not isinstance(pair[0], (int, float))]
    for pair in pairs:
        expected = told(OPERATORS[operation], *pair)
        for _ in range(2):  # first as a kind that is new, then as one that is known
            assert told(operation, *pair) == expected, [getattr(each, "type", each) for each in pair]


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
