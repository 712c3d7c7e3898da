"""The source of the kernels of a step on tiles: as ``templates`` has them for lanes. A program has one chunk of one row.

Shapes: L steps in N chunks, B rows of D numbers. ``states`` [L, B, D]; ``starts``, ``ends``, ``sizes`` [N, B, D] and ``products``
[N, B, D, D] of the chunks, the last with a tangent a row. Of these, a program has LEAD; as many programs as it takes share a chunk.
"""

from __future__ import annotations

import re

from .expressions import Scalar, Value
from .text import CASTS, RESETS, Lines, indented, kernel_text, leaf_arguments
from .tile_program import Read, TileProgram, state_strides
from .tiles import Tile


class _Places:
    """Where numbers of tiles lie: expressions, and the lines before the loop that they need."""

    def __init__(self, program: TileProgram):
        self.program, self._needed = program, []

    def text(self, scalar: Scalar) -> str:
        self._needed.append(scalar)
        return self.program.code.text(scalar)

    def of_state(self, at: int, lead: bool = False) -> tuple[str, str]:
        """Of one of the state's tiles in a row of D: offsets, and which are inside."""
        shape, tiles = self.program.shapes[at], self.program.tiles
        tile = Tile(0.0, shape, lead)
        strides = state_strides(shape)
        offsets = tiles.code.add(tiles.offsets(tile.sizes, strides, lead), self.program.begins[at])
        return self.text(offsets), self.text(tiles.inside(tile.sizes, lead))

    def of_leaf(self, read: Read) -> tuple[str, str]:
        tiles = self.program.tiles
        sizes = read.tile.sizes
        return self.text(tiles.offsets(sizes, self.program.strides(read.leaf))), self.text(tiles.inside(sizes))

    @property
    def lines(self) -> list[str]:
        return self.program.code.lines(0, self._needed)


def _in_order(program: TileProgram, lines: list[str]) -> list[str]:
    """Lines of the code in the order of their names, each once."""
    return sorted(dict.fromkeys(lines), key=lambda line: int(re.match(r"v(\d+)", line)[1]))  # pyright: ignore[reportOptionalSubscript]


def _masked(inside: str, *others: str) -> str:
    parts = [part for part in (inside, *others) if part != "True"]
    return f", mask={' & '.join(f'({part})' for part in parts)}" if parts else ""


def _load(places: _Places, read: Read) -> str:
    offsets, inside = places.of_leaf(read)
    other = ", other=0" if inside != "True" else ""
    return f"{read.value.name} = tl.load(a{read.leaf} + {offsets}{_masked(inside)}{other}){CASTS[read.value.kind]}"


def _addresses(program: TileProgram, lines: Lines, begin: str) -> list[str]:
    """Where leaves begin, in words that tell the compiler how far apart the least of them are: EVEN, by four numbers."""
    even, found = [], []
    for i in lines.leaves:
        leaf = program.leaves[i]
        steps = [*(["row"] if leaf.per_row else []), *(["step"] if leaf.per_step else [])]
        even += [f"    {name}{i} = tl.multiple_of({name}{i}, 4)" for name in steps]
        parts = [f"p{i}", *([str(leaf.offset)] if leaf.offset else [])]
        parts += [*([f"b * row{i}"] if leaf.per_row else []), *([f"{begin} * step{i}"] if leaf.per_step else [])]
        found.append(f"a{i} = {' + '.join(parts)}")
    return [*(["if EVEN:", *even] if even else []), *found]


def _whole_tile(program: TileProgram, tile: Tile) -> str:
    """A tile's text, also where it is one number."""
    text = program.code.text(tile.value)
    if isinstance(tile.value, Value):
        return text
    dims = program.tiles.dims(tile)
    return f"tl.full(({', '.join(dims)},), {text}, REAL)" if dims else f"tl.cast({text}, REAL)"


def _assigned(program: TileProgram, places: _Places, name: str, tile: Tile, shape: tuple[int, ...]) -> str:
    """A part of the next state, or of its tangents: zero in its padding, as all that follows may expect."""
    tile = Tile(tile.value, shape, tile.lead, tile.clean)
    text = _whole_tile(program, tile)
    inside = places.text(program.tiles.inside(tile.sizes, tile.lead))
    if (tile.clean and isinstance(tile.value, Value)) or inside == "True":
        return f"{name} = {text}"
    return f"{name} = tl.where({inside}, {text}, 0.0)"


