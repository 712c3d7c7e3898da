"""The source of the kernels of a step: what a program computes, put into four frames.

Shapes: L steps in N chunks, R lanes (rows, times channels of an elementwise step), K numbers of the state a lane. ``states``
[L, R * K] as they are packed; ``starts``, ``ends``, ``sizes`` [N, K, R] and ``products`` [N, K * K, R] of the chunks.

* ``roll`` runs all chunks at once, each from its start, with the product of its Jacobians; or, WHOLE, one after the other.
* ``join`` corrects the starts: each is to be the end of the chunk before it. See ``nn.kernels``, which does the same for networks.
* ``sweep`` runs chunks backwards: as maps of the cotangents behind them, or with these, to the cotangents of all that is read.
* ``chain`` puts the chunks' maps one after the other.

``join`` and ``chain`` have G groups of chunks side by side in one program: every group as one map, what comes before each, and
then what is inside.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from .expressions import FUNCTIONS, Scalar, Value
from .program import Program, Read

#: What a kernel may take from ``support``.
_SUPPORT = {"FAR", "ROUGH", "finite_or_zero", "in_units", "is_enough", "settled"}
_NAME = re.compile(r"[A-Za-z_]\w*")


def forward_source(program: Program) -> str:
    """The module with ``roll``."""
    return _module(program.dtype, _roll(program))


def backward_source(program: Program) -> str:
    """The module with ``sweep``."""
    return _module(program.dtype, _sweep(program))


def joints_source(width: int, dtype: torch.dtype) -> str:
    """The module with ``join`` and ``chain``, which know nothing of the step: all steps of a width share it."""
    return _module(dtype, _join(width), _chain(width))


def _module(dtype: torch.dtype, *kernels: str) -> str:
    names = {name for text in kernels for name in _NAME.findall(text)}
    functions, support = sorted(names & set(FUNCTIONS)), sorted(names & _SUPPORT)
    head = [
        '"""A step and what runs it: made by deeppcr.fuse."""',
        "",
        "import triton",
        "import triton.language as tl",
        "",
        *([f"from deeppcr.fuse.device import {', '.join(functions)}"] if functions else []),
        *([f"from deeppcr.fuse.support import {', '.join(support)}"] if support else []),
        "",
        f"REAL = tl.constexpr(tl.{str(dtype).removeprefix('torch.')})",
        *([f"EPS = tl.constexpr({torch.finfo(dtype).eps!r})"] if "EPS" in names else []),
    ]
    return "\n".join(head) + "".join("\n\n\n" + text for text in kernels) + "\n"


def _indented(lines: list[str], depth: int) -> str:
    return "\n".join("    " * depth + line if line else "" for line in lines)


def _for(width: int, *texts: str) -> list[str]:
    """Lines for k = 0 ... width - 1; of each k all texts."""
    return [text.format(k=k) for k in range(width) for text in texts]


def _squares(width: int, text: str) -> list[str]:
    return [text.format(i=i, j=j, at=i * width + j) for i in range(width) for j in range(width)]


def _row(i: int, width: int, left: str, right: str) -> str:
    """Row i of a product of a matrix and a vector (or a column of a matrix), by names with {i} and {k}."""
    return " + ".join(f"{left.format(i=i, k=k)} * {right.format(k=k)}" for k in range(width))


class _Lines:
    """The lines that some results need: of all steps, and of one, with what they read."""

    def __init__(self, program: Program, results: list[Scalar]):
        code = program.code
        self.before, self.body = code.lines(0, results), code.lines(1, results)
        words = set(_NAME.findall("\n".join([*self.before, *self.body])))
        words |= {each.name for each in results if isinstance(each, Value)}
        words |= {code.text(each) for each in results}
        self.numbers = sorted((w for w in words if re.fullmatch(r"n\d+", w)), key=lambda w: int(w[1:]))
        reads = [read for read in program.reads if read.value.name in words]
        self.fixed = [read for read in reads if read.value.level == 0]
        self.moving = [read for read in reads if read.value.level == 1]


def _load(program: Program, read: Read, mask: str) -> str:
    value, leaf = read.value, read.leaf
    offset = f" + {read.offset}" if read.offset else ""
    cast = {"real": ".to(REAL)", "int": ".to(tl.int64)", "bool": " != 0"}[value.kind]
    masked = "" if _is_one_for_all(program, leaf) else f", mask={mask}, other=0"
    return f"{value.name} = tl.load(a{leaf}{offset}{masked}){cast}"


def _is_one_for_all(program: Program, leaf: int) -> bool:
    """Whether a leaf is the same for all lanes, which then load it once: the compiler's time grows with what lanes load themselves."""
    each = program.leaves[leaf]
    return not (program.elementwise or each.per_step or each.per_row)


