"""How a Sequence becomes a bidiagonal system: the Jacobians of its steps, exact or approximate.

Shapes: N steps or chunks at a time, B rows, D the packed state, K tangents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .linear import BlockDiagonal, Blocks, Dense, Diagonal, Scalar
from .runtime import is_capturing
from .sequence import Sequence
from .sequence.evaluate import StepError
from .sequence.layout import Layout

#: A Jacobian by forward mode holds about this many tensors of its own size while it is formed (primal and tangent
#: of the largest intermediates).
_WORKSPACE = 6


class Jacobian:
    """Strategy: Jacobians of the steps. Subclasses give ``evaluate``; collapsing steps into chunks comes with it.

    Attributes:
        repeatable: whether a recording of its operations may stand for it, given what ``trace`` and ``settings`` tell
        asks_nothing: whether nothing that it does looks at values, so that a CUDA graph of the caller's may hold it
    """

    # A class says these for itself (``runtime.declares``): a subclass may do anything.
    repeatable = False
    asks_nothing = False
    #: Whether the blocks are what the caller says they are, rather than derivatives of the step.
    given = False

    @property
    def true(self) -> bool:
        """Whether the blocks are the true Jacobians, so that Newton's iteration converges quadratically."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """How derivatives are formed, for the plan; "" where the sequence knows."""
        return ""

    def evaluate(self, sequence: Sequence, previous: Tensor, steps: range) -> tuple[Tensor, Blocks]:
        """Values [N, B, D] and N blocks, at the states ``previous`` [N, B, D] before ``steps``."""
        raise NotImplementedError

    def blocks_at(self, sequence: Sequence, previous: Tensor, steps: range) -> Blocks | None:
        """The blocks alone, where they do not need the values; None where both come together."""
        return None

    @property
    def settings(self) -> tuple:
        """What a recording depends on besides what was traced."""
        return ()

    def trace(self, sequence: Sequence) -> None:
        """Add to the trace of a sequence what else the blocks depend on."""

    def for_recording(self, sequence: Sequence) -> Jacobian:
        """The same, less what it would ask the host at every use."""
        return self

    def verifier(self, sequence: Sequence) -> Callable[[Tensor, range], Tensor] | None:
        """A function of the states before steps that flags where a step is not as claimed; from then on the caller verifies."""
        return None

    def contradiction(self, sequence: Sequence, index: int, state: Tensor, true: Tensor, rounding: float) -> str | None:
        """What is wrong with what it claims of a step; None where nothing is.

        Args:
            state: [B, D], before step ``index``
            true: [1, B, D, D], the Jacobian of that step
            rounding: relative
        """
        return None

    def fit_chunk(self, sequence: Sequence, chunk: int) -> int:
        """The chunk, or the next larger one by doubling at which the blocks fit in memory."""
        return chunk

    def steps_at_once(self, sequence: Sequence) -> int:
        """Of how many steps the blocks fit in memory together, for the backward pass."""
        return sequence.length

    def linearise(
        self, sequence: Sequence, starts: Tensor, chunk: int, first: int = 0, ends: Tensor | None = None
    ) -> tuple[Tensor, Blocks]:
        """Roll all chunks out, each from its own start, with the product of their Jacobians.

        Args:
            starts: [chunks, B, D], the states before chunks ``first``, ``first + 1``, ...
            ends: the states after the chunks, where they are known

        Returns:
            the states after the chunks, [chunks, B, D], and one block a chunk. The block of a ragged last chunk is
            that of its own steps.
        """
        if chunk == 1 and ends is not None:
            blocks = self.blocks_at(sequence, starts, range(first, sequence.length))
            if blocks is not None:
                return ends, blocks
        current, product, ended = starts, None, []
        for steps in sequence.chunk_steps(chunk, first):
            if product is not None and len(steps) < len(current):
                ended.append((current[len(steps) :], product[len(steps) :]))
                product = product[: len(steps)]
            current, blocks = self.evaluate(sequence, current[: len(steps)], steps)
            product = blocks if product is None else blocks.compose(product)
        assert product is not None
        ends = _joined([current, *(state for state, _ in ended)])
        return ends, type(product)(_joined([product.data, *(blocks.data for _, blocks in ended)]))


