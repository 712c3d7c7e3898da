"""What deep networks of equal layers share: one way in, and the choice how to run the layers.

Shapes: B rows, w the width, L layers (steps of the solve), s layers inside a skip connection.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..jacobian import GivenJacobian
from ..linear import Dense
from ..newton import Newton
from ..newton.guess import RepeatInitial
from ..runtime import has_triton, in_functorch, is_capturing, is_transformed, outside_of_graph
from ..solution import Solution
from ..solve import solve
from ..warned import warn
from ..ways.fused import covers
from ..ways.judged import attach
from . import kernel_way, operator
from .arguments import ASKED, EMPTY, Mode, check_mode, check_newton, check_size
from .layers import ACTIVATIONS
from .operator import in_words
from .report import looped, one_chunk, solve_finite_rows

_REPEATED = RepeatInitial()


def _changes_its_argument(activation: Callable[[Tensor], Tensor]) -> bool:
    """Whether a function overwrites what it is given, as far as two numbers on the CPU show."""
    given = torch.tensor([-1.5, 0.5])
    kept = given.clone()
    with torch.no_grad(), torch.random.fork_rng(devices=[]), suppress(Exception):  # one that needs others is seen later
        activation(given)
    return not torch.equal(given, kept)


class Network(nn.Module):
    """What MLP and ResNet share: an input layer, L stacked steps, an output layer, and two ways to run the steps."""

    activations: Tensor  # [L, w], the batch mean of the last training step's states
    _kind: str
    _asked_for = 1
    #: The settings that were last asked about, and what ``covers`` said of them.
    _usual: tuple[Newton | None, bool] = (None, False)

    def __init__(
        self,
        in_features: int,
        width: int,
        steps: tuple[int, ...],
        out_features: int,
        activation: str | Callable[[Tensor], Tensor],
        mode: Mode,
        newton: Newton | None,
        guess: Any,
        warm_start: bool,
        save_warm_start: bool,
        device: Any,
        dtype: torch.dtype | None,
    ):
        super().__init__()
        if isinstance(activation, str) and activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)} or a function, got {activation!r}")
        if not callable(activation) and not isinstance(activation, str):
            raise TypeError(f"activation: expected one of {', '.join(ACTIVATIONS)} or a function, got {activation!r}")
        if not isinstance(activation, str) and _changes_its_argument(activation):
            raise ValueError(
                "activation: it changes its argument in place, which a skip connection and the states still need; "
                "take it without inplace=True"
            )
        in_features, width = check_size("in_features", in_features), check_size("width", width)
        out_features = check_size("out_features", out_features)
        self.activation: str | Callable[[Tensor], Tensor] = activation
        self.newton: Newton = check_newton(newton)
        self.guess: Any = guess
        self.warm_start: bool = warm_start
        self.mode: Mode = check_mode(mode)
        options = {"device": device, "dtype": dtype}
        self.input: nn.Linear = nn.Linear(in_features, width, **options)
        self.weight: nn.Parameter = nn.Parameter(torch.empty(*steps, width, width, **options))
        self.bias: nn.Parameter = nn.Parameter(torch.empty(*steps, width, **options))
        self.output: nn.Linear = nn.Linear(width, out_features, **options)
        self.register_buffer("activations", torch.zeros(steps[0], width, **options), persistent=save_warm_start)
        self._warm = False
        self.register_load_state_dict_pre_hook(self._note_loading)
        self._passed: Any = None  # a Solution, or what says how the last parallel pass went when it is asked
        self._looped: tuple[int, str] | None = None  # the rows of the last pass, and why it was the loop, if it was
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as ``nn.Linear`` does: uniform between plus and minus 1 / sqrt(fan in)."""
        self.input.reset_parameters()
        self.output.reset_parameters()
        bound = 1 / math.sqrt(self.weight.shape[-1])
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, mode: Mode | None = None) -> Tensor:
        """[*batch, in_features] to [*batch, out_features]; ``mode`` overrides the module's for this call."""
        if not isinstance(x, Tensor):
            raise TypeError(f"x: expected a tensor [*batch, in_features], got {type(x).__name__}")
        features = getattr(self.input, "in_features", None)  # which another layer in its place may not have
        if x.ndim == 0 or (features is not None and x.shape[-1] != features):
            wanted = f"[*batch, {features or 'in_features'}]"
            raise ValueError(f"x: expected {wanted}, got {list(x.shape)}; images are flattened first: x.flatten(1)")
        try:
            hidden = self.input(x)
        except RuntimeError as error:
            if x.dtype == self.weight.dtype:
                raise
            raise TypeError(
                f"x: expected {self.weight.dtype}, the dtype of the weights, got {x.dtype}; x.to(...) or net.to(...) changes it"
            ) from error
        rows = hidden if hidden.ndim == 2 else hidden.reshape(-1, hidden.shape[-1])
        state = self._apply_activation(self._run(rows, mode, last=True))
        if hidden.ndim != 2:
            state = state.reshape(hidden.shape)
        return self.output(state if state.dtype == hidden.dtype else state.to(hidden.dtype))

    def hidden_states(self, hidden: Tensor, mode: Mode | None = None) -> Tensor:
        """The states after every step, [L, B, w], from the state [B, w] after the input layer."""
        return self._run(hidden, mode, last=False)

    def _run(self, hidden: Tensor, mode: Mode | None, *, last: bool) -> Tensor:
        """The states after every step, [L, B, w], or after the last one, [B, w]."""
        chosen, why = check_mode(self.mode if mode is None else mode), ""
        if hidden.shape[0] == 0:
            chosen, why = "sequential", EMPTY
        # The steps run in the precision of the weights, also under autocast: Newton's method compares small differences.
        weight = self.weight  # a look-up among the parameters takes a while
        if hidden.dtype != weight.dtype:
            hidden = hidden.to(weight.dtype)
        if torch.compiler.is_compiling():
            return self._run_in_graph(hidden, chosen, last)
        return self._run_eagerly(hidden, chosen, why, last)

    def _run_eagerly(self, hidden: Tensor, mode: Mode, why: str, last: bool) -> Tensor:
        weight = self.weight
        if self._may_use_kernels(hidden):
            states = self._fused(weight, hidden, mode, last)
            if states is not None:
                return states
        if mode == "auto":
            mode, why = kernel_way.choose_without_kernels(weight.shape, hidden.shape[0], hidden.device)
        if mode == "sequential":
            self._looped = hidden.shape[0], why or ASKED
        with torch.autocast(hidden.device.type, enabled=False):
            states = self._loop(hidden) if mode == "sequential" else self._solve(hidden, why)
        return states[-1] if last else states

    def _is_traced(self, hidden: Tensor, mode: Mode) -> bool:
        """Whether a compiler sees through the layers: any number of rows goes by a loop without kernels."""
        if mode == "auto":  # no number of rows is more in favour of a parallel pass than one
            mode, _ = kernel_way.choose_without_kernels(self.weight.shape, 1, hidden.device)
        return mode == "sequential" and not self._may_use_kernels(hidden)

    def _run_again(self, hidden: Tensor, states: Tensor, last: bool) -> Tensor:
        """What ``_run_eagerly`` gave, differentiable; where that was a loop, or rows went one by one, it is run again."""
        mode, weight = self.mode, self.weight
        if self._may_use_kernels(hidden):
            way = self._way(weight, hidden, mode)
            if way is not None:
                return kernel_way.kernels().attach(weight, self.bias, hidden, states, way.layers, last)
        if mode == "auto":
            mode, _ = kernel_way.choose_without_kernels(weight.shape, hidden.shape[0], hidden.device)
        if mode == "sequential" or not hidden.isfinite().all():
            return self._run_eagerly(hidden, mode, "", last)
        (found,) = attach(self._step, hidden, (weight, self.bias), (states,), self._solver(), batch_dims=1)
        return found[-1] if last else found

    def _loop(self, hidden: Tensor) -> Tensor:
        states, z = [], hidden
        for x in zip(self.weight.unbind(), self.bias.unbind(), strict=True):
            z = self._step(z, x)
            states.append(z)
        return torch.stack(states)

    def _may_use_kernels(self, hidden: Tensor) -> bool:
        """Whether there are fused kernels for such a call, as far as that may change from one call to the next."""
        if not (hidden.is_cuda and hidden.dtype == torch.float32 and isinstance(self.activation, str)):
            return False
        return not in_functorch() and forward_ad._current_level < 0 and has_triton()

    def _is_usual(self) -> bool:
        """Whether the parallel kernels know the method and its start."""
        if self.newton is not self._usual[0]:  # frozen, and to compare all of its settings takes longer than a launch
            self._usual = (self.newton, covers(self.newton))
        return self._usual[1] and self.guess == _REPEATED

    def _wants_digits(self) -> bool:
        """Of every layer, since a gradient may be asked for: a signal may die out, and slopes are all about what is left of it."""
        return self.newton.scale == "local" or (self.newton.atol is None and torch.is_grad_enabled())

    def _way(self, weight: Tensor, hidden: Tensor, mode: Mode) -> kernel_way.Way | None:
        """How the fused kernels do what is asked; None where they do not."""
        newton = self.newton
        tolerance = newton.tolerance(hidden.dtype)
        how = (mode, self._is_usual(), str(self.activation), newton.chunk)
        how = (*how, tolerance.atol, tolerance.rtol, self._wants_digits())
        return kernel_way.find(weight.shape, hidden.shape[0], hidden.device, *how)

    def _fused(self, weight: Tensor, hidden: Tensor, mode: Mode, last: bool) -> Tensor | None:
        """By the fused kernels; None where they do not do what is asked."""
        way = self._way(weight, hidden, mode)
        if way is None:
            return None
        kernels, choice = kernel_way.kernels(), way.choice
        activations = self.activations if self.warm_start and choice is not None else None
        guess, average = activations if self._warm else None, activations if self.training else None
        left: list[Any] = []
        states = kernels.apply(weight, self.bias, hidden, guess, way.layers, left, last, average)
        # Past ``nn.Module.__setattr__``, which first looks whether they are modules, parameters or buffers.
        if choice is not None:
            report, x = left
            passed, finished = report, ""
            if report is None:
                passed = one_chunk(weight.shape[0], x.shape[1], x.device)
            else:
                report.note, finished = choice.why, report.solution().message if report.finished else ""
            warm = self._warm if average is None else not finished or self._can_start_from(average)
            self.__dict__.update(_passed=passed, _looped=None, _warm=warm)
            if finished:
                warn(finished)
        else:
            self.__dict__["_looped"] = hidden.shape[0], way.why
        return states

    def _keep_activations(self, states: Tensor) -> None:
        # In place: a CUDA graph of the caller reads it again. After a divergence the next pass starts afresh, or in such a
        # graph, where nobody can look, from what was kept before.
        if is_capturing(states.device):
            mean = states.mean(1)
            self.activations.copy_(torch.where(torch.isfinite(mean).all(), mean, self.activations))
            self._warm = True
        else:
            torch.mean(states, 1, out=self.activations)
            self._warm = self._can_start_from(self.activations)

    @staticmethod
    def _can_start_from(activations: Tensor) -> bool:
        """After a divergence, start afresh."""
        return bool(torch.isfinite(activations).all())

    @property
    def solution(self) -> Solution | None:
        """How the last pass went that was not compiled, in parallel or by the loop; its states are not kept. None before the first one."""
        if self._looped is not None:
            rows, why = self._looped
            return looped(self.weight.shape[0], rows, self.weight.device, why)
        if self._passed is None or isinstance(self._passed, Solution):
            return self._passed
        return self._passed.solution()  # read anew: a CUDA graph of the caller may have been replayed since

    def _solver(self) -> Newton:
        scale = "local" if self._wants_digits() else self.newton.scale
        return replace(self.newton, jacobian=GivenJacobian(self._jacobian, exact=True), scale=scale)

    def _solve(self, hidden: Tensor, why: str = "") -> Tensor:
        solver, guess = self._solver(), self.guess
        if self.warm_start and self._warm:
            guess = self.activations.unsqueeze(1).expand(-1, hidden.shape[0], -1)
        xs = (self.weight, self.bias)
        solution = solve_finite_rows(
            lambda start: solve(self._step, start, xs, solver=solver, guess=guess), self._loop, hidden
        )
        if self.warm_start and self.training:
            self._keep_activations(solution.states.detach())
        if why:
            solution.plan.note(why)
        self._passed, self._looped = solution.in_short(), None
        return solution.states

    def _apply_activation(self, z: Tensor) -> Tensor:
        return ACTIVATIONS[self.activation].function(z) if isinstance(self.activation, str) else self.activation(z)

    def _slope(self, z: Tensor) -> Tensor:
        if isinstance(self.activation, str):
            return ACTIVATIONS[self.activation].slope(z)
        return torch.func.jvp(self.activation, (z,), (torch.ones_like(z),))[1]

    def _layer(self, z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return self._apply_activation(z) @ weight.mT + bias

    def _step(self, z: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        raise NotImplementedError

    def _jacobian(self, z: Tensor, x: tuple[Tensor, Tensor]) -> Dense:
        raise NotImplementedError

    @staticmethod
    def _note_loading(module: Network, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """A warm start helps, but no network depends on it: one that is missing or not asked for is no mistake."""
        name = f"{prefix}activations"
        if "activations" in module._non_persistent_buffers_set:
            state_dict.pop(name, None)
        elif name in state_dict:
            module._warm = bool(torch.isfinite(state_dict[name]).all())
        else:
            state_dict[name] = module.activations.clone()

    def extra_repr(self) -> str:
        layers = self.weight.shape[:-2]
        skip = f"skip={layers[1]}, " if len(layers) == 2 else ""
        return f"depth={layers.numel()}, {skip}width={self.weight.shape[-1]}, activation={self.activation}, mode={self.mode}"

    # As one operation of a compiler's graph: see ``operator.operated``.

    def _run_in_graph(self, hidden: Tensor, mode: Mode, last: bool) -> Tensor:
        """A loop without kernels is traced; else all layers are one operation, which chooses its way when it runs."""
        if self._is_traced(hidden, mode):
            with torch.autocast(hidden.device.type, enabled=False):
                states = self._loop(hidden)
            return states[-1] if last else states
        words = self._in_words(mode)
        if words is None or is_transformed():
            why = "a network with a warm start, settings or an activation of your own, or inside a transform, is no operator"
            eagerly = outside_of_graph(self._run_eagerly, f"{why}: it runs in parallel by looking at values")
            return eagerly(hidden, mode, "", last)
        return operator.run_in_graph(words, [hidden, self.weight, self.bias], last=last)[0]

    def _in_words(self, mode: Mode) -> str | None:
        """The layers alone; None where there are no words for them: a warm start writes to the module."""
        told = [in_words(each) for each in (self.activation, self.newton, self.guess)]
        if self.warm_start or None in told:
            return None
        steps, width = self.weight.shape[:-2], self.weight.shape[-1]
        depth, skip = math.prod(steps), f", skip={steps[1]}" if len(steps) == 2 else ""
        options = f"activation={told[0]}, mode={mode!r}, newton={told[1]}, guess={told[2]}"
        return f"{self._kind}({width}, {width}, {depth}, {width}{skip}, {options})"

    def _like(self, tensors: list[Tensor], last: bool, gradients: bool) -> list[Tensor]:
        hidden, weight, _ = tensors
        states, one = hidden.new_empty((weight.shape[0], *hidden.shape)), hidden.new_empty(hidden.shape)
        return [states] if not last else [one, states] if gradients else [one]

    def _found(self, tensors: list[Tensor], last: bool, gradients: bool) -> list[Tensor]:
        hidden, module = self._with(tensors)
        states = module._run_eagerly(hidden, module.mode, "", last and not gradients)
        return [states[-1], states] if last and gradients else [states]

    def _attached(self, tensors: list[Tensor], found: list[Tensor], last: bool) -> list[Tensor]:
        (hidden, module), states = self._with(tensors), found[-1]
        return [module._run_again(hidden, states, last)]

    def _with(self, tensors: list[Tensor]) -> tuple[Tensor, Any]:
        """A network with these weights, and what it is run on."""
        hidden, weight, bias = tensors
        return hidden, operator.with_tensors(self, weight=weight, bias=bias)
