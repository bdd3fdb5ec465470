"""``ConvTranspose1d/2d/3d`` and their lazy forms: `torch.nn`'s modules with polyphase's forward pass.

They are subclasses of `torch.nn`'s with nothing added: the same constructor, random numbers, parameters, state_dict and
``output_size`` argument, and the same repr behind "polyphase.". `polyphase.accelerate` relies on that when it changes
the class of a built module.

Tools that compare exact types, ``type(module) in (torch.nn.ConvTranspose2d, ...)`` or a dictionary of types, treat them
as `torch.nn`'s: each class is equal to the class that it replaces, though not identical (see `StandIn`).
"""

from __future__ import annotations

import sys
import warnings
from abc import ABCMeta
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from polyphase.functional import conv_transpose1d, conv_transpose2d, conv_transpose3d

#: Modules to which no class is equal to another: `fully_shard` caches the class that it derives from each, and a shared
#: one would be PyTorch's, or polyphase's.
APART_FOR = ("torch.distributed.",)


class StandIn(ABCMeta):
    """The type of classes that are equal to the class of `torch.nn` that they name as ``_stands_for``.

    Counters of flops, initialisers and quantization look layers up by their exact type, and silently skip types that
    they do not find. A subclass is equal only to itself. (ABCMeta: subclasses may also have abstract bases.)
    """

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **keywords: Any) -> StandIn:
        """A class of the caller's module: classes that PyTorch derives would be of ABCMeta's module, the next frame."""
        namespace.setdefault("__module__", sys._getframe(1).f_globals.get("__name__"))
        return super().__new__(mcls, name, bases, namespace, **keywords)

    def __eq__(cls, other: object) -> bool:
        if cls is other or vars(cls).get("_stands_for") is not other:
            return cls is other
        asks: str = sys._getframe(1).f_globals.get("__name__", "")
        return not asks.startswith(vars(cls).get("_apart_for", APART_FOR))

    def __hash__(cls) -> int:
        return type.__hash__(vars(cls).get("_stands_for", cls))


def operands_of(module: Any) -> tuple[Any, Any]:
    """A layer's weight and bias; if they are its parameters past `torch.nn.Module.__getattr__`, which takes a while."""
    own, cls = module.__dict__, type(module)
    computed = "weight" in own or "bias" in own or hasattr(cls, "weight") or hasattr(cls, "bias")
    if computed or torch.compiler.is_compiling():
        return module.weight, module.bias
    try:
        parameters = own["_parameters"]
        return parameters["weight"], parameters["bias"]
    except KeyError:
        return module.weight, module.bias


def node_of(module: Any, input: Any, *further: Any) -> Any:
    """The node of a module's call on a proxy, as for modules of `torch.nn`; None if the module itself is traced."""
    tracer = input.tracer
    if getattr(tracer, "root", module) is module:
        return None
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (input, *further), {})


def _forward(
    module: Any, function: Callable[..., Tensor], dims: int, input: Any, output_size: Sequence[int] | None
) -> Tensor:
    if module.padding_mode != "zeros":
        raise ValueError(
            f"{module._get_name()} supports only the padding mode 'zeros', got padding_mode={module.padding_mode!r}"
        )
    if type(input) is not Tensor and isinstance(input, torch.fx.Proxy):
        arguments = (input,) if output_size is None else (input, output_size)
        node: Tensor | None = node_of(module, *arguments)
        if node is not None:
            return node
    output_padding = module.output_padding
    if output_size is not None:
        output_padding = module._output_padding(
            input, list(output_size), module.stride, module.padding, module.kernel_size, dims, module.dilation
        )
    chain = module._chain
    if chain is not None and chain.layer is module and chain.is_active():  # not in a shallow copy of the layer
        fused: Tensor = chain.run(input, output_padding)
        return fused
    weight, bias = operands_of(module)
    return function(
        input,
        weight,
        bias,
        module.stride,
        module.padding,
        output_padding,
        module.groups,
        module.dilation,
    )


