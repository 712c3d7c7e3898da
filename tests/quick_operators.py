"""Operations of Triton's language on kinds of tensors that have met before: NumPy's function at once, with the type that came out the first time.

A kind is a number: one for each type, shape and dtype of the data, which a tensor is given when it is first asked for. The first time
that kinds meet, Triton's interpreter computes, and what NumPy's function makes of the same data is held against it: where they differ,
in a bit or in a dtype, these kinds are left to the interpreter.
"""

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
FLOATS, INTEGERS, TRUTHS = frozenset({"fp32", "fp64"}), frozenset({"int32", "int64"}), frozenset({"int1"})


class Operators:
    """Puts quicker operations in the place of the language's own.

    Args:
        scope: takes what replaces the language's own
        check_integers: those are left to the interpreter
    """

    def __init__(self, scope, interpreter, *, check_integers):
        self.tl, self.np, self.semantic = interpreter.tl, interpreter.np, interpreter.interpreter_semantic
        self.tensor, self.handle, self.memory = self.tl.core.tensor, interpreter.TensorHandle, interpreter._interpreter
        self.kinds, self.constants, self.scalars = {}, {}, {}
        scope.set_attr(self.tensor, "kind", None)  # of those that nobody has asked for yet
        # Of two types of one family Triton takes the wider, as NumPy does.
        families = (FLOATS,) if check_integers else (FLOATS, INTEGERS)
        self.numbers = frozenset().union(*families)
        for name, function in (ARITHMETIC | COMPARISONS).items():
            self.put(scope, f"__{name}__", self.of_two(f"__{name}__", function, *families))
        for name, function in ARITHMETIC.items():
            self.put(scope, f"__r{name}__", self.reflected(f"__r{name}__", function))
        for name, function in BITWISE.items():
            self.put(scope, f"__{name}__", self.of_two(f"__{name}__", function, TRUTHS))
        self.put(scope, "__truediv__", self.of_two("__truediv__", "divide", FLOATS))
        self.put(scope, "__rtruediv__", self.reflected("__rtruediv__", "divide"))
        self.put(scope, "__invert__", self.of_one(self.tensor.__invert__, self.np.invert, TRUTHS))
        self.put(scope, "__neg__", self.of_one(self.tensor.__neg__, self.np.negative, FLOATS))
        self.put(scope, "__add__", self.moved(self.tensor.__add__))
        self.put(scope, "__getitem__", self.spread(self.tensor.__getitem__))
        self.put(scope, "to", self.converted(self.tensor.to))
        core = self.tl.core
        for name, quick in {
            "where": self.where(core.where),
            "load": self.load(core.load),
            "store": self.store(core.store),
            "maximum": self.of_two(core.maximum, "fmax", FLOATS),
            "minimum": self.of_two(core.minimum, "fmin", FLOATS),
            "abs": self.of_one(self.tl.math.abs, self.np.abs, FLOATS),
            "exp": self.of_one(self.tl.math.exp, self.np.exp, FLOATS),
        }.items():
            for module in (self.tl, core, self.tl.math):
                if hasattr(module, name):
                    scope.set_attr(module, name, quick)

    def put(self, scope, name, quick):
        scope.set_attr(self.tensor, name, quick)

    def kind_of(self, tensor):
        """The number of the kind of a tensor, which it keeps. What a comparison gave, the interpreter still labels as what was compared."""
        handle = tensor.handle
        key = tensor.dtype.name, handle.dtype.name, handle.data.dtype, handle.data.ndim, id(tensor.shape)
        # The shape is held: another one could else have its number.
        tensor.kind, _ = self.kinds.setdefault(key, (1 + len(self.kinds), tensor.shape))
        return tensor.kind

    def made(self, data, template):
        """A tensor as one before it, with other data."""
        others, dtype = template
        handle, result = object.__new__(self.handle), object.__new__(self.tensor)
        handle.__dict__ = {"data": data, "dtype": dtype, "attr": {}}
        result.__dict__ = {**others, "handle": handle}
        return result

    def template(self, result, data):
        """What others of its kind share with a result, or None where the data that NumPy computed are not those."""
        theirs = result.handle.data
        if (data.dtype, data.shape, data.tobytes()) != (theirs.dtype, theirs.shape, theirs.tobytes()):
            return None
        self.kind_of(result)
        return {name: value for name, value in vars(result).items() if name != "handle"}, result.handle.dtype

    def of_one(self, slow, function, family):
        known, tensor, made, kind_of = {}, self.tensor, self.made, self.kind_of

        def operate(one, **options):
            if options or type(one) is not tensor:
                return slow(one, **options)
            kind = one.kind or kind_of(one)
            template = known.get(kind)
            if template is not None:
                return made(function(one.handle.data), template)
            result = slow(one)
            if kind not in known:
                known[kind] = self.template(result, function(one.handle.data)) if one.dtype.name in family else None
            return result

        return operate

    def of_two(self, slow, function, *families):
        slow = getattr(self.tensor, slow) if isinstance(slow, str) else slow
        function, known = getattr(self.np, function), {}
        tensor, constexpr = self.tensor, self.tl.constexpr
        made, like, kind_of = self.made, self.number_like, self.kind_of

        def operate(left, right, *options, **named):
            if options or named or type(left) is not tensor:
                return slow(left, right, *options, **named)
            if type(right) is constexpr:
                right = right.value
            other = right if type(right) is tensor else like(left, right)
            if other is None:
                return slow(left, right)
            kinds = left.kind or kind_of(left), other.kind or kind_of(other)
            template = known.get(kinds)
            if template is not None:
                return made(function(left.handle.data, other.handle.data), template)
            result = slow(left, right)
            if kinds not in known:
                covered = any(family.issuperset((left.dtype.name, other.dtype.name)) for family in families)
                known[kinds] = self.template(result, function(left.handle.data, other.handle.data)) if covered else None
            return result

        return operate

    def reflected(self, name, function):
        """The same for a number on the left."""
        slow, function, known = getattr(self.tensor, name), getattr(self.np, function), {}

        def operate(right, left):
            other = None if type(left) is self.tensor else self.number_like(right, left)
            if other is None:
                return slow(right, left)
            template = known.get(right.kind)
            if template is not None:
                return self.made(function(other.handle.data, right.handle.data), template)
            result, kind = slow(right, left), right.kind
            if kind not in known:
                known[kind] = self.template(result, function(other.handle.data, right.handle.data))
            return result

        return operate

    def number_like(self, tensor, number):
        """A number as a tensor of that type and shape, or None where the type would be another."""
        if type(number) is self.tl.constexpr:
            number = number.value
        if type(number) not in (int, float) or number != number:
            return None
        # Zeros have a sign.
        key = tensor.kind or self.kind_of(tensor), type(number), number or str(number)
        constant = self.constants.get(key)
        if constant is None and tensor.dtype.name in self.numbers:
            given, made = self.semantic.binary_op_type_checking_impl(tensor, number)
            if given is tensor:
                if len(self.constants) > 10_000:
                    self.constants.clear()
                constant = self.constants[key] = made
        return constant

    def scalar(self, number):
        """A number by itself as a tensor, as it is beside another number."""
        if type(number) not in (int, float):
            return None
        key = type(number), number or str(number)
        if key not in self.scalars:
            self.scalars[key] = self.semantic.to_tensor(number)
        return self.scalars[key]

    def moved(self, add):
        """Pointers, by integers."""
        tensor, made, known, unsigned = self.tensor, self.made, {}, self.np.uint64
        kind_of, scalar, names = self.kind_of, self.scalar, INTEGERS

        def move(left, right):
            if not left.dtype.is_ptr():
                return add(left, right)
            by = right if type(right) is tensor else scalar(right)
            if by is None or by.dtype.name not in names:
                return add(left, right)
            kinds = left.kind or kind_of(left), by.kind or kind_of(by)
            found = known.get(kinds)
            if found is not None:
                template, bytes_each = found
                return made(left.handle.data + bytes_each * by.handle.data.astype(unsigned), template)
            result = add(left, right)
            if kinds not in known:
                bytes_each = unsigned(max(1, left.dtype.element_ty.primitive_bitwidth // 8))
                template = self.template(result, left.handle.data + bytes_each * by.handle.data.astype(unsigned))
                known[kinds] = None if template is None else (template, bytes_each)
            return result

        return move

    def spread(self, slow):
        """Of a tensor, with further dimensions of size 1."""
        made, known = self.made, {}

        def take(source, index):
            places = tuple([each is None for each in index]) if type(index) is tuple else None
            if places is None or any(each != slice(None) for each in index if each is not None):
                return slow(source, index)
            key = source.kind or self.kind_of(source), places
            template = known.get(key)
            if template is not None:
                return made(source.handle.data[index], template)
            result = slow(source, index)
            if key not in known:
                known[key] = self.template(result, source.handle.data[index])
            return result

        return take

    def converted(self, slow):
        """To another type, where both are numbers, or from truths."""
        made, known, tensor_type = self.made, {}, self.tl.dtype

        def convert(source, dtype, *options, **named):
            dtype = getattr(dtype, "value", dtype)  # of a constant of the kernel
            if options or named or type(dtype) is not tensor_type:
                return slow(source, dtype, *options, **named)
            key = source.kind or self.kind_of(source), dtype.name
            found = known.get(key)
            if found is not None:
                return made(source.handle.data.astype(found[0]), found[1]) if found else source
            result = slow(source, dtype)
            if result is source:
                known[key] = ()
            elif key not in known:
                covered = {source.dtype.name, dtype.name} <= FLOATS | INTEGERS | TRUTHS and dtype.name not in TRUTHS
                data = result.handle.data
                template = self.template(result, source.handle.data.astype(data.dtype)) if covered else None
                known[key] = None if template is None else (data.dtype, template)
            return result

        return convert

    def where(self, slow):
        tensor, made, known, where, kind_of = self.tensor, self.made, {}, self.np.where, self.kind_of

        def choose(condition, x, y, **options):
            if type(condition) is not tensor or condition.dtype.name != "int1" or options:
                return slow(condition, x, y, **options)
            first = x if type(x) is tensor else self.number_like(y, x) if type(y) is tensor else self.scalar(x)
            second = y if type(y) is tensor else self.number_like(x, y) if type(x) is tensor else self.scalar(y)
            if first is None or second is None:
                return slow(condition, x, y)
            key = (
                condition.kind or kind_of(condition),
                first.kind or kind_of(first),
                second.kind or kind_of(second),
            )
            template = known.get(key)
            if template is not None:
                return made(where(condition.handle.data, first.handle.data, second.handle.data), template)
            result = slow(condition, x, y)
            if key not in known:
                covered = first.dtype.name == second.dtype.name and first.dtype.name in self.numbers | TRUTHS
                data = where(condition.handle.data, first.handle.data, second.handle.data)
                known[key] = self.template(result, data) if covered and result.dtype is first.dtype else None
            return result

        return choose

    def load(self, slow):
        """From pointers of a shape, where a mask of the same shape allows it, and a number elsewhere."""
        np, tensor, made, known, fills = self.np, self.tensor, self.made, {}, {}
        kind_of, load_from = self.kind_of, self.memory.load
        dtypes = {
            "pointer<fp32>": np.dtype("float32"),
            "pointer<fp64>": np.dtype("float64"),
            "pointer<int32>": np.dtype("int32"),
            "pointer<int64>": np.dtype("int64"),
        }

        def load(pointer, mask=None, other=None, **options):
            if (
                options
                or type(mask) is not tensor
                or mask.shape is not pointer.shape
                or type(other) not in (int, float, type(None))
            ):
                return slow(pointer, mask, other, **options)
            kind = pointer.kind or kind_of(pointer)
            found = known.get(kind)
            if found is None:
                result = slow(pointer, mask, other)
                dtype = dtypes.get(pointer.dtype.name)
                known[kind] = dtype and (dtype, self.template(result, result.handle.data))
                return result
            dtype, template = found
            places, fill = pointer.handle.data, (kind, other)
            if fill not in fills:
                fills[fill] = np.full(places.shape, other or 0, dtype=dtype)
            return made(load_from(places, mask.handle.data, fills[fill], dtype), template)

        return load

    def store(self, slow):
        """To pointers of a shape, what has the same one and the type that they point to, where a mask of that shape allows it."""
        tensor, known, kind_of, store_to = self.tensor, {}, self.kind_of, self.memory.store

        def fits(pointer, value, mask):
            return (
                pointer.shape is value.shape
                and pointer.shape is mask.shape
                and pointer.dtype.is_ptr()
                and not pointer.dtype.is_const()
                and pointer.dtype.element_ty.name == value.dtype.name
                and value.dtype.name in FLOATS | INTEGERS
                and value.handle.data.dtype.itemsize * 8 == value.dtype.primitive_bitwidth
                and mask.dtype.name in TRUTHS
            )

        def store(pointer, value, mask=None, **options):
            if options or type(mask) is not tensor or type(value) is not tensor or type(pointer) is not tensor:
                return slow(pointer, value, mask, **options)
            key = pointer.kind or kind_of(pointer), value.kind or kind_of(value), mask.kind or kind_of(mask)
            quick = known.get(key)
            if quick is None:
                quick = known[key] = fits(pointer, value, mask)
            if quick:
                return store_to(pointer.handle.data, value.handle.data, mask.handle.data)
            return slow(pointer, value, mask)

        return store
