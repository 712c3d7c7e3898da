"""Sequence: the body of a loop, its start and its inputs; any of its steps evaluated at once.

Shapes: L steps, N of them at a time, B rows, D the packed state, K tangents, C steps a chunk.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext, suppress
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..linear.hierarchical import interleave
from ..runtime import has_tangent, is_capturing, random_state, tensors_in, version_of
from .evaluate import RandomStep, StepError, StepGroup, entry_of
from .history import WithHistory
from .layout import Layout, hint_of_array, hint_of_batch_first, note_call
from .purity import AsDifferentiated, AsTransformed, Purity, changes_in_place, refuse_hooked
from .rows import Rowwise, check_fold, check_rows, differs_from
from .stack import LISTS, group_callables
from .trace import Trace
from .vmapped import vmap_over_steps


class Sequence:
    """The loop ``for x in xs: z = step(z, x)`` on packed states.

    Attributes:
        length: L
        layout: of a state
        initial: [B, D], ``z_0``, still attached to the caller's graph
        xs: as given
        needs_gradients: whether anything that the states depend on requires a gradient
        first: [B, D], the state after the first step; where the loop goes on from it, still attached to the caller's graph
        trace: of the first step, where it was asked for and could be made
    """

    def __init__(
        self,
        step: Callable[..., Any] | list[Callable[..., Any]] | nn.ModuleList,
        z0: Any,
        xs: Any = None,
        length: int | None = None,
        batch_dims: int | None = None,
        *,
        traced: bool = False,
        watched: bool = True,
        stacked: bool = True,
    ):
        """
        Args:
            traced: keep a trace of the first step
            watched: refuse what a step must not do
            stacked: one of the modules of a list that are alike stands in for all of them, where it does what they do
        """
        self.layout: Layout = Layout.of(z0, batch_dims)
        self.initial: Tensor = self.layout.pack(z0)
        self.xs = xs
        several = isinstance(step, LISTS)
        self.length: int = find_length(step, xs, length)
        inner = step.step if isinstance(step, Rowwise) else step
        self.history: int = inner.history if isinstance(inner, WithHistory) else 1  # states that a step looks back on
        self.notes: list[str] = []
        self._verified = False
        self._places: list[tuple[StepGroup, int]] = []  # of each step of a list: its group, and where in it
        if several:
            for index, each in enumerate(step):
                if not callable(each):
                    raise TypeError(f"step: entry {index} of the list is not callable but {type(each).__name__}")
            members, said = group_callables(list(step), xs, self.layout, stack=watched and stacked)
            self._groups = members
            placed = {m: (group, place) for indices, group in members for place, m in enumerate(indices)}
            self._places = [placed[index] for index in range(self.length)]
            self.notes.append(said)
        elif callable(step):
            fold = isinstance(step, Rowwise)
            if fold:
                check_rows(xs, self.length, self.layout)
            self._groups = [([], StepGroup(step, xs, self.layout, rowwise=fold))]
        else:
            raise TypeError(f"step: expected a callable or a list of them, got {type(step).__name__}")
        self.trace = Trace(self.layout.device) if traced and not several else None
        self._purity = Purity([group for _, group in self._groups]) if watched else None
        differentiated = watched and torch.is_grad_enabled()
        stand_ins = [(indices, group) for indices, group in self._groups if group.module is not None]
        first = None
        # What a stand-in says is not for the caller, who knows of none: the modules themselves say the same, or do it.
        said = suppress(Exception) if stand_ins else nullcontext()
        with said, AsDifferentiated() if differentiated else AsTransformed() if watched else nullcontext() as seen:
            first = self._take_first_step(xs)
        if first is None:
            self._begin_alone(step, z0, xs, length, batch_dims, traced=traced)
            return
        if seen is not None and seen.switches_off:
            for _, group in self._groups:
                group.differentiate_as_autograd()
        self.first: Tensor = first.detach() if watched else first
        if self._purity is not None:
            self._purity.look_at_first(self.initial.detach(), self.inputs(0), first.detach())
        if any(self._stands_in_wrongly(group, indices, step) for indices, group in stand_ins):
            self._begin_alone(step, z0, xs, length, batch_dims, traced=traced)
            return
        if any(has_tangent(leaf) for leaf in [first, *pytree.tree_leaves(xs)]):
            raise RuntimeError("deeppcr.solve has no forward-mode derivative; use reverse mode (backward)")
        if self._groups[0][1].way == "rowwise" and self.length > 1 and watched:
            try:
                check_fold(self._groups[0][1], self.initial.detach(), first.detach(), self.length)
            except BaseException as error:
                self.check_purity(error)
                raise
        inputs = [group.xs for _, group in self._groups]
        self.needs_gradients: bool = any(leaf.requires_grad for leaf in (first, *tensors_in(inputs)))
        if self._purity is not None and differentiated and self.needs_gradients:
            refuse_hooked(self._purity.roots)

    def _stands_in_wrongly(self, group: StepGroup, indices: list[int], steps: Any) -> bool:
        """Whether some of a group's modules by themselves do something else; raises where they keep what they did."""
        if is_capturing(self.layout.device):
            return False
        places = sorted({0, 1, len(indices) // 2, len(indices) - 1})
        real = {at: StepGroup(steps[indices[at]], self.xs, self.layout) for at in places}
        watched = Purity(list(real.values()))
        given = {at: (each, entry_of(self.xs, indices[at])) for at, each in real.items()}
        wrong = differs_from(group, given, self.first)
        watched.last_look()
        return wrong

    def odd_one(self, steps: Any) -> int | None:
        """The first module of a list that does something else than what stands in for it: all are compared, and not four of a kind."""
        for indices, group in self._groups:
            for place, index in enumerate(indices if group.module is not None else ()):
                real = StepGroup(steps[index], self.xs, self.layout)
                if differs_from(group, {place: (real, entry_of(self.xs, index))}, self.first):
                    return index
        return None

    def _begin_alone(self, *loop: Any, traced: bool) -> None:
        """The modules of a list are called one by one, since one that stands in for others does not do what they do."""
        self.__init__(*loop, traced=traced, stacked=False)
        self.notes.append(
            "modules that look alike are called one by one: where one stands in for others, it fails or does something else"
        )

    def _take_first_step(self, xs: Any) -> Tensor:
        """The first step as the loop takes it: what is wrong with the step shows here, under its own name."""
        state, x = self.initial, self.inputs(0)
        if not is_capturing(state.device):  # where they would be copied again at every replay
            # A step that changes its arguments is refused, and the caller's tensors are as they were. To a trace, all else of
            # the caller's memory is what the step closes over.
            state = state.clone()
            if x is not None and self._group_of(0)[0].module is None:
                x = pytree.tree_map(torch.clone, x)
        watched = [("its state", state), *(("xs", leaf) for leaf in pytree.tree_leaves(x) if x is not None)]
        before = [version_of(leaf) for _, leaf in watched]
        try:
            first = self._call_traced(state, x)
        except (TypeError, AttributeError, RuntimeError) as error:
            if isinstance(xs, (list, tuple)) and len(xs) > 2 and all(isinstance(x, Tensor) for x in xs):
                raise TypeError(
                    f"xs: is a {type(xs).__name__} of {len(xs)} tensors, read as a nest whose leaves each run over the steps. "
                    f"If they are the inputs of {len(xs)} steps, stack them: torch.stack(xs). (The step said: {error})"
                ) from error
            hint = hint_of_batch_first(xs, self.layout.batch_shape)
            note_call(error, 0, self.layout.unpack(state), *(() if x is None else (x,)), hint=hint)
            raise
        of_module = self._group_of(0)[0].module is not None  # whose xs are what it holds: see Purity
        for (name, leaf), version in zip(watched, before, strict=True):
            if version_of(leaf) != version and (leaf is state or not of_module):
                raise StepError(changes_in_place(name))
        return first

    def check_purity(self, error: BaseException | None = None) -> None:
        """After the solve: raise where modules hold something else than after the first step, which may have led to ``error``."""
        if self._purity is not None:
            self._purity.last_look(error)

    def stop_watching(self) -> None:
        """``check_purity`` for the last time: who keeps the sequence, as gradients do, is not to keep what modules once held."""
        self.check_purity()
        self._purity = None

    def _call_traced(self, state: Tensor, x: Any) -> Tensor:
        group = self._group_of(0)[0]
        if self.trace is not None:
            try:
                return self.trace.run(group.function, group.call, state, x)
            except Exception:  # not every step can be traced; if it fails without that too, its error says why
                self.trace = None
        return group.call(state, x)

    def trace_derivative(self) -> None:
        """Add to the trace what the derivative of the first step does: a function with a derivative of its own may have it depend on
        more than its values do."""
        group, x = self._groups[0][1], self.inputs(0)
        state = self.initial.detach().clone()
        x = pytree.tree_map(lambda leaf: leaf.detach().clone(), x) if x is not None else None
        assert self.trace is not None

        def derivative(state: Tensor, tangent: Tensor, x: Any) -> Any:
            return torch.func.jvp(lambda z: group.call(z, x), (state,), (tangent,))

        self.trace.run(group.function, derivative, state, torch.ones_like(state), x)

    def moved_to(self, initial: Tensor, xs: Any) -> Sequence:
        """The same loop from another start [B, D] on other inputs, nothing known of how it can be evaluated.

        Only for sequences of one step function.
        """
        moved, group = copy(self), self._groups[0][1]
        moved.initial, moved.xs, moved.notes, moved._verified, moved._purity = initial, xs, [], False, None
        moved._groups = [([], StepGroup(group.function, xs, self.layout, rowwise=group.way == "rowwise"))]
        return moved

    def forget_step(self) -> None:
        """Let go of the step and of all that it closes over: nothing is evaluated any more."""
        self._groups[0][1].function = _forgotten

    # Evaluation. `steps` is a range over the steps of the loop; `previous[n]` is the state before step steps[n].

    def step(self, index: int, state: Tensor) -> Tensor:
        """One step as in the loop: [B, D] to [B, D]."""
        x = self.inputs(index)
        try:
            return self._group_of(index)[0].call(state, x)
        except Exception as error:
            if not isinstance(error, StepError):  # which says what it is about
                note_call(error, index, self.layout.unpack(state), *(() if x is None else (x,)))
            raise

    @torch.no_grad()
    def draws(self, index: int) -> bool:
        """Whether a step draws PyTorch's random numbers: torch.vmap tells. Where that does not cover the step, whether somebody drew some in
        each of a few calls, which another thread hardly does."""
        start, device = self.first, self.layout.device
        try:
            self.values(start.unsqueeze(0), range(index, index + 1))
        except RandomStep:
            return True
        except Exception:  # which is not asked for here
            pass
        if self._group_of(index)[0].way == "vmap":
            return False
        for _ in range(4):
            before = random_state(device)
            self.step(index, start.clone())
            if torch.equal(before, random_state(device)):
                return False
        return True

    def inputs(self, index: int) -> Any:
        """What the step function sees of xs at one step."""
        group, place = self._group_of(index)
        return group.inputs(place)

    def given_inputs(self, index: int) -> Any:
        """What was given for one step: without parameters of modules that are stacked, which are inputs of the step function as well."""
        return entry_of(self.xs, index)

    def _group_of(self, index: int) -> tuple[StepGroup, int]:
        return self._places[index] if self._places else (self._groups[0][1], index)

    def values(self, previous: Tensor, steps: range) -> Tensor:
        """[N, B, D] to [N, B, D]"""
        (result,) = self._gather(steps, lambda group, index, at: (group.values(previous[at], index),))
        return result

    def push(self, previous: Tensor, tangents: Tensor, steps: range) -> tuple[Tensor, Tensor]:
        """Values and Jacobian-vector products along ``tangents`` [N or 1, K, B, D]."""

        def one(group, index, at):
            # A view with an offset makes forward mode lay out the tangents of everything it meets anew, at D times the
            # memory: a copy of the states is cheap.
            return group.push(previous[at].clone(), tangents if tangents.shape[0] == 1 else tangents[at], index)

        values, pushed = self._gather(steps, one)
        return values, pushed

    def push_alone(self, index: int, state: Tensor, tangent: Tensor) -> Tensor:
        """The Jacobian-vector product [B, D] of one step as in the loop."""
        return self._group_of(index)[0].push_alone(state, tangent, self.inputs(index))

    def map(self, function: Callable[..., Any], previous: Tensor, steps: range) -> Any:
        """``function(z, x)`` on the user's own state and input at every step, results stacked over steps."""
        return vmap_over_steps(function, self.layout.unpack(previous), entry_of(self.xs, _as_slice(steps)))

    def _gather(self, steps: range, evaluate: Callable) -> tuple[Tensor, ...]:
        """Let every group evaluate its share of ``steps`` and put the results in order."""
        if len(self._groups) == 1:
            return evaluate(self._groups[0][1], _as_slice(steps), slice(None))
        positions, parts = [], []
        for members, group in self._groups:
            local = [(steps.index(m), i) for i, m in enumerate(members) if m in steps]
            if not local:
                continue
            at, index = (torch.tensor(each, device=self.layout.device) for each in zip(*local, strict=True))
            positions.append(at)
            parts.append(evaluate(group, index, at))
        order = torch.cat(positions).argsort()
        return tuple(torch.cat(each)[order] for each in zip(*parts, strict=True))

    def roll_out(self, starts: Tensor, chunk: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Run all chunks from chunk ``first`` on at once, each from its own start.

        Args:
            starts: [chunks, B, D], the state before each chunk

        Returns:
            the state after each chunk, [chunks, B, D], and every state, [steps, B, D]
        """
        states, current, ended = [], starts, []
        for steps in self.chunk_steps(chunk, first):
            if len(steps) < len(current):  # the last chunk is ragged and ends here
                ended.append(current[len(steps) :])
            current = self.values(current[: len(steps)], steps)
            states.append(current)
        return torch.cat([current, *ended]), interleave(states)

    def push_out(
        self, starts: Tensor, tangents: Tensor, chunk: int, first: int = 0, part: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """Run chunks as ``roll_out`` does, with tangents that become their products with the chunks' Jacobians.

        Args:
            starts: [chunks, B, D]
            tangents: [chunks or 1, K, B, D]
            part: which of the chunks from ``first`` on these are

        Returns:
            the state after each chunk, [chunks, B, D], and the products, [chunks, K, B, D]
        """
        current, ended = starts, []
        for steps in self.chunk_steps(chunk, first):
            steps = steps[part]
            if not len(steps):
                break
            if len(steps) < len(current):  # the last chunk is ragged and ends here
                ended.append((current[len(steps) :], tangents[len(steps) :]))
                current, tangents = current[: len(steps)], tangents[: len(steps)]
            current, tangents = self.push(current, tangents, steps)
        if not ended:  # a copy of all tangents takes as much memory again
            return current, tangents
        return torch.cat([current, *(each for each, _ in ended)]), torch.cat([tangents, *(each for _, each in ended)])

    def chunk_steps(self, chunk: int, first: int = 0) -> list[range]:
        """Step k of every chunk from chunk ``first`` on, for k = 0, 1, ...: ranges over the steps of the loop."""
        ranges = [range(first * chunk + k, self.length, chunk) for k in range(chunk)]
        return [steps for steps in ranges if len(steps)]

    def verify_once(self) -> bool:
        """True the first time: whether the step is elementwise, where that is claimed, is seen once."""
        new, self._verified = not self._verified, True
        return new

    @property
    def evaluation(self) -> str:
        return ", ".join(sorted({group.way for _, group in self._groups}))

    @property
    def derivative(self) -> str:
        return "; ".join(sorted({group.derivative for _, group in self._groups}))

    @property
    def all_notes(self) -> list[str]:
        return self.notes + [note for _, group in self._groups for note in group.notes]


def _forgotten(*_: Any) -> Any:
    raise RuntimeError("the step was forgotten when the solve had been recorded")


def _as_slice(steps: range) -> slice:
    return slice(steps.start, steps.stop, steps.step)


_SHARED = ". The first dimension counts the steps: what is the same for all of them is closed over by the step"


def find_length(step: Any, xs: Any, length: int | None, least: int = 1) -> int:
    """L, ``least`` or more, by all that tells it; raises where they differ, or nothing does."""
    found: list[tuple[str, int]] = []
    if length is not None:
        try:
            if isinstance(length, bool):
                raise TypeError
            length = operator.index(length)
        except TypeError:
            raise TypeError(f"length: expected an int, got {type(length).__name__}") from None
        found.append(("length", length))
    if isinstance(step, LISTS):
        found.append(("step: the list", len(step)))
    for path, leaf in pytree.tree_flatten_with_path(xs)[0] if xs is not None else []:
        name = "xs" + pytree.keystr(path)
        if not isinstance(leaf, Tensor):
            instead = f" (for so many steps without inputs: length={leaf})" if type(leaf) is int and not path else ""
            hint = hint_of_array(leaf, name)
            raise TypeError(
                f"{name}: expected a tensor [L, ...], got {type(leaf).__name__}{hint or (_SHARED if path else instead)}"
            )
        if leaf.layout is not torch.strided:
            raise TypeError(f"{name}: expected a dense tensor, got {leaf.layout} (use {name}.to_dense())")
        if leaf.ndim == 0:
            raise ValueError(
                f"{name}: expected [L, ...], got a tensor without dimensions. A list of the steps' inputs must be stacked: "
                f"torch.stack(xs){_SHARED}"
            )
        found.append((name, leaf.shape[0]))
    if not found:
        raise ValueError("length: there are no xs, so the number of steps must be given: length=L")
    if len({value for _, value in found}) > 1:
        leaves = sum(name.startswith("xs") for name, _ in found)
        hint = "; a list of the steps' inputs must be stacked: torch.stack(xs)" if isinstance(xs, list) else ""
        hint += _SHARED if leaves > 1 else ""
        about = "xs" if xs is not None else "step"
        raise ValueError(
            f"{about}: lengths differ: " + ", ".join(f"{name} has {value}" for name, value in found[:6]) + hint
        )
    name, value = found[0]
    if value < least:
        raise ValueError(f"{name}: at least one step is needed, got L = {value}")
    return value
