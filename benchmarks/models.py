"""Whole models on one GPU: PyTorch, polyphase's layers, and layers that compute what stands behind them.

    PYTHONPATH=src python benchmarks/models.py                  # writes benchmarks/results/models.csv

Models are written below from their published configurations, with random weights, or are those of `transformers`, where
that is installed (`library_models.py`). Each runs inference at batch 1 and a large one, and a training step (forward,
and backward of the mean square) at the large one: eager, as a CUDA graph, and by `torch.compile`; with PyTorch's
layers, accelerated, and accelerated with `fuse=True` (compiled: within `enable_compile_fusion`). Outputs, and gradients
of a step, are compared with float64 on two samples; what is further from it than PyTorch's by more than its dtype
allows is ``wrong``, and the exit status 1. Kernels are compiled before that, and nothing is begun after ``--seconds``.
"""

from __future__ import annotations

import importlib.util
import itertools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from blocks import CONTESTANTS, dcgan, pose, sam
from library_models import LIBRARY_MODELS
from shared import (
    ROOT,
    compile_kernels,
    compiled,
    error,
    fill_inductor,
    norms_met,
    problems_met,
    sources_of,
    timed,
    write,
)
from torch import Tensor, nn

import polyphase
from polyphase.bench import environment
from polyphase.bench.report import make_console
from polyphase.bench.timing import Timer
from polyphase.jit.launcher import quiet
from polyphase.problem import Pass
from polyphase.problem.device import DeviceInfo

ALL = (Pass.FORWARD, Pass.INPUT_GRAD, Pass.WEIGHT_GRAD)


@dataclass
class Row:
    """A model in one dtype, one way of running it. Milliseconds are medians of one call, the cache flushed before."""

    model: str
    dtype: str
    run: str  # inference, or a training step
    batch: int
    mode: str  # eager, graph, compile
    status: str = ""
    reason: str = ""
    torch_ms: float | None = None
    swapped_ms: float | None = None
    fused_ms: float | None = None
    swapped_over_torch: float | None = None
    fused_over_torch: float | None = None
    torch_error: float | None = None
    swapped_error: float | None = None
    fused_error: float | None = None
    fused_chains: str = ""


@dataclass(frozen=True)
class Model:
    """How a model is built, its large batch, and the shapes of its inputs without the batch."""

    build: Callable[[], nn.Module]
    batch: int
    inputs: tuple[tuple[int, ...], ...]


class Pix2Pix(nn.Module):
    """The generator of pix2pix for 256 pixels: (N, 3, 256, 256) to the same."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 512, 512, 512, 512)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 4, 2, 1) for a, b in zip((3, *widths), widths))
        self.down_norms = nn.ModuleList(nn.BatchNorm2d(each) for each in widths)
        outputs = (3, *widths)[-2::-1]
        given = (widths[-1], *(2 * each for each in outputs[:-1]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 4, 2, 1) for a, b in zip(given, outputs))
        self.up_norms = nn.ModuleList(nn.BatchNorm2d(each) for each in outputs[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """The image."""
        skips = []
        for place, (layer, norm) in enumerate(zip(self.down, self.down_norms)):
            x = layer(F.leaky_relu(x, 0.2) if place else x)
            x = norm(x) if 0 < place < len(self.down) - 1 else x
            skips.append(x)
        for layer, norm, skip in zip(self.up, self.up_norms, skips[-2::-1]):
            x = torch.cat([skip, norm(layer(F.relu(x)))], 1)
        return torch.tanh(self.up[-1](F.relu(x)))


class UNet(nn.Module):
    """U-Net in two or three dimensions: widths double by default, two convolutions at each level."""

    def __init__(self, dims: int, channels: int, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        convolution, up = getattr(nn, f"Conv{dims}d"), getattr(nn, f"ConvTranspose{dims}d")
        norm = nn.BatchNorm2d if dims == 2 else partial(nn.InstanceNorm3d, affine=True)

        def twice(a: int, b: int, stride: int = 1) -> nn.Module:
            layers: list[nn.Module] = []
            for given, step in ((a, stride), (b, 1)):
                layers += [convolution(given, b, 3, step, 1), norm(b), nn.LeakyReLU(0.01, inplace=True)]
            return nn.Sequential(*layers)

        pairs = list(itertools.pairwise(widths))
        self.first = twice(channels, widths[0])
        self.down = nn.ModuleList(twice(a, b, 2) for a, b in pairs)
        self.up = nn.ModuleList(up(b, a, 2, 2) for a, b in reversed(pairs))
        self.merge = nn.ModuleList(twice(2 * a, a) for a, _ in reversed(pairs))
        self.last = convolution(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, *size) to (N, classes, *size)."""
        skips = [self.first(x)]
        for down in self.down:
            skips.append(down(skips[-1]))
        x = skips.pop()
        for up, merge in zip(self.up, self.merge):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        result: Tensor = self.last(x)
        return result


