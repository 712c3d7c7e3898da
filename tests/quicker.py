"""Triton's interpreter without what it does again at every call; kernels compute what they did, bit by bit.

Python's part of an operation takes a hundred times as long as NumPy's. It is the same for all tensors of a kind, so it is done once.
"""

import ast
import dataclasses
import functools
import inspect
import linecache
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest

from quick_operators import Operators


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
        # The larger of a number and NaN is the number, as on a GPU: before 3.9 Triton's interpreter took NaN.
        for name, function in (("create_maxnumf", interpreter.np.fmax), ("create_minnumf", interpreter.np.fmin)):
            patch.setattr(interpreter.InterpreterBuilder, name, functools.partialmethod(_of_two, function))
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
    Operators(scope, interpreter, check_integers=check_integers)
    _launch_directly(patch, interpreter)
    _rewrite_directly(patch, interpreter.FunctionRewriter)
    return scope


def _of_two(builder, function, one, other):
    return builder.binary_op(one, other, function)


def _launch_directly(patch, interpreter):
    """What a kernel's arguments are called is looked up once; those on a CPU already are not brought there, nor back."""
    executor, facts = interpreter.GridExecutor, {}
    patch.setattr(executor, "_init_args_hst", lambda self, arguments, options: (arguments, options))
    patch.setattr(executor, "_restore_args_dev", lambda self, *_: None)
    patch.setattr(interpreter.tl, "str_to_ty", functools.lru_cache(interpreter.tl.str_to_ty))
    look = {name: getattr(inspect, name) for name in ("getfullargspec", "getcallargs")}

    def names_of(function):
        if function not in facts:
            facts[function] = look["getfullargspec"](function)
        return facts[function]

    def arguments_of(function, /, *arguments, **options):
        names = names_of(function)
        if len(arguments) + len(options) != len(names.args):  # some have defaults, or are wrong
            return look["getcallargs"](function, *arguments, **options)
        return dict(zip(names.args, arguments, strict=False)) | options

    quick = ModuleType("inspect")
    vars(quick).update(vars(inspect), getfullargspec=names_of, getcallargs=arguments_of, getsourcelines=_lines_of)
    patch.setattr(interpreter, "inspect", quick)


def _rewrite_directly(patch, rewriter):
    """Where a kernel stands is asked of its code: Triton reads it a second time, and then adds to the number of every line."""
    transformer = rewriter.ast_transformer

    def place_of(self):
        lines, first = _lines_of(self.fn)
        return self.fn.__code__.co_filename, first + next(at for at, line in enumerate(lines) if _is_def(line))

    def transform(self, source):
        return ast.fix_missing_locations(transformer.visit(ast.parse("\n" * (self.def_file_lineno - 1) + source)))

    patch.setattr(rewriter, "_get_jit_fn_file_line", place_of)
    patch.setattr(rewriter, "_transform_ast", transform)


def _is_def(line):
    return line.strip().startswith("def ")


def _lines_of(function):
    """As ``inspect.getsourcelines`` of a function that stands by itself in a file: by its lines of code and indentation, not token by token."""
    code = function.__code__
    linecache.checkcache(code.co_filename)
    lines, first = linecache.getlines(code.co_filename, function.__globals__), code.co_firstlineno
    if function.__qualname__ != function.__name__ or len(lines) < first:
        return inspect.getsourcelines(function)
    end = max(line for *_, line in code.co_lines() if line is not None)
    while end < len(lines) and (lines[end][:1].isspace() or lines[end].startswith(")")):
        end += 1
    while not lines[end - 1].strip():
        end -= 1
    return lines[first - 1 : end], first


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
    full, tensor, shapes, types, constants, filled = semantic.full, tl.core.tensor, {}, {}, {}, {}
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

    def full_once(self, shape, value, dtype):
        if type(value) not in (int, float) or value != value:
            return full(self, shape, value, dtype)
        key = *shape, type(value), value or str(value), dtype.name
        if key not in filled:
            filled[key] = full(self, shape, value, dtype)
            filled[key].handle.data.setflags(write=False)
        return filled[key]

    def unwrap_if_other(value):
        return value if type(value) is tensor else unwrap(value)

    patch.setattr(tl.core, "_unwrap_if_constexpr", unwrap_if_other)
    patch.setattr(semantic, "binary_op_type_checking_impl", check_if_other)
    patch.setattr(semantic, "cast", cast_if_other)
    patch.setattr(semantic, "full", full_once)
    patch.setattr(semantic, "broadcast_impl_value", broadcast_if_other)
    patch.setattr(semantic, "computation_type_impl", promote_once)
