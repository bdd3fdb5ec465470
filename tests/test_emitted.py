"""Emitted files at work, with no GPU: what they launch, what they compute in the emulator, what they refuse."""

from __future__ import annotations

import itertools
import os
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import emulator
from emitted import BOXES, BY_BOXES, LAYERS, binding_on_the_cpu, emitted, emitted_layer, load, names, on_the_emulator
from polyphase.emit import support
from polyphase.emit.support import packed_tensor_map
from polyphase.jit.source import SPECIALISATION
from polyphase.plan.planner import plan
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.problem.layouts import Layouts
from polyphase.problem.sizes import typical
from polyphase.program.params import params_of
from polyphase.program.program import Program
from polyphase.program.step import Step
from polyphase.program.tensor_map import TensorMap

# Its input gradient comes in planes.
IN_PARTS = "1x16x3x4 -> 64, k=8, s=4, p=2, channels_last, bfloat16"

needs_emulator = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")


# That it launches what the package launches


def random_sizes(problem: ConvTransposeProblem, seed: int) -> list[ConvTransposeProblem]:
    """The layer on other images, from a single pixel to large ones."""
    generator = random.Random(seed)
    found = [problem]
    while len(found) < 9:
        batch, most = generator.choice([0, 1, 2, 7, 40]), generator.choice([1, 5, 40, 300])
        sizes = tuple(generator.randint(1, most) for _ in range(problem.dims))
        extra = tuple(generator.randrange(max(s, d)) for s, d in zip(problem.stride, problem.dilation))
        other = replace(problem, batch=batch, input_size=sizes, output_padding=extra)
        if min(other.output_size) > 0:
            found.append(other)
    return found


@pytest.mark.sampled(8, 2)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_it_launches_what_the_package_launches_at_any_size(arch: str) -> None:
    """Grid, block, shared memory, geometry, boxes, workspace and constants, as the package has them.

    That is: of what its planner chooses at a typical size, and of aligned tensors where the kernel is for those.
    """
    compared, by_boxes = 0, 0
    for seed, (name, text) in enumerate((name, emitted(name)) for name in names()):
        module: Any = load(text)
        on_the_emulator(module, arch)
        problem = model_problem(module)
        for other in random_sizes(problem, seed):
            for pass_ in Pass:
                expected = expected_program(other, pass_, arch, aligned=True)
                for aligned in (True, False):
                    copies = not aligned and bool(expected.main.tensor_maps)
                    if not aligned and not copies:
                        unaligned = expected_program(other, pass_, arch, aligned=False)
                        copies = unaligned.main.source != expected.main.source
                        expected = expected if copies else unaligned
                    call = module.prepare(
                        module.Pass[pass_.name],
                        module.LAYERS[0],
                        other.input_shape,
                        other.output_padding,
                        torch.device("cpu"),
                        aligned,
                    )
                    wanted = [(each.name, each.elements, getattr(torch, each.dtype)) for each in expected.buffers]
                    assert call.buffers == wanted, name
                    assert (call.copies, call.channels_last) == (copies, expected.dst_channels_last)
                    assert [operands for _, operands in call.steps] == [step.operands for step in expected.steps]
                    for (arguments, _), step in zip(call.steps, expected.steps, strict=True):
                        compare(module, arch, arguments, step)
                    compared += 1
                    by_boxes += bool(expected.main.tensor_maps)
    assert compared > 500
    assert (by_boxes > 20) == (arch == "sm_90a")


def expected_program(problem: ConvTransposeProblem, pass_: Pass, arch: str, aligned: bool) -> Program:
    device, problem = DeviceInfo.for_arch(arch), problem.of_pass(pass_)
    selected = plan(typical(problem), pass_, device, as_given=True).selected
    serving = next(each for each in selected if each.schedule.any_size(problem, pass_, device))
    layouts = replace(Layouts.of_call(problem, pass_), aligned=aligned)
    return serving.schedule.program(problem, pass_, device, layouts, serving.candidate.config)


def model_problem(module: Any) -> ConvTransposeProblem:
    return ConvTransposeProblem(**vars(module.LAYERS[0].problem) | {})


