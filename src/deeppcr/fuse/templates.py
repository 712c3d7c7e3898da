"""The source of the kernels of a step: what a program computes, put into two frames; another (``joints``) knows nothing of it.

Shapes: L steps in N chunks, R lanes (rows, times channels of an elementwise step), K numbers of the state a lane. ``states``
[L, R * K] as they are packed, or [L // every, R * K]; ``starts``, ``ends``, ``sizes`` [N, K, R] and ``products`` [N, K * K, R] of the chunks.

* ``roll`` runs all chunks at once, each from its start, with the product of its Jacobians; or, WHOLE, one after the other.
* ``join`` corrects the starts: each is to be the end of the chunk before it. See ``nn.kernels``, which does the same for networks.
* ``sweep`` runs chunks backwards, from the cotangents behind them: these are joined in the same way, counted from the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from .expressions import Scalar, Value
from .program import Program, Read
from .text import CASTS, RESETS, Lines, for_each, for_pairs, indented, kernel_text, leaf_arguments


def _load(program: Program, read: Read, mask: str) -> str:
    value, leaf = read.value, read.leaf
    offset = f" + {read.offset}" if read.offset else ""
    masked = "" if _is_one_for_all(program, leaf) else f", mask={mask}, other=0"
    return f"{value.name} = tl.load(a{leaf}{offset}{masked}){CASTS[value.kind]}"


def _is_one_for_all(program: Program, leaf: int) -> bool:
    """Whether a leaf is the same for all lanes, which then load it once: the compiler's time grows with what lanes load themselves."""
    each = program.leaves[leaf]
    return not (program.elementwise or each.per_step or each.per_row)


def _addresses(program: Program, lines: Lines, begin: str) -> list[str]:
    found = []
    for i in lines.leaves:
        text = f"a{i} = p{i} + offset{i}"
        if not _is_one_for_all(program, i):
            text += f" + b * row{i}"
        if program.elementwise:
            text += f" + c * channel{i}"
        if program.leaves[i].per_step:
            text += f" + {begin} * step{i}"
        found.append(text)
    return found


def _prologue(program: Program, lines: Lines, begin: str) -> list[str]:
    return [
        *lines.numbers_loaded(),
        *_addresses(program, lines, begin),
        *(_load(program, read, "live") for read in lines.fixed),
        *lines.before,
    ]


def _begin(width: int) -> list[str]:
    """Of a pass: its lanes, and which have something to do. The first program resets what the pass counts."""
    return [
        "lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)",
        "inside = lane < chunks * rows",
        "n = lane // rows",
        "r = lane % rows",
        "b = r // channels",
        "c = r % channels",
        f"at = b * ({width} * channels) + c  # of its first number among those of all lanes",
        "live = inside & ~settled(found, passes, r, rows, inside)",
        *RESETS,
        "if tl.sum(live.to(tl.int32), 0) > 0:",
    ]


def _product_scalars(program: Program, rows: list[list[Scalar]]) -> list[Scalar]:
    """The Jacobian of a step, or its transpose, times the product so far, j{i}_{k}."""
    code, width = program.code, program.width
    so_far = [[code.input(f"j{i}_{k}") for k in range(width)] for i in range(width)]
    return [_inner(program, rows[i], [so_far[m][k] for m in range(width)])
            for i in range(width) for k in range(width)]  # fmt: skip


def _inner(program: Program, row: Sequence[Scalar], column: Sequence[Scalar]) -> Scalar:
    total: Scalar = 0.0
    for a, b in zip(row, column, strict=True):
        total = program.code.add(total, program.code.mul(a, b))
    return total


