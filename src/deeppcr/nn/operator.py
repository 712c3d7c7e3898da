"""``deeppcr::run``: the steps of a module as one operation of a compiler's graph.

They are run by looking at values: how many iterations it takes, whether kernels are worth making. As an operation that nobody looks into,
they run as they do eagerly, for any number of rows and steps in one graph, and are exported. A graph holds tensors and words. So a module
is told in words, those that make it (``"GRU(3, 8, mode='parallel', ...)"``), and its tensors are given beside them.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..jacobian import DenseJacobian, DiagonalJacobian, HutchinsonJacobian, ScalarJacobian
from ..linear import PCR, Auto, ForwardSubstitution, Fused, Hierarchical
from ..newton import Newton
from ..newton.guess import Random, RepeatInitial, Zeros
from ..runtime import as_if_eager, check_backward
from ..stopping import FixedIterations, PaperTest, UpdateTest

_SETTINGS: dict[str, Any] = {
    each.__name__: each
    for each in (
        Newton,
        *(UpdateTest, PaperTest, FixedIterations),
        *(DenseJacobian, DiagonalJacobian, HutchinsonJacobian, ScalarJacobian),
        *(Auto, PCR, Hierarchical, ForwardSubstitution, Fused),
        *(RepeatInitial, Zeros, Random),
    )
}
_FIELDS = {name: [field.name for field in fields(each)] for name, each in _SETTINGS.items()}
_MODULES: dict[str, type[nn.Module]] = {}


def operated(module: Any) -> Any:
    """A decorator: have operators make such modules from words. Modules that are derived from it are told as it is.

    They hold no tensors then: all are given, in an order that the module itself has put them into. Such a module has

    - ``_found(tensors, last, gradients)``: what an eager pass gives, first what is asked for (``last``: the last state alone), then what a
      backward pass needs besides; and ``_asked_for``, how many of these are differentiable
    - ``_like``, of the same: tensors of the shapes and dtypes that ``_found`` gives, for any number of rows and steps
    - ``_attached(tensors, found, last)``: what was asked for, differentiable in the tensors; ``found`` is known
    """
    module._kind = module.__name__
    _MODULES[module.__name__] = module
    return module


def in_words(value: Any) -> str | None:
    """What ``made_of`` makes an equal value of; None where there are no words for it. (Of what is here, a compiler sees through all.)"""
    name = type(value).__name__
    if name in ("NoneType", "bool", "int", "float", "str"):
        return repr(value)
    if name not in _SETTINGS or _SETTINGS[name] is not type(value):
        return None
    parts = []
    for field in _FIELDS[name]:
        part = in_words(getattr(value, field))
        if part is None:
            return None
        parts.append(f"{field}={part}")
    return f"{name}({', '.join(parts)})"


def made_of(words: str) -> Any:
    """Settings, a number or a text that ``in_words`` has told, or a module without its tensors."""

    def made(node: ast.expr) -> Any:
        if not isinstance(node, ast.Call):
            return ast.literal_eval(node)
        assert isinstance(node.func, ast.Name)
        arguments = [made(each) for each in node.args]
        options = {each.arg: made(each.value) for each in node.keywords if each.arg is not None}
        name = node.func.id
        return _SETTINGS[name](*arguments, **options) if name in _SETTINGS else _bare(name, arguments, options)

    return made(ast.parse(words, mode="eval").body)


def _bare(name: str, arguments: list[Any], options: dict[str, Any]) -> nn.Module:
    module = _MODULES[name](*arguments, **options, device="meta")
    for each in module.modules():
        each._parameters, each._buffers = {}, {}
    return module


#: A module and what it has learned of its passes, for all that are told in the same words.
_module_of = lru_cache(maxsize=256)(made_of)


@contextmanager
def _as_traced(tensor: Tensor, autocast: str, gradients: bool) -> Iterator[None]:
    """In the modes that the caller was in when the graph was made."""
    dtype = getattr(torch, autocast) if autocast else None
    with (
        as_if_eager(),
        torch.autocast(tensor.device.type, dtype, enabled=bool(autocast)),
        torch.set_grad_enabled(gradients),
    ):
        yield


def _leaves(tensors: list[Tensor], wanted: Container[int]) -> list[Tensor]:
    """Tensors of which to compute the gradients that are wanted, nobody else's."""
    return [
        each.detach().requires_grad_(index in wanted and each.is_floating_point()) for index, each in enumerate(tensors)
    ]


