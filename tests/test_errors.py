"""Bad arguments: PyTorch's exception type, before anything runs, with what was given and what is allowed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import polyphase
from helpers import OURS, TORCH
from polyphase.torch_op import operators

X, W, B = (2, 4, 5, 6), (4, 3, 3, 3), (3,)


def tensor(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
    return torch.ones(shape, **options)


#: name: (arguments that replace those of a good call, in words that the message holds). PyTorch raises for all of them.
BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "input of rank 2": ({"input": tensor((5, 6))}, ["4D input (N, C_in, H, W)", "3D unbatched", "(5, 6)"]),
    "input of rank 5": ({"input": tensor((1, 2, 4, 5, 6))}, ["4D input", "(1, 2, 4, 5, 6)"]),
    "weight of rank 3": ({"weight": tensor((4, 3, 3))}, ["4D weight (C_in, C_out/groups, H, W)", "(4, 3, 3)"]),
    "wrong channels": ({"input": tensor((2, 3, 5, 6))}, ["takes 4 input channels", "has 3"]),
    "wrong channels, unbatched": ({"input": tensor((5, 5, 6))}, ["takes 4 input channels", "has 5"]),
    "groups that do not divide": ({"groups": 3}, ["groups=3 does not divide in_channels=4"]),
    "groups of 0": ({"groups": 0}, ["at least 1", "groups=0"]),
    "groups of -1": ({"groups": -1}, ["at least 1", "groups=-1"]),
    "bias too short": ({"bias": tensor((2,))}, ["bias must have shape (3,)", "(2,)"]),
    "bias of two dimensions": ({"bias": tensor((1, 3))}, ["bias must have shape (3,)", "(1, 3)"]),
    "bias for one group": ({"bias": tensor((3,)), "groups": 2}, ["(6,)", "3·2", "(3,)"]),
    "stride of 0": ({"stride": 0}, ["stride must be at least 1", "stride=0"]),
    "one stride of 0": ({"stride": (1, 0)}, ["stride must be at least 1", "stride=(1, 0)"]),
    "stride of -1": ({"stride": -1}, ["stride must be at least 1"]),
    "dilation of 0": ({"dilation": 0}, ["dilation must be at least 1", "dilation=0"]),
    "negative padding": ({"padding": -1}, ["padding must be at least 0", "padding=-1"]),
    "negative output_padding": ({"output_padding": (0, -1)}, ["output_padding must be at least 0", "(0, -1)"]),
    "output_padding of the stride": (
        {"stride": 2, "output_padding": 2},
        ["smaller than stride or dilation", "output_padding=(2, 2)", "stride=(2, 2)", "dilation=(1, 1)"],
    ),
    "one output_padding of the stride": ({"stride": (2, 3), "output_padding": 2}, ["output_padding=(2, 2)"]),
    "three strides": ({"stride": (1, 1, 1)}, ["stride must be one integer or 2 of them", "(1, 1, 1)"]),
    "no stride": ({"stride": ()}, ["stride must be one integer or 2 of them", "stride=()"]),
    "negative output size": ({"padding": 5}, ["(-3, -2)", "at least 1", "padding=(5, 5)", "(5, 6)"]),
    "output size of 0": ({"input": tensor((1, 4, 2, 2)), "padding": 2}, ["(0, 0)", "at least 1"]),
    "output size beyond 64 bits": ({"stride": 2**62}, ["less than 2**63", str(4 * 2**62 + 3)]),
    "no pixels": ({"input": tensor((2, 4, 5, 0))}, ["spatial size of the input must be at least 1", "(5, 0)"]),
    "no pixels in no images": (
        {"input": tensor((0, 4, 5, 0)), "padding": 2},
        ["(3, -2)", "every size must be at least 1"],
    ),
    "nested input": (
        {"input": torch.nested.nested_tensor([torch.zeros(4, 5, 6), torch.zeros(4, 2, 3)])},
        ["takes no nested tensors", "input"],
    ),
    "no input channels": ({"input": tensor((2, 0, 5, 6)), "weight": tensor((0, 3, 3, 3))}, ["(0, 3, 3, 3)"]),
    "no taps": ({"weight": tensor((4, 3, 3, 0))}, ["(4, 3, 3, 0)", "at least 1"]),
    "other dtype of the weight": (
        {"weight": tensor(W, dtype=torch.float64)},
        ["same dtype", "input torch.float32", "weight torch.float64", "autocast"],
    ),
    "other dtype of the input": ({"input": tensor(X, dtype=torch.bfloat16)}, ["same dtype", "input torch.bfloat16"]),
    "other dtype of the bias": ({"bias": tensor(B, dtype=torch.float16)}, ["same dtype", "bias torch.float16"]),
    "stride beyond 64 bits": ({"stride": 2**70}, ["stride must fit 64 bits", str(2**70)]),
    "groups beyond 64 bits": ({"groups": 2**70}, ["groups must fit 64 bits", str(2**70)]),
    "sparse input": ({"input": tensor(X).to_sparse()}, ["input must be a dense", "sparse_coo"]),
    "input of no tensor": ({"input": 3}, ["input must be a Tensor, not int"]),
    "weight of no tensor": ({"weight": None}, ["weight must be a Tensor, not NoneType"]),
    "bias of no tensor": ({"bias": 1.5}, ["bias must be a Tensor, not float"]),
    "float stride": ({"stride": 2.0}, ["stride must be an integer or a tuple of integers, not float"]),
    "float in a stride": ({"stride": (2, 2.5)}, ["stride must be an integer", "float"]),
    "bool stride": ({"stride": True}, ["stride must be an integer", "bool"]),
    "padding of text": ({"padding": "same"}, ["padding must be an integer", "str"]),
    "groups of text": ({"groups": "a"}, ["groups must be an integer", "str"]),
    "int32": (
        {"input": tensor(X, dtype=torch.int32), "weight": tensor(W, dtype=torch.int32), "bias": None},
        ["not implemented for torch.int32 on cpu"],
    ),
    "bool tensors": (
        {"input": tensor(X, dtype=torch.bool), "weight": tensor(W, dtype=torch.bool), "bias": None},
        ["not implemented for torch.bool"],
    ),
}


def good() -> dict[str, Any]:
    return {"input": tensor(X), "weight": tensor(W), "bias": tensor(B)}


@pytest.mark.parametrize("warm", [False, True], ids=["", "after a good call"])
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str, warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced, words = BAD[name]
    arguments = {**good(), **replaced}
    with pytest.raises(Exception, match=r".") as theirs:
        TORCH[2](**arguments)
    if warm:  # a call of the same shapes that was checked before must not let this one through
        polyphase.conv_transpose2d(**good())
        polyphase.conv_transpose2d(**good(), stride=2)
        polyphase.conv_transpose2d(**good(), stride=1)
    monkeypatch.setattr(operators, "conv_transpose", lambda *_: pytest.fail("something ran"))
    kinds = (NotImplementedError, RuntimeError, TypeError, ValueError)
    expected = next(kind for kind in kinds if isinstance(theirs.value, kind))
    if name in ("stride beyond 64 bits", "groups beyond 64 bits"):  # PyTorch's own kind depends on its version
        expected = ValueError
    with pytest.raises(expected) as ours:
        polyphase.conv_transpose2d(**arguments)
    message = str(ours.value)
    assert message.startswith("conv_transpose2d")
    for part in words:
        assert part in message
    with torch.no_grad(), pytest.raises(expected):
        polyphase.conv_transpose2d(**arguments)


def test_the_good_call_is_good() -> None:
    torch.testing.assert_close(polyphase.conv_transpose2d(**good()), TORCH[2](**good()))


def test_what_pytorch_lets_through_or_fails_at_obscurely() -> None:
    """Cases in which PyTorch's CPU function raises nothing: mixed devices, no output channels."""
    polyphase.conv_transpose2d(**good())  # a call of the same shapes that was checked before
    with pytest.raises(RuntimeError, match="same device, got input on meta and weight on cpu"):
        polyphase.conv_transpose2d(tensor(X, device="meta"), tensor(W), tensor(B))
    with pytest.raises(RuntimeError, match="same device, got input on cpu and weight on meta"):
        polyphase.conv_transpose2d(tensor(X), tensor(W, device="meta"))
    with pytest.raises(RuntimeError, match="same device, got input on cpu and bias on meta"):
        polyphase.conv_transpose2d(tensor(X), tensor(W), tensor(B, device="meta"))
    with pytest.raises(RuntimeError, match="every size of the weight must be at least 1"):
        polyphase.conv_transpose2d(tensor(X), tensor((4, 0, 3, 3)))