def _with_lead(program: TileProgram, tile: Tile) -> Tile:
    """Tangents that are the same for all, as zero is."""
    return tile if tile.lead else Tile(tile.value, tile.shape, lead=True)


def _program_lines() -> list[str]:
    """Which chunk and row a program has, what is zeroed before anybody adds to it, and whether there is something left to do."""
    return [
        "pair = tl.program_id(0) // BLOCKS",
        "block = tl.program_id(0) % BLOCKS",
        "n = (pair // rows).to(tl.int64)",
        "b = (pair % rows).to(tl.int64)",
        *RESETS,
        "if (block == 0) & (n == 0) & (not WHOLE):",
        "    tl.store(worst + b, 0.0)",
        "    tl.store(worst + rows + b, 0.0)",
        "    tl.store(worst + 2 * rows + b, 0.0)",
        "    tl.store(worst + 3 * rows + b, 0.0)",
        "if not settled(found, passes, b, rows, b >= 0):",
    ]


def _which(program: TileProgram, at: int) -> str:
    """The numbers of tangents, beside one of the state's tiles."""
    rank = len(Tile(0.0, program.shapes[at]).axes)
    return f"which[{', '.join([':', *['None'] * rank])}]" if rank else "which"


def _stored(spots: list[tuple[str, str]], pointer: str, name: str) -> list[str]:
    return [
        f"tl.store({pointer} + {offsets}, {name}{at}{_masked(inside)})" for at, (offsets, inside) in enumerate(spots)
    ]


def _products_stored(program: TileProgram, places: _Places) -> list[str]:
    """Of a chunk, a row for each tangent."""
    width, found = program.width, []
    for at in range(len(program.shapes)):
        (offsets, inside), which = places.of_state(at, lead=True), _which(program, at)
        place = f"products + here * {width} + {which} * {width} + {offsets}"
        found.append(f"tl.store({place}, t{at}{_masked(inside, f'{which} < {width}')})")
    return found


def _identity(program: TileProgram, places: _Places, at: int) -> str:
    offsets, inside = places.of_state(at, lead=True)
    hit = f"({_which(program, at)} == {offsets})"
    return f"t{at} = tl.where({hit if inside == 'True' else f'{hit} & ({inside})'}, 1.0, 0.0).to(REAL)"