def _by_themselves(results: Any, given: list[Tensor]) -> list[Tensor]:
    """Results that share memory with nothing that was given, nor with each other, and begin where their memory does, as those of an
    operator have to: two biases that are added have one gradient, and the last state is a part of all."""
    taken, apart = {each.untyped_storage().data_ptr() for each in given}, []
    for result in results:
        each = result.detach().contiguous()
        if each.storage_offset() or each.untyped_storage().data_ptr() in taken:
            each = each.clone()
        taken.add(each.untyped_storage().data_ptr())
        apart.append(each)
    return apart


# Where PyTorch would capture compiled graphs as CUDA graphs, it is to leave this out: it looks at values.
@torch.library.custom_op("deeppcr::run", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def run(module: str, tensors: list[Tensor], autocast: str, last: bool, gradients: bool) -> list[Tensor]:
    """What an eager pass of the module gives.

    Args:
        module: in words
        tensors: what it is run on, and its weights, as ``module`` has put them into order
        autocast: the dtype that is at work; empty where there is none
        last: the last state alone is asked for
        gradients: a backward pass may come
    """
    with _as_traced(tensors[0], autocast, gradients):
        found = _module_of(module)._found(_leaves(tensors, range(len(tensors) * gradients)), last, gradients)
    return _by_themselves(found, tensors)


@run.register_fake
def _(module: str, tensors: list[Tensor], autocast: str, last: bool, gradients: bool) -> list[Tensor]:
    return _module_of(module)._like(tensors, last, gradients)


@torch.library.custom_op("deeppcr::run_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def run_backward(
    module: str,
    tensors: list[Tensor],
    found: list[Tensor],
    grads: list[Tensor],
    given: list[int],
    wanted: list[int],
    autocast: str,
    last: bool,
) -> list[Tensor]:
    """The gradients of those tensors that are wanted.

    Args:
        grads: of what was found, as far as they are ``given``
    """
    leaves = _leaves(tensors, wanted)
    with _as_traced(tensors[0], autocast, True):
        attached = _module_of(module)._attached(leaves, found, last)
        outputs, into = [attached[index] for index in given], [leaves[index] for index in wanted]
        with torch.autocast(tensors[0].device.type, enabled=False):
            of = torch.autograd.grad(outputs, into, grads, materialize_grads=True)
    return _by_themselves(of, [*tensors, *found, *grads])


@run_backward.register_fake
def _(module: str, tensors: list[Tensor], found: Any, grads: Any, given: Any, wanted: list[int], *_: Any) -> Any:
    return [torch.empty_like(tensors[index], memory_format=torch.contiguous_format) for index in wanted]


def _setup_context(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    ctx.module, tensors, ctx.autocast, ctx.last, _ = inputs
    ctx.count = len(tensors)
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[_module_of(ctx.module)._asked_for :])


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple:
    saved = list(ctx.saved_tensors)
    tensors, found = saved[: ctx.count], saved[ctx.count :]
    given = [index for index, grad in enumerate(grads) if grad is not None]
    wanted = [index for index, needed in enumerate(ctx.needs_input_grad[1]) if needed]
    of: list[Tensor | None] = [None] * ctx.count
    if given:
        of_given = [grad for grad in grads if grad is not None]
        check_backward(of_given[0])
        made = run_backward(ctx.module, tensors, found, of_given, given, wanted, ctx.autocast, ctx.last)
        for index, each in zip(wanted, made, strict=True):
            of[index] = each
    return None, of, None, None, None


run.register_autograd(_backward, setup_context=_setup_context)


def run_in_graph(words: str, tensors: list[Tensor], autocast: str = "", *, last: bool = False) -> list[Tensor]:
    """``run``, as far as gradients are asked for."""
    gradients = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    return run(words, tensors, autocast, last, gradients)


def with_tensors(module: Any, **known: Any) -> Any:
    """A module of those that were made from words, with what belongs to one pass."""
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__, **known)
    return copy