def compare(module: Any, arch: str, given: tuple[Any, ...], expected: Step) -> None:
    number, geometry, boxes, *grid, block, shared_bytes = given
    assert (tuple(grid), block, shared_bytes) == (expected.grid, expected.block, expected.shared_bytes)
    places = params_of(expected.source).tensor_maps
    assert (geometry, boxes) == (expected.params, b"".join(map(packed_tensor_map, expected.tensor_maps, places)))
    name, generated, files = module.KERNELS[arch][number]
    assert (name, files) == (expected.source.kernel, expected.source.files)
    lines = zip(
        generated[SPECIALISATION].strip().splitlines(), expected.source.specialisation.strip().splitlines(), strict=True
    )
    settled = expected.source.settled_constants
    assert all(ours == theirs or any(f" {name} =" in ours for name in settled) for ours, theirs in lines)


def test_a_size_without_a_kernel_is_an_error() -> None:
    module: Any = load(emitted_layer("1x4x8x8 -> 4, k=3, s=2", "sm_80"))
    on_the_emulator(module, "sm_80")
    shape = (1, 4, 40000, 40000)
    with pytest.raises(NotImplementedError, match="more than 32 bits: emit it again for inputs as large"):
        module.prepare(module.Pass.FORWARD, module.LAYERS[0], shape, (0, 0), torch.device("cpu"), True)


def test_another_size_rounds_as_the_emitted_one() -> None:
    """Little work would be exact in the package (the file has its true limits): the file has kernels of one kind."""
    module: Any = load(emitted_layer("16x64x32x32 -> 64, k=4, s=2, p=1", "sm_90a"))
    on_the_emulator(module, "sm_90a")
    layer, shape = module.LAYERS[0], (1, 64, 4, 4)
    assert not replace(layer.problem, batch=1, input_size=(4, 4)).uses_tf32(module.Pass.FORWARD)
    for pass_ in module.Pass:
        module.prepare(pass_, layer, shape, (0, 0), torch.device("cpu"), True)


def test_a_layer_of_such_a_size_has_both_kernels() -> None:
    layer = "1x4x40000x40000 -> 4, k=3, s=2"
    module: Any = load(emitted_layer(layer, "sm_80"))
    on_the_emulator(module, "sm_80")
    for shape in ((1, 4, 40000, 40000), (1, 4, 8, 8)):
        module.prepare(module.Pass.FORWARD, module.LAYERS[0], shape, (0, 0), torch.device("cpu"), True)


# That it computes what the original computes


def both(module: Any) -> tuple[nn.Module, nn.Module]:
    models = []
    for cls in (module.Model, module.ModelNew):
        torch.manual_seed(3)
        models.append(cls(*module.get_init_inputs()))
    return models[0], models[1]


@pytest.mark.sampled(16, 4)
@needs_emulator
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("layer", [*LAYERS[:6], BY_BOXES, IN_PARTS])
def test_it_computes_the_layer_and_its_gradients(layer: str, arch: str) -> None:
    """Small integers, whose sums are exact in any order and any of the dtypes."""
    module: Any = load(emitted(layer) if layer != IN_PARTS else emitted_layer(layer, arch))
    on_the_emulator(module, arch)
    problem = module.LAYERS[0].problem
    dtype = getattr(torch, problem.dtype)
    model, new = both(module)
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), new.parameters(), strict=True):
            assert torch.equal(parameter, other)
            parameter.copy_(torch.randint(-3, 4, parameter.shape))
            other.copy_(parameter)
    new.to(dtype)
    model.double()
    for shape in (problem.input_shape, (1, problem.in_channels, *(5, 4, 3)[: problem.dims])):
        x = torch.randint(-3, 4, shape).to(dtype)
        results = []
        for each, source in ((model, x.double()), (new, x.transpose(0, 1).contiguous().transpose(0, 1))):
            leaf = source.detach().requires_grad_()
            output = each(leaf)
            torch.manual_seed(5)
            gradient = torch.randint(-3, 4, output.shape).to(output.dtype)
            each.zero_grad()
            output.backward(gradient)
            results.append([output.detach(), leaf.grad, *(parameter.grad for parameter in each.parameters())])
        for exact, ours in zip(*results, strict=True):
            assert torch.equal(exact.to(dtype), ours)
    if layer == IN_PARTS and arch == "sm_90a":
        calls = [call for (pass_, *_), call in module._calls.items() if pass_ is module.Pass.INPUT_GRAD]
        assert any("partials" in [name for name, *_ in call.buffers] for call in calls)


