"""Layer norms over channels: what is one, and layers that compute it, by modules and by `polyphase.fused`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyphase
from polyphase import fused
from polyphase.module_steps import normalized_dims
from polyphase.plan.planner import plan
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.epilogue import CHANNEL, Epilogue, Operand, Operation
from polyphase.torch_op.epilogue import Apart


class LayerNorm2d(nn.Module):
    """As `segment_anything` has it."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels))
        self.bias = nn.Parameter(torch.randn(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class PermutedNorm(nn.LayerNorm):
    """As torchvision and timm have it."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class FormattedNorm(nn.LayerNorm):
    """As `transformers` has it."""

    def __init__(self, channels: int, data_format: str) -> None:
        super().__init__(channels, eps=1e-6)
        self.data_format = data_format

    def forward(self, x: Tensor) -> Tensor:
        if self.data_format == "channels_first":
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return super().forward(x)


class LineNorm(LayerNorm2d):
    """Over the channels of a line."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[..., None])[..., 0]


class OtherEpsilon(LayerNorm2d):
    """Named as the others, and another function."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        deviation = (x - mean).pow(2).mean(1, keepdim=True).sqrt()
        return self.weight[:, None, None] * (x - mean) / (deviation + self.eps) + self.bias[:, None, None]


class Branching(LayerNorm2d):
    """Another function of large values."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.abs().max() > 1e6 else super().forward(x)


class Clamped(LayerNorm2d):
    """The same of values that are not large."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-30, 30)


class Scaled(LayerNorm2d):
    """With a number that may change."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "segment_anything": LayerNorm2d,
    "torchvision": PermutedNorm,
    "transformers": lambda channels: FormattedNorm(channels, "channels_first"),
}


def test_what_normalizes_channels() -> None:
    assert [normalized_dims(norm(24)) for norm in NORMS.values()] == [(4,)] * 3
    assert normalized_dims(LineNorm(7)) == (3,)
    unscaled = LayerNorm2d(5)
    with torch.no_grad():
        unscaled.weight.zero_()
    assert normalized_dims(unscaled) == (4,), "whatever the parameters are"
    others = [FormattedNorm(24, "channels_last"), OtherEpsilon(24), Branching(24), nn.LayerNorm(24)]
    others += [Clamped(24), Scaled(24)]
    others += [nn.GroupNorm(1, 24), nn.BatchNorm2d(24), nn.Linear(3, 3)]
    assert [normalized_dims(norm) for norm in others] == [()] * len(others)


def upscaling(norm: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    first = (nn.ConvTranspose2d(16, 24, 2, 2), norm, nn.GELU())
    return nn.Sequential(*first, nn.ConvTranspose2d(24, 8, 2, 2), nn.GELU()).eval()


def test_an_image_without_a_batch_is_normalized_as_the_module_does() -> None:
    """Over its second dimension, which is the height."""
    model, x = upscaling(LayerNorm2d(24)), torch.randn(16, 12, 5)
    with torch.no_grad():
        wanted = model(x)
        polyphase.accelerate(model, fuse=True)
        torch.testing.assert_close(model(x), wanted)


@pytest.mark.parametrize("name", NORMS)
def test_modules_are_fused(name: str) -> None:
    model, x = upscaling(NORMS[name](24)), torch.randn(2, 16, 3, 5)
    with torch.no_grad():
        wanted = model(x)
    state = copy.deepcopy(model.state_dict())
    report = polyphase.accelerate(model, fuse=True)
    assert "0: fused with 1 (" in str(report)
    assert "computed by the transposed convolution" in repr(model[1])
    assert list(model.state_dict()) == list(state)
    kind = type(model[1])
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(each[1]) is kind
        with torch.no_grad():
            torch.testing.assert_close(each(x), wanted)
        torch.testing.assert_close(each(x), wanted)  # derivatives are recorded
    assert type(model(x).grad_fn) is not None
    model.train()
    torch.testing.assert_close(model(x), wanted)
    model.eval()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), wanted)
    polyphase.restore(model)
    assert type(model[1]) is not kind
    with torch.no_grad():
        torch.testing.assert_close(model(x), wanted, rtol=0, atol=0)


