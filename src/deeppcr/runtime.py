"""What every room asks: is somebody capturing, transforming or compiling, how exact are products, is Triton there."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Self

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_functorch = import_module("torch._C._functorch")  # which torch's type stubs leave out
_autograd = import_module("torch._C._autograd")
_is_legacy_batched = _functorch.is_legacy_batchedtensor
#: Of all that tell, the one that a compiler answers right while it traces. (Of ``peek_interpreter_stack`` it says that it is not None.)
_transforms_are_active = torch._C._are_functorch_transforms_active  # type: ignore[attr-defined]
#: By type of device: whether operations are being captured by somebody, to be run later.
CAPTURING: dict[str, Callable[[], bool]] = {"cuda": torch.cuda.is_current_stream_capturing}


def in_functorch() -> bool:
    """Whether a torch.func transform (vmap, grad, jvp, ...) is at work."""
    return _transforms_are_active()


def is_transformed() -> bool:
    """The same, or whether a caller takes derivatives in forward mode."""
    return forward_ad._current_level >= 0 or _transforms_are_active()


def is_batched(tensor: Tensor) -> bool:
    """Whether ``tensor`` stands for many: inside a torch.func transform, or with is_grads_batched=True."""
    return in_functorch() or _is_legacy_batched(tensor)


def random_state(device: torch.device) -> Tensor:
    """Of PyTorch's own generator: it is another one after a random number was drawn."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def is_capturing(device: torch.device) -> bool:
    """Whether operations on ``device`` go into a graph of the caller: they have no values yet that Python could read."""
    return device.type in CAPTURING and CAPTURING[device.type]()


def values_can_be_read(tensor: Tensor) -> bool:
    """Whether Python may branch on what ``tensor`` holds: not while tracing, transforming or capturing."""
    return not (is_traced(tensor) or is_capturing(tensor.device))


def is_traced(tensor: Tensor) -> bool:
    """Whether ``tensor`` stands for others: while compiling, or under a transform."""
    return torch.compiler.is_compiling() or is_batched(tensor)


