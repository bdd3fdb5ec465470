"""Operators whose derivatives are registered in Python: where none are asked for, they are dispatched once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from polyphase.torch_op.operators import pass_autograd

CALLS: list[str] = []


@pytest.fixture(scope="module")
def operator() -> Iterator[Any]:
    """A product, for CPU tensors, with what is dispatched to."""
    library = torch.library.Library("polyphase_test", "DEF")
    library.define("product(Tensor x, Tensor w, SymInt[] sizes) -> Tensor")

    def product(x: Tensor, w: Tensor, *sizes: Any) -> Tensor:
        CALLS.append("computed")
        return x * w

    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        CALLS.append("recorded")
        ctx.save_for_backward(*inputs[:2])

    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w, g * x, None

    library.impl("product", product, "CPU")
    torch.library.register_autograd("polyphase_test::product", backward, setup_context=setup_context, lib=library)
    torch.library.register_fake("polyphase_test::product", lambda x, w, sizes: torch.empty_like(x), lib=library)
    pass_autograd(library, "product", product, "CPU")
    yield torch.ops.polyphase_test.product.default
    library._destroy()


def test_derivatives(operator: Any) -> None:
    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    operator(x, w, [1]).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, w.detach())
    assert not operator(x.detach(), w.detach(), [1]).requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_derivatives(operator: Any, mode: Any) -> None:
    x, w = torch.randn(3, requires_grad=True), torch.randn(3)
    CALLS.clear()
    with mode():
        assert torch.equal(operator(x, w, [1]), x * w)
    assert CALLS == ["computed"]


def test_who_listens_still_hears(operator: Any) -> None:
    class Watched(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            CALLS.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    CALLS.clear()
    with torch.no_grad(), Watched():  # type: ignore[no-untyped-call]
        operator(x, x, [1])
    assert CALLS[:2] == ["polyphase_test.product.default", "computed"]
    with torch.no_grad(), FakeTensorMode() as mode:
        assert operator(mode.from_tensor(torch.ones(2)), mode.from_tensor(torch.ones(2)), [1]).shape == (2,)


def test_compiled(operator: Any) -> None:
    compiled = torch.compile(lambda x, w: operator(x, w, [1]) * 2, fullgraph=True)
    x, w = torch.randn(3, requires_grad=True), torch.randn(3)
    compiled(x, w).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * w)
    assert set(torch.library.opcheck(operator, (x, w, [1])).values()) == {"SUCCESS"}