class HiFiGAN(nn.Module):
    """The generator of HiFi-GAN, V1, its weight norms removed: (N, 80, frames) to (N, 1, 256·frames)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(80, 512, 7, 1, 3)
        rates = ((8, 16), (8, 16), (2, 4), (2, 4))
        sizes = [512 >> i for i in range(5)]
        self.up = nn.ModuleList(
            nn.ConvTranspose1d(a, b, k, s, (k - s) // 2) for a, b, (s, k) in zip(sizes, sizes[1:], rates)
        )
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                nn.ModuleList(nn.Conv1d(size, size, k, 1, d * (k - 1) // 2, d) for step in (1, 3, 5) for d in (step, 1))
                for k in (3, 7, 11)
            )
            for size in sizes[1:]
        )
        self.last = nn.Conv1d(sizes[-1], 1, 7, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        """The waveform."""
        x = self.first(x)
        for up, blocks in zip(self.up, self.blocks):
            x = up(F.leaky_relu(x, 0.1))
            results = []
            modules: Any = blocks
            for block in modules:
                y = x
                for one, other in zip(block[::2], block[1::2]):
                    y = y + other(F.leaky_relu(one(F.leaky_relu(y, 0.1)), 0.1))
                results.append(y)
            x = sum(results[1:], results[0]) / len(results)
        return torch.tanh(self.last(F.leaky_relu(x)))


class Snake(nn.Module):
    """x + sin²(αx) / α, α for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, L)."""
        return x + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * x).pow(2)


class Residual(nn.Module):
    """A residual unit of DAC."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        first = nn.Conv1d(channels, channels, 7, 1, 3 * dilation, dilation)
        self.block = nn.Sequential(Snake(channels), first, Snake(channels), nn.Conv1d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, L)."""
        y: Tensor = self.block(x)
        return x + y


def dac() -> nn.Module:
    """The decoder of DAC at 44 kHz: (N, 1024, frames) to (N, 1, 512·frames)."""
    layers: list[nn.Module] = [nn.Conv1d(1024, 1536, 7, 1, 3)]
    for place, s in enumerate((8, 8, 4, 2)):
        a, b = 1536 >> place, 1536 >> (place + 1)
        layers += [Snake(a), nn.ConvTranspose1d(a, b, 2 * s, s, s // 2), *(Residual(b, d) for d in (1, 3, 9))]
    return nn.Sequential(*layers, Snake(96), nn.Conv1d(96, 1, 7, 1, 3), nn.Tanh())


def fsrcnn() -> nn.Module:
    """FSRCNN, four times."""
    layers: list[nn.Module] = [nn.Conv2d(1, 56, 5, 1, 2), nn.PReLU(56), nn.Conv2d(56, 12, 1), nn.PReLU(12)]
    for _ in range(4):
        layers += [nn.Conv2d(12, 12, 3, 1, 1), nn.PReLU(12)]
    return nn.Sequential(*layers, nn.Conv2d(12, 56, 1), nn.PReLU(56), nn.ConvTranspose2d(56, 1, 9, 4, 4, 3))


def mask_head() -> nn.Module:
    """Mask R-CNN's mask branch: four convolutions and the predictor; a sample is 25 boxes."""
    layers: list[nn.Module] = [nn.Flatten(0, 1)]
    for _ in range(4):
        layers += [nn.Conv2d(256, 256, 3, 1, 1), nn.ReLU(inplace=True)]
    predictor = (nn.ConvTranspose2d(256, 256, 2, 2), nn.ReLU(inplace=True), nn.Conv2d(256, 91, 1))
    return nn.Sequential(*layers, *predictor, nn.Unflatten(0, (-1, 25)))


