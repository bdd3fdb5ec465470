"""PyTorch's error against float64, where TF32 is allowed: the layers of all suites at several batches, and random ones.

python benchmarks/experiments/011-where-pytorch-rounds/probe.py --csv probe.csv
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from polyphase.bench.environment import facts
from polyphase.bench.layers import every_layer
from polyphase.bench.random_layers import notation, random_layers
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.problem import FEW_CHANNELS

#: Larger layers take too long in float64.
MOST_GFLOP = 60.0


def layers(seed: int) -> list[ConvTransposeProblem]:
    """Contiguous float32 layers, each once, in random order."""
    found = [named.problem for named in every_layer()]
    found += [replace(problem, batch=batch) for problem in found for batch in (1, 2, 4)]
    for dims, count in ((1, 60), (2, 120), (3, 160)):
        found += [named.problem for named in random_layers(count, seed, dims, least_seconds=2e-6)]
    unique = {notation(each): each for each in found}
    few = [each for each in unique.values() if each.flops < 1e9 * MOST_GFLOP and each.bytes < 4e9]
    random.Random(seed).shuffle(few)
    return [replace(each, tf32=True) for each in few]


def volumes(seed: int) -> list[ConvTransposeProblem]:
    """Those of which too few are known: volumes in groups without a stride, and of many taps and few positions."""
    found = []
    for named in random_layers(2500, seed, 3, least_seconds=2e-6):
        problem, phases = named.problem, math.prod(named.problem.stride)
        few = min(problem.in_channels_per_group, problem.out_channels_per_group)
        grouped = problem.groups > 1 and phases == 1 and few >= 4
        many_taps = problem.groups == 1 and 1 < phases <= 12 and problem.taps > 64 and few >= FEW_CHANNELS
        if (grouped or many_taps) and problem.flops < 1e9 * MOST_GFLOP:
            found.append(replace(problem, tf32=True))
    return found


def of_few_channels(seed: int) -> list[ConvTransposeProblem]:
    """Layers of one group and few channels on one side, without a stride or volumes; and volumes with a stride of 3."""
    draw = random.Random(seed)
    found = []
    for _ in range(120):
        dims, kernel = draw.choice((1, 2, 2)), draw.choice((1, 2, 3, 3, 4, 5, 7, 9))
        size = draw.choice((4000, 16384, 65536) if dims == 1 else (33, 64, 128, 167))
        shape = draw.choice((1, 2, 4, 8, 16)), draw.choice((1, 2, 3, 4, 8, 12, 15)), *(size,) * dims
        padding, dilation = draw.choice((0, kernel // 2)), draw.choice((1, 1, 1, 2))
        outputs = draw.choice((16, 64, 100, 256, 512))
        found.append(ConvTransposeProblem.make(shape, outputs, kernel, padding=padding, dilation=dilation))
    for _ in range(60):
        shape = (
            draw.choice((1, 2, 4, 8)),
            draw.choice((16, 64, 96, 256)),
            *(draw.choice((4, 6, 8, 12, 16, 24, 32)),) * 3,
        )
        kernel, padding = draw.choice((3, 3, 3, 4, 5)), draw.choice((0, 0, 1))
        found.append(ConvTransposeProblem.make(shape, draw.choice((16, 32, 128, 300)), kernel, 3, padding))
    for named in random_layers(1500, seed, 3, least_seconds=2e-6):
        if named.problem.groups == 1 and min(named.problem.in_channels, named.problem.out_channels) < FEW_CHANNELS:
            found.append(named.problem)
    return [replace(each, tf32=True) for each in found if each.flops < 1e9 * MOST_GFLOP / 3]


def errors(problem: ConvTransposeProblem) -> Iterator[tuple[Pass, float]]:
    """PyTorch's relative error in the first image, of the forward pass and the input gradient."""
    call = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}[problem.dims]
    x = torch.randn(problem.input_shape, device="cuda", requires_grad=True)
    weight = torch.randn(problem.weight_shape, device="cuda")
    grad = torch.randn(problem.output_shape, device="cuda")

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return call(
            x, weight, None, problem.stride, problem.padding, problem.output_padding, problem.groups, problem.dilation
        )

    def error(found: Tensor, wanted: Tensor) -> float:
        return float((found[0].double() - wanted[0]).norm() / wanted.norm())

    first = x.detach()[:1].double().requires_grad_()
    wanted, found = run(first, weight.double()), run(x, weight)
    yield Pass.FORWARD, error(found, wanted)
    gradient: Callable[..., tuple[Tensor, ...]] = torch.autograd.grad
    yield Pass.INPUT_GRAD, error(gradient(found, x, grad)[0], gradient(wanted, first, grad[:1].double())[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--volumes", action="store_true", help="only those of which few are known")
    parser.add_argument("--few-channels", action="store_true", help="only those of few channels, and of stride 3")
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = True
    gpu, start = facts("cuda")["gpu"], time.monotonic()
    with options.csv.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["gpu", "problem", "layout", "pass", "dtype", "torch_error"])
        chosen = volumes if options.volumes else of_few_channels if options.few_channels else layers
        for problem in chosen(options.seed):
            if time.monotonic() - start > options.seconds:
                break
            for pass_, error in errors(problem):
                layer = notation(replace(problem, tf32=False))
                writer.writerow([gpu, layer, "nchw", pass_.value, "float32", f"{error:.3g}"])


if __name__ == "__main__":
    main()
