"""The source of the kernel that joins chunks, whatever the step: see ``templates`` for shapes.

``join`` has G groups of chunks side by side in one program: every group as one map, what comes before each, and then what is inside.
"""

from __future__ import annotations

import torch

from .text import for_each, for_pairs, indented, kernel_text, module_text, row_of

#: So many times as much as over all of it, one number may move another within a chunk.
_WITHIN = 8.0
#: What one number rounds to is taken for the cause of another's miss up to so many tolerances of that one's largest size, and where no
#: correction of a lane is larger than so many: numbers may be large and exact (a clock, a constant), and hide a signal.
_CARRIED, _NEAR = 8.0, 32.0
#: Numbers of a lane up to which one kernel has registers enough: of six in float32 it takes 254 of 255, and on an H200 a tenth less time than
#: three kernels.
_IN_ONE = {torch.float32: 6, torch.float64: 3}


def joints_source(width: int, dtype: torch.dtype) -> str:
    """The module with ``join``, which knows nothing of the step: all steps of a width share it."""
    return module_text(dtype, _join(width))


def _groups(width: int) -> list[str]:
    return [
        "rows = rows.to(tl.int64)  # chunks times rows may be more than 32 bits hold",
        "i = tl.arange(0, GROUPS * LANES)",
        "g = (i // LANES).to(tl.int64)",
        "r = tl.program_id(0).to(tl.int64) * LANES + i % LANES",
        "inside = r < rows",
        "each = maps + r  # of the first group, and then of others",
        f"own = each + g * {map_size(width)} * rows",
    ]


def map_size(width: int) -> int:
    """Numbers of a group and lane: its term, its map, the size of its states; what comes before it, the size until there, and whether
    that went beyond the numbers; and how much of the rounding of other numbers its last chunk carries to each."""
    return width * width + 5 * width + 1