@pytest.mark.parametrize("dims", OURS)
def test_every_dimension_names_itself(dims: int) -> None:
    with pytest.raises(RuntimeError, match=rf"conv_transpose{dims}d: expected a {dims + 2}D input"):
        OURS[dims](tensor((2,) * (dims + 3)), tensor((2,) * (dims + 2)))


def test_module_errors_name_the_function() -> None:
    with pytest.raises(RuntimeError, match=r"conv_transpose2d: weight of shape .* takes 3 input channels"):
        polyphase.ConvTranspose2d(3, 2, 3)(tensor((1, 2, 4, 4)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_errors_on_a_gpu() -> None:
    x, w = tensor(X, device="cuda"), tensor(W, device="cuda")
    with pytest.raises(RuntimeError, match="same device, got input on cuda:0 and weight on cpu"):
        polyphase.conv_transpose2d(x, w.cpu())
    with pytest.raises(polyphase.UnsupportedError, match="int64 except on CUDA"):
        polyphase.conv_transpose2d(x.long(), w.long())
    with pytest.raises(polyphase.UnsupportedError, match=r"no CUDA kernels for torch\.int64"):
        torch.ops.polyphase.conv_transpose(x.long(), w.long(), None, [1, 1], [0, 0], [0, 0], [1, 1], 1)


def test_exceptions() -> None:
    assert issubclass(polyphase.UnsupportedError, NotImplementedError)
    assert issubclass(polyphase.UnsupportedError, polyphase.PolyphaseError)
    assert issubclass(polyphase.CompilationError, RuntimeError)
    error = polyphase.CompilationError("message", log="line 3: error", source_path="/somewhere/kernel.cu")
    for copied in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (str(copied), copied.log, copied.source_path) == ("message", "line 3: error", "/somewhere/kernel.cu")


def test_explain_errors() -> None:
    layer = polyphase.ConvTranspose2d(2, 2, 3)
    assert "forward" in polyphase.explain(layer, (1, 2, 8, 8), "sm_90a")
    assert "portable" in polyphase.explain(layer, (1, 2, 8, 8), "cpu")
    assert polyphase.explain(layer, (2, 8, 8), "cpu") == polyphase.explain(layer, (1, 2, 8, 8), "cpu")
    for shape in (None, (8, 8), "(2, 8, 8)"):
        with pytest.raises(TypeError, match="4 sizes"):
            polyphase.explain(layer, shape)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Linear"):
        polyphase.explain(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="complex64"):
        polyphase.explain(polyphase.ConvTranspose2d(2, 2, 3, dtype=torch.complex64), (1, 2, 8, 8))
    for size in (0, -1, 1.0, "8", 2.5):
        with pytest.raises(ValueError, match=r"integers of at least 1, got .*8"):
            polyphase.explain(layer, (1, 2, size, 8))  # type: ignore[arg-type]
    for device in ("sm_1", "h300"):
        with pytest.raises(polyphase.UnsupportedError, match=f"{device}.*sm_75, .*sm_90a"):
            polyphase.explain(layer, (1, 2, 8, 8), device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_explain_says_that_there_is_no_gpu() -> None:
    layer = polyphase.ConvTranspose1d(2, 2, 3)
    text, remark = polyphase.explain(layer, (1, 2, 8)).rsplit("\n\n", 1)
    assert "Here polyphase uses its portable path" in remark
    assert text == polyphase.explain(layer, (1, 2, 8), "sm_90a")
    with pytest.raises(polyphase.UnsupportedError, match="no CUDA device here, so not 'cuda:1'; give an architecture"):
        polyphase.explain(layer, (1, 2, 8), "cuda:1")
