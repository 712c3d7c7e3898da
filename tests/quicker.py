"""Triton's interpreter without what it does again at every call; kernels compute what they did, bit by bit.

Python's part of an operation takes a hundred times as long as NumPy's. It is the same for all tensors of a kind, so it is done once.
"""

import dataclasses
import math
import sys
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
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
    scope = patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    _Operators(scope, interpreter, check_integers=check_integers)
    return scope


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


#: Operators, and what they are of NumPy where both sides are of one type.
ARITHMETIC = {"add": "add", "sub": "subtract", "mul": "multiply"}
COMPARISONS = {
    "gt": "greater",
    "ge": "greater_equal",
    "lt": "less",
    "le": "less_equal",
    "eq": "equal",
    "ne": "not_equal",
}
BITWISE = {"and": "bitwise_and", "or": "bitwise_or"}


class _Operators:
    """Operations on kinds of tensors that have met before: NumPy's function at once, with the type that came out the first time.

    Args:
        scope: takes what replaces the language's own
        check_integers: those are left to the interpreter
    """

    def __init__(self, scope, interpreter, *, check_integers):
        self.tl, self.np, self.semantic = interpreter.tl, interpreter.np, interpreter.interpreter_semantic
        self.tensor, self.handle = self.tl.core.tensor, interpreter.TensorHandle
        self.scalars = {}
        self.load_from = interpreter._interpreter.load
        # Of two types of one family Triton takes the wider, as NumPy does.
        self.families = ({"fp32", "fp64"},) if check_integers else ({"fp32", "fp64"}, {"int32", "int64"})
        self.numbers = set().union(*self.families)
        self.loaded = {f"pointer<{name}>": np_dtype for name, np_dtype in self._loaded_types()}
        for name, function in (ARITHMETIC | COMPARISONS).items():
            scope.set_attr(self.tensor, f"__{name}__", self.operator(f"__{name}__", function, *self.families))
        for name, function in ARITHMETIC.items():
            scope.set_attr(self.tensor, f"__r{name}__", self.reflected(f"__r{name}__", function))
        for name, function in BITWISE.items():
            scope.set_attr(self.tensor, f"__{name}__", self.operator(f"__{name}__", function, {"int1"}))
        scope.set_attr(self.tensor, "__add__", self.moved(self.tensor.__add__))
        scope.set_attr(self.tensor, "__getitem__", self.spread(self.tensor.__getitem__))
        for name, quick in (("where", self.where(self.tl.where)), ("load", self.load(self.tl.load))):
            scope.set_attr(self.tl, name, quick)
            scope.set_attr(self.tl.core, name, quick)

    def _loaded_types(self):
        return (
            ("fp32", self.np.float32),
            ("fp64", self.np.float64),
            ("int32", self.np.int32),
            ("int64", self.np.int64),
        )

    def made(self, data, template):
        """A tensor as one before it, with other data."""
        others, dtype = template
        handle, result = object.__new__(self.handle), object.__new__(self.tensor)
        handle.__dict__ = {"data": data, "dtype": dtype, "attr": {}}
        result.__dict__ = {**others, "handle": handle}
        return result

    def template(self, result):
        return {name: value for name, value in vars(result).items() if name != "handle"}, result.handle.dtype

    def operator(self, name, function, *families):
        slow, function, known = getattr(self.tensor, name), getattr(self.np, function), {}
        tensor, made, constexpr, like = self.tensor, self.made, self.tl.constexpr, self.number_like

        def operate(left, right):
            if type(right) is constexpr:
                right = right.value
            other = right if type(right) is tensor else like(left, right)
            if other is None:
                return slow(left, right)
            mine, theirs = left.handle.data, other.handle.data
            kinds = left.dtype.name, other.dtype.name
            # What a comparison gave, the interpreter still labels as what was compared.
            key = *kinds, left.handle.dtype.name, mine.dtype, theirs.dtype, id(left.shape), id(other.shape)
            if key in known:
                return made(function(mine, theirs), known[key])
            result = slow(left, right)
            if any(family.issuperset(kinds) for family in families):
                known[key] = self.template(result)
            return result

        return operate

    def reflected(self, name, function):
        """The same for a number on the left."""
        slow, function, known = getattr(self.tensor, name), getattr(self.np, function), {}

        def operate(right, left):
            other = None if type(left) is self.tensor else self.number_like(right, left)
            if other is None:
                return slow(right, left)
            key = right.dtype.name, id(right.shape)
            if key not in known:
                result = slow(right, left)
                known[key] = self.template(result)
                return result
            return self.made(function(other.handle.data, right.handle.data), known[key])

        return operate

    def number_like(self, tensor, number):
        """A number as a tensor of that type and shape, or None where the type would be another."""
        if type(number) not in (int, float) or tensor.dtype.name not in self.numbers:
            return None
        given, constant = self.semantic.binary_op_type_checking_impl(tensor, number)
        return constant if given is tensor else None

    def scalar(self, number):
        """A number by itself as a tensor, as it is beside another number."""
        if type(number) not in (int, float):
            return None
        key = type(number), number, math.copysign(1, number)
        if key not in self.scalars:
            self.scalars[key] = self.semantic.to_tensor(number)
        return self.scalars[key]

    def moved(self, add):
        """Pointers, by integers."""
        tensor, made, known, unsigned = self.tensor, self.made, {}, self.np.uint64

        def move(left, right):
            if not left.dtype.is_ptr() or type(right) is not tensor or right.dtype.name not in ("int32", "int64"):
                return add(left, right)
            key = left.dtype.name, id(left.shape), id(right.shape)
            if key not in known:
                result = add(left, right)
                known[key] = self.template(result), max(1, left.dtype.element_ty.primitive_bitwidth // 8)
                return result
            template, bytes_each = known[key]
            return made(left.handle.data + bytes_each * right.handle.data.astype(unsigned), template)

        return move

    def spread(self, slow):
        """Of a tensor, with further dimensions of size 1."""
        made, known = self.made, {}

        def take(source, index):
            places = tuple([each is None for each in index]) if type(index) is tuple else None
            if places is None or any(each != slice(None) for each in index if each is not None):
                return slow(source, index)
            key = source.dtype.name, id(source.shape), places
            if key in known:
                return made(source.handle.data[index], known[key])
            result = slow(source, index)
            known[key] = self.template(result)
            return result

        return take

    def where(self, slow):
        tensor, made, known, where = self.tensor, self.made, {}, self.np.where

        def choose(condition, x, y, **options):
            if type(condition) is not tensor or condition.dtype.name != "int1" or options:
                return slow(condition, x, y, **options)
            first = x if type(x) is tensor else self.number_like(y, x) if type(y) is tensor else self.scalar(x)
            second = y if type(y) is tensor else self.number_like(x, y) if type(x) is tensor else self.scalar(y)
            if first is None or second is None or first.dtype.name != second.dtype.name:
                return slow(condition, x, y)
            key = first.dtype.name, id(condition.shape), id(first.shape), id(second.shape)
            if key in known:
                return made(where(condition.handle.data, first.handle.data, second.handle.data), known[key])
            result = slow(condition, x, y)
            if result.dtype is first.dtype and first.dtype.name in ("int1", *self.numbers):
                known[key] = self.template(result)
            return result

        return choose

    def load(self, slow):
        """From pointers of a shape, where a mask of the same shape allows it, and a number elsewhere."""
        tensor, made, known, fills, load_from = self.tensor, self.made, {}, {}, self.load_from

        def load(pointer, mask=None, other=None, **options):
            if (
                options
                or type(mask) is not tensor
                or mask.shape is not pointer.shape
                or type(other) not in (int, float, type(None))
            ):
                return slow(pointer, mask, other, **options)
            dtype = self.loaded.get(pointer.dtype.name)
            key = pointer.dtype.name, id(pointer.shape)
            if dtype is None or key not in known:
                result = slow(pointer, mask, other)
                if dtype is not None:
                    known[key] = self.template(result)
                return result
            places, fill = pointer.handle.data, (*key, other)
            if fill not in fills:
                fills[fill] = self.np.full(places.shape, other or 0, dtype=dtype)
            return made(load_from(places, mask.handle.data, fills[fill], self.np.dtype(dtype)), known[key])

        return load
