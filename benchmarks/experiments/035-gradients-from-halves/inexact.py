"""Times gradients whose float16 copies are exact, and inexact ones: ``python inexact.py --csv FILE``. Needs a GPU.

Milliseconds, as `bench` measures them, of layers of the record, and PyTorch's by default. Inexact data has a channel
and pixels of the output gradient that are 10⁻¹² times as large.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import replace

import torch

from polyphase.bench.contestants import TorchVariant, polyphase_call, torch_call, torch_flags
from polyphase.bench.layers import Suite, suite
from polyphase.bench.operands import make_operands
from polyphase.bench.timing import Timer
from polyphase.plan.planner import plan
from polyphase.problem import Pass
from polyphase.problem.device import DeviceInfo

LAYERS = ("KernelBench 69", "KernelBench 65", "DCGAN generator, 4th", "U-Net, deepest up", "SimpleBaseline", "HiFi-GAN")
DEVICE = torch.device("cuda", 0)


def main() -> None:
    """Prints and writes the times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv", required=True)
    path = parser.parse_args().csv
    timer, info, rows = Timer(DEVICE, repetitions=10, budget_seconds=0.1), DeviceInfo.of(DEVICE), []
    chosen = [each for each in suite(Suite.ALL) if each.name.startswith(LAYERS)]
    for layer in chosen:
        for channels_last in (False, True)[: layer.problem.dims]:
            for pass_ in (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD):
                problem = replace(layer.problem, tf32=True, channels_last=channels_last)
                schedule = plan(problem, pass_, info).schedule
                if not schedule.endswith("_transposed"):
                    continue
                operands, found = make_operands(problem, DEVICE), []
                with torch_flags(TorchVariant.DEFAULT, False):
                    rival = timer.measure(torch_call(problem, pass_, operands)).ms
                    for inexact in (False, True):
                        if inexact:
                            operands.grad_output[0, ..., 2:3] *= 1e-12
                            operands.grad_output[:, 0] *= 1e-12
                        found.append(timer.measure(polyphase_call(problem, pass_, operands)).ms)
                layout = "channels_last" if channels_last else "nchw"
                rows.append((torch.cuda.get_device_name(), torch.__version__, layer.name, layout, pass_.value))
                rows[-1] += (schedule, *(f"{each:.4f}" for each in (*found, rival)))
                print(*rows[-1][2:], flush=True)
    with open(path, "w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(("gpu", "torch", "layer", "layout", "pass", "schedule", "exact_ms", "inexact_ms", "torch_ms"))
        out.writerows(rows)


if __name__ == "__main__":
    main()
