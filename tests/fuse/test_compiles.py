"""Emitted kernels compile: for a GPU that need not be there. The interpreter takes what the compiler does not, such as a name that
changes its type in a loop."""

import itertools
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

from deeppcr import compiling, launch
from deeppcr.compiling import for_kernel
from deeppcr.fuse import transients
from deeppcr.fuse.compiled import Kernels
from deeppcr.fuse.joints import parts_of
from deeppcr.fuse.program import program_of
from deeppcr.fuse.trace import one_row
from deeppcr.sequence.layout import Layout
from fuse.cases import BINARY, NO_TANGENT, UNARY
from fuse.emitted import Emitted, pulled_back, pushed_forward, trace
from fuse.tile_steps import STEPS as STEPS_ON_TILES
from fuse.tile_steps import Draw, gru
from kernel_support import thorough

triton = pytest.importorskip("triton")
knobs = triton.knobs


def elementwise():
    gain = torch.linspace(0.1, 0.9, 6).reshape(2, 3)

    def step(h, gates):
        r, n = gates.chunk(2, -1)
        r = torch.sigmoid(r + gain[0] * h)
        return r * h + (1 - r) * torch.tanh(n + gain[1] * h)

    return step, torch.zeros(2, 3), torch.zeros(2, 6)


def narrow():
    def step(z):
        angle, speed = z.unbind(-1)
        return z + 0.01 * torch.stack([speed, -torch.sin(angle) - 0.3 * speed], -1)

    return step, torch.zeros(2, 2, dtype=torch.float64), None


def wide():
    weights = torch.eye(5) + 0.1
    return lambda z, x: z - 0.1 * (torch.tanh(z) @ weights) + x, torch.zeros(2, 5), torch.zeros(2, 5)


def dense(width):
    def make():
        step, z0, xs = gru(width)(Draw(torch.float32, torch.device("cpu"), length=1))
        return step, z0, xs[0]

    return make


def filtered():
    step, z0, xs = STEPS_ON_TILES["Kalman"](Draw(torch.float32, torch.device("cpu"), length=1))
    return step, z0, xs[0]


STEPS = {"elementwise": elementwise, "narrow": narrow, "wide": wide}
ON_TILES = {"dense12": dense(12), "dense16": dense(16), "dense40": dense(40), "filtered": filtered}
#: Arguments that point to something else than the numbers of the kernel.
POINTERS = {"unsettled": "*i32", "taken": "*i32", "found": "*fp32", "residual": "*fp32"}