@needs_emulator
def test_a_model_of_several_layers() -> None:
    module: Any = load(emitted("two layers"))
    extension = on_the_emulator(module, "sm_80")
    model, new = both(module)
    assert [type(layer).__module__ for layer in new.modules() if "Transpose" in type(layer).__name__] == [
        module.__name__
    ] * 3
    assert list(model.state_dict()) == list(new.state_dict())
    x = module.get_inputs()[0]
    torch.testing.assert_close(new(x), model(x))
    torch.testing.assert_close(new.again(x[0]), model.again(x[0]))
    torch.testing.assert_close(new.again(x, output_size=[13, 15]), model.again(x, output_size=[13, 15]))
    assert [str(layer.problem.epilogue) for layer in module.LAYERS] == ["", "", "relu"]
    assert extension.launches


@needs_emulator
def test_neighbours_of_a_thread_are_those_of_the_tensor_at_hand() -> None:
    """Of other output paddings, and of a weight that is not aligned."""
    module = load(emitted_layer("1x1x64 -> 16, k=16, s=8, p=4", "sm_90a"))
    on_the_emulator(module, "sm_90a")
    choice = module.LAYERS[0].choices["sm_90a"][module.Pass.FORWARD]
    assert (choice.schedule.name, choice.config.run) == ("direct_general", 4)
    x, weight = torch.randn(2, 1, 6), torch.randn(1, 16, 16)
    beside = torch.empty(weight.numel() + 1)[1:].view(1, 16, 16).copy_(weight)
    for w, extra in itertools.product((weight, beside), range(8)):
        found = module.run(module.Pass.FORWARD, 0, (2, 1, 6), (extra,), x, w)
        expected = torch.conv_transpose1d(x, weight, None, 8, 4, extra)
        assert torch.allclose(found, expected, atol=1e-5), (extra, w is weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer",
    ["1x32x56x56 -> 32, k=3, s=1, p=1, g=32, float16", "1x32x56x56 -> 32, k=4, s=2, g=32", "1x16x40 -> 16, k=5, g=16"],
)
def test_it_has_kernels_for_rows_of_any_length(layer: str) -> None:
    """A depthwise weight gradient loads runs of elements, as long as rows have whole ones."""
    module = load(emitted_layer(layer, "sm_90a"))
    on_the_emulator(module, "sm_90a")
    of_layer = module.LAYERS[0]
    _, channels, *_ = of_layer.problem.input_shape
    for width, extra in itertools.product(range(40, 57), range(max(of_layer.problem.stride))):
        shape = (1, channels, *(8, width)[-of_layer.problem.dims :])
        padding = (0, extra)[-of_layer.problem.dims :]
        for pass_ in module.Pass:
            module.prepare(pass_, of_layer, shape, padding, torch.device("cpu"), True)


def test_boxes_are_those_of_the_tensor_at_hand() -> None:
    """On sm_90a the extension is told what boxes to take, and tensors that boxes cannot be taken of are copied."""
    module: Any = load(emitted(BY_BOXES))
    extension = on_the_emulator(module, "sm_90a")
    new = module.ModelNew().to(torch.bfloat16)
    x = torch.randint(-3, 4, (3, 32, 9, 11)).to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
    beside = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].as_strided(x.shape, x.stride()).copy_(x)
    assert beside.data_ptr() % 16 != 0
    assert torch.equal(new(x), new(beside))
    first, second = extension.boxes
    assert first == second
    assert (first.dtype, first.sizes[0], first.strides[0]) == ("bfloat16", 32, 64)


