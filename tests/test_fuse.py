"""``accelerate(model, fuse=True)``: which chains are found, that they compute the same, and that it is undone."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyphase
from polyphase import functional, fused, fused_calls
from polyphase.chain import Chain
from polyphase.torch_op.epilogue import conv_transpose_epilogue


class Head(nn.Module):
    """A chain, a function, an output that two read, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Sequential(
            nn.ConvTranspose2d(6, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.5)
        )
        self.functional = nn.ConvTranspose2d(8, 6, 2, 2)
        self.skipped = nn.ConvTranspose2d(6, 6, 3, 1, 1)
        self.act = nn.GELU()
        self.twice = nn.ConvTranspose2d(6, 6, 1)
        self.last = nn.ConvTranspose2d(6, 3, 2, 2)
        self.tanh = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        """(N, 6, H, W) to (N, 3, 8·H, 8·W)."""
        x = torch.relu(self.functional(self.up(x)))
        y = self.skipped(x)
        x = self.act(y) - y
        return self.tanh(self.last(self.twice(self.twice(x))))


def _spread(model: nn.Module) -> nn.Module:
    """Statistics and parameters of norms as training leaves them."""
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor in (module.running_mean, module.running_var, module.weight, module.bias):
                if tensor is not None:
                    tensor.data.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return model