def _leaf_arguments(program: Program) -> tuple[list[str], list[str]]:
    """Of every leaf where its base lies, how far apart steps, rows and channels are, and where the first channel stands."""
    pointers = [f"p{i}" for i in range(len(program.leaves))]
    strides = [f"{what}{i}" for i in range(len(program.leaves)) for what in ("step", "row", "channel", "offset")]
    return pointers, strides


def _addresses(program: Program, lines: _Lines, begin: str) -> list[str]:
    used = sorted({read.leaf for read in (*lines.fixed, *lines.moving)})
    found = []
    for i in used:
        text = f"a{i} = p{i} + offset{i}"
        if not _is_one_for_all(program, i):
            text += f" + b * row{i}"
        if program.elementwise:
            text += f" + c * channel{i}"
        if program.leaves[i].per_step:
            text += f" + {begin} * step{i}"
        found.append(text)
    return found


def _advance(program: Program, lines: _Lines, sign: str) -> list[str]:
    return [f"a{i} {sign}= step{i}" for i in sorted({read.leaf for read in lines.moving})]


def _prologue(program: Program, lines: _Lines, begin: str) -> list[str]:
    return [
        *(f"{name} = tl.load(numbers + {name[1:]})" for name in lines.numbers),
        *_addresses(program, lines, begin),
        *(_load(program, read, "live") for read in lines.fixed),
        *lines.before,
    ]


def _lanes() -> list[str]:
    return [
        "lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)",
        "inside = lane < chunks * rows",
        "n = lane // rows",
        "r = lane % rows",
        "b = r // channels",
        "c = r % channels",
        "at = b * ({width} * channels) + c  # of its first number among those of all lanes",
    ]


def _product_scalars(program: Program) -> list[Scalar]:
    """The Jacobian of a step times the product so far, j{i}_{k}."""
    code, width = program.code, program.width
    so_far = [[code.input(f"j{i}_{k}") for k in range(width)] for i in range(width)]
    return [_inner(program, program.jacobian[i], [so_far[m][k] for m in range(width)])
            for i in range(width) for k in range(width)]  # fmt: skip


def _inner(program: Program, row: Sequence[Scalar], column: Sequence[Scalar]) -> Scalar:
    total: Scalar = 0.0
    for a, b in zip(row, column, strict=True):
        total = program.code.add(total, program.code.mul(a, b))
    return total


