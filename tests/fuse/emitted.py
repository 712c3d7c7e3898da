"""What the tests of emitted code share: a function is traced, written as code, and the code is run.

Shapes: N lanes, each with numbers of its own; an argument is [N, ...], and the function sees one lane of it.
"""

import importlib.util

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from deeppcr.fuse.expressions import FUNCTIONS, Code
from deeppcr.fuse.operations import DECOMPOSITIONS, evaluate


def trace(function, *arguments, decompositions=DECOMPOSITIONS):
    """The graph of a function, decomposed."""
    functional = torch.func.functionalize(lambda *tensors: function(*tensors))
    make = make_fx(functional, decomposition_table=decompositions, tracing_mode="fake", _allow_non_fake_inputs=True)
    # Views of larger tensors, with tangents, fail in PyTorch's fake tensors.
    return make(*(argument.clone() for argument in arguments))


def pushed_forward(function):
    """Values and tangents, from arguments and as many tangents."""

    def call(*both):
        half = len(both) // 2
        return torch.func.jvp(function, both[:half], both[half:])

    return call


def pulled_back(function):
    """Products with the Jacobian from the left, of ones."""

    def call(*arguments):
        results, pull = torch.func.vjp(function, *arguments)
        return pull(pytree.tree_map(torch.ones_like, results))

    return call


class Emitted:
    """A function as code.

    Args:
        function: of tensors
        arguments: [N, ...] each
    """

    def __init__(self, function, *arguments):
        self.lanes, self.code, self.values = len(arguments[0]), Code(), {}
        module = function if isinstance(function, torch.fx.GraphModule) else trace(function, *(a[0] for a in arguments))
        inputs = [self._named(f"x{at}", argument, level=1) for at, argument in enumerate(arguments)]
        outputs = evaluate(module.graph, inputs, lambda name: self._constant(name, getattr(module, name)), self.code)
        self.finish([output.shape for output in outputs], [scalar for output in outputs for scalar in output.flat])

    def finish(self, shapes, results):
        """Say what comes out: scalars, as many as the shapes have."""
        self.shapes, self.results = shapes, results
        self.texts = [self.code.text(scalar) for scalar in self.results]
        self.lines = [line for level in (0, 1) for line in self.code.lines(level, self.results)]

    def _named(self, name, numbers, level):
        names = np.empty(numbers.shape[1:], dtype=object)
        kind = "real" if numbers.dtype.is_floating_point else "bool" if numbers.dtype == torch.bool else "int"
        for at, place in enumerate(np.ndindex(names.shape)):
            names[place] = self.code.input(f"{name}_{at}", kind, level)
            self.values[f"{name}_{at}"] = numbers[(slice(None), *place)].detach().cpu()
        return names

    def _constant(self, name, tensor):
        if tensor.dtype.is_floating_point:
            return self._named(name, tensor.detach().expand(self.lanes, *tensor.shape), level=0)
        numbers = np.empty(tensor.shape, dtype=object)
        for place in np.ndindex(numbers.shape):
            numbers[place] = tensor[place].item()
        return numbers

    def run(self, device, dtype=torch.float64, folder=None):
        """What the code computes, [N, ...] for each output: by NumPy, or compiled where the device is a GPU."""
        if device.type == "cpu":
            return self._shaped(self.by_numpy(dtype))
        return self._shaped(self.by_kernel(folder, device, dtype))

    def by_numpy(self, dtype=torch.float64):
        real = torch.empty(0, dtype=dtype).numpy().dtype.type
        names = {**FUNCTIONS, "tl": NumPyLanguage, "REAL": real}
        for name, value in self.values.items():
            names[name] = (value.to(dtype) if value.dtype.is_floating_point else value).numpy()
        names.update({f"n{at}": real(number) for at, number in enumerate(self.code.numbers)})
        with np.errstate(all="ignore"):
            exec("\n".join(self.lines), names)
            results = [eval(text, names) for text in self.texts]
        return [torch.from_numpy(np.broadcast_to(result, self.lanes).astype(real)) for result in results]

    def by_kernel(self, folder, device, dtype=torch.float64):
        """By a kernel with as many lanes: interpreted on a CPU."""
        lanes = 1 << max(self.lanes - 1, 0).bit_length()
        arguments = torch.zeros(len(self.values) + 1, lanes, dtype=torch.float64)
        for row, value in zip(arguments, self.values.values(), strict=False):
            row[: self.lanes] = value
        arguments = arguments.to(device, dtype)
        numbers = torch.tensor([*self.code.numbers, 0.0], device=device, dtype=torch.float64).to(dtype)
        results = torch.full((len(self.texts), lanes), float("nan"), device=device, dtype=dtype)
        self.kernel(folder, dtype)[(1,)](arguments, numbers, results, lanes)
        return list(results[:, : self.lanes].cpu())

    def kernel(self, folder, dtype):
        path = folder / "emitted_kernel.py"
        path.write_text(self.source(dtype))
        spec = importlib.util.spec_from_file_location("emitted_kernel", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.kernel

    def source(self, dtype):
        kinds = {"real": "REAL", "int": "tl.int64", "bool": "tl.int1"}
        inputs = {
            each.name: each.kind
            for line in self.code._lines.values()
            for each in line.operands
            if hasattr(each, "kind")
        }
        inputs.update({each.name: each.kind for each in self.results if hasattr(each, "kind")})
        return "\n".join(
            [
                "import triton",
                "import triton.language as tl",
                "from deeppcr.fuse.device import *",
                f"REAL = tl.constexpr(tl.{str(dtype).removeprefix('torch.')})",
                "@triton.jit",
                "def kernel(ARGUMENTS, NUMBERS, RESULTS, LANES: tl.constexpr):",
                "    lane = tl.arange(0, LANES)",
                *(
                    f"    {name} = tl.load(ARGUMENTS + {at} * LANES + lane).to({kinds[inputs.get(name, 'real')]})"
                    for at, name in enumerate(self.values)
                ),
                *(f"    n{at} = tl.load(NUMBERS + {at})" for at in range(len(self.code.numbers))),
                *(f"    {line}" for line in self.lines),
                *(f"    tl.store(RESULTS + {at} * LANES + lane, {text})" for at, text in enumerate(self.texts)),
            ]
        )

    def _shaped(self, results):
        outputs, rest = [], iter(results)
        for shape in self.shapes:
            scalars = [next(rest) for _ in range(int(np.prod(shape)))]
            outputs.append(torch.stack(scalars, -1).reshape(self.lanes, *shape))
        return outputs


class NumPyLanguage:
    """What emitted lines use of ``triton.language``, on arrays of NumPy."""

    uint8, int8, int16, int32, int64 = np.uint8, np.int8, np.int16, np.int32, np.int64
    where = staticmethod(np.where)
    abs = staticmethod(np.abs)
    cast = staticmethod(lambda array, dtype: np.asarray(array).astype(dtype))


def expected(function, *arguments):
    """What PyTorch computes, lane by lane, [N, ...] for each output, in float64."""
    lanes = [pytree.tree_leaves(function(*lane)) for lane in zip(*arguments, strict=True)]
    return [torch.stack(output).double() for output in zip(*lanes, strict=True)]