def test_boxes_are_packed_by_the_numbers_of_the_driver() -> None:
    tensor_map = pytest.importorskip("polyphase.jit.encode_tensor_map", reason="needs cuda-bindings, but no GPU")
    assert {name: int(number) for name, number in tensor_map._DTYPES.items()} == support._DATA_TYPES
    assert {name: int(number) for name, number in tensor_map._SWIZZLES.items()} == support._SWIZZLES
    for dtype, tf32, number in (("float32", True, 11), ("float32", False, 7), ("float16", True, 6)):
        steps = 1, 1, 2, 8, 1
        boxes = TensorMap(dtype, (1, 2, 3, 4, 5), (6, 7, 8, 2**39), (10, 11, 12, 13, 14), 64, tf32, 1, steps)
        spans = 10, 11, 23, 97, 14
        expected = (*range(1, 9), 2**39, *spans, *steps, number, 2, 1, 256)
        assert struct.unpack(BOXES, packed_tensor_map(boxes, 256)) == expected


@needs_emulator
@pytest.mark.slow
def test_the_binding_passes_on_what_it_is_given(small: Any, tmp_path: Path) -> None:
    """The C++ between Python and a launch, built for the CPU: pointers, a missing tensor, bytes, sizes, errors."""
    binding = binding_on_the_cpu(small.BINDING, tmp_path, 13000)
    first, second = torch.rand(3), torch.rand(4)
    binding.launch(3, b"abcd", b"", 2**31 - 1, 5, 6, 256, 1024, [first, None, second])
    assert binding.launched() == [
        *(3, 2**31 - 1, 5, 6, 256, 1, 1, 1024, 7),
        *(first.data_ptr(), 0, second.data_ptr()),
    ]
    assert binding.params() == b"abcd"
    assert binding.encoded() == []
    with pytest.raises(RuntimeError, match="kernel 2 takes 2 tensors and 4 bytes, given 1 tensors and 3 bytes"):
        binding.launch(2, b"abc", b"", 1, 1, 1, 32, 0, [first])
    with pytest.raises(RuntimeError, match="all tensors must be on one CUDA device, got cpu and meta"):
        binding.launch(2, b"abcd", b"", 1, 1, 1, 32, 0, [first, torch.empty(3, device="meta")])
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        binding.launch(2, b"abcd", b"", 1, 1, 1, 32, 13, [first, second])

    geometry, boxes = (
        bytes(range(196)),
        TensorMap("float32", (9, 8, 7, 6, 2**33), (16, 32, 48, 2**38), (4,) * 5, 64, True),
    )
    boxes = replace(boxes, steps=(1, 2, 1, 1, 1))
    binding.launch(1, geometry, packed_tensor_map(boxes, 64), 1, 1, 1, 32, 0, [first])
    assert binding.encoded() == [
        *(1, 0, 11, 5, first.data_ptr()),
        *(*boxes.sizes, *boxes.strides, *boxes.spans, *boxes.steps),
        *(0, 2, 2, 0),
    ]
    assert binding.params() == geometry[:64] + b"m" * 128 + geometry[192:]
    assert geometry == bytes(range(196))
    with pytest.raises(RuntimeError, match=r"boxes are .* 128 bytes each, given 127"):
        binding.launch(1, geometry, packed_tensor_map(boxes, 64)[1:], 1, 1, 1, 32, 0, [first])
    with pytest.raises(RuntimeError, match=r"a tensor map takes 128 bytes from 128 on, and .* parameter has 196"):
        binding.launch(1, geometry, packed_tensor_map(boxes, 128), 1, 1, 1, 32, 0, [first])
    refused = packed_tensor_map(boxes, 64)[:-12] + struct.pack("<3I", 4, 0, 64)
    with pytest.raises(RuntimeError, match=r"no tensor map, error 1: data type 11, sizes \[9, .*\], .* swizzle 4, add"):
        binding.launch(1, geometry, refused, 1, 1, 1, 32, 0, [first])