class Neck(nn.Module):
    """PointPillars' neck: three scales, each brought to the first one's size by a layer, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(
            nn.Sequential(nn.ConvTranspose2d(c, 128, s, s, bias=False), nn.BatchNorm2d(128, 1e-3), nn.ReLU())
            for c, s in ((64, 1), (128, 2), (256, 4))
        )

    def forward(self, *scales: Tensor) -> Tensor:
        """(N, 64, H, W), (N, 128, H/2, W/2), (N, 256, H/4, W/4) to (N, 384, H, W)."""
        return torch.cat([up(x) for up, x in zip(self.up, scales)], 1)


MODELS: dict[str, Model] = {
    "DCGAN": Model(dcgan, 256, ((100, 1, 1),)),
    "SimpleBaseline head": Model(pose, 64, ((2048, 8, 6),)),
    "Mask R-CNN branch": Model(mask_head, 16, ((25, 256, 14, 14),)),
    "SAM upscaling": Model(sam, 16, ((256, 64, 64),)),
    "HiFi-GAN": Model(HiFiGAN, 8, ((80, 128),)),
    "U-Net": Model(partial(UNet, 2, 3, (64, 128, 256, 512, 1024), 2), 8, ((3, 256, 256),)),
    "pix2pix": Model(Pix2Pix, 16, ((3, 256, 256),)),
    "DAC decoder": Model(dac, 4, ((1024, 64),)),
    "FSRCNN": Model(fsrcnn, 16, ((1, 128, 128),)),
    "PointPillars neck": Model(Neck, 4, ((64, 248, 216), (128, 124, 108), (256, 62, 54))),
    "nnU-Net 3-D": Model(partial(UNet, 3, 1, (32, 64, 128, 256, 320), 3), 2, ((1, 96, 96, 96),)),
}

if importlib.util.find_spec("transformers") is not None:
    MODELS |= {name: Model(build, batch, (shape,)) for name, (build, batch, shape) in LIBRARY_MODELS.items()}


def built(model: Model) -> nn.Module:
    """The model with random weights, and statistics as training leaves them, in evaluation mode."""
    torch.manual_seed(0)
    module = model.build()
    for each in module.modules():
        if isinstance(each, nn.BatchNorm2d):
            each.register_buffer("running_mean", torch.rand(each.num_features) - 0.5)
            each.register_buffer("running_var", torch.rand(each.num_features) + 0.5)
    return module.eval()


def shapes(model: Model, batch: int) -> list[tuple[int, ...]]:
    """The inputs' shapes."""
    return [(batch, *shape) for shape in model.inputs]


def sources(name: str, dtype: torch.dtype, device: DeviceInfo, runs: list[str]) -> list[Any]:
    """The kernels that a model's swapped and fused layers will ask for, found on meta tensors."""
    found: list[Any] = []
    model = MODELS[name]
    for batch in {1, 2, model.batch} if "inference" in runs else {2, model.batch}:  # 2: of the check
        inputs = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes(model, batch)]
        for fusing in (False, True):
            module = built(model).to("meta", dtype)
            polyphase.accelerate(module, fuse=fusing)
            met = problems_met(partial(module, *inputs), dtype)
            training = "training" in runs and not fusing and batch == model.batch
            found += sources_of(met, device, ALL if training else ALL[:1])
            if "training" in runs and batch == model.batch:
                found += norms_met(partial(step, module.train(), *inputs))
    return found


