"""Modules of a model in parallel, and back: each stays the object that it is, and becomes one of another class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ..newton import USUAL, Newton
from .arguments import Mode, check_mode, check_newton
from .sequential import DEEP, Sequential
from .torch_like import GRU, LSTM, RNN

_OURS: dict[type[nn.Module], type[nn.Module]] = {nn.RNN: RNN, nn.GRU: GRU, nn.LSTM: LSTM, nn.Sequential: Sequential}
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}
#: What we add to a module of ``torch.nn``.
_ADDED = ("run_mode", "newton", "_passed", "_cells", "_known", "_zeros")
#: Layers that keep the shape of what they are given, as far as they can be put one after the other, draw no random numbers, and treat the
#: rows of a batch independently.
_PLAIN = (
    nn.Linear, nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.Tanh, nn.ReLU, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.SELU, nn.CELU,
    nn.Softplus, nn.Softsign, nn.LeakyReLU, nn.Hardtanh, nn.Mish, nn.LogSigmoid, nn.Tanhshrink,
)  # fmt: skip


def convert(
    model: nn.Module, *, mode: Mode = "auto", newton: Newton | None = None, blocks: Iterable[type[nn.Module]] = ()
) -> dict[str, nn.Module]:
    """Have every ``nn.RNN``, ``nn.GRU``, ``nn.LSTM`` and deep ``nn.Sequential`` of a model run in parallel, in place.

    A module stays the object that it is, with its parameters, names and hooks, and becomes one of ``deeppcr.nn``: optimisers, checkpoints
    and DistributedDataParallel go on as before. Subclasses are somebody's own, and left alone, but for those that parametrizations make. Of an ``nn.Sequential`` all layers, 64 or
    more, have to be alike, and made of layers that are known to keep shapes and to draw no random numbers: linear, normalisations of a
    row, activations. Those with hooks are left alone; a hook that is put on a layer later is called as often as Newton's method calls it.

    Args:
        model: any module; it may be one of those itself
        mode, newton: of all of them, as for ``GRU``
        blocks: classes of your own that are layers of deep networks, keep the shape of what they are given, draw no random numbers (no
            dropout) and treat the rows of a batch independently. What does not is refused when it is run

    Returns:
        those that were converted, by name; those that were before get the settings alone

    >>> import torch, deeppcr.nn
    >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.GRU(4, 8))
    >>> deeppcr.nn.convert(model)
    {'1': GRU(4, 8)}
    >>> type(model[1]) is deeppcr.nn.GRU, deeppcr.nn.revert(model)
    (True, {'1': GRU(4, 8)})
    >>> type(model[1]) is torch.nn.GRU
    True
    """
    _check_model(model)
    mode, newton, trusted = check_mode(mode), USUAL if newton is None else check_newton(newton), (*_PLAIN, *blocks)
    for each in trusted:
        if not (isinstance(each, type) and issubclass(each, nn.Module)):
            raise TypeError(f"blocks: expected classes of modules, got {each!r}")
    found: dict[str, nn.Module] = {}
    # Outside in, as they are named: what is inside of a network that was converted is run by it.
    for name, module in model.named_modules():
        kind = _kind_of(module)
        ours = _OURS.get(kind)
        if _THEIRS.get(kind) is not None:  # it was converted before, and gets other settings
            module.__dict__.update({"mode" if isinstance(module, Sequential) else "run_mode": mode, "newton": newton})
            continue
        if ours is None or (ours is Sequential and not _is_deep(module, trusted)):
            continue
        _become(module, ours)
        if ours is Sequential:
            module.__dict__.update(mode=mode, newton=newton, _passed=None)
        else:
            module.__dict__.update(run_mode=mode, newton=newton)
        found[name] = module
    return found


def revert(model: nn.Module) -> dict[str, nn.Module]:
    """Have every ``RNN``, ``GRU``, ``LSTM`` and ``Sequential`` of ``deeppcr.nn`` in a model be the module of ``torch.nn`` again, in place.

    Returns:
        those that were reverted, by name

    >>> import torch, deeppcr.nn
    >>> gru = deeppcr.nn.GRU(4, 8)
    >>> type(deeppcr.nn.revert(gru)[""]) is torch.nn.GRU
    True
    """
    _check_model(model)
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        theirs = _THEIRS.get(_kind_of(module))
        if theirs is not None:
            # PyTorch's own ``mode`` says which kind of cell it is.
            for added in (*_ADDED, *(("mode",) if theirs is nn.Sequential else ())):
                module.__dict__.pop(added, None)
            _become(module, theirs)
            found[name] = module
    return found


def _kind_of(module: nn.Module) -> type[nn.Module]:
    """Its class; a parametrization makes one for a module by itself, of which the class before is the base."""
    return type(module).__bases__[0] if is_parametrized(module) else type(module)


def _become(module: nn.Module, kind: type[nn.Module]) -> None:
    own = type(module)
    if is_parametrized(module):  # whose class has a property for each parametrization
        held = {name: each for name, each in vars(own).items() if name not in ("__dict__", "__weakref__")}
        kind = type(own.__name__, (kind,), held)
    module.__class__ = kind


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")


def _is_deep(layers: nn.Module, trusted: tuple[type[nn.Module], ...]) -> bool:
    """Whether it pays to have them run in parallel, and nothing is known to speak against it."""
    every = list(layers.children())
    if len(every) < DEEP or len(layers._modules) != len(every):  # a layer that comes twice is told once
        return False
    first = _structure_of(every[0])
    return all(_is_trusted(each, trusted) and _structure_of(each) == first for each in every)


def _is_trusted(layer: nn.Module, trusted: tuple[type[nn.Module], ...]) -> bool:
    """Whether layers of its class are known to do nothing but compute; hooks, which may do anything, are called once a pass in a loop alone."""
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return False
    if type(layer) in trusted:
        return True
    return type(layer) is nn.Sequential and all(_is_trusted(each, trusted) for each in layer.children())


def _structure_of(layer: nn.Module) -> Any:
    """What layers have in common that may be stacked."""
    shapes = [(name, each.shape, each.dtype) for name, each in layer.state_dict().items()]
    return shapes, [(name, type(each), each.extra_repr()) for name, each in layer.named_modules()]