def _model() -> nn.Module:
    torch.manual_seed(0)
    return _spread(Head())


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps each fused call had."""
    calls: list[int] = []
    original = Chain._run

    def counting(self: Chain, tensors: Any, padding: Any, steps: list[fused.Step | None], *more: Any) -> Tensor:
        calls.append(sum(step is not None for step in steps))
        return original(self, tensors, padding, steps, *more)

    monkeypatch.setattr(Chain, "_run", counting)
    return calls


def test_chains_and_reasons() -> None:
    report = polyphase.accelerate(_model(), fuse=True)
    blocks = {block.name: block for block in report.blocks}
    assert blocks["up.0"].fused == ("up.1", "up.2", "up.3")
    assert blocks["up.0"].reason.startswith("functional is a ConvTranspose2d")
    assert blocks["functional"].fused == ("relu()",)
    assert blocks["skipped"].reason == "2 operations read its output"
    assert blocks["twice"].reason == "it is called more than once"
    assert blocks["last"].fused == ("tanh",)
    assert str(blocks["last"]) == "last: fused with tanh (Tanh); ends there: the next thing is the model's output"
    assert "up.0: fused with up.1 (BatchNorm2d) → up.2 (" in str(report)


def test_the_same_in_evaluation_and_training(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _model(), torch.randn(2, 6, 5, 4)
    fused_model = copy.deepcopy(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    polyphase.accelerate(fused_model, fuse=True)
    assert fused_model.state_dict().keys() == state.keys()
    calls = _counted(monkeypatch)
    torch.testing.assert_close(fused_model.eval()(x), model.eval()(x), rtol=1e-4, atol=1e-5)
    assert calls == [2, 0, 1]  # with derivatives no function is taken in
    del calls[1]
    # Live parameters, and statistics that training changes.
    for each in (model, fused_model):
        each.train()
        torch.manual_seed(1)
        each(x).sum().backward()
        each.up[1].weight.data.mul_(2)
        each.eval()
    assert calls == [2, 1]
    torch.testing.assert_close(fused_model.up[1].running_var, model.up[1].running_var)
    with torch.no_grad():
        torch.testing.assert_close(fused_model(x), model(x), rtol=1e-4, atol=1e-5)
    assert calls == [2, 1, 2, 1, 1]
    for (name, one), (_, other) in zip(fused_model.named_parameters(), model.named_parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_part_of_a_chain_in_training_and_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _model().eval(), torch.randn(1, 6, 3, 3)
    expected = model(x)
    polyphase.accelerate(model, fuse=True)
    calls = _counted(monkeypatch)
    model.up[3].train()
    model.up[3].p = 0.0
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert calls == [0, 1]
    model.eval()
    seen: list[Tensor] = []
    handle = model.up[1].register_forward_hook(lambda module, given, output: seen.append(output.detach().clone()))
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert float(seen[0].min()) < 0
    assert calls == [0, 1] * 2
    handle.remove()
    model(x)
    assert calls == [0, 1, 0, 1, 2, 0, 1]


def test_restore_undoes_all() -> None:
    model = _model()
    kinds = [type(module) for module in model.modules()]
    text = repr(model)
    polyphase.accelerate(model, fuse=True)
    assert "computed by the transposed convolution before it in evaluation mode" in repr(model.up[1])
    assert repr(model.up[1]).startswith("BatchNorm2d(8, eps")
    assert {type(module) for module in model.modules()} == set(kinds)  # by equality
    polyphase.accelerate(model, fuse=True)  # again: nothing changes
    polyphase.restore(model)
    assert all(type(module) is kind for module, kind in zip(model.modules(), kinds))
    assert repr(model) == text
    assert not any("_chain" in vars(module) for module in model.modules())


def test_copies_and_pickles_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _model().eval(), torch.randn(1, 6, 3, 3)
    polyphase.accelerate(model, fuse=True)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stream, weights_only=False)]
    calls = _counted(monkeypatch)
    for each in copies:
        each.up[1].weight.data.mul_(3)  # its own
        assert each.up[0]._chain.modules[0] is each.up[1]
        assert not torch.equal(each(x), model(x))
    assert calls == [2, 0, 1] * 6


@pytest.mark.slow
def test_compiled_in_one_graph() -> None:
    model, x = _model().eval(), torch.randn(1, 6, 3, 3)
    expected = model(x)
    polyphase.accelerate(model, fuse=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)
    graph = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(graph(x), expected, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_traced_is_traced_in_parts() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.ConvTranspose1d(3, 4, 2, 2), nn.LeakyReLU(0.2))
            self.free = nn.ConvTranspose1d(4, 2, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.free(self.head(x)) if x.sum() > 0 else x

    model = Branches().eval()
    x = torch.rand(2, 3, 5)
    expected = model(x)
    blocks = {block.name: block for block in polyphase.accelerate(model, fuse=True).blocks}
    assert blocks["head.0"].fused == ("head.1",)
    assert blocks["head.0"].reason == "the next thing is head's output, and torch.fx traces no further"
    assert blocks["free"].reason == "torch.fx cannot trace what calls it"
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_every_layer_has_a_reason() -> None:
    """Also those that are never fused, for what the report says is all that there is to go by."""

    class Vocoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.normed = nn.utils.parametrizations.weight_norm(nn.ConvTranspose1d(4, 4, 2))
            self.up, self.unused = nn.ConvTranspose1d(4, 4, 2), nn.ConvTranspose1d(4, 4, 2)
            self.own = Own(4, 4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(nn.functional.leaky_relu(self.own(self.normed(x)))).sum()

    class Own(polyphase.ConvTranspose1d):
        pass

    model = Vocoder().eval()
    report = polyphase.accelerate(model, fuse=True)
    reasons = {
        "up": "up: not fused: sum() reads its output, in a way that is not fused; "
        "leaky_relu() before it would be fused as a module, or by enable_compile_fusion",
        "normed": "normed: not fused: its weight is computed at every call by a parametrization: call "
        "torch.nn.utils.parametrize.remove_parametrizations before",
        "unused": "unused: not fused: forward does not call it",
        "own": "own: not fused: Own is a subclass, and may compute something else",
    }
    assert {block.name: str(block) for block in report.blocks} == reasons
    assert all(reason in str(report) for reason in reasons.values())
    nn.utils.parametrize.remove_parametrizations(model.normed, "weight")
    blocks = polyphase.accelerate(model, fuse=True).blocks
    assert str(blocks[0]).startswith("normed: not fused: own is an Own")
    fused_before = nn.Sequential(nn.ConvTranspose1d(4, 4, 2), nn.ReLU()).eval()
    assert str(polyphase.accelerate(fused_before, fuse=True).blocks[0]).startswith("0: fused with 1 (ReLU); ends there")
    again = str(polyphase.accelerate(fused_before, fuse=True).blocks[0])
    assert again == "0: not fused: it has been already, by an earlier call"
    alone = polyphase.accelerate(nn.ConvTranspose1d(4, 4, 2), fuse=True).blocks
    assert list(map(str, alone)) == ["the model itself: not fused: nothing follows it"]


ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.ReLU, nn.ReLU6, lambda: nn.LeakyReLU(0.1), lambda: nn.PReLU(4), nn.PReLU, lambda: nn.ELU(0.7), nn.GELU,
    lambda: nn.GELU("tanh"), nn.SiLU, nn.Tanh, nn.Sigmoid, lambda: nn.Hardtanh(-0.3, 0.4), nn.Hardswish,
    lambda: nn.Softplus(2.0, 10.0), nn.Mish, nn.Identity, lambda: nn.BatchNorm3d(4, affine=False),
]  # fmt: skip


@pytest.mark.sampled(12, 2)
@pytest.mark.parametrize("make", ACTIVATIONS)
def test_every_module(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = _spread(nn.Sequential(nn.ConvTranspose3d(3, 4, 2, 2), make())).eval().double()
    x = torch.randn(1, 3, 2, 3, 2, dtype=torch.float64)
    expected = model(x)
    (block,) = polyphase.accelerate(model, fuse=True).blocks
    assert block.fused == ("1",)
    torch.testing.assert_close(model(x), expected)


def test_what_is_left_alone() -> None:
    def reason(module: nn.Module) -> str:
        model = nn.Sequential(nn.ConvTranspose2d(3, 4, 2, 2), module)
        (block,) = polyphase.accelerate(model, fuse=True).blocks
        assert block.fused == ()
        return block.reason

    assert reason(nn.BatchNorm2d(4, track_running_stats=False)) == "1 has no running statistics"
    assert reason(nn.LocalResponseNorm(2)) == "1 is a LocalResponseNorm, which is not fused"
    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda *_: None)
    assert reason(hooked) == "1 has hooks"
    shared = nn.PReLU()
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 2, 2), shared, nn.Conv2d(4, 4, 1), shared)
    assert polyphase.accelerate(model, fuse=True).blocks[0].reason == "1 is called more than once"


def test_hooks_of_all_modules_and_of_gradients_see_what_pytorch_gives() -> None:
    model, x = (
        nn.Sequential(nn.ConvTranspose2d(3, 4, 2, 2), nn.BatchNorm2d(4), nn.Tanh()).eval(),
        torch.randn(1, 3, 3, 3),
    )
    plain = copy.deepcopy(model)
    assert polyphase.accelerate(model, fuse=True).blocks[0].fused == ("1", "2")
    hooks = torch.nn.modules.module
    ways: list[Callable[[nn.Module, Callable[..., None]], Any]] = [
        lambda model, hook: hooks.register_module_forward_hook(hook),
        lambda model, hook: hooks.register_module_full_backward_hook(hook),
        lambda model, hook: model[0].register_full_backward_hook(hook),  # type: ignore[index]
        lambda model, hook: model[1].register_full_backward_hook(hook),  # type: ignore[index]
    ]
    for way in ways:
        seen: dict[nn.Module, list[Tensor]] = {model: [], plain: []}
        for each, found in seen.items():
            handle = way(each, lambda module, given, result, found=found: found.append(result))
            each(x).square().sum().backward()
            handle.remove()
        assert len(seen[model]) == len(seen[plain]) > 0
        for one, other in zip(seen[model], seen[plain]):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_replicas_of_data_parallel_compute_of_their_own_parameters() -> None:
    model, x = nn.Sequential(nn.ConvTranspose2d(3, 4, 2, 2), nn.ReLU()).eval(), torch.randn(1, 3, 3, 3)
    polyphase.accelerate(model, fuse=True)
    replica: Any = model._replicate_for_data_parallel()  # type: ignore[operator]
    for name, module in model.named_children():
        replica._modules[name] = module._replicate_for_data_parallel()  # type: ignore[operator]
    replica[0].weight, replica[0].bias = torch.zeros(3, 4, 2, 2), torch.ones(4)
    assert torch.equal(replica(x), torch.ones(1, 4, 6, 6))


def test_calls_that_were_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for prepared calls: equal calls run unchecked; parameters are read each time."""
    from polyphase import runtime

    def call(x: Tensor, w: Tensor, b: Tensor | None, *constants: Any, epilogue: str) -> Callable[..., Tensor]:
        return lambda x, w, b, operands: conv_transpose_epilogue(x, w, b, operands, epilogue, *constants)

    checked = []
    original = fused_calls._known_call
    monkeypatch.setattr(fused_calls, "_by_kernels", lambda input: True)
    monkeypatch.setattr(runtime, "forward_call", call)
    monkeypatch.setattr(fused_calls, "_known_call", lambda *given: (checked.append(given), original(*given))[1])
    model = nn.Sequential(nn.ConvTranspose2d(6, 4, 2, 2), nn.BatchNorm2d(4), nn.LeakyReLU()).eval()
    plain, x = copy.deepcopy(model), torch.randn(2, 6, 3, 3)
    polyphase.accelerate(model, fuse=True)

    def changed(each: Any) -> None:
        each[1].eps = 0.5

    def replaced(each: Any) -> None:
        each[1].weight, each[1].running_mean = nn.Parameter(torch.arange(1.0, 5.0)), torch.full((4,), 0.25)

    def without(each: Any) -> None:
        each[1].bias = None

    def sloped(each: Any) -> None:
        each[2].negative_slope = 0.5

    functional.forget_calls()
    try:
        for change in (len, changed, replaced, without, sloped):
            change(model), change(plain)
            checked.clear()
            new = int(change is not replaced)
            for batch, calls in ((x, new), (x, 0), (x[:1], new), (x[:1], 0)):
                with torch.no_grad():
                    torch.testing.assert_close(model(batch), plain(batch))
                assert len(checked) == calls, (change, batch.shape)
                checked.clear()
        model(x).sum().backward()
        with torch.no_grad():
            seen: list[Any] = []

            class Recorder(torch.overrides.TorchFunctionMode):
                def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                    seen.append(function)
                    return function(*args, **(kwargs or {}))

            with Recorder():
                model(x), model(x)
            assert seen.count(fused.conv_transpose2d) == 2
            eps = model[1].eps = torch.tensor(0.25)
            plain[1].eps = 2.0
            model(x), eps.fill_(2.0)
            torch.testing.assert_close(model(x), plain(x))
            with torch.autocast("cpu", torch.bfloat16):
                torch.testing.assert_close(model(x), plain(x), rtol=2**-6, atol=2**-6)
            torch.testing.assert_close(model.double()(x.double()), plain.double()(x.double()))
    finally:
        functional.forget_calls()
    assert model[0].weight.grad is not None