def roll(program: TileProgram) -> str:
    width, count = program.width, len(program.shapes)
    tangents = [_with_lead(program, tile) for tile in program.tangents]
    plain = Lines(program, [tile.value for tile in program.values])
    whole = Lines(program, [tile.value for tile in (*program.values, *tangents)])
    places = _Places(program)
    spots = [places.of_state(at) for at in range(count)]
    pointers, strides = leaf_arguments(program)
    loads = [_load(places, read) for read in whole.moving]
    fixed = [_load(places, read) for read in whole.fixed]
    next_state = [
        _assigned(program, places, f"y{at}", tile, program.shapes[at]) for at, tile in enumerate(program.values)
    ]
    next_tangents = [_assigned(program, places, f"u{at}", tile, program.shapes[at]) for at, tile in enumerate(tangents)]
    identity = [_identity(program, places, at) for at in range(count)]
    products = _products_stored(program, places)

    def stored(pointer: str, name: str) -> list[str]:
        return ["if block == 0:", *indented(_stored(spots, pointer, name))]

    def loaded(pointer: str) -> list[str]:
        return [
            f"z{at} = tl.load({pointer} + {offsets}{_masked(inside)}{', other=0' if inside != 'True' else ''}).to(REAL)"
            for at, (offsets, inside) in enumerate(spots)
        ]

    turns = [
        *loads,
        "if PRODUCT:",
        *indented([*whole.body, *next_state, *next_tangents, *(f"t{at} = u{at}" for at in range(count))]),
        "else:",
        *indented([*plain.body, *next_state]),
        *(line for at in range(count) for line in (f"z{at} = y{at}", f"m{at} = tl.maximum(m{at}, tl.abs(z{at}))")),
        *stored("out", "z"),
        f"out += rows * {width}",
        *whole.advance("+"),
    ]
    lines = [
        *_program_lines(),
        "    begin = first + n * chunk",
        "    turns = (tl.minimum(begin + chunk, steps) - begin).to(tl.int32)",
        *indented([*whole.numbers_loaded(), *_addresses(program, whole, "begin")]),
        *indented(_in_order(program, places.lines)),
        *indented([*fixed, *(line for line in whole.before if line not in set(places.lines))]),
        "    if WHOLE:",
        *indented(loaded(f"initial + b * {width}"), 2),
        "    else:",
        "        here = (n * rows + b) * " + str(width),
        "        if passes > 0:",
        *indented(loaded("starts + here"), 3),
        "        elif n == 0:",
        *indented(loaded(f"initial + b * {width}"), 3),
        "        else:",
        *indented(loaded(f"guess + (n * chunk - 1) * guess_step + b * {width}"), 3),
        *indented(stored("starts + here", "z"), 2),
        *(f"    m{at} = tl.abs(z{at})" for at in range(count)),
        "    if PRODUCT:",
        "        which = block * LEAD + tl.arange(0, LEAD)  # tangents",
        *indented(identity, 2),
        f"    out = states + (begin * rows + b) * {width}",
        "    for turn in tl.range(0, turns, num_stages=STAGES):",
        *indented(turns, 2),
        "    if not WHOLE:",
        *indented(stored("ends + here", "z"), 2),
        *indented(stored("sizes + here", "m"), 2),
        "        if PRODUCT:",
        *indented(products, 3),
    ]
    arguments = [
        "initial", "numbers", "guess", "states", "starts", "ends", "products", "sizes", "found", "unsettled", "worst", *pointers, *strides,
        "guess_step", "rows", "steps", "first", "chunk", "chunks", "passes", "limit",
    ]  # fmt: skip
    doc = '"""Run a chunk from its start; WHOLE: a row that is not settled, from ``initial`` before step ``first`` to the end."""'
    return kernel_text(
        "roll", arguments, ["PRODUCT", "WHOLE", "EVEN", "BLOCKS", "LEAD", "PRECISION", "STAGES"], doc, lines
    )


