"""Hooks on gradients: the loop calls them at every step, a backward pass through all steps at once does not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch.overrides import TorchFunctionMode

from .evaluate import StepError

_WHY = (
    "which a backward pass through all steps at once does not call: the gradient would not be the loop's. Take it away (a "
    "torch.autograd.Function changes gradients, too), use solver=Loop(), or torch.no_grad() where no gradient is needed"
)


class NoHooks(TorchFunctionMode):
    """Inside, a hook on the gradient of a tensor is refused."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # PyTorch's own (of counters of operations, say) look on and change nothing.
        if func is Tensor.register_hook and getattr(args[1], "__module__", None) != "torch.autograd.graph":
            raise StepError(f"step: registers a hook on the gradient of a tensor, {_WHY}")
        return func(*args, **(kwargs or {}))


def refuse_hooked(roots: Iterable[nn.Module]) -> None:
    """Raise where a module or one inside of it has a hook on its gradient."""
    roots = list(roots)
    if roots and (all_modules._global_backward_hooks or all_modules._global_backward_pre_hooks):
        raise StepError(f"step: all modules have a backward hook, {_WHY}")
    for root in roots:
        for name, module in root.named_modules():
            if getattr(module, "_backward_hooks", None) or getattr(module, "_backward_pre_hooks", None):
                path = ".".join([type(root).__name__, *([name] if name else [])])
                raise StepError(f"step: the module {path} has a backward hook, {_WHY}")