def step(module: nn.Module, *inputs: Tensor) -> Tensor:
    """A training step without the optimizer's."""
    for parameter in module.parameters():
        parameter.grad = None
    loss: Tensor = module(*inputs).float().square().mean()
    loss.backward()
    return loss


def outcome(module: nn.Module, run: str, inputs: list[Tensor]) -> Tensor:
    """What a model's output is in evaluation mode, or its parameters' gradients after a training step, one by one."""
    if run == "inference":
        with torch.inference_mode():
            result: Tensor = module(*inputs)
        return result
    step(module.train(), *inputs)
    return torch.cat([each.grad.flatten() for each in module.parameters() if each.grad is not None])


def run_of(module: nn.Module, run: str, mode: str) -> tuple[Callable[..., Any], str]:
    """What is timed, and its mode; of a training step the model is compiled, and not what calls backward."""
    if run == "inference":
        return module, mode
    if "compile" not in mode:
        return partial(step, module), mode
    torch._dynamo.reset()
    return partial(step, torch.compile(module, fullgraph=True)), mode.replace("compile", "eager")  # type: ignore[arg-type]


def contestants(model: Model, dtype: torch.dtype) -> tuple[dict[str, nn.Module], str]:
    """The model by PyTorch's layers, by polyphase's, and fused, and the chains that are fused."""
    found = {who: built(model).to("cuda", dtype) for who in CONTESTANTS}
    polyphase.accelerate(found["swapped"])
    blocks = polyphase.accelerate(found["fused"], fuse=True).blocks
    return found, "; ".join(str(block).partition(";")[0] for block in blocks if block.fused)


def operands(model: Model, dtype: torch.dtype, batch: int) -> list[Tensor]:
    """A model's inputs."""
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(shape, device="cuda", generator=generator).to(dtype) for shape in shapes(model, batch)]


def compile_one(job: tuple[str, str, str, int, str]) -> None:
    """Compile a model in a dtype, a run, a batch and by a contestant with Inductor, for its cache."""
    name, text, run, batch, who = job
    dtype = getattr(torch, text)
    module = contestants(MODELS[name], dtype)[0][who].train(run == "training")
    inputs = operands(MODELS[name], dtype, batch)
    with quiet(), torch.inference_mode(run == "inference"):
        if run == "inference":
            compiled(module, inputs, who == "fused")
        else:
            run_of(module, run, "compile")[0](*inputs)
    torch.cuda.empty_cache()


def measured(
    name: str, model: Model, dtype: torch.dtype, run: str, batch: int, timer: Timer, modes: list[str]
) -> list[Row]:
    """A model's rows of one batch."""
    module, text = built(model), str(dtype).removeprefix("torch.")
    inputs = operands(model, dtype, batch)
    few, (models, chains) = [each[:2] for each in inputs], contestants(model, dtype)
    wanted = outcome(module.to("cuda").double(), run, [each.double() for each in few])
    errors = {who: error(outcome(each, run, few), wanted) for who, each in models.items()}
    del module, wanted
    allowed = 2 * errors["torch"] + 4 * torch.finfo(dtype).eps
    wrong = [who for who in models if not errors[who] <= allowed]
    rows = []
    for mode in modes:
        row = Row(name, text, run, batch, mode, "wrong" if wrong else "ok", ", ".join(wrong), fused_chains=chains)
        row.torch_error, row.swapped_error, row.fused_error = (errors.get(who) for who in CONTESTANTS)
        times: dict[str, float] = {}
        for who, each in models.items():
            try:
                with torch.inference_mode(run == "inference"):
                    call, how = run_of(each.train(run == "training"), run, mode)
                    times[who] = timed(call, inputs, how, timer, who == "fused")
            except Exception as failure:
                row.status, row.reason = "failed", f"{row.reason} {who}: {environment.first_line(failure)}".strip()
            for parameter in each.parameters():
                parameter.grad = None
        row.torch_ms, row.swapped_ms, row.fused_ms = (times.get(who) for who in CONTESTANTS)
        if row.torch_ms and row.swapped_ms:
            row.swapped_over_torch = row.torch_ms / row.swapped_ms
        if row.torch_ms and row.fused_ms:
            row.fused_over_torch = row.torch_ms / row.fused_ms
        rows.append(row)
    return rows