def _roll(program: Program) -> str:
    width, code = program.width, program.code
    products = _product_scalars(program)
    plain, whole = _Lines(program, program.values), _Lines(program, [*program.values, *products])
    pointers, strides = _leaf_arguments(program)
    next_state = [f"y{k} = {code.text(value)} + tl.zeros_like(z{k})" if not isinstance(value, Value) else
                  f"y{k} = {code.text(value)}" for k, value in enumerate(program.values)]  # fmt: skip
    next_product = [f"y{i // width}_{i % width} = {code.text(value)}" for i, value in enumerate(products)]
    turns = [
        "l = begin + t",
        "active = live & (l < steps)",
        *(_load(program, read, "active") for read in whole.moving),
        "if PRODUCT:",
        *("    " + line for line in (*whole.body, *next_state, *next_product)),
        *("    " + line for line in _squares(width, "j{i}_{j} = tl.where(active, y{i}_{j}, j{i}_{j})")),
        "else:",
        *("    " + line for line in (*plain.body, *next_state)),
        *_for(width, "z{k} = tl.where(active, y{k}, z{k})", "m{k} = tl.maximum(m{k}, tl.abs(z{k}))",
              "tl.store(out + {k} * channels, z{k}, mask=active)"),
        "out += rows * " + str(width),
        *_advance(program, whole, "+"),
    ]  # fmt: skip
    lines = [
        *(line.format(width=width) for line in _lanes()),
        "live = inside & ~settled(found, passes, r, rows, inside)",
        "if (tl.program_id(0) == 0) & (not WHOLE):",
        "    tl.store(unsettled + passes, 0)  # before anybody adds to it",
        "    if passes == 0:",
        "        tl.store(unsettled + limit, 0)",
        "if tl.sum(live.to(tl.int32), 0) > 0:",
        "    begin = first + n * chunk",
        *("    " + line for line in _prologue(program, whole, "begin")),
        "    if (passes == 0) | WHOLE:",
        "        earlier = live & (n > 0)",
        *("        " + line for line in _for(
            width,
            "z{k} = tl.load(initial + at + {k} * channels, mask=live & (n == 0), other=0).to(REAL)",
            "g{k} = tl.load(guess + (n * chunk - 1) * guess_step + at + {k} * channels, mask=earlier, other=0).to(REAL)",
            "z{k} = tl.where(earlier, g{k}, z{k})",
        )),
        "    else:",
        *("        " + line for line in _for(width, "z{k} = tl.load(starts + (n * " + str(width) + " + {k}) * rows + r, mask=live, other=0)")),
        "    if not WHOLE:",
        *("        " + line for line in _for(width, "tl.store(starts + (n * " + str(width) + " + {k}) * rows + r, z{k}, mask=live)")),
        *("    " + line for line in _for(width, "m{k} = tl.abs(z{k})")),
        "    if PRODUCT:",
        *("        " + line for line in [
            f"j{i}_{k} = tl.full((BLOCK,), {1.0 if i == k else 0.0}, REAL)" for i in range(width) for k in range(width)
        ]),
        f"    out = states + begin * rows * {width} + at",
        "    for t in tl.range(0, turns, num_stages=STAGES):",
        *("        " + line for line in turns),
        "    if not WHOLE:",
        *("        " + line for line in _for(
            width,
            "tl.store(ends + (n * " + str(width) + " + {k}) * rows + r, z{k}, mask=live)",
            "tl.store(sizes + (n * " + str(width) + " + {k}) * rows + r, m{k}, mask=live)",
        )),
        "        if PRODUCT:",
        *("            " + line for line in _squares(width, "tl.store(products + (n * " + str(width * width) + " + {at}) * rows + r, j{i}_{j}, mask=live)")),
    ]  # fmt: skip
    arguments = [
        "initial", "numbers", "guess", "states", "starts", "ends", "products", "sizes", "found", "unsettled", *pointers, *strides,
        "guess_step", "rows", "channels", "steps", "first", "chunk", "chunks", "turns", "passes", "limit",
    ]  # fmt: skip
    doc = '"""Run chunks from their starts; WHOLE: the lanes that are not settled, from ``initial`` before step ``first`` to the end."""'
    return _kernel("roll", arguments, ["PRODUCT", "WHOLE", "BLOCK", "STAGES"], doc, lines)


#: Arguments that a kernel is not compiled for anew.
_SIZES = re.compile(
    r"(to_)?(step|row|channel|offset)\d+|guess_step|given_step|rows|channels|steps|first|chunk|chunks|turns|passes|limit|groups|group_chunks|local|atol|rtol"
)


def _kernel(name: str, arguments: list[str], constants: list[str], doc: str, lines: list[str]) -> str:
    sizes = ", ".join(f'"{each}"' for each in arguments if _SIZES.fullmatch(each))
    constant = ", ".join(f"{each}: tl.constexpr" for each in constants)
    return "\n".join([
        f"@triton.jit(do_not_specialize=[{sizes}])",
        f"def {name}({', '.join(arguments)}, {constant}):",
        "    " + doc,
        _indented(lines, 1),
    ])  # fmt: skip


def _groups(width: int) -> list[str]:
    return [
        "i = tl.arange(0, GROUPS * LANES)",
        "g = (i // LANES).to(tl.int64)  # chunks times rows may be more than 32 bits hold",
        "r = tl.program_id(0).to(tl.int64) * LANES + i % LANES",
        "inside = r < rows",
        "each = maps + r  # of the first group, and then of others",
        f"own = each + g * {map_size(width)} * rows",
    ]