def parts_of(width: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Where the numbers of a lane fit its registers, one kernel; wider ones are cut in three, launched one after the other."""
    return (0,) if width <= _IN_ONE[dtype] else (1, 2, 3)


def _over_groups(width: int) -> list[str]:
    """The head of a loop over the groups before one's own: the map p, t of each, and its size o.

    They are loaded a group ahead. Of matrices that are used once, the compiler would load a number, wait for it, use it, and load the
    next: some forty waits for memory a group, which took longer than all steps of the chunks.
    """
    square = width * width

    def load(mask: str) -> list[str]:
        return [
            *for_pairs(width, f"a{{i}}_{{j}} = tl.load(each + ({width} + {{at}}) * rows, mask={mask}, other=0)"),
            *for_each(width, f"b{{k}} = tl.load(each + {{k}} * rows, mask={mask}, other=0)"),
            *for_each(width, f"c{{k}} = tl.load(each + ({width + square} + {{k}}) * rows, mask={mask}, other=0)"),
        ]  # fmt: skip

    return [
        *load("live & (g > 0)"),
        "for e in range(0, groups):",
        "    ok = live & (e < g)",
        *for_pairs(width, "    p{i}_{j} = a{i}_{j}"),
        *for_each(width, "    t{k} = b{k}", "    o{k} = c{k}"),
        f"    each += {map_size(width)} * rows",
        *indented(load("live & (e + 1 < g)")),
    ]


def _in_part(condition: str, lines: list[str]) -> list[str]:
    return [f"if {condition}:", *indented(lines)]


def _join(width: int) -> str:
    square, size = width * width, map_size(width)
    # Addresses that loads share: the compiler's time grows with more than the square of all operations.
    places = [f"here = n * ({width} * rows) + r", f"there = n * ({square} * rows) + r"]
    chunk_of, chunk_after = "here + {k} * rows", f"here + ({width} + {{k}}) * rows"
    matrix = "p{i}_{j} = tl.load(products + there + {at} * rows, mask=ok, other=0)"
    # What a number rounds to in a chunk moves others: by up to some times what it does from the chunk's start to its end, which after half
    # a turn is next to nothing. No more than of the largest number beside it: what grows along the sequence is no rounding.
    others = [[f"tl.abs(p{i}_{k}) * o{k}" for k in range(width) if k != i] for i in range(width)]
    carried = [f"a{i} = {_WITHIN} * ({' + '.join(others[i] or ['o0'])})" for i in range(width)]
    gather = [
        "# Every group as one map, from the correction before it to the one after it; behind the last chunk nobody asks for one.",
        *for_each(width, *(f"{name}{{k}} = tl.zeros((GROUPS * LANES,), REAL)" for name in "tma")),
        *(f"j{i}_{k} = tl.full((GROUPS * LANES,), {1.0 if i == k else 0.0}, REAL)" for i in range(width) for k in range(width)),
        "for q in range(0, group_chunks):",
        "    n = g * group_chunks + q",
        *indented(places),
        "    ok = live & (n < chunks - 1)",
        *indented(for_pairs(width, matrix)),
        *indented(for_each(
            width,
            f"e{{k}} = tl.load(ends + {chunk_of}, mask=ok, other=0)",
            f"f{{k}} = tl.load(starts + {chunk_after}, mask=ok, other=0)",
            f"o{{k}} = tl.load(sizes + {chunk_of}, mask=ok, other=0)",
            "m{k} = tl.maximum(m{k}, tl.where(o{k} < float('inf'), o{k}, 0.0))",
        )),
        *(f"    u{i} = {row_of(i, width, 'p{i}_{k}', 't{k}')} + (e{i} - f{i})" for i in range(width)),
        *(f"    u{i}_{j} = {row_of(i, width, 'p{i}_{k}', f'j{{k}}_{j}')}" for i in range(width) for j in range(width)),
        *indented(carried),
        *indented(for_each(width, "t{k} = u{k}")),
        *indented(for_pairs(width, "j{i}_{j} = u{i}_{j}")),
        *for_each(
            width, "tl.store(own + {k} * rows, t{k}, mask=live)",
            f"tl.store(own + ({size - width} + {{k}}) * rows, a{{k}}, mask=live)",
            f"tl.store(own + ({width + square} + {{k}}) * rows, m{{k}}, mask=live)",
        ),
        *for_pairs(width, f"tl.store(own + ({width} + {{at}}) * rows, j{{i}}_{{j}}, mask=live)"),
    ]  # fmt: skip
    between = [
        "# The correction before the group, and how large the states have been so far.",
        *for_each(width, "d{k} = tl.zeros((GROUPS * LANES,), REAL)",
                  "z{k} = tl.abs(tl.load(starts + {k} * rows + r, mask=live, other=0))",
                  "m{k} = z{k}"),
        *_over_groups(width),
        *for_each(width, "    m{k} = tl.maximum(m{k}, o{k})"),
        *(f"    u{i} = {row_of(i, width, 'p{i}_{k}', 'd{k}')} + t{i}" for i in range(width)),
        *indented(for_each(width, "largest = tl.where(ok & ~(tl.abs(u{k}) < float('inf')), float('inf'), largest)",
                                             "d{k} = tl.where(ok, finite_or_zero(u{k}), d{k})")),
    ]  # fmt: skip
    widest = "c0"
    for k in range(1, width):
        widest = f"tl.maximum({widest}, c{k})"
    spread = [
        "# The chunks of the group.",
        f"before = (g * group_chunks - 1) * ({width} * rows) + r",
        "ok = live & (g > 0) & (g * group_chunks < chunks)",
        *for_each(
            width,
            "h{k} = tl.load(ends + before + {k} * rows, mask=ok, other=0)",
            "b{k} = tl.load(sizes + before + {k} * rows, mask=ok, other=0)",
            f"a{{k}} = tl.load(own + ({{k}} - {width}) * rows, mask=ok, other=0)",
        ),
        "for q in range(0, group_chunks):",
        "    n = g * group_chunks + q",
        *indented(places),
        "    ok = live & (n < chunks)",
        "    joined = ok & (n > 0)",
        *indented(for_pairs(width, matrix)),
        *indented(for_each(
            width,
            f"z{{k}} = tl.load(starts + {chunk_of}, mask=ok, other=0)",
            f"e{{k}} = tl.load(ends + {chunk_of}, mask=ok, other=0)",
            # Behind the group it may be written by now, and nobody here asks for it.
            f"f{{k}} = tl.load(starts + {chunk_after}, mask=ok & (n < chunks - 1) & (n < g * group_chunks + group_chunks - 1), other=0)",
            f"o{{k}} = tl.load(sizes + {chunk_of}, mask=ok, other=0)",
            # The start is judged by what came before it: what a wrong one leads to may be as large as it likes.
            "c{k} = tl.where(r * 0 + local > 0, b{k}, m{k})",
            "s{k} = atol + rtol * c{k}  # how far it may be off",
            "v{k} = atol + rtol * m{k}  # and beside the largest of all so far",
            "m{k} = tl.maximum(m{k}, tl.where(o{k} < float('inf'), o{k}, 0.0))",
            "hidden = tl.maximum(hidden, tl.where(joined & (r * 0 + local + linear == 0), lives_on(o{k}, b{k}, m{k}, rtol), 0.0))",
            "b{k} = o{k}",
            "w{k} = h{k} - z{k}  # the miss",
            "y{k} = h{k} + (d{k} - w{k})",
        )),
        f"    beside = {widest}",
        "    known = joined",
        "    far = tl.zeros((GROUPS * LANES,), tl.int1)",
        *indented(for_each(
            width,
            "known = known & (tl.abs(d{k}) < float('inf')) & (tl.abs(w{k}) < float('inf')) & (tl.abs(e{k}) < float('inf'))",
            # Overflow, or far beyond where the linearisation holds: on from the end of the chunk before.
            "far = far | (~(tl.abs(y{k}) <= m{k} * FAR + atol) & (r * 0 + linear == 0))",
            "largest = tl.maximum(largest, tl.where(joined, in_units(tl.maximum(tl.abs(d{k}), tl.abs(w{k})), s{k}), 0.0))",
            "missed = tl.maximum(missed, tl.where(joined, tl.abs(w{k}), 0.0))",
            "gross = tl.maximum(gross, tl.where(joined, in_units(tl.maximum(tl.abs(d{k}), tl.abs(w{k})), v{k}), 0.0))",
            "own_units = in_units(tl.abs(w{k}), EPS * c{k})",
            "rough = tl.maximum(rough, tl.where(joined, own_units, 0.0))",
            "units = in_units(tl.abs(w{k}), EPS * tl.maximum(c{k}, tl.minimum(a{k}, beside)))",
            f"borne = tl.maximum(borne, tl.where(joined, tl.where(tl.abs(w{{k}}) <= {_CARRIED} * v{{k}}, units, own_units), 0.0))",
            # A state that is not finite settles nothing, wherever it is.
            "largest = tl.where(ok & ~(o{k} < float('inf')), float('inf'), largest)",
            "s{k} = atol + rtol * tl.where(r * 0 + local > 0, o{k}, m{k})",
        )),
        # An end that does not depend on its start has to be where the next chunk starts: else derivatives are not what the step does.
        "    inner = ok & (n < chunks - 1) & (n < g * group_chunks + group_chunks - 1) & (r * 0 + linear == 0)",
        *(line for i in range(width) for line in (
            f"    blind = inner & ({' + '.join(f'tl.abs(p{i}_{k})' for k in range(width))} == 0)",
            f"    largest = tl.where(blind & (tl.abs(e{i} - f{i}) > m{i} * (SMOOTH * EPS)), float('inf'), largest)",
        )),
        "    exact = n <= passes + 1",
        *indented(for_each(
            width,
            "y{k} = tl.where(exact, h{k}, tl.where(far, tl.where(tl.abs(h{k}) < float('inf'), h{k}, z{k}), y{k}))",
            "tl.store(starts + " + chunk_of + ", y{k}, mask=joined)",
            "d{k} = tl.where(joined, y{k} - z{k}, 0.0)  # which is what the chunks that follow hear of",
        )),
        *(f"    u{i} = {row_of(i, width, 'p{i}_{k}', 'd{k}')}" for i in range(width)),
        *indented(for_each(
            width,
            # How far the correction of its start moves the end of the chunk: of the last one, nobody else asks.
            "largest = tl.maximum(largest, tl.where(ok, in_units(tl.abs(u{k}), s{k}), 0.0))",
        )),
        *indented(for_each(width, "known = known & (tl.abs(u{k}) < float('inf'))")),
        "    largest = tl.where(joined & ~known, float('inf'), largest)",
        *indented(for_each(
            width, "d{k} = finite_or_zero(u{k} + (e{k} - f{k}))", "h{k} = e{k}",
        )),
        *indented(carried),
    ]  # fmt: skip
    note = [
        "# What was found: of a lane the largest of its groups.",
        "largest = tl.max(tl.reshape(largest, (GROUPS, LANES)), 0)",
        "missed = tl.max(tl.reshape(missed, (GROUPS, LANES)), 0)",
        "rough = tl.max(tl.reshape(rough, (GROUPS, LANES)), 0)",
        "borne = tl.max(tl.reshape(borne, (GROUPS, LANES)), 0)",
        "gross = tl.max(tl.reshape(gross, (GROUPS, LANES)), 0)",
        f"borne = tl.where(gross <= {_NEAR}, borne, rough)",
        "hidden = tl.max(tl.reshape(hidden, (GROUPS, LANES)), 0)",
        "r = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)",
        "inside = r < rows",
        "note(largest, missed, rough, borne, hidden, found, unsettled, taken, residual, r, rows, inside, passes, limit, roughest, linear)",
    ]  # fmt: skip
    kept = (("d", width + square + width), ("m", width + square + 2 * width))
    lines = [
        *_groups(width),
        "live = inside & ~settled(found, passes, r, rows, inside)",
        "largest = tl.zeros((GROUPS * LANES,), REAL)",
        "missed = tl.zeros((GROUPS * LANES,), REAL)",
        "rough = tl.zeros((GROUPS * LANES,), REAL)  # the largest miss in units of rounding",
        "borne = tl.zeros((GROUPS * LANES,), REAL)  # and of that which others have passed on",
        "gross = tl.zeros((GROUPS * LANES,), REAL)  # the largest correction in tolerances of the largest size so far",
        "hidden = tl.zeros((GROUPS * LANES,), REAL)",
        "if tl.sum(live.to(tl.int32), 0) > 0:",
        *indented([
            *_in_part("PART <= 1", gather),
            *_in_part("PART == 0", ["tl.debug_barrier()"]),
            *_in_part("PART % 2 == 0", between),
            *_in_part("PART == 2", [
                *(f"tl.store(own + ({at} + {k}) * rows, {name}{k}, mask=live)" for name, at in kept for k in range(width)),
                f"tl.store(own + {size - 1 - width} * rows, largest, mask=live)",
            ]),
            *_in_part("PART == 3", [
                *(f"{name}{k} = tl.load(own + ({at} + {k}) * rows, mask=live, other=0)" for name, at in kept for k in range(width)),
                f"largest = tl.load(own + {size - 1 - width} * rows, mask=live, other=0)",
            ]),
            *_in_part("PART % 3 == 0", spread),
        ]),
        *_in_part("PART % 3 == 0", note),
    ]  # fmt: skip
    arguments = [
        "starts", "ends", "products", "sizes", "maps", "found", "unsettled", "taken", "residual",
        "rows", "chunks", "groups", "group_chunks", "passes", "limit", "atol", "rtol", "roughest", "local", "linear",
    ]  # fmt: skip
    return kernel_text(
        "join",
        arguments,
        ["PART", "GROUPS", "LANES"],
        '"""Correct the starts of all chunks, and note by how much. ``linear``: whatever the correction, it is believed."""',
        lines,
    )