def apply_directly(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """What ``function.apply`` does outside transforms, but for the search for arguments that were left out and for wrappers
    among those that are no tensors: it takes longer than the launches."""
    base: Any = super(torch.autograd.Function, function)
    return base.apply(*[_functorch.unwrap_if_dead(each) if isinstance(each, Tensor) else each for each in arguments])


def has_hooks_of_saved_tensors() -> bool:
    """Whether somebody sees what is saved for a backward pass when it is saved, and may copy it, or compute it again: checkpointing, offloading."""
    return _autograd._top_saved_tensors_default_hooks(True) is not None


def check_backward(gradients: Tensor) -> None:
    """Refuse what no backward pass through ``solve`` takes."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "second derivatives through deeppcr.solve are not taken by gradient=Implicit(); use solver=deeppcr.Loop(), "
            'gradient=deeppcr.Unrolled(), or mode="sequential" of a module of deeppcr.nn'
        )
    if is_batched(gradients):
        raise RuntimeError(
            "a backward pass through deeppcr.solve takes one gradient at a time, not a batch of them: call "
            "torch.autograd.grad once for each instead of is_grads_batched=True (vectorize=True in functional.jacobian)"
        )


def is_observed(data: Tensor, rhs: Tensor) -> bool:
    """Whether autograd, of either mode, or a transform has to see what is done with the tensors."""
    if (data.requires_grad or rhs.requires_grad) and torch.is_grad_enabled():
        return True
    return is_transformed() or _is_legacy_batched(data) or _is_legacy_batched(rhs)


def has_tangent(leaf: Any) -> bool:
    """Whether a value carries a forward-mode derivative of the caller's."""
    inside = forward_ad._current_level >= 0  # of a level: outside of all, to ask takes as long as to launch
    return inside and isinstance(leaf, Tensor) and forward_ad.unpack_dual(leaf).tangent is not None


def outside_of_graph(function: Callable, why: str) -> Callable:
    """``function``, left out of the graph that a compiler makes: with ``fullgraph=True`` it raises, and says why."""
    torch._dynamo.graph_break(msg=why)
    return torch.compiler.disable(function)


def unseen_by_compiler(function: Callable) -> Callable:
    """``function``, for what is called outside of a graph while a compiler watches: it would try to compile every function inside."""
    # Where this itself is being compiled, the compiler would warn of a function that it cannot see through.
    watched = torch.compiler.is_compiling() or get_eval_frame_callback() not in (None, False)
    return torch.compiler.disable(function) if watched else function


class _Wishes(threading.local):
    """How often this thread wants functions that somebody compiled to run as they are written."""

    count = 0


_wishes = _Wishes()


def _stance_by_thread(eval_frame: Any) -> Any:
    """A setting of the compiler that is "force_eager" for the threads that want it, and for all others what it is now.

    PyTorch has one for the process, which any thread may change at any time, and may set back later to what it found. So this one is
    only ever put over another, and holds what that says: whoever keeps it and sets it back, nothing is lost.
    """
    below = eval_frame._stance

    class ByThread(eval_frame.DynamoStance):
        by_thread = True
        stance = property(lambda self: "force_eager" if _wishes.count else below.stance)
        backend = property(lambda self: below.backend)
        skip_guard_eval_unsafe = property(lambda self: not _wishes.count and below.skip_guard_eval_unsafe)

        def __init__(self) -> None:  # which would set them
            pass

    return ByThread()


_stance_lock = threading.Lock()


@contextmanager
def as_written() -> Iterator[None]:
    """Inside, functions that the user compiled run as they are written, in this thread.

    A function that is called for the first time while its operations are watched, PyTorch would never compile, then or later.
    """
    # Only outside of what is being compiled may the compiler be told so. Where it was never imported, nothing is compiled.
    if "torch._dynamo" not in sys.modules or get_eval_frame_callback() not in (None, False):
        yield
        return
    eval_frame: Any = sys.modules["torch._dynamo"].eval_frame
    with _stance_lock:
        if not hasattr(eval_frame._stance, "by_thread"):
            eval_frame._set_stance(_stance_by_thread(eval_frame))
    _wishes.count += 1
    try:
        yield
    finally:
        _wishes.count -= 1


class Watcher(TorchDispatchMode):
    """Sees the operations of what runs inside, as it is written: ``look`` is told of each."""

    def __enter__(self) -> Self:
        self._as_written = as_written()
        self._as_written.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._as_written.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.look(func, args, kwargs or {}, found)
        return found

    def look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> None:
        """After an operation, with what it was given and what it made of that."""
        raise NotImplementedError


#: What PyTorch keeps away from what an operator does: autograd, and below an observer of operations transforms and views of numbers, too.
_KEPT_AWAY = (
    *("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView", "Functionalize"),
    *("FuncTorchBatched", "FuncTorchVmapMode", "FuncTorchGradWrapper"),
    *("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode"),
    *("Conjugate", "Negative", "ZeroTensor", "PythonTLSSnapshot"),
)


@contextmanager
def as_if_eager() -> Iterator[None]:
    """Inside a registered operator: autograd and transforms work as they do outside of it."""
    away = torch._C._dispatch_tls_local_exclude_set()
    for name in _KEPT_AWAY:
        away = away.remove(getattr(torch._C.DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), away):
        yield


def tensors_in(nest: Any) -> list[Tensor]:
    """Those among the leaves of a nest."""
    return [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Tensor)]


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was written to; None where that is not counted, or where it has yet to be made."""
    try:
        return None if tensor.is_inference() else tensor._version
    except ValueError:  # of a lazy module
        return None


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def declares(strategy: Any, name: str) -> bool:
    """Whether the class of a strategy says so for itself: what is said of a class does not hold for its subclasses."""
    return vars(type(strategy)).get(name, False)


_TRITON, _NUMPY = (find_spec(name) is not None for name in ("triton", "numpy"))  # which compilers do not look for


def has_triton() -> bool:
    """Whether Triton is installed; it is imported only when a kernel is used."""
    return _TRITON


#: Types of devices that the kernels of a step run on. (Tests have them interpreted on a CPU, which nobody would want to wait for.)
KERNEL_DEVICES = {"cuda"}


def has_kernels(device: torch.device) -> bool:
    """Whether kernels that are made of steps, which are written with arrays of NumPy, run on a device."""
    return device.type in KERNEL_DEVICES and has_triton() and _NUMPY


def is_elsewhere(device: torch.device) -> bool:
    """Whether kernels are not launched on a device, but on another GPU."""
    return device.type == "cuda" and device.index != torch.cuda.current_device()


def launching(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, kernels are launched on a device. To change it takes as long as a launch, and as a rule it is the one."""
    return torch.cuda.device(device) if is_elsewhere(device) else nullcontext()