def map_size(width: int) -> int:
    """Numbers of a group and lane: its term, its map, the size of its states; what comes before it, the size until there, and whether
    that went beyond the numbers."""
    return width * width + 4 * width + 1


def parts_of(width: int) -> tuple[int, ...]:
    """Wide kernels are compiled in three parts, launched one after the other: the time that it takes grows with the third power."""
    return (0,) if width <= 3 else (1, 2, 3)


def _in_part(condition: str, lines: list[str]) -> list[str]:
    return [f"if {condition}:", *("    " + line for line in lines)]


def _join(width: int) -> str:
    square, size = width * width, map_size(width)
    chunk_of = f"(n * {width} + {{k}}) * rows + r"
    matrix = f"p{{i}}_{{j}} = tl.load(products + (n * {square} + {{at}}) * rows + r, mask=ok, other=0)"
    gather = [
        "# Every group as one map, from the correction before it to the one after it; behind the last chunk nobody asks for one.",
        *("" + line for line in _for(width, "t{k} = tl.zeros((GROUPS * LANES,), REAL)", "m{k} = tl.zeros((GROUPS * LANES,), REAL)")),
        *("" + line for line in [f"j{i}_{k} = tl.full((GROUPS * LANES,), {1.0 if i == k else 0.0}, REAL)" for i in range(width) for k in range(width)]),
        "for q in range(0, group_chunks):",
        "    n = g * group_chunks + q",
        "    ok = live & (n < chunks - 1)",
        *("    " + line for line in _squares(width, matrix)),
        *("    " + line for line in _for(
            width,
            f"e{{k}} = tl.load(ends + {chunk_of}, mask=ok, other=0)",
            f"f{{k}} = tl.load(starts + {chunk_of.replace('(n *', '((n + 1) *')}, mask=ok, other=0)",
            f"m{{k}} = tl.maximum(m{{k}}, tl.load(sizes + {chunk_of}, mask=ok, other=0))",
        )),
        *(f"    u{i} = {_row(i, width, 'p{i}_{k}', 't{k}')} + (e{i} - f{i})" for i in range(width)),
        *(f"    u{i}_{j} = {_row(i, width, 'p{i}_{k}', f'j{{k}}_{j}')}" for i in range(width) for j in range(width)),
        *("    " + line for line in _for(width, "t{k} = u{k}")),
        *("    " + line for line in _squares(width, "j{i}_{j} = u{i}_{j}")),
        *("" + line for line in _for(
            width, "tl.store(own + {k} * rows, t{k}, mask=live)",
            f"tl.store(own + ({width + square} + {{k}}) * rows, m{{k}}, mask=live)",
        )),
        *("" + line for line in _squares(width, f"tl.store(own + ({width} + {{at}}) * rows, j{{i}}_{{j}}, mask=live)")),
    ]  # fmt: skip
    between = [
        "# The correction before the group, and how large the states have been so far.",
        *("" + line for line in _for(width, "d{k} = tl.zeros((GROUPS * LANES,), REAL)",
                                         "z{k} = tl.abs(tl.load(starts + {k} * rows + r, mask=live, other=0))",
                                         "m{k} = z{k}")),
        "for e in range(0, groups):",
        "    ok = live & (e < g)",
        *("    " + line for line in _squares(width, f"p{{i}}_{{j}} = tl.load(each + ({width} + {{at}}) * rows, mask=ok, other=0)")),
        *("    " + line for line in _for(
            width, "t{k} = tl.load(each + {k} * rows, mask=ok, other=0)",
            f"m{{k}} = tl.maximum(m{{k}}, tl.load(each + ({width + square} + {{k}}) * rows, mask=ok, other=0))",
        )),
        *(f"    u{i} = {_row(i, width, 'p{i}_{k}', 'd{k}')} + t{i}" for i in range(width)),
        *("    " + line for line in _for(width, "largest = tl.where(ok & ~(tl.abs(u{k}) < float('inf')), float('inf'), largest)",
                                             "d{k} = tl.where(ok, finite_or_zero(u{k}), d{k})")),
        f"    each += {size} * rows",
    ]  # fmt: skip
    spread = [
        "# The chunks of the group.",
        *("" + line for line in _for(width, f"h{{k}} = tl.load(ends + ((g * group_chunks - 1) * {width} + {{k}}) * rows + r, mask=live & (g > 0) & (g * group_chunks < chunks), other=0)")),
        "for q in range(0, group_chunks):",
        "    n = g * group_chunks + q",
        "    ok = live & (n < chunks)",
        "    joined = ok & (n > 0)",
        *("    " + line for line in _squares(width, matrix)),
        *("    " + line for line in _for(
            width,
            f"z{{k}} = tl.load(starts + {chunk_of}, mask=ok, other=0)",
            f"e{{k}} = tl.load(ends + {chunk_of}, mask=ok, other=0)",
            # Behind the group it may be written by now, and nobody here asks for it.
            f"f{{k}} = tl.load(starts + {chunk_of.replace('(n *', '((n + 1) *')}, mask=ok & (n < chunks - 1) & (n < g * group_chunks + group_chunks - 1), other=0)",
            f"o{{k}} = tl.load(sizes + {chunk_of}, mask=ok, other=0)",
            "m{k} = tl.maximum(m{k}, tl.where(o{k} < float('inf'), o{k}, 0.0))",
            "s{k} = atol + rtol * tl.where(r * 0 + local > 0, o{k}, m{k})  # how far it may be off",
            "w{k} = h{k} - z{k}  # the miss",
            "y{k} = h{k} + (d{k} - w{k})",
        )),
        "    known = joined",
        "    far = tl.zeros((GROUPS * LANES,), tl.int1)",
        *("    " + line for line in _for(
            width,
            "known = known & (tl.abs(d{k}) < float('inf')) & (tl.abs(w{k}) < float('inf')) & (tl.abs(e{k}) < float('inf'))",
            # Overflow, or far beyond where the linearisation holds: on from the end of the chunk before.
            "far = far | ~(tl.abs(y{k}) <= FAR * m{k} + atol)",
            "largest = tl.maximum(largest, tl.where(joined, in_units(tl.maximum(tl.abs(d{k}), tl.abs(w{k})), s{k}), 0.0))",
            "missed = tl.maximum(missed, tl.where(joined, tl.abs(w{k}), 0.0))",
            "rough = tl.maximum(rough, tl.where(joined, in_units(tl.abs(w{k}), EPS * m{k}), 0.0))",
        )),
        "    exact = n <= passes + 1",
        *("    " + line for line in _for(
            width,
            "y{k} = tl.where(exact, h{k}, tl.where(far, tl.where(tl.abs(h{k}) < float('inf'), h{k}, z{k}), y{k}))",
            "tl.store(starts + " + chunk_of + ", y{k}, mask=joined)",
            "d{k} = tl.where(joined, y{k} - z{k}, 0.0)  # which is what the chunks that follow hear of",
        )),
        *(f"    u{i} = {_row(i, width, 'p{i}_{k}', 'd{k}')}" for i in range(width)),
        *("    " + line for line in _for(
            width,
            # How far the correction of its start moves the end of the chunk: of the last one, nobody else asks.
            "largest = tl.maximum(largest, tl.where(ok, in_units(tl.abs(u{k}), s{k}), 0.0))",
        )),
        *("    " + line for line in _for(width, "known = known & (tl.abs(u{k}) < float('inf'))")),
        "    largest = tl.where(joined & ~known, float('inf'), largest)",
        *("    " + line for line in _for(
            width, "d{k} = finite_or_zero(u{k} + (e{k} - f{k}))", "h{k} = e{k}",
        )),
    ]  # fmt: skip
    note = [
        "# What was found: of a lane the largest of its groups.",
        "largest = tl.max(tl.reshape(largest, (GROUPS, LANES)), 0)",
        "missed = tl.max(tl.reshape(missed, (GROUPS, LANES)), 0)",
        "rough = tl.max(tl.reshape(rough, (GROUPS, LANES)), 0)",
        "r = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)",
        "inside = r < rows",
        "alive = inside & ~settled(found, passes, r, rows, inside)",
        "later = inside & (r * 0 + passes > 0)",
        "before = tl.load(found + tl.maximum(passes - 1, 0) * rows + r, mask=later, other=0)",
        "enough = later & is_enough(before, largest)",
        "# Where chunks join to the last digit, corrections are what rounding is amplified to: nothing better can be had.",
        "floored = alive & later & ~enough & (rough <= ROUGH) & (largest < float('inf'))",
        "tl.store(found + passes * rows + r, tl.where(floored, 0.0, largest), mask=inside)",
        "passed = (r * 0 + passes + 1).to(tl.int32)",
        "tl.store(taken + r, tl.where(floored, -passed, passed), mask=alive)",
        "tl.store(residual + r, missed, mask=alive)",
        "tl.atomic_add(unsettled + limit, tl.sum(floored.to(tl.int32), 0))",
        "left = inside & ~(enough | floored)",
        "tl.atomic_add(unsettled + passes, tl.sum(left.to(tl.int32), 0))",
    ]  # fmt: skip
    kept = (("d", width + square + width), ("m", width + square + 2 * width))
    lines = [
        *_groups(width),
        "live = inside & ~settled(found, passes, r, rows, inside)",
        "largest = tl.zeros((GROUPS * LANES,), REAL)",
        "missed = tl.zeros((GROUPS * LANES,), REAL)",
        "rough = tl.zeros((GROUPS * LANES,), REAL)  # the largest miss in units of rounding",
        "if tl.sum(live.to(tl.int32), 0) > 0:",
        *("    " + line for line in [
            *_in_part("PART <= 1", gather),
            *_in_part("PART == 0", ["tl.debug_barrier()"]),
            *_in_part("PART % 2 == 0", between),
            *_in_part("PART == 2", [
                *(f"tl.store(own + ({at} + {k}) * rows, {name}{k}, mask=live)" for name, at in kept for k in range(width)),
                f"tl.store(own + {size - 1} * rows, largest, mask=live)",
            ]),
            *_in_part("PART == 3", [
                *(f"{name}{k} = tl.load(own + ({at} + {k}) * rows, mask=live, other=0)" for name, at in kept for k in range(width)),
                f"largest = tl.load(own + {size - 1} * rows, mask=live, other=0)",
            ]),
            *_in_part("PART % 3 == 0", spread),
        ]),
        *_in_part("PART % 3 == 0", note),
    ]  # fmt: skip
    arguments = [
        "starts", "ends", "products", "sizes", "maps", "found", "unsettled", "taken", "residual",
        "rows", "chunks", "groups", "group_chunks", "passes", "limit", "atol", "rtol", "local",
    ]  # fmt: skip
    return _kernel(
        "join",
        arguments,
        ["PART", "GROUPS", "LANES"],
        '"""Correct the starts of all chunks, and note by how much."""',
        lines,
    )