class _Layer:
    """What polyphase's classes have in common; each is also a subclass of the class of `torch.nn` that it replaces."""

    _chain: Any = None  # what it computes of what follows it (`polyphase.fuse`)

    def _get_name(self) -> str:
        cls = type(self)  # polyphase's class, or one that PyTorch has derived from it: parametrized, or FSDP's
        own = cls.__module__.partition(".")[0] in (__name__.partition(".")[0], "torch")
        return f"polyphase.{cls.__name__}" if own else cls.__name__

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by `torch.jit.script`. Raises NotImplementedError."""
        raise NotImplementedError(
            f"torch.jit.script cannot compile {self._get_name()}: script the model after polyphase.restore(model), or "
            "use torch.jit.trace, torch.compile or torch.export"
        )

    @property
    def qconfig(self) -> Any:
        """The configuration of `torch.ao.quantization`, for as long as it runs."""
        if "qconfig" not in vars(self):
            raise AttributeError("qconfig")  # `torch.nn.Module.__getattr__` raises one that says more
        return vars(self)["qconfig"]

    @qconfig.setter
    def qconfig(self: Any, value: Any) -> None:
        """Called when quantization begins: the layer becomes PyTorch's, which has a quantized form."""
        from polyphase.convert import restore

        vars(self)["qconfig"] = value
        if value is not None:
            warnings.warn(f"{self} is to be quantized, and is PyTorch's from here on", stacklevel=3)
            restore(self)

    @qconfig.deleter
    def qconfig(self) -> None:
        """Called when quantization ends, also for layers that it does not quantize."""
        if "qconfig" not in vars(self):
            raise AttributeError(f"{self._get_name()} has no qconfig")
        del vars(self)["qconfig"]


class ConvTranspose1d(_Layer, torch.nn.ConvTranspose1d, metaclass=StandIn):
    """`torch.nn.ConvTranspose1d` computed by `polyphase.conv_transpose1d`."""

    _stands_for: type = torch.nn.ConvTranspose1d

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """``(N, C_in, L)`` or ``(C_in, L)`` to ``(N, C_out, L_out)`` or ``(C_out, L_out)``.

        ``output_size``, with or without batch and channels, chooses among the sizes that a stride can give.
        ValueError: it is none of them.
        """
        return _forward(self, conv_transpose1d, 1, input, output_size)


class ConvTranspose2d(_Layer, torch.nn.ConvTranspose2d, metaclass=StandIn):
    """`torch.nn.ConvTranspose2d` computed by `polyphase.conv_transpose2d`."""

    _stands_for: type = torch.nn.ConvTranspose2d

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """``(N, C_in, H, W)`` or ``(C_in, H, W)`` to ``(N, C_out, H_out, W_out)`` or ``(C_out, H_out, W_out)``.

        ``output_size``, with or without batch and channels, chooses among the sizes that a stride can give.
        ValueError: it is none of them.
        """
        return _forward(self, conv_transpose2d, 2, input, output_size)


class ConvTranspose3d(_Layer, torch.nn.ConvTranspose3d, metaclass=StandIn):
    """`torch.nn.ConvTranspose3d` computed by `polyphase.conv_transpose3d`."""

    _stands_for: type = torch.nn.ConvTranspose3d

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """``(N, C_in, D, H, W)`` or ``(C_in, D, H, W)`` to ``(N, C_out, D_out, H_out, W_out)`` or without ``N``.

        ``output_size``, with or without batch and channels, chooses among the sizes that a stride can give.
        ValueError: it is none of them.
        """
        return _forward(self, conv_transpose3d, 3, input, output_size)


LAYERS = (ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)


class LazyConvTranspose1d(torch.nn.LazyConvTranspose1d, ConvTranspose1d):  # type: ignore[misc]
    """A `ConvTranspose1d` that takes ``in_channels`` from its first input."""

    _stands_for = torch.nn.LazyConvTranspose1d
    cls_to_become = ConvTranspose1d


class LazyConvTranspose2d(torch.nn.LazyConvTranspose2d, ConvTranspose2d):  # type: ignore[misc]
    """A `ConvTranspose2d` that takes ``in_channels`` from its first input."""

    _stands_for = torch.nn.LazyConvTranspose2d
    cls_to_become = ConvTranspose2d


class LazyConvTranspose3d(torch.nn.LazyConvTranspose3d, ConvTranspose3d):  # type: ignore[misc]
    """A `ConvTranspose3d` that takes ``in_channels`` from its first input."""

    _stands_for = torch.nn.LazyConvTranspose3d
    cls_to_become = ConvTranspose3d