@needs_emulator
@pytest.mark.slow
def test_the_binding_is_built_with_cuda_11(small: Any, tmp_path: Path) -> None:
    binding = binding_on_the_cpu(small.BINDING, tmp_path, 11070)
    boxes = packed_tensor_map(TensorMap("float16", (8,) * 5, (16,) * 4, (8,) * 5, 16, False), 0)
    binding.launch(1, bytes(196), b"", 1, 1, 1, 32, 0, [torch.rand(3)])
    with pytest.raises(RuntimeError, match="knows no tensor maps: both must be of CUDA 12 or newer"):
        binding.launch(1, bytes(196), boxes, 1, 1, 1, 32, 0, [torch.rand(3)])


# What it refuses


@pytest.fixture(scope="module")
def small() -> Any:
    return load(emitted_layer("2x4x6x6 -> 4, k=3", "sm_80", "sm_90a"))


def test_cpu_tensors_are_refused(small: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"the input is on cpu: .* only on CUDA devices"):
        small.ModelNew()(torch.rand(2, 4, 6, 6))


class Pretended:
    """A tensor that says it is elsewhere, or of another kind."""

    def __init__(self, tensor: torch.Tensor, device: str = "cuda:0") -> None:
        self.tensor, self.device = tensor, torch.device(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


@pytest.mark.parametrize(
    ("input", "weight", "error", "message"),
    [
        (torch.rand(2, 4, 6, 6).half(), torch.rand(4, 4, 3, 3), NotImplementedError, "input is torch.float16.*--dtype"),
        (torch.rand(2, 4, 6, 6), torch.rand(4, 4, 3, 3).double(), NotImplementedError, "weight is torch.float64"),
        (
            torch.rand(2, 5, 6, 6),
            torch.rand(4, 4, 3, 3),
            RuntimeError,
            r"\(N, 4, \*spatial\).*got shape \(2, 5, 6, 6\)",
        ),
        (torch.rand(2, 4, 6), torch.rand(4, 4, 3, 3), RuntimeError, "2 spatial sizes"),
        (torch.rand(2, 4, 0, 6), torch.rand(4, 4, 3, 3), RuntimeError, "at least 1"),
    ],
)
def test_wrong_tensors_are_refused(
    small: Any, input: torch.Tensor, weight: torch.Tensor, error: type[Exception], message: str
) -> None:
    class Layer:
        bias = None

    Layer.weight = Pretended(weight)  # type: ignore[attr-defined]
    with pytest.raises(error, match=message):
        small.check(Layer, Pretended(input), small.LAYERS[0].problem)
    with pytest.raises(RuntimeError, match="on one device, got cuda:1 and cuda:0"):
        small.check(Layer, Pretended(torch.rand(2, 4, 6, 6), "cuda:1"), small.LAYERS[0].problem)


def test_other_architectures_are_refused(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    for capability, arch in (((8, 0), "sm_80"), ((9, 0), "sm_90a")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert small.arch_of(device) == arch
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(NotImplementedError, match=r"kernels for sm_80, sm_90a, and cuda:0 is sm_86: .* --arch"):
        small.arch_of(device)


def test_other_layers_are_refused() -> None:
    module: Any = load(emitted("two layers"))
    with pytest.raises(NotImplementedError, match=r"no kernels for body.0, ConvTranspose2d\(5, 4"):
        module.ModelNew(5)


@pytest.mark.parametrize("before", [None, "Hopper"])
def test_it_is_built_for_its_architecture_alone(
    small: Any, before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(
        small, "load_inline", lambda **options: asked.append((options["name"], os.environ["TORCH_CUDA_ARCH_LIST"]))
    )
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    if before is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", before)
    for arch in ("sm_80", "sm_90a", "sm_80"):
        small.build(arch)
    assert [arch for _, arch in asked] == ["8.0", "9.0a"]
    assert len({name for name, _ in asked}) == 2
    assert os.environ.get("TORCH_CUDA_ARCH_LIST") == before
    small.build.cache_clear()


@needs_emulator
def test_it_has_first_derivatives_only(small: Any) -> None:
    module: Any = load(emitted_layer("2x4x6x6 -> 4, k=3", "sm_80"))
    on_the_emulator(module, "sm_80")
    x = torch.rand(1, 4, 3, 3, requires_grad=True)
    with pytest.raises(NotImplementedError, match="only first derivatives"):
        torch.autograd.grad(module.ModelNew()(x).sum(), x, create_graph=True)