@dataclass(frozen=True, kw_only=True)
class DenseJacobian(Jacobian):
    """The full Jacobian of every step, by automatic differentiation: the paper's method.

    Args:
        memory_budget: bytes that forming the blocks may take at a time, beyond the blocks themselves; more is done
            in slices. Default: a quarter of the free memory of a GPU (while a CUDA graph is captured: an eighth of
            all of it), 1 GiB on a CPU

    >>> import torch, deeppcr
    >>> newton = deeppcr.Newton(jacobian=deeppcr.DenseJacobian(memory_budget=2**20))
    >>> deeppcr.solve(torch.tanh, torch.ones(4), length=100, solver=newton).result.name
    'CONVERGED'
    """

    memory_budget: int | None = None
    repeatable = asks_nothing = True

    def __post_init__(self):
        if self.memory_budget is not None and (not isinstance(self.memory_budget, int) or self.memory_budget < 1):
            raise ValueError(f"memory_budget: expected a number of bytes, got {self.memory_budget!r}")

    @property
    def true(self) -> bool:
        return True

    def evaluate(self, sequence: Sequence, previous: Tensor, steps: range) -> tuple[Tensor, Dense]:
        parts = [
            sequence.push(previous[part], _identity(sequence), steps[part])
            for part in self.slices(sequence, len(steps))
        ]
        values, pushed = zip(*parts, strict=True)
        return _joined(values), Dense(_joined([_as_blocks(each) for each in pushed]))

    def linearise(
        self, sequence: Sequence, starts: Tensor, chunk: int, first: int = 0, ends: Tensor | None = None
    ) -> tuple[Tensor, Dense]:
        # The columns of the product are pushed through the steps as tangents: no step's own Jacobian is ever
        # formed, and what a step merely passes on (with_history) costs nothing.
        if chunk == 1:
            return self.evaluate(sequence, starts, range(first, sequence.length))
        reached, blocks = [], []
        for part in self.slices(sequence, len(starts)):
            ends, pushed = sequence.push_out(starts[part], _identity(sequence), chunk, first, part)
            reached.append(ends)
            blocks.append(_as_blocks(pushed))
        return _joined(reached), Dense(_joined(blocks))

    def slices(self, sequence: Sequence, count: int) -> list[slice]:
        """How many of ``count`` steps (or chunks) are done at a time to keep to the memory budget."""
        at_once = max(1, self.budget(sequence) // (_WORKSPACE * block_bytes(sequence)))
        return [slice(start, min(start + at_once, count)) for start in range(0, count, at_once)]

    def budget(self, sequence: Sequence) -> int:
        if self.memory_budget is not None:
            return self.memory_budget
        device = sequence.layout.device
        if device.type != "cuda":
            return 2**30
        if is_capturing(device):  # no time to ask what is free
            return torch.cuda.get_device_properties(device).total_memory // 8
        return torch.cuda.mem_get_info(device)[0] // 4

    @property
    def settings(self) -> tuple:
        return (self.memory_budget,)

    def for_recording(self, sequence: Sequence) -> Jacobian:
        return DenseJacobian(memory_budget=self.budget(sequence))

    def fit_chunk(self, sequence: Sequence, chunk: int) -> int:
        budget = self.budget(sequence)
        while chunk < sequence.length and 4 * block_bytes(sequence) * sequence.length > budget * chunk:
            chunk = min(2 * chunk, sequence.length)
        return chunk

    def steps_at_once(self, sequence: Sequence) -> int:
        return max(1, self.budget(sequence) // (4 * block_bytes(sequence)))


def block_bytes(sequence: Sequence) -> int:
    """Memory of the dense blocks of one step for all rows."""
    layout = sequence.layout
    return layout.rows * layout.width**2 * layout.dtype.itemsize


def _joined(parts: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """One after the other; a single one as it is, for a copy of all blocks takes as much memory again."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _identity(sequence: Sequence) -> Tensor:
    layout = sequence.layout
    eye = torch.eye(layout.width, dtype=layout.dtype, device=layout.device)
    return eye[None, :, None, :].expand(1, layout.width, layout.rows, layout.width)


def _as_blocks(pushed: Tensor) -> Tensor:
    """Columns [N, K, B, D] to matrices [N, B, D, K]; contiguous, as matrix products want them."""
    return pushed.permute(0, 2, 3, 1).contiguous()


@dataclass(frozen=True, kw_only=True)
class DiagonalJacobian(Jacobian):
    """The exact diagonal, for steps that treat every element of the state by itself.

    One Jacobian-vector product gives it; of complex elements, each of which has a derivative of 2 x 2 real numbers, two do. Another, along random signs, is compared at the first iteration of a
    solve: where the step is not elementwise, an error says so (a row sum is not a diagonal). There,
    use ``HutchinsonJacobian`` or ``DenseJacobian``.

    >>> import torch, deeppcr
    >>> newton = deeppcr.Newton(jacobian=deeppcr.DiagonalJacobian())
    >>> deeppcr.solve(torch.sin, torch.ones(1000), length=100, solver=newton).result.name
    'CONVERGED'
    """

    repeatable = True

    @property
    def true(self) -> bool:
        return True

    def evaluate(self, sequence: Sequence, previous: Tensor, steps: range) -> tuple[Tensor, Blocks]:
        layout = sequence.layout
        parts = self._parts(layout)
        if not sequence.verify_once("diagonal"):
            values, pushed = sequence.push(previous, self._tangents(layout), steps)
            return values, self._blocks(pushed, parts)
        values, blocks, wrong = self._compare(sequence, previous, steps, self._signs(layout))
        if wrong.any():
            element = int(wrong.any(0).any(0).nonzero()[0]) // parts
            raise StepError(
                "jacobian: DiagonalJacobian was claimed, but the step is not elementwise: element "
                f"{element} of its output depends on other elements of the state. Use HutchinsonJacobian() or DenseJacobian()"
            )
        return values, blocks

    @staticmethod
    def _parts(layout: Layout) -> int:
        """How many real numbers an element of the state is."""
        if len(set(layout.parts)) > 1:
            raise ValueError(
                "jacobian: DiagonalJacobian is for elements that are all real or all complex, and the state has both; use DenseJacobian()"
            )
        return layout.parts[0]

    @classmethod
    def _tangents(cls, layout: Layout) -> Tensor:
        """[1, parts, 1, D] for all rows: along all elements at once, part by part."""
        parts = cls._parts(layout)
        eye = torch.eye(parts, dtype=layout.dtype, device=layout.device).repeat(1, layout.width // parts)
        return eye[None, :, None].expand(1, parts, layout.rows, layout.width)

    @staticmethod
    def _blocks(pushed: Tensor, parts: int) -> Blocks:
        """Of products [N, parts, B, D] with these tangents."""
        if parts == 1:
            return Diagonal(pushed[:, 0])
        return BlockDiagonal(pushed.unflatten(-1, (-1, parts)).permute(0, 2, 3, 4, 1).contiguous())

    def verifier(self, sequence: Sequence) -> Callable[[Tensor, range], Tensor]:
        sequence.verify_once("diagonal")
        signs = self._signs(sequence.layout)
        return lambda previous, steps: self._compare(sequence, previous, steps, signs)[2]

    def contradiction(self, sequence: Sequence, index: int, state: Tensor, true: Tensor, rounding: float) -> str | None:
        element = torch.arange(true.shape[-1], device=true.device) // self._parts(sequence.layout)
        off = true.abs().where(element != element.unsqueeze(-1), 0)
        if off.max() <= rounding * (1 + true.abs().max()):
            return None
        _, _, row, column = (int(i) for i in (off == off.max()).nonzero()[0])
        return (
            f"DiagonalJacobian is claimed, but at step {index + 1} element {row} of the result depends on element {column} of the "
            f"state (derivative {float(off.max()):.2g}). Use HutchinsonJacobian() or DenseJacobian()"
        )

    @staticmethod
    def _signs(layout: Layout) -> Tensor:
        return _signs((1, 1, layout.rows, layout.width), layout, 0)

    @classmethod
    def _compare(
        cls, sequence: Sequence, previous: Tensor, steps: range, signs: Tensor
    ) -> tuple[Tensor, Blocks, Tensor]:
        """Values, blocks, and which elements of the product with ``signs`` [1, 1, B, D] are not theirs, [N, B, D]."""
        parts = cls._parts(sequence.layout)
        values, pushed = sequence.push(previous, torch.cat([cls._tangents(sequence.layout), signs], 1), steps)
        blocks, mixed = cls._blocks(pushed[:, :-1], parts), pushed[:, -1]
        allowed = 100 * torch.finfo(mixed.dtype).eps * (1 + pushed[:, :-1].abs().sum(1))
        return values, blocks, (mixed - blocks.apply(signs[:, 0])).abs() > allowed


@dataclass(frozen=True, kw_only=True)
class HutchinsonJacobian(Jacobian):
    """An unbiased estimate of the diagonal: the mean of ``v * (J v)`` over random signs v.

    An approximate Jacobian: the iteration converges linearly, and only where the diagonal dominates.

    Args:
        samples: random vectors a step
        seed: of the random signs; the same in every iteration

    >>> import torch, deeppcr
    >>> step = lambda z: torch.tanh(0.5 * z + 0.1 * z.roll(1, -1))
    >>> newton = deeppcr.Newton(jacobian=deeppcr.HutchinsonJacobian(samples=4))
    >>> deeppcr.solve(step, torch.ones(8), length=100, solver=newton).result.name
    'CONVERGED'
    """

    samples: int = 1
    seed: int = 0

    def __post_init__(self):
        if not isinstance(self.samples, int) or self.samples < 1:
            raise ValueError(f"samples: expected a whole number from 1, got {self.samples!r}")

    @property
    def true(self) -> bool:
        return False

    def evaluate(self, sequence: Sequence, previous: Tensor, steps: range) -> tuple[Tensor, Diagonal]:
        layout = sequence.layout
        shape = (1, self.samples, layout.rows, layout.width)
        signs = _signs(shape, layout, self.seed)
        values, pushed = sequence.push(previous, signs, steps)
        return values, Diagonal((signs * pushed).mean(1))


def _signs(shape: tuple[int, ...], layout: Layout, seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)  # on the CPU, so that every device sees the same signs
    signs = torch.randint(0, 2, shape, generator=generator, device="cpu").mul_(2).sub_(1)
    return signs.to(layout.device, layout.dtype)


@dataclass(frozen=True, eq=False)
class ScalarJacobian(Jacobian):
    """A multiple of the identity, given by the user: nothing is differentiated.

    Args:
        value: one number for all steps, or a tensor [L] or [L, B]

    >>> import torch, deeppcr
    >>> newton = deeppcr.Newton(jacobian=deeppcr.ScalarJacobian(0.5))
    >>> deeppcr.solve(lambda z: 0.5 * torch.sin(z), torch.ones(3), length=50, solver=newton).result.name
    'CONVERGED'
    """

    value: float | Tensor

    def __post_init__(self):
        if not isinstance(self.value, (int, float, Tensor)):
            raise TypeError(f"value: expected a number or a tensor [L] or [L, B], got {type(self.value).__name__}")

    @property
    def true(self) -> bool:
        return False

    @property
    def name(self) -> str:
        return "given"

    def evaluate(self, sequence: Sequence, previous: Tensor, steps: range) -> tuple[Tensor, Scalar]:
        layout = sequence.layout
        data = torch.as_tensor(self.value, dtype=layout.dtype, device=layout.device)
        if data.ndim and (data.ndim > 2 or data.shape[0] != sequence.length):
            raise ValueError(
                f"jacobian: ScalarJacobian takes a number or a tensor [L] or [L, B] with L = {sequence.length}, "
                f"got shape {tuple(data.shape)}"
            )
        if data.ndim == 2 and data.shape[1] not in (1, layout.rows):
            raise ValueError(f"jacobian: ScalarJacobian has {data.shape[1]} rows for a batch of {layout.rows}")
        each = data[steps.start : steps.stop : steps.step] if data.ndim else data
        each = each.reshape(-1, 1) if each.ndim < 2 else each
        return sequence.values(previous, steps), Scalar(each.expand(len(steps), layout.rows))


@dataclass(frozen=True)
class GivenJacobian(Jacobian):
    """Blocks given by the user: fixed ones (a prior), or a function of the state.

    Args:
        blocks: L blocks with batch shape [], [1] or [B] of the flattened state of width D; or a
            function that takes what ``step`` takes, so ``(z, x)``, or ``(z)`` alone without xs, and returns blocks for that
            one step (``linear.Dense`` of a tensor [*batch, D, D], ``linear.Diagonal`` of [*batch, D], ...); it is evaluated
            by ``torch.vmap``
        exact: they are the true Jacobians (``deeppcr.check`` can tell), so Newton converges quadratically

    >>> import torch, deeppcr
    >>> weights = torch.randn(200, 5, 5) / 5
    >>> jacobian = lambda z, w: deeppcr.linear.Dense(w * (1 - torch.tanh(z) ** 2).unsqueeze(-2))
    >>> newton = deeppcr.Newton(jacobian=deeppcr.GivenJacobian(jacobian, exact=True))
    >>> step = lambda z, w: torch.tanh(z) @ w.mT
    >>> deeppcr.solve(step, torch.ones(5), weights, solver=newton).result.name
    'CONVERGED'
    """

    blocks: Blocks | Callable[..., Blocks]
    exact: bool = False
    repeatable = asks_nothing = True
    given = True

    def __post_init__(self):
        if not isinstance(self.blocks, Blocks) and (isinstance(self.blocks, Tensor) or not callable(self.blocks)):
            raise TypeError(
                "blocks: expected linear.Dense, Diagonal, BlockDiagonal or Scalar around a tensor, or a function, got "
                f"{type(self.blocks).__name__}"
            )

    @property
    def true(self) -> bool:
        return self.exact

    @property
    def name(self) -> str:
        return "given"

    def evaluate(self, sequence: Sequence, previous: Tensor, steps: range) -> tuple[Tensor, Blocks]:
        return sequence.values(previous, steps), self.blocks_at(sequence, previous, steps)

    def trace(self, sequence: Sequence) -> None:
        trace, given = sequence.trace, self.blocks
        assert trace is not None
        if isinstance(given, Blocks):
            trace.run(type(given), lambda: given.data)
            return
        state, x = sequence.layout.unpack(sequence.initial.detach().clone()), sequence.inputs(0)
        inputs = (state,) if x is None else (state, pytree.tree_map(lambda leaf: leaf.detach().clone(), x))
        trace.run(given, given, *inputs)

    def contradiction(self, sequence: Sequence, index: int, state: Tensor, true: Tensor, rounding: float) -> str | None:
        try:
            given = self.blocks_at(sequence, state.unsqueeze(0), range(index, index + 1))
        except (TypeError, ValueError) as error:
            return str(error)
        off, largest = (given.to_dense(sequence.layout.width) - true).abs().max(), true.abs().max()
        if off <= 100 * rounding * (1 + largest):
            return None
        return (
            f"GivenJacobian is claimed to be exact, but at step {index + 1} it is off by {float(off):.2g} "
            f"(the true Jacobian's largest entry: {float(largest):.2g})"
        )

    @staticmethod
    def _map(function: Callable, sequence: Sequence, previous: Tensor, steps: range) -> Any:
        try:
            return sequence.map(function, previous, steps)
        except TypeError as error:
            takes = "(z): there are no xs" if sequence.xs is None else "(z, x)"
            try:
                signature(function).bind(*(None,) * (1 if sequence.xs is None else 2))
            except TypeError:
                raise TypeError(f"jacobian: the function is called as step is, with {takes}. {error}") from error
            except ValueError:  # not every function has a signature
                pass
            raise

    def blocks_at(self, sequence: Sequence, previous: Tensor, steps: range) -> Blocks:
        layout = sequence.layout
        if isinstance(self.blocks, Blocks):
            if len(self.blocks) != sequence.length:
                raise ValueError(f"jacobian: {len(self.blocks)} blocks were given for {sequence.length} steps")
            found = self.blocks[steps.start : steps.stop : steps.step].aligned(1)
            batch = found.batch_shape
            fits = len(batch) == 1 and batch[0] in (1, layout.rows)
        else:
            found = self._map(self.blocks, sequence, previous, steps)
            if not isinstance(found, Blocks):
                raise TypeError(
                    f"jacobian: the function must return linear.Dense, Diagonal, BlockDiagonal or Scalar, got {type(found).__name__}"
                )
            fits = found.batch_shape in (layout.batch_shape, torch.Size())
            core = found.data.shape[found.data.ndim - found.core_dims :]
            found = type(found)(found.data.reshape(len(steps), -1, *core)) if fits else found
        if found.data.is_complex():
            raise TypeError(
                "jacobian: the blocks are complex, while states are solved for as pairs of real numbers; give the blocks of these: a + bi is "
                "[[a, -b], [b, a]]"
            )
        square = found.core_dims < 2 or found.data.shape[-1] == found.data.shape[-2]
        if not fits or not square or found.width not in (None, layout.width):
            raise ValueError(
                f"jacobian: expected blocks of batch shape {tuple(layout.batch_shape)} and width {layout.width} for each "
                f"step, got {type(found).__name__} of shape {tuple(found.data.shape[1:])}"
            )
        if found.data.dtype != layout.dtype or found.data.device != layout.device:
            raise TypeError(
                f"jacobian: the blocks are {found.data.dtype} on {found.data.device}, the states {layout.dtype} on {layout.device}"
            )
        core = found.data.shape[2:]
        return type(found)(found.data.expand(len(steps), layout.rows, *core))