def shown(row: Row) -> str:
    """A row on the screen."""
    times = " ".join("       -" if ms is None else f"{ms:8.3f}" for ms in (row.torch_ms, row.swapped_ms, row.fused_ms))
    gains = " ".join("     -" if x is None else f"{x:4.2f} x" for x in (row.swapped_over_torch, row.fused_over_torch))
    return (
        f"{row.model:20} {row.dtype:9} {row.run:9} {row.batch:4} {row.mode:8} {times} {gains} {row.status} {row.reason}"
    )


def main(
    csv_path: Annotated[Path, typer.Option("--csv")] = ROOT / "benchmarks" / "results" / "models.csv",
    only: Annotated[str, typer.Option(help="Models whose names contain one of these, comma-separated.")] = "",
    dtypes: Annotated[str, typer.Option(help="Comma-separated.")] = "float32,bfloat16",
    runs: Annotated[str, typer.Option(help="Comma-separated.")] = "inference,training",
    modes: Annotated[str, typer.Option(help="Comma-separated.")] = "eager,graph,compile",
    batches: Annotated[str, typer.Option(help="Of inference: 1, large, or both, comma-separated.")] = "1,large",
    seconds: Annotated[float, typer.Option(help="No model is begun after so many.")] = 450.0,
) -> None:
    """Compile, check and time."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("models are timed on an NVIDIA GPU, and PyTorch finds none here")
    warnings.simplefilter("ignore")
    started, console = time.perf_counter(), make_console()
    chosen = {name: each for name, each in MODELS.items() if any(part in name for part in only.split(","))}
    kinds, asked = [getattr(torch, dtype) for dtype in dtypes.split(",")], runs.split(",")
    device = DeviceInfo.of(torch.device("cuda", 0))
    count = compile_kernels(sources, [(*each, device, asked) for each in itertools.product(chosen, kinds)], device.arch)
    console.print(f"{count} kernels after {time.perf_counter() - started:.0f} s", markup=False)
    rounds = [
        (name, dtype, run, batch)
        for name, dtype, run in itertools.product(chosen, kinds, asked)
        for batch in ({"1": 1}.get(which, chosen[name].batch) for which in batches.split(","))
        if run == "inference" or batch == chosen[name].batch
    ]
    if "compile" in modes:
        jobs = [
            (name, str(dtype).removeprefix("torch."), run, batch, who)
            for name, dtype, run, batch in rounds
            for who in CONTESTANTS
            if run == "inference" or who != "fused"  # which are compiled as what is swapped is
        ]
        fill_inductor(compile_one, jobs, seconds / 3)
        console.print(f"Inductor's cache after {time.perf_counter() - started:.0f} s", markup=False)
    timer, rows = Timer(torch.device("cuda"), budget_seconds=0.1), list[Row]()
    for name, dtype, run, batch in rounds:
        if time.perf_counter() - started > seconds:
            console.print(f"no time left for {name}, {dtype}, {run} at batch {batch}", markup=False)
            continue
        with quiet():
            found = measured(name, chosen[name], dtype, run, batch, timer, modes.split(","))
        rows += found
        for row in found:
            console.print(shown(row), markup=False)
        write(csv_path, rows)
        torch.cuda.empty_cache()
    if any(row.status != "ok" for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
