"""`override`: transposed convolutions that no module of the model makes, such as function calls in a library."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from polyphase import functional
from polyphase.reduction_steps import per_dim
from polyphase.torch_op.operators import conv_transpose
from polyphase.torch_op.validate import FLOATING

_lock = threading.Lock()
_libraries: dict[str, tuple[torch.library.Library, int]] = {}  # by device, with the number of its overrides


class Override:
    """Polyphase computes PyTorch's transposed convolutions on a kind of device until `undo`, or the end of ``with``."""

    def __init__(self, device: str) -> None:
        self._device: str | None = device
        with _lock:
            library, count = _libraries.get(device) or (_register(device), 0)
            _libraries[device] = library, count + 1

    def undo(self) -> None:
        """PyTorch computes them again, unless another override of that device is left. A second call does nothing."""
        with _lock:
            device, self._device = self._device, None
            if device is None:
                return
            library, count = _libraries.pop(device)
            if count > 1:
                _libraries[device] = library, count - 1
            else:
                library._destroy()
                _forget_kernels()

    def __enter__(self) -> Override:
        return self

    def __exit__(self, *raised: object) -> None:
        self.undo()


def override(device: str = "cuda") -> Override:
    """Have polyphase compute every transposed convolution of this process on CUDA devices, or on the CPU.

    It reaches what `accelerate` cannot: calls of ``torch.nn.functional``'s functions in anyone's code, and modules of
    models that are not built yet. PyTorch's operators ``aten::conv_transpose1d/2d/3d`` get polyphase as their kernel in
    PyTorch's dispatcher, so autograd, autocast and ``torch.compile`` work as with `conv_transpose2d`, and
    `enable_compile_fusion` fuses what is around such a call as around a layer. What was compiled
    or captured before stays as it was, and so does what is compiled meanwhile. A ``torch.export`` program keeps
    PyTorch's operator, which is polyphase's wherever an override is active. PyTorch still computes calls within the
    transforms of `torch.func` (``grad``, ``vmap``, ``jvp``), tensors of other layouts, such as MKL-DNN's, and calls of
    ``torch.convolution`` itself.

        with polyphase.override():
            audio = third_party_vocoder(mel)

    Args:
        device: ``"cuda"`` for tensors on CUDA devices, or ``"cpu"`` for tensors on the CPU, where the portable path
            computes: to test with.

    Returns:
        what undoes it: a context manager with a method ``undo``. Overrides may be nested; the last one that is undone
        restores PyTorch's.

    Raises:
        ValueError: ``device`` is neither of these.

    Warns:
        UserWarning: ``device`` is ``"cuda"`` and PyTorch finds no CUDA device, so that nothing changes.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cuda' or 'cpu', not {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        warnings.warn(
            "polyphase.override() acts on CUDA tensors, and PyTorch finds no CUDA device here: it changes nothing. On "
            'a CPU use polyphase.override("cpu")',
            stacklevel=2,
        )
    return Override(device)


def devices() -> tuple[str, ...]:
    """The kinds of devices on which polyphase computes PyTorch's transposed convolutions at the moment."""
    return tuple(sorted(_libraries))


def _register(device: str) -> torch.library.Library:
    """The kernels of PyTorch's three operators on a device, until the library is destroyed."""
    library = torch.library.Library("aten", "IMPL")
    for dims in (1, 2, 3):
        kernel = _kernel(dims)
        name = f"conv_transpose{dims}d" + ("" if dims == 1 else ".input")
        for key in ("Autograd", ""):  # tensors of inference mode have no autograd key
            library.impl(name, kernel, f"{key}{device.upper()}")
    _forget_kernels()
    return library


def _forget_kernels() -> None:
    """Clears what the operators remember of their kernels where graphs are traced: it outlasts registrations."""
    for dims in (1, 2, 3):
        getattr(_operator(dims), "_dispatch_cache", {}).clear()


def _operator(dims: int) -> Any:
    packet: Any = getattr(torch.ops.aten, f"conv_transpose{dims}d")
    return packet.default if dims == 1 else packet.input


def _kernel(dims: int) -> Callable[..., Tensor]:
    theirs = _operator(dims)

    def kernel(input: Tensor, weight: Tensor, bias: Tensor | None = None, *constants: Any) -> Tensor:
        """The dispatcher passes lists, and omits trailing arguments that have their defaults."""
        function: Callable[..., Tensor] = getattr(functional, f"conv_transpose{dims}d")
        constants = tuple(tuple(each) if isinstance(each, list) else each for each in constants)
        if torch._C._are_functorch_transforms_active() or input.layout is not torch.strided:
            return theirs.decompose(input, weight, bias, *constants)  # type: ignore[no-any-return]
        return function(input, weight, bias, *constants)

    return kernel


#: PyTorch's functions, as graphs have them, and their dimensions.
_FUNCTIONS: dict[Any, int] = {torch.conv_transpose1d: 1, torch.conv_transpose2d: 2, torch.conv_transpose3d: 3}
_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}


def replace_functions(graph: Graph, value_of: Callable[[Any], Any]) -> None:
    """Replaces calls of PyTorch's functions in a graph without derivatives by polyphase's operator, where it overrides.

    ``value_of``: the fake tensor of a node. Calls with symbolic constants, or of several dtypes (autocast), stay.
    """
    for call in [node for node in graph.nodes if node.target in _FUNCTIONS]:
        dims = _FUNCTIONS[call.target]
        names = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
        given: dict[str, Any] = {**_DEFAULTS, **dict(zip(names, call.args)), **call.kwargs}
        input, weight, bias = (given[name] for name in names[:3])
        tensors = [value_of(each) for each in (input, call, weight, *([] if bias is None else [bias]))]
        if not all(isinstance(each, Tensor) for each in tensors) or tensors[0].dim() != dims + 2:
            continue
        of_one_dtype = len({each.dtype for each in tensors}) == 1 and tensors[0].dtype in FLOATING
        constants = [per_dim(given[name], dims) for name in ("stride", "padding", "output_padding", "dilation")]
        if None in constants or type(given["groups"]) is not int or not of_one_dtype or tensors[1].requires_grad:
            continue
        if tensors[0].device.type in devices():
            with graph.inserting_before(call):
                layer = graph.call_function(conv_transpose, (input, weight, bias, *constants, given["groups"]))
            layer.meta = {**call.meta}
            call.replace_all_uses_with(layer)
            graph.erase_node(call)