def roll(program: Program) -> str:
    width, code = program.width, program.code
    products = _product_scalars(program, program.jacobian)
    plain, whole = Lines(program, program.values), Lines(program, [*program.values, *products])
    pointers, strides = leaf_arguments(program)
    next_state = [f"y{k} = {code.text(value)} + tl.zeros_like(z{k})" if not isinstance(value, Value) else
                  f"y{k} = {code.text(value)}" for k, value in enumerate(program.values)]  # fmt: skip
    next_product = [f"y{i // width}_{i % width} = {code.text(value)}" for i, value in enumerate(products)]
    turns = [
        "l = begin + t",
        "active = live & (l < steps)",
        *(_load(program, read, "active") for read in whole.moving),
        "if PRODUCT:",
        *indented((*whole.body, *next_state, *next_product)),
        *indented(for_pairs(width, "j{i}_{j} = tl.where(active, y{i}_{j}, j{i}_{j})")),
        "else:",
        *indented((*plain.body, *next_state)),
        *for_each(width, "z{k} = tl.where(active, y{k}, z{k})", "m{k} = tl.maximum(m{k}, tl.abs(z{k}))"),
        "if ALL:",
        *indented(for_each(width, "tl.store(out + {k} * channels, z{k}, mask=active)")),
        "    out += rows * " + str(width),
        "else:",
        "    if WHOLE:",
        *indented(for_each(width, "m{k} = tl.where(z{k} == z{k}, m{k}, float('inf'))"), 2),
        *indented(for_each(width, "tl.store(out + {k} * channels, z{k}, mask=active & (due == 0))")),
        "    out += tl.where(due == 0, rows * " + str(width) + ", 0)",
        "    due = tl.where(due == 0, every, due) - 1",
        *whole.advance("+"),
    ]  # fmt: skip
    lines = [
        *_begin(width),
        "    begin = first + n * chunk",
        *indented(_prologue(program, whole, "begin")),
        "    if (passes == 0) | WHOLE:",
        "        earlier = live & (n > 0)",
        *("        " + line for line in for_each(
            width,
            "z{k} = tl.load(initial + at + {k} * channels, mask=live & (n == 0), other=0).to(REAL)",
            "g{k} = tl.load(guess + (n * chunk - 1) * guess_step + at + {k} * channels, mask=earlier, other=0).to(REAL)",
            "z{k} = tl.where(earlier, g{k}, z{k})",
        )),
        "    else:",
        *indented(for_each(width, "z{k} = tl.load(starts + (n * " + str(width) + " + {k}) * rows + r, mask=live, other=0)"), 2),
        "    if not WHOLE:",
        *indented(for_each(width, "tl.store(starts + (n * " + str(width) + " + {k}) * rows + r, z{k}, mask=live)"), 2),
        *indented(for_each(width, "m{k} = tl.abs(z{k})")),
        "    if PRODUCT:",
        *("        " + line for line in [
            f"j{i}_{k} = tl.full((BLOCK,), {1.0 if i == k else 0.0}, REAL)" for i in range(width) for k in range(width)
        ]),
        "    if ALL:",
        f"        out = states + begin * rows * {width} + at",
        "    else:",
        f"        out = states + (begin // every) * rows * {width} + at",
        "        due = every - 1 - begin % every  # steps until one is kept",
        "    for t in tl.range(0, turns, num_stages=STAGES):",
        *indented(turns, 2),
        "    if WHOLE and not ALL:",
        *("        " + line for line in for_each(
            width, "tl.store(ends + {k} * rows + r, z{k}, mask=live)", "tl.store(sizes + {k} * rows + r, m{k}, mask=live)"
        )),
        "    if not WHOLE:",
        *("        " + line for line in for_each(
            width,
            "tl.store(ends + (n * " + str(width) + " + {k}) * rows + r, z{k}, mask=live)",
            "tl.store(sizes + (n * " + str(width) + " + {k}) * rows + r, m{k}, mask=live)",
        )),
        "        if PRODUCT:",
        *("            " + line for line in for_pairs(width, "tl.store(products + (n * " + str(width * width) + " + {at}) * rows + r, j{i}_{j}, mask=live)")),
    ]  # fmt: skip
    arguments = [
        "initial", "numbers", "guess", "states", "starts", "ends", "products", "sizes", "found", "unsettled", *pointers, *strides,
        "guess_step", "rows", "channels", "steps", "every", "first", "chunk", "chunks", "turns", "passes", "limit",
    ]  # fmt: skip
    doc = (
        '"""Run chunks from their starts; WHOLE: the lanes that are not settled, from ``initial`` before step ``first`` to the end. ALL: all '
        'states are written; else those after ``every`` so many steps; where a state was not finite, its size is infinite if WHOLE."""'
    )
    return kernel_text("roll", arguments, ["PRODUCT", "WHOLE", "ALL", "BLOCK", "STAGES"], doc, lines)


