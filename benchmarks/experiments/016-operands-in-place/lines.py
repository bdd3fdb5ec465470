"""Times weight gradients whose planes begin at lines of memory: ``python lines.py --csv FILE``; needs a Hopper GPU.

For each layer the best config by forecast of `tap_gemm_wgrad_tma` of each way to lay out positions (`ways.py`), with
channels of planes whole pieces of 16 bytes apart, as before; whole lines of 128 bytes; and rows, too, where taps shift
by rows and that adds few elements.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from ways import DTYPES, OWN, WAYS, WEIGHT_GRAD, Way, rows, way

from polyphase.bench.layers import parse_layer
from polyphase.bench.timing import Timer
from polyphase.jit.ahead import compile_ahead
from polyphase.problem import ConvTransposeProblem
from polyphase.problem.device import DeviceInfo
from polyphase.problem.integers import round_up
from polyphase.problem.layouts import Layouts
from polyphase.schedules.tap_gemm import flat, wgrad_tma

LAYERS = """
16x1024x8282 -> 256, k=3, s=2
1x768x197x197 -> 96, k=5, s=2
16x320x26x26 -> 320, k=(3, 8), s=(3, 8)
4x320x112x224 -> 96, k=4, s=2, p=1
2x256x125x251 -> 96, k=5, s=2, p=2
3x384x77x501 -> 192, k=4, s=2, p=1
2x128x31x45x61 -> 64, k=3, s=2
32x512x173 -> 512, k=4, s=2, p=1
"""
_PLANES, _SHARE = flat.FlatProduct.planes.func, flat._WHOLE_LINES


def main() -> None:
    """Measure all layers in TF32 and bfloat16."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    options, start = parser.parse_args(), time.monotonic()
    torch.backends.cudnn.allow_tf32 = True
    timer = Timer(torch.device("cuda", 0), repetitions=9, budget_seconds=0.03)
    device = DeviceInfo.of(timer.device)
    layers = [parse_layer(line) for line in LAYERS.strip().splitlines()]
    problems = [replace(each, dtype=dtype, tf32=dtype == "float32") for each in layers for dtype in DTYPES]
    found = {problem: list(programs(problem, device)) for problem in problems}
    compile_ahead(
        [source for each in found.values() for _, _, program in each for source in program.sources], device.arch
    )
    print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    with options.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["gpu", "layer", "way", "config", "forecast_us", "torch_us", "error", "all_us", "steps_us"])
        for problem in problems:
            for row in rows(timer, problem, found[problem]):
                writer.writerow([torch.cuda.get_device_name(), problem, *row])
                print(*row[:1], *row[2:], sep=" | ", flush=True)
            file.flush()
            torch.cuda.empty_cache()


def programs(problem: ConvTransposeProblem, device: DeviceInfo) -> Iterator[Way]:
    """By way and alignment; where alignment changes nothing, once."""
    layouts, seen = Layouts.dense(problem), set()
    configs = OWN.configs(problem, WEIGHT_GRAD, device)
    for name, of_way in WAYS.items():
        mine = [config for config in configs if way(config) == of_way]
        costs = [(OWN.cost(problem, WEIGHT_GRAD, device, layouts, config), config) for config in mine]
        for _, config in sorted((cost[0], config) for cost, config in costs if cost is not None)[:1]:
            for alignment in ("pieces", "lines", "rows of lines"):
                align(alignment)
                cost = OWN.cost(problem, WEIGHT_GRAD, device, layouts, config)
                program = OWN.program(problem, WEIGHT_GRAD, device, layouts, config)
                if cost is not None and program.steps not in seen:
                    seen.add(program.steps)
                    yield f"{name}, {alignment}", f"{1e6 * cost[0]:.1f} | {OWN.name} {tuple(config)}", program
    align("rows of lines")


def align(to: str) -> None:
    """Planes are laid out so from now on."""

    def planes(product: flat.FlatProduct) -> tuple[flat.Flattened, ...]:
        unit = product.product.piece if to == "pieces" else product.depth
        return tuple(each._replace(pitch=round_up(max(1, each.positions), unit)) for each in _PLANES(product))

    flat.FlatProduct.planes = cached_property(planes)
    flat.FlatProduct.planes.__set_name__(flat.FlatProduct, "planes")
    flat._WHOLE_LINES = _SHARE if to == "rows of lines" else 0.0
    for forget in (flat.flat_product, wgrad_tma._slices, wgrad_tma._splits):
        forget.cache_clear()


if __name__ == "__main__":
    main()