def multiplies_in_tf32(device: torch.device, convolves: bool) -> bool:
    """Whether float32 products on a device are set to round their factors to TF32: of matrices, or of convolutions where there are any."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    backends: Any = torch.backends
    settings = [backends.cuda.matmul.fp32_precision]
    if convolves:
        settings.append(backends.cudnn.conv.fp32_precision)
    everywhere = backends.fp32_precision
    return any((everywhere if each == "none" else each) == "tf32" for each in settings)


@contextmanager
def full_precision(device: torch.device, *, tf32: bool = False) -> Iterator[None]:
    """Products and convolutions in float32 proper, or in TF32, on a GPU; what was set before is put back.

    PyTorch has these settings twice, in an old and a new way, and refuses to tell the old ones where both were used.
    """
    if device.type != "cuda":
        yield
        return
    wanted = "tf32" if tf32 else "ieee"
    _precision.enter(wanted)
    try:
        yield
    finally:
        _precision.leave()


class _Precision:
    """What each thread wants at the moment, by the innermost of its wishes: PyTorch has one setting for the process.

    Nobody waits for another: a thread of autograd that did would wait for the one which waits for it. Where a thread wants float32
    proper, that is what all get, and who asked for TF32 gets more than was asked for. The last one puts back what was set before the first.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._wishes: dict[int, list[str]] = {}  # by thread
        self._before: tuple[Any, Any, Any] | None = None

    def enter(self, wanted: str) -> None:
        with self._lock:
            self._wishes.setdefault(threading.get_ident(), []).append(wanted)
            self._apply()

    def leave(self) -> None:
        with self._lock:
            thread = threading.get_ident()
            self._wishes[thread].pop()
            if not self._wishes[thread]:
                del self._wishes[thread]
            self._apply()

    def _apply(self) -> None:
        if not self._wishes:
            if self._before is not None:
                _set(*self._before)
            self._before = None
            return
        wanted = "ieee" if any(wishes[-1] == "ieee" for wishes in self._wishes.values()) else "tf32"
        if _told() != (wanted,) * 3:
            self._before = self._before or _settings()
            wish = ("high" if wanted == "tf32" else "highest", wanted == "tf32")
            told, _, on_a_cpu = self._before
            _set(
                tuple(None if known is None else new for known, new in zip(told, wish, strict=True)),
                (wanted,) * 3,
                on_a_cpu,
            )


_precision = _Precision()


def _precisions() -> tuple[Any, ...]:
    """What has the setting in the new way. The old one for cuDNN changes both of its own."""
    backends: Any = torch.backends
    return backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn


def _told() -> tuple[str, ...]:
    return tuple(each.fp32_precision for each in _precisions())


def _settings() -> tuple[tuple[Any, ...], tuple[str, ...], str]:
    """As they are: in the old way, each by itself, None where PyTorch refuses to tell, and so leaves it alone; in the new one; and that of
    products on a CPU, which the old way changes, too."""
    old: list[Any] = []
    for ask in (torch.get_float32_matmul_precision, lambda: torch.backends.cudnn.allow_tf32):
        try:
            old.append(ask())
        except RuntimeError:
            old.append(None)
    return tuple(old), _told(), _on_a_cpu().fp32_precision


def _on_a_cpu() -> Any:
    return torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def _set(old: tuple[Any, ...], new: tuple[str, ...], on_a_cpu: str) -> None:
    products, cudnn = old
    if products is not None:
        torch.set_float32_matmul_precision(products)
    if cudnn is not None:
        torch.backends.cudnn.allow_tf32 = cudnn
    for where, precision in zip(_precisions(), new, strict=True):
        where.fp32_precision = precision
    _on_a_cpu().fp32_precision = on_a_cpu