def sweep(program: TileProgram) -> str:
    width, count = program.width, len(program.shapes)
    maps = [_with_lead(program, tile) for tile in program.adjoints]
    single, of_reads = program.adjoint, program.cotangents
    as_map = Lines(program, [tile.value for tile in (*maps, *single)])
    with_them = Lines(program, [*(tile.value for tile in single), *(tile.value for _, tile in of_reads)])
    both = Lines(program, [*as_map.results, *with_them.results])
    places = _Places(program)
    spots = [places.of_state(at) for at in range(count)]
    products = _products_stored(program, places)
    pointers, strides = leaf_arguments(program, cotangents=True)
    loads = [_load(places, read) for read in both.moving]
    fixed = [_load(places, read) for read in both.fixed]
    stepwise = [(read, tile) for read, tile in of_reads if program.leaves[read.leaf].per_step]
    shared = [(at, read, tile) for at, (read, tile) in enumerate(of_reads) if not program.leaves[read.leaf].per_step]

    def loaded(name: str, pointer: str, later: bool = False) -> list[str]:
        return [
            f"{name}{at} = tl.load({pointer} + {offsets}{_masked(inside, *([f'{offsets} * 0 + l > 0'] if later else []))}"
            f"{', other=0' if later or inside != 'True' else ''}).to(REAL)"  # a mask is as large as what it masks
            for at, (offsets, inside) in enumerate(spots)
        ]

    def put(read: Read, text: str, index: str) -> str:
        i = read.leaf
        offsets, inside = places.of_leaf(read)
        return (
            f"tl.store(g{i} + to_offset{i} + {index} * to_step{i} + b * to_row{i} + {offsets}, {text}{_masked(inside)})"
        )

    next_map = [_assigned(program, places, f"u{at}", tile, program.shapes[at]) for at, tile in enumerate(maps)]
    next_single = [_assigned(program, places, f"y{at}", tile, program.shapes[at]) for at, tile in enumerate(single)]
    turns = [
        *loads,
        *loaded("z", "before", later=True),
        *(f"z{at} = tl.where(l > 0, z{at}, i{at})" for at in range(count)),
        *loaded("q", f"given + (l - 1) * given_step + b * {width}", later=True),
        "if MAP:",
        *indented([*as_map.body, *next_map, *next_single]),
        *indented([f"t{at} = u{at}" for at in range(count)]),
        "else:",
        *indented([*with_them.body, *next_single]),
        *indented([put(read, _whole_tile(program, tile), "l") for read, tile in stepwise]),
        *indented([f"sum{at} += {_whole_tile(program, tile)}" for at, _, tile in shared]),
        *(
            line
            for at in range(count)
            for line in (f"w{at} = y{at} + q{at}", f"m{at} = tl.maximum(m{at}, tl.abs(w{at}))")
        ),
        f"before -= rows * {width}",
        *both.advance("-"),
    ]
    identity = [_identity(program, places, at) for at in range(count)]
    one_chunk = [
        "begin = n * chunk",
        "turns = (tl.minimum(begin + chunk, steps) - begin).to(tl.int32)",
        *_addresses(program, both, "(begin + turns - 1)"),
        *fixed,
        *(line for line in both.before if line not in set(places.lines)),
        f"before = states + ((begin + turns - 2) * rows + b) * {width}",
        "if not MAP:",
        *indented([f"sum{at} = {_zero(program, tile)}" for at, _, tile in shared] or ["pass"]),
        "for turn in tl.range(0, turns, num_stages=STAGES):",
        "    l = begin + turns - 1 - turn",
        *indented(turns),
        "if not MAP:",
        "    if n == 0:",
        *indented(_stored(spots, f"of_initial + b * {width}", "w"), 2),
        *indented([put(read, f"sum{at}", "n") for at, read, _ in shared]),
    ]
    last = loaded("w", f"given + (b * 0 + steps - 1) * given_step + b * {width}")
    nothing = [f"w{at} = {_zero(program, tile)}" for at, tile in enumerate(program.states)]
    lines = [
        *_program_lines(),
        *indented([
            *both.numbers_loaded(),
            *_in_order(program, places.lines),
            *loaded("i", f"initial + b * {width}"),
            "if WHOLE:",
            "    n = b * 0 + chunks - 1",
            f"here = ((chunks - 1 - n) * rows + b) * {width}  # counted from the end",
            "if MAP | WHOLE:",
            *indented([*nothing, "if n == chunks - 1:", *indented(last)]),
            "else:",
            *indented(loaded("w", "starts + here")),
            *(f"m{at} = tl.abs(w{at})" for at in range(count)),
            "if MAP:",
            "    which = block * LEAD + tl.arange(0, LEAD)  # cotangents",
            *indented([*identity, "if block == 0:", *indented(_stored(spots, "starts + here", "w"))]),
            "if WHOLE:",
            "    for _ in range(0, chunks):",
            *indented([*one_chunk, "n -= 1"], 2),
            "else:",
            *indented(one_chunk),
            "    if block == 0:",
            *indented([*_stored(spots, "ends + here", "w"), *_stored(spots, "sizes + here", "m")], 2),
            "if MAP:",
            *indented(products),
        ]),
    ]  # fmt: skip
    arguments = [
        "initial", "numbers", "states", "given", "starts", "ends", "products", "sizes", "found", "unsettled", "worst", "of_initial",
        *pointers, *strides, "given_step", "rows", "steps", "chunk", "chunks", "passes", "limit",
    ]  # fmt: skip
    doc = '"""Run a chunk backwards: see ``templates``."""'
    return kernel_text(
        "sweep", arguments, ["MAP", "WHOLE", "EVEN", "BLOCKS", "LEAD", "PRECISION", "STAGES"], doc, lines
    )


def _zero(program: TileProgram, tile: Tile) -> str:
    dims = program.tiles.dims(tile)
    return f"tl.zeros(({', '.join(dims)},), REAL)" if dims else "0.0"