def _sweep(program: Program) -> str:
    width, code = program.width, program.code
    jacobian = program.jacobian
    columns = [[jacobian[i][k] for i in range(width)] for k in range(width)]  # the transpose's rows
    inputs = [[code.input(f"j{i}_{k}") for k in range(width)] for i in range(width)]
    term = [code.input(f"t{k}") for k in range(width)]
    maps = [
        _inner(program, columns[i], [inputs[m][k] for m in range(width)]) for i in range(width) for k in range(width)
    ]
    terms = [_inner(program, columns[i], term) for i in range(width)]
    pulled = [_inner(program, columns[i], program.adjoint) for i in range(width)]
    of_reads = program.cotangents
    as_map, with_them = _Lines(program, [*maps, *terms]), _Lines(program, [*pulled, *(value for _, value in of_reads)])
    both = _Lines(program, [*maps, *terms, *pulled, *(value for _, value in of_reads)])
    pointers, strides = _leaf_arguments(program)
    outputs = [f"g{i}" for i in range(len(program.leaves))]
    strides += [f"to_{what}{i}" for i in range(len(program.leaves)) for what in ("step", "row", "channel", "offset")]
    stepwise = [(at, read, value) for at, (read, value) in enumerate(of_reads) if program.leaves[read.leaf].per_step]
    shared = [(at, read, value) for at, (read, value) in enumerate(of_reads) if not program.leaves[read.leaf].per_step]

    def assigned(name: str, value: Scalar) -> str:
        return f"{name} = {code.text(value)}" + ("" if isinstance(value, Value) else " + tl.zeros((BLOCK,), REAL)")

    turns = [
        "l = begin + t",
        "active = live & (l < steps)",
        *(_load(program, read, "active") for read in both.moving),
        *_for(width,
              "z{k} = tl.load(before + {k} * channels, mask=active & (l > 0), other=0).to(REAL)",
              "q{k} = tl.load(initial + at + {k} * channels, mask=active & (l == 0), other=0).to(REAL)",
              "z{k} = tl.where(l > 0, z{k}, q{k})",
              "q{k} = tl.load(given + (l - 1) * given_step + at + {k} * channels, mask=active & (l > 0), other=0).to(REAL)"),
        "if MAP:",
        *("    " + line for line in as_map.body),
        *("    " + assigned(f"y{i // width}_{i % width}", value) for i, value in enumerate(maps)),
        *("    " + assigned(f"y{i}", value) for i, value in enumerate(terms)),
        *("    " + line for line in _squares(width, "j{i}_{j} = tl.where(active, y{i}_{j}, j{i}_{j})")),
        *("    " + line for line in _for(width, "t{k} = tl.where(active, y{k} + q{k}, t{k})")),
        "else:",
        *("    " + line for line in with_them.body),
        *("    " + f"tl.store({_output(program, read, 'l')}, {code.text(value)}, mask=active)" for _, read, value in stepwise),
        *("    " + f"sum{at} += tl.where(active, {code.text(value)}, 0.0)" for at, _, value in shared),
        *("    " + assigned(f"y{i}", value) for i, value in enumerate(pulled)),
        *("    " + line for line in _for(width, "w{k} = tl.where(active, y{k} + q{k}, w{k})")),
        f"before -= rows * {width}",
        *_advance(program, both, "-"),
    ]  # fmt: skip
    lines = [
        *(line.format(width=width) for line in _lanes()),
        "live = inside",
        "begin = n * chunk",
        *_prologue(program, both, "(begin + chunk - 1)"),
        f"before = states + (begin + chunk - 2) * rows * {width} + at",
        "if MAP:",
        *("    " + f"j{i}_{k} = tl.full((BLOCK,), {1.0 if i == k else 0.0}, REAL)" for i in range(width) for k in range(width)),
        *("    " + line for line in _for(width, "t{k} = tl.zeros((BLOCK,), REAL)")),
        "else:",
        *("    " + line for line in _for(width, f"w{{k}} = tl.load(adjoints + (n * {width} + {{k}}) * rows + r, mask=live, other=0)")),
        *("    " + f"sum{at} = tl.zeros((BLOCK,), REAL)" for at, _, _ in shared),
        "for u in tl.range(0, chunk, num_stages=STAGES):",
        "    t = chunk - 1 - u",
        *("    " + line for line in turns),
        "if MAP:",
        *("    " + line for line in _for(width, f"tl.store(adjoints + (n * {width} + {{k}}) * rows + r, t{{k}}, mask=live)")),
        *("    " + line for line in _squares(width, f"tl.store(products + (n * {width * width} + {{at}}) * rows + r, j{{i}}_{{j}}, mask=live)")),
        "else:",
        *("    " + line for line in _for(width, "tl.store(of_initial + at + {k} * channels, w{k}, mask=live & (n == 0))")),
        *("    " + f"tl.store({_output(program, read, 'n')}, sum{at}, mask=live)" for at, read, _ in shared),
    ]  # fmt: skip
    arguments = [
        "initial", "numbers", "states", "given", "adjoints", "products", "of_initial", *pointers, *outputs, *strides,
        "given_step", "rows", "channels", "steps", "chunk", "chunks",
    ]  # fmt: skip
    doc = '"""Run chunks backwards. MAP: as maps of what comes behind; else with that, to the cotangents of all that is read."""'
    return _kernel("sweep", arguments, ["MAP", "BLOCK", "STAGES"], doc, lines)