def sweep(program: Program) -> str:
    width, code = program.width, program.code
    jacobian = program.jacobian
    columns = [[jacobian[i][k] for i in range(width)] for k in range(width)]  # the transpose's rows
    maps = _product_scalars(program, columns)
    pulled = [_inner(program, columns[i], program.adjoint) for i in range(width)]
    of_reads = program.cotangents
    as_map, with_them = Lines(program, [*maps, *pulled]), Lines(program, [*pulled, *(value for _, value in of_reads)])
    both = Lines(program, [*maps, *pulled, *(value for _, value in of_reads)])
    pointers, strides = leaf_arguments(program, cotangents=True)
    stepwise = [(at, read, value) for at, (read, value) in enumerate(of_reads) if program.leaves[read.leaf].per_step]
    shared = [(at, read, value) for at, (read, value) in enumerate(of_reads) if not program.leaves[read.leaf].per_step]

    def assigned(name: str, value: Scalar) -> str:
        return f"{name} = {code.text(value)}" + ("" if isinstance(value, Value) else " + tl.zeros((BLOCK,), REAL)")

    turns = [
        "l = begin + t",
        "active = live & (l < steps)",
        *(_load(program, read, "active") for read in both.moving),
        *for_each(width,
              "z{k} = tl.load(before + {k} * channels, mask=active & (l > 0), other=0).to(REAL)",
              "q{k} = tl.load(initial + at + {k} * channels, mask=active & (l == 0), other=0).to(REAL)",
              "z{k} = tl.where(l > 0, z{k}, q{k})",
              "q{k} = tl.load(given + (l - 1) * given_step + at + {k} * channels, mask=active & (l > 0), other=0).to(REAL)"),
        "if MAP:",
        *indented(as_map.body),
        *("    " + assigned(f"y{i // width}_{i % width}", value) for i, value in enumerate(maps)),
        *("    " + assigned(f"y{i}", value) for i, value in enumerate(pulled)),
        *indented(for_pairs(width, "j{i}_{j} = tl.where(active, y{i}_{j}, j{i}_{j})")),
        "else:",
        *indented(with_them.body),
        *("    " + f"tl.store({_output(program, read, 'l')}, {code.text(value)}, mask=active)" for _, read, value in stepwise),
        *("    " + f"sum{at} += tl.where(active, {code.text(value)}, 0.0)" for at, _, value in shared),
        *("    " + assigned(f"y{i}", value) for i, value in enumerate(pulled)),
        *for_each(width, "w{k} = tl.where(active, y{k} + q{k}, w{k})", "m{k} = tl.maximum(m{k}, tl.abs(w{k}))"),
        f"before -= rows * {width}",
        *both.advance("-"),
    ]  # fmt: skip
    place = f"((chunks - 1 - n) * {width} + {{k}}) * rows + r"
    one_chunk = [
        "begin = n * chunk",
        *_prologue(program, both, "(begin + chunk - 1)"),
        f"before = states + (begin + chunk - 2) * rows * {width} + at",
        "if not MAP:",
        *("    " + f"sum{at} = tl.zeros((BLOCK,), REAL)" for at, _, _ in shared),
        *(["    pass"] if not shared else []),
        "for u in tl.range(0, chunk, num_stages=STAGES):",
        "    t = chunk - 1 - u",
        *indented(turns),
        "if not MAP:",
        *indented(for_each(width, "tl.store(of_initial + at + {k} * channels, w{k}, mask=live & (n == 0))")),
        *("    " + f"tl.store({_output(program, read, 'n')}, sum{at}, mask=live)" for at, read, _ in shared),
    ]
    lines = [
        *_begin(width),
        *indented([
            "if WHOLE:",
            "    n = r * 0 + chunks - 1",
            "if MAP | WHOLE:",
            "    last = live & (n == chunks - 1)",
            *indented(for_each(width, "w{k} = tl.load(given + (r * 0 + steps - 1) * given_step + at + {k} * channels, mask=last, other=0).to(REAL)")),
            "else:",
            *indented(for_each(width, f"w{{k}} = tl.load(starts + {place}, mask=live, other=0)")),
            *for_each(width, "m{k} = tl.abs(w{k})"),
            "if MAP:",
            *indented(for_each(width, f"tl.store(starts + {place}, w{{k}}, mask=live)")),
            *("    " + f"j{i}_{k} = tl.full((BLOCK,), {1.0 if i == k else 0.0}, REAL)" for i in range(width) for k in range(width)),
            "if WHOLE:",
            "    for _ in range(0, chunks):",
            *indented(one_chunk, 2),
            "        n -= 1",
            "else:",
            *indented(one_chunk),
            *indented(for_each(
                width, f"tl.store(ends + {place}, w{{k}}, mask=live)", f"tl.store(sizes + {place}, m{{k}}, mask=live)"
            )),
            "if MAP:",
            *indented(for_pairs(width, f"tl.store(products + ((chunks - 1 - n) * {width * width} + {{at}}) * rows + r, j{{i}}_{{j}}, mask=live)")),
        ]),
    ]  # fmt: skip
    arguments = [
        "initial", "numbers", "states", "given", "starts", "ends", "products", "sizes", "found", "unsettled", "of_initial",
        *pointers, *strides, "given_step", "rows", "channels", "steps", "chunk", "chunks", "passes", "limit",
    ]  # fmt: skip
    doc = (
        '"""Run chunks backwards, from the cotangents behind them, which are counted from the end, to those before them. MAP: from none, and '
        "with the product of their Jacobians; else to the cotangents of all that is read. WHOLE: all chunks of the lanes that are not "
        'settled, one after the other."""'
    )
    return kernel_text("sweep", arguments, ["MAP", "WHOLE", "BLOCK", "STAGES"], doc, lines)


def _output(program: Program, read: Read, index: str) -> str:
    """Where the cotangent of a number goes: of a step, or of a chunk's share."""
    i, offset = read.leaf, f" + {read.offset}" if read.offset else ""
    channel = f" + c * to_channel{i}" if program.elementwise else ""
    return f"g{i} + to_offset{i} + {index} * to_step{i} + b * to_row{i}{channel}{offset}"