def test_autocast_gives_what_it_gave() -> None:
    """Autocast has layer norms in float32, as no epilogue of a half type would give them."""
    model, x = upscaling(PermutedNorm(24))[:2], torch.randn(2, 16, 3, 5)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = model(x)
        polyphase.accelerate(model, fuse=True)
        found = model(x)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_a_norm_of_other_dimensions_stays() -> None:
    model = nn.Sequential(nn.ConvTranspose1d(4, 6, 2, 2), LayerNorm2d(6)).eval()
    assert "1 is a LayerNorm2d, which is not fused" in str(polyphase.accelerate(model, fuse=True))


def call(x: Tensor, w: Tensor, b: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    norm = fused.layer_norm(scale, shift, 0.25)
    return fused.conv_transpose2d(x, w, b, 2, 1, epilogue=["silu", norm, "tanh", fused.multiply_value(1)])


def operands(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((2, 3, 3, 2), (3, 4, 3, 3), (4,), (4,), (4,))
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]


def unfused(x: Tensor, w: Tensor, b: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    v = F.silu(F.conv_transpose2d(x, w, b, 2, 1)).movedim(1, -1)
    return F.layer_norm(v, (4,), scale, shift, 0.25).tanh().mul(v).movedim(-1, 1)


@pytest.mark.slow
def test_values_and_derivatives() -> None:
    given = operands()
    torch.testing.assert_close(call(*given), unfused(*given))
    assert torch.autograd.gradcheck(call, given)
    assert torch.autograd.gradgradcheck(call, given)
    halves = [each.detach().bfloat16() for each in operands(torch.float32)]
    wanted = unfused(*(each.double() for each in halves))
    torch.testing.assert_close(call(*halves).double(), wanted, rtol=2**-8, atol=1e-5)


def test_one_norm_alone_and_of_floats() -> None:
    x, w = torch.randn(1, 2, 3), torch.randn(2, 3, 2)
    with pytest.raises(ValueError, match="one of layer_norm, softmax at most"):
        fused.conv_transpose1d(x, w, epilogue=[fused.layer_norm(), fused.layer_norm()])
    plain = fused.conv_transpose1d(x, w, epilogue=[fused.layer_norm(eps=0.5)])
    wanted = F.layer_norm(F.conv_transpose1d(x, w).movedim(1, -1), (3,), eps=0.5).movedim(-1, 1)
    torch.testing.assert_close(plain, wanted)


def test_reasons() -> None:
    epilogue = Epilogue((Operation("layer_norm", (1e-6,)),))
    bare = ConvTransposeProblem.make((16, 64, 8, 8), 512, 2, 2, dtype="bfloat16")
    many = replace(bare, epilogue=epilogue)
    with pytest.raises(polyphase.UnsupportedError, match="does not have all 512 channels of a pixel"):
        plan(many, Pass.FORWARD, DeviceInfo.for_arch("sm_90a"))
    grouped = replace(many, groups=4)
    reason = "implicit_gemm, implicit_gemm_transposed: a norm over channels needs one group"
    with pytest.raises(polyphase.UnsupportedError, match=reason) as told:
        plan(grouped, Pass.FORWARD, DeviceInfo.for_arch("sm_90a"))
    assert str(told.value).count("its blocks do not have all channels of a pixel") == 1
    assert "dgrad" not in str(told.value)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_apart(memory_format: torch.memory_format) -> None:
    """Where no kernel has all channels, PyTorch's functions follow the layer's own."""
    roles = Operand("weight", CHANNEL, True), Operand("offset", CHANNEL, True)
    epilogue = Epilogue((Operation("layer_norm", (0.25,), roles), Operation("gelu")))
    x, scale, shift = torch.randn(2, 6, 3, 5), torch.randn(6), torch.randn(6)
    sums = x.bfloat16().contiguous(memory_format=memory_format)
    layer: Any = lambda *tensors: sums  # noqa: E731
    found = Apart(layer, epilogue)(sums, sums, None, (scale, shift))
    assert found.stride() == sums.stride()
    wanted = F.gelu(F.layer_norm(sums.double().movedim(1, -1), (6,), scale.double(), shift.double(), 0.25))
    torch.testing.assert_close(found.double(), wanted.movedim(-1, 1), rtol=2e-2, atol=2e-2)
    out = torch.empty_like(sums)
    assert Apart(layer, epilogue)(sums, sums, None, (scale, shift), out) is out
    assert torch.equal(out, found)