def compile_for_hopper(kernel, signature: dict[str, str], constants: dict[str, int], up_to: str = "llir") -> str:
    """The instructions, where they are asked for."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from compiler_stages import compiled_up_to

    values = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    with compiled_up_to(up_to):
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"]


def compile_operations(names: str) -> None:
    """Compile operations as one program, in both precisions.

    Args:
        names: "all" that go number by number, with their derivatives; or some of one number, separated by commas
    """
    every = names == "all"
    families = (UNARY, BINARY) if every else ({name: UNARY[name] for name in names.split(",")},)
    transforms = (lambda function: function, pushed_forward, pulled_back) if every else (lambda function: function,)
    for family, transform in itertools.product(families, transforms):
        number = torch.full((1,), 0.5, dtype=torch.float64)
        arguments = [number] * (2 if family is BINARY else 1)
        lane = [each[0] for each in arguments]
        graphs = [trace(function, *lane) for name, function in family.items() if name not in NO_TANGENT]
        if transform is pushed_forward:
            arguments = [*arguments, *map(torch.clone, arguments)]
        program = trace(lambda *given: [transform(graph)(*given) for graph in graphs], *(each[0] for each in arguments))  # noqa: B023
        emitted = Emitted(program, *arguments)
        for dtype, real in ((torch.float64, "*fp64"), (torch.float32, "*fp32")):
            with tempfile.TemporaryDirectory() as folder:
                signature = {"ARGUMENTS": real, "NUMBERS": real, "RESULTS": real, "LANES": "constexpr"}
                compile_for_hopper(emitted.kernel(Path(folder), dtype), signature, {"LANES": 32})


def compile_step(name: str) -> None:
    """Compile every kernel of a step."""
    step, z0, x = STEPS[name]()
    layout = Layout.of(z0, None)
    kernels = Kernels(program_of(one_row(step, layout, x), layout))
    program = kernels.program
    real = "fp64" if program.dtype == torch.float64 else "fp32"
    sizes = {"atol": "fp32", "rtol": "fp32", "roughest": "fp32"}

    def kind_of(argument: str) -> str:
        pointed = (
            "initial",
            "numbers",
            "guess",
            "states",
            "starts",
            "ends",
            "products",
            "sizes",
            "maps",
            "given",
            "adjoints",
            "of_initial",
        )
        if argument in pointed or (argument[0] in "pg" and argument[1:].isdigit()):
            return "*" + real
        return POINTERS.get(argument) or sizes.get(argument, "i32")

    block = {"BLOCK": 32, "STAGES": 4}
    asked = [
        *((kernels.roll, {"PRODUCT": product, "WHOLE": whole, "ALL": every, **block}) for product, whole, every in (
            (True, False, True), (False, True, True), (False, False, True), (True, False, False), (False, True, False))),
        *((kernels.sweep, {"MAP": as_map, "WHOLE": whole, **block}) for as_map, whole in ((True, False), (False, False), (False, True))),
        *((kernels.join, {"PART": part, "GROUPS": 8, "LANES": 4}) for part in parts_of(program.width, program.dtype)),
    ]  # fmt: skip
    for number, (kernel, constants) in enumerate(asked):
        signature = {each: "constexpr" if each in constants else kind_of(each) for each in kernel.arg_names}
        assert kernel.one_lane_a_thread
        if name == "elementwise" and number % 4:
            compile_for_hopper(kernel, signature, constants)
            continue  # one of each kind both ways
        with mock.patch.object(knobs.compilation, "always_compile", True):  # both are kept under one name
            in_full = compile_for_hopper(kernel, signature, constants, "ptx")
            with for_kernel(kernel):
                assert compile_for_hopper(kernel, signature, constants, "ptx") == in_full, (
                    "what was left out made a difference"
                )


def compile_tiles(name: str) -> None:
    """Compile every kernel of a step on tiles, and those that join its chunks; "step:some" a few of them."""
    from deeppcr.fuse import wide as joining

    name, _, some = name.partition(":")
    step, z0, x = ON_TILES[name]()
    layout = Layout.of(z0, None)
    kernels = Kernels(program_of(one_row(step, layout, x), layout))
    program = kernels.program
    known = {"WIDTH": program.width, "PADDED": max(16, triton.next_power_of_2(program.width)), "EVEN": program.width % 4 == 0,
             "BLOCKS": program.blocks, "LEAD": program.lead, "STAGES": 2, "LANES": 32}  # fmt: skip
    asked = [
        *((kernels.roll, {"PRODUCT": product, "WHOLE": whole, "PRECISION": "tf32"}) for product, whole in ((True, False), (False, True))),
        (joining.gather, {"PRECISION": "tf32"}),
        (joining.spread, {}),
        (joining.note_rows, {}),
        *((kernels.sweep, {"MAP": as_map, "WHOLE": whole, "PRECISION": "tf32x3"}) for as_map, whole in ((True, False), (False, False), (False, True))),
    ]  # fmt: skip
    pointed = {"initial", "numbers", "guess", "states", "starts", "ends", "products", "sizes", "maps", "terms", "largest", "worst", "given",
               "adjoints", "of_initial"}  # fmt: skip

    def kind_of(argument: str) -> str:
        if argument in pointed or (argument[0] in "pg" and argument[1:].isdigit()):
            return "*fp32"
        return POINTERS.get(argument) or ("fp32" if argument in ("atol", "rtol", "roughest") else "i32")

    for kernel, constants in asked[:: 3 if some else 1]:
        constants |= {name: value for name, value in known.items() if name in kernel.arg_names}
        signature = {each: "constexpr" if each in constants else kind_of(each) for each in kernel.arg_names}
        compile_for_hopper(kernel, signature, constants)


#: Functions of two arguments, one of them a number.
OF_NUMBERS = "atan2_of_numbers,fmod,hypot_of_number,pow_7,pow_odd,pow_of_number,remainder"


def compile_looks(every: bool) -> None:
    """Compile what asks whether something large hides what comes after it: in both precisions, and by both ways or one each."""
    for real in ("fp32", "fp64"):
        kinds = dict.fromkeys(("atol", "rtol", "faint", "lives_on", "known", "log_proof"), "fp32")
        kinds |= dict.fromkeys(("sizes", "initial", "closer", "largest", "so_far", "nearer"), "*" + real)
        for closer in (False, True) if every else (real == "fp32",):
            constants = {"CLOSER": closer, "TINY": 1e-38, "POSITIONS": 128, "LANES": 8}
            signature = {each: kinds.get(each, "i32") for each in transients._look.arg_names} | {"hidden": "*i32"}
            compile_for_hopper(transients._look, signature | dict.fromkeys(constants, "constexpr"), constants)


@pytest.mark.parametrize(
    "what",
    [
        f"elementwise {OF_NUMBERS} dense12:some looks:some",
        *thorough("looks", "dense12", "narrow", "wide", "all", "dense16", "dense40", "filtered"),
    ],
)
def test_every_kernel_compiles(what, tmp_path):
    # In a process of its own: in this one Triton interprets. What is compiled in part nobody else is to find.
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_DISABLE_LINE_INFO": "1"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, *what.split()],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]


class Kernel:
    """Stands for one by ``triton.jit``: notes what it is asked to do."""

    def __init__(self):
        self.compiled, self.launched = [], []

    def warmup(self, *arguments, grid, **options):
        self.compiled.append((arguments, grid, options))

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launched.append((arguments, grid, options))


def test_kernels_are_compiled_ahead_each_once_and_none_is_launched(monkeypatch):
    monkeypatch.setattr(launch, "JITFunction", Kernel)
    first, second, given = Kernel(), Kernel(), torch.zeros(4)

    def make():
        assert launch.compiles_ahead()
        for passes in range(3):  # which it is not compiled for
            launch.launch(first, 2, (given, passes), (True,), warps=1)
            launch.launch(second, 5, (given,), (), warps=4, registers=64)

    launch.compile_ahead(make)
    assert not launch.compiles_ahead()
    assert [len(each.compiled) for each in (first, second)] == [1, 1]
    assert second.compiled == [((given,), (5,), {"num_warps": 4, "maxnreg": 64})]
    assert not first.launched + second.launched
    launch.compile_ahead(
        lambda: launch.launch(first, 2, (given, 0), (True,), warps=1)
    )  # one by itself has nothing to wait for
    assert len(first.compiled) == 1
    launch.launch(first, 2, (given, 0), (True,), warps=1)
    assert len(first.launched) == 1


def test_nothing_is_compiled_ahead_where_the_caller_does_so(monkeypatch):
    monkeypatch.setattr(launch, "JITFunction", Kernel)
    first, second, given = Kernel(), Kernel(), torch.zeros(4)
    with ThreadPoolExecutor(1) as threads, triton.AsyncCompileMode(threads):
        launch.compile_ahead(*(partial(launch.launch, each, 2, (given,), (), warps=1) for each in (first, second)))
    assert not first.compiled + second.compiled + first.launched + second.launched


class Asks(Kernel):
    """Has a thread ask whether a pass is to be added to it."""

    def warmup(self, *arguments, grid, **options):
        ask = partial(compiling._unless_left_out, self.compiled.append)
        triton.runtime._async_compile.active_mode.get().executor.submit(ask, "coalesce")


def test_passes_are_left_out_of_kernels_of_one_lane_alone():
    alone, other = compiling.with_one_lane(Asks()), Asks()
    compiling.compile_side_by_side([compiling.Asked(each, 1, (), 1, None) for each in (alone, other, alone)])
    compiling._unless_left_out(other.compiled.append, "afterwards")
    assert (alone.compiled, other.compiled) == ([], ["coalesce", "afterwards"])


def test_a_pass_that_can_be_left_out_is_called_as_others_call_it():
    assert compiling._unless_left_out(lambda *given, **named: (given, named), "passes", wide=32) == (
        ("passes",),
        {"wide": 32},
    )


def test_kernels_compile_where_triton_has_no_such_passes(monkeypatch):
    monkeypatch.setattr(triton._C, "libtriton", bare := ModuleType("triton._C.libtriton"))
    monkeypatch.setitem(sys.modules, bare.__name__, bare)
    monkeypatch.setattr(bare, "passes", ModuleType("passes"), raising=False)
    compiling._make_optional.cache_clear()
    try:
        with for_kernel(compiling.with_one_lane(Kernel())):
            pass
    finally:
        compiling._make_optional.cache_clear()
    assert not compiling._left_out.get()


def test_what_fails_while_launches_are_looked_at_leaves_nothing_behind():
    with pytest.raises(ZeroDivisionError):
        launch.compile_ahead(lambda: 1 // 0)
    assert not launch.compiles_ahead()


if __name__ == "__main__":
    for what in sys.argv[1:]:
        if what.startswith("looks"):
            compile_looks(every=what == "looks")
            continue
        (compile_step if what in STEPS else compile_tiles if what.split(":")[0] in ON_TILES else compile_operations)(
            what
        )