def _output(program: Program, read: Read, index: str) -> str:
    """Where the cotangent of a number goes: of a step, or of a chunk's share."""
    i, offset = read.leaf, f" + {read.offset}" if read.offset else ""
    channel = f" + c * to_channel{i}" if program.elementwise else ""
    return f"g{i} + to_offset{i} + {index} * to_step{i} + b * to_row{i}{channel}{offset}"


def _chain(width: int) -> str:
    square, size = width * width, map_size(width)
    gather = [
        "# Groups count from the end, and so do the chunks of a group; before the first chunk nobody asks for a map.",
        *_for(width, "t{k} = tl.zeros((GROUPS * LANES,), REAL)"),
        *(f"j{i}_{k} = tl.full((GROUPS * LANES,), {1.0 if i == k else 0.0}, REAL)" for i in range(width) for k in range(width)),
        "for q in range(0, group_chunks):",
        "    n = chunks - 1 - (g * group_chunks + q)",
        "    ok = live & (n >= 0)",
        *("    " + line for line in _squares(width, f"p{{i}}_{{j}} = tl.load(products + (n * {square} + {{at}}) * rows + r, mask=ok, other=0)")),
        *("    " + line for line in _for(width, f"f{{k}} = tl.load(adjoints + (n * {width} + {{k}}) * rows + r, mask=ok, other=0)")),
        *(f"    u{i} = {_row(i, width, 'p{i}_{k}', 't{k}')} + f{i}" for i in range(width)),
        *(f"    u{i}_{j} = {_row(i, width, 'p{i}_{k}', f'j{{k}}_{j}')}" for i in range(width) for j in range(width)),
        *("    " + line for line in _for(width, "t{k} = u{k}")),
        *("    " + line for line in _squares(width, "j{i}_{j} = u{i}_{j}")),
        *_for(width, "tl.store(own + {k} * rows, t{k}, mask=live)"),
        *_squares(width, f"tl.store(own + ({width} + {{at}}) * rows, j{{i}}_{{j}}, mask=live)"),
    ]  # fmt: skip
    between = [
        "b = r // channels",
        "c = r % channels",
        f"last = given + (r * 0 + steps - 1) * given_step + b * ({width} * channels) + c  # in 64 bits, as r",
        *_for(width, "d{k} = tl.load(last + {k} * channels, mask=live, other=0).to(REAL)"),
        "for e in range(0, groups):",
        "    ok = live & (e < g)",
        *("    " + line for line in _squares(width, f"p{{i}}_{{j}} = tl.load(each + ({width} + {{at}}) * rows, mask=ok, other=0)")),
        *("    " + line for line in _for(width, "t{k} = tl.load(each + {k} * rows, mask=ok, other=0)")),
        *(f"    u{i} = {_row(i, width, 'p{i}_{k}', 'd{k}')} + t{i}" for i in range(width)),
        *("    " + line for line in _for(width, "d{k} = tl.where(ok, u{k}, d{k})")),
        f"    each += {size} * rows",
    ]  # fmt: skip
    spread = [
        "for q in range(0, group_chunks):",
        "    n = chunks - 1 - (g * group_chunks + q)",
        "    ok = live & (n >= 0)",
        *("    " + line for line in _squares(width, f"p{{i}}_{{j}} = tl.load(products + (n * {square} + {{at}}) * rows + r, mask=ok, other=0)")),
        *("    " + line for line in _for(
            width, f"f{{k}} = tl.load(adjoints + (n * {width} + {{k}}) * rows + r, mask=ok, other=0)",
            f"tl.store(adjoints + (n * {width} + {{k}}) * rows + r, d{{k}}, mask=ok)",
        )),
        *(f"    u{i} = {_row(i, width, 'p{i}_{k}', 'd{k}')} + f{i}" for i in range(width)),
        *("    " + line for line in _for(width, "d{k} = tl.where(ok, u{k}, d{k})")),
    ]  # fmt: skip
    at = width + square + width
    lines = [
        *_groups(width),
        "live = inside",
        *_in_part("PART <= 1", gather),
        *_in_part("PART == 0", ["tl.debug_barrier()"]),
        *_in_part("PART % 2 == 0", between),
        *_in_part("PART == 2", [f"tl.store(own + ({at} + {k}) * rows, d{k}, mask=live)" for k in range(width)]),
        *_in_part("PART == 3", [f"d{k} = tl.load(own + ({at} + {k}) * rows, mask=live, other=0)" for k in range(width)]),
        *_in_part("PART % 3 == 0", spread),
    ]  # fmt: skip
    arguments = [
        "products", "adjoints", "given", "maps", "given_step", "rows", "channels", "steps", "chunks", "groups", "group_chunks",
    ]  # fmt: skip
    doc = '"""From the maps\' terms in ``adjoints`` to the cotangents behind every chunk, in their place."""'
    return _kernel("chain", arguments, ["PART", "GROUPS", "LANES"], doc, lines)
