"""PyTorch's own samples for its functions and modules, run through ours.

PyTorch has no error inputs for these functions; ``test_errors.py`` compares errors with those that PyTorch raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import OUR_MODULES, OURS, TORCH_MODULES, assert_as_accurate_as_torch, rounding_eps

pytest.importorskip("expecttest", reason="PyTorch's test tools need it")

with pytest.MonkeyPatch.context() as patch:
    # Importing these would forbid the whole process to set torch.backends' flags; other tests do.
    patch.setattr(torch.backends, "disable_global_flags", lambda: None)
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

OP_INFOS = {dims: next(op for op in op_db if op.name == f"nn.functional.conv_transpose{dims}d") for dims in OURS}
MODULE_INFOS = {dims: next(info for info in module_db if info.module_cls is TORCH_MODULES[dims]) for dims in OURS}
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
]


def everything(function: Callable[..., Tensor], sample: Any, gradient: Tensor | None) -> list[Tensor]:
    """The output of a sample, and the gradients of its tensors."""
    output = function(sample.input, *sample.args, **sample.kwargs)
    if gradient is None:
        return [output]
    tensors = [tensor for tensor in (sample.input, *sample.args) if isinstance(tensor, Tensor)]
    return [output, *torch.autograd.grad(output, tensors, gradient)]


def widen(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().to(torch.complex128 if tensor.is_complex() else torch.float64)


def mapped(sample: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return sample.transform(lambda value: change(value).requires_grad_() if isinstance(value, Tensor) else value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", OURS)
def test_op_samples(dims: int, dtype: torch.dtype, device: torch.device) -> None:
    info = OP_INFOS[dims]
    if dtype not in info.supported_dtypes(device.type):
        pytest.skip("not a dtype of PyTorch's here")
    differentiable = dtype != torch.int64
    samples = list(info.reference_inputs(str(device), dtype, requires_grad=differentiable))
    assert samples
    for sample in samples:
        output = info.op(sample.input, *sample.args, **sample.kwargs)
        gradient = torch.linspace(-1, 1, output.numel()).view(output.shape).to(output) if differentiable else None
        ours, theirs = everything(OURS[dims], sample, gradient), everything(info.op, sample, gradient)
        assert ours[0].stride() == theirs[0].stride()
        if gradient is None:
            assert torch.equal(ours[0], theirs[0])
            continue
        exact = everything(info.op, mapped(sample, widen), widen(gradient))
        magnitudes = everything(info.op, mapped(sample, lambda tensor: widen(tensor).abs()), widen(gradient).abs())
        for got, torchs, ref64, magnitude in zip(ours, theirs, exact, magnitudes, strict=True):
            assert_as_accurate_as_torch(got, torchs, ref64, rounding_eps(ref64, magnitude, dtype, device))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dims", OURS)
def test_module_samples(dims: int, training: bool, dtype: torch.dtype, device: torch.device) -> None:
    info = MODULE_INFOS[dims]
    samples = info.module_inputs_func(info, device=device, dtype=dtype, requires_grad=True, training=training)
    seen = 0
    for sample in samples:
        arguments, keywords = sample.constructor_input.args, sample.constructor_input.kwargs
        torch.manual_seed(0)
        theirs = TORCH_MODULES[dims](*arguments, **keywords, device=device, dtype=dtype).train(training)
        torch.manual_seed(0)
        ours = OUR_MODULES[dims](*arguments, **keywords, device=device, dtype=dtype).train(training)
        if sample.forward_input is None:
            continue
        inputs, options = sample.forward_input.args, sample.forward_input.kwargs
        torch.testing.assert_close(ours(*inputs, **options), theirs(*inputs, **options))
        seen += 1
    assert seen > 0
