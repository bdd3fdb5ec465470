"""Times forward passes whose output rows begin at odd addresses, by how implicit_gemm stores them.

``python stores.py --csv stores.csv`` runs each variant (a patch of this folder, applied to a copy of the package) in a
process of its own; with ``--counters counters.csv`` also under Nsight Compute. Outputs must have the first's bits.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
LAYERS = (
    "32x64x256x256 -> 64, k=4, s=2, p=1, op=1, bias",
    "128x64x64x64 -> 128, k=4, s=2, bias",
    "32x3x278x278 -> 192, k=3, s=2, p=1",
    "16x64x24x48x48 -> 128, k=3, s=2, p=1, bias",
    "64x32x256x256 -> 32, k=3, s=2, p=1, bias",
    "16x64x113x113 -> 64, k=3, p=1",
    "32x192x100x100 -> 128, k=3, s=2",
    "8x64x128x128 -> 64, k=3, s=2, p=1",
)
DTYPES = ("float32", "bfloat16")
COUNTED = ((LAYERS[0], "float32"), (LAYERS[0], "bfloat16"), (LAYERS[3], "bfloat16"))
METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sectors_op_write.sum",
    "lts__t_requests_op_write.sum",
    "l1tex__data_pipe_lsu_wavefronts.sum",
    "smsp__inst_executed.sum",
)


def run(layer: str, dtype: str, times: bool) -> None:
    """Prints the sum of an output's bits, and the milliseconds of a call."""
    import torch

    from polyphase import functional
    from polyphase.bench.layers import parse_layer
    from polyphase.bench.timing import Timer

    problem = parse_layer(layer)
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    x = torch.randn(problem.batch, problem.in_channels, *problem.input_size, device="cuda", dtype=kind)
    w = torch.randn(problem.in_channels, problem.out_channels, *problem.kernel_size, device="cuda", dtype=kind)
    b = torch.randn(problem.out_channels, device="cuda", dtype=kind) if problem.bias else None
    function = getattr(functional, f"conv_transpose{problem.dims}d")
    torch.backends.cudnn.allow_tf32 = True

    def call() -> torch.Tensor:
        return function(x, w, b, problem.stride, problem.padding, problem.output_padding, 1, problem.dilation)

    with torch.inference_mode():
        out = call()
        torch.cuda.synchronize()
        if times:
            bits = out.view(torch.int32 if dtype == "float32" else torch.int16)
            print(int(bits.sum(dtype=torch.int64)), Timer(torch.device("cuda")).measure(call).ms, flush=True)
        else:
            torch.cuda.cudart().cudaProfilerStart()
            call()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()


def main() -> None:
    """Measure all variants."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--counters", type=Path)
    parser.add_argument("--run", nargs=2, action="append", default=[])
    parser.add_argument("--only")
    parser.add_argument("--once", action="store_true")
    options = parser.parse_args()
    if options.run:
        for layer, dtype in options.run:
            run(layer, dtype, times=not options.once)
        return
    variants = {"as it is": None, **{each.stem: each for each in sorted(HERE.glob("*.patch"))}}
    if options.only:
        variants = {name: variants[name] for name in options.only.split(",")}
    cases = [(layer, dtype) for layer in LAYERS for dtype in DTYPES]
    rows: list[list[object]] = [["layer", "dtype", "variant", "ms", "bits"]]
    counted: list[list[object]] = [["layer", "dtype", "variant", "kernel", *METRICS]]
    with tempfile.TemporaryDirectory() as folder:
        for name, patch in variants.items():
            home = Path(folder, name.replace(" ", "-"))
            shutil.copytree(ROOT / "src", home / "src")
            if patch is not None:
                tool = ["patch", "-p1", "-s", "-i"] if shutil.which("patch") else ["git", "apply", "-p1"]
                subprocess.run([*tool, str(patch)], check=True, cwd=home)
            env = {**os.environ, "PYTHONPATH": str(home / "src")}
            compiled = [
                subprocess.Popen([sys.executable, __file__, "--run", *case, "--once"], env=env) for case in cases
            ]
            for each in compiled:
                each.wait()
            jobs = [item for case in cases for item in ("--run", *case)]
            done = subprocess.run([sys.executable, __file__, *jobs], env=env, capture_output=True, text=True)
            print(name, done.stderr[-500:])
            for case, line in zip(cases, done.stdout.splitlines(), strict=False):
                bits, ms = line.split()
                rows.append([*case, name, f"{float(ms):.4f}", bits])
                print(*rows[-1], flush=True)
            if options.csv:
                with options.csv.open("w", newline="") as file:
                    csv.writer(file).writerows(rows)
            for case in COUNTED if options.counters else ():
                command = f"ncu --csv --metrics {','.join(METRICS)} --profile-from-start off --clock-control none"
                done = subprocess.run(
                    [*command.split(), sys.executable, __file__, "--once", "--run", *case],
                    env=env,
                    capture_output=True,
                    text=True,
                )
                lines = done.stdout.splitlines()
                start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
                if start is None:
                    print(done.stdout[-800:], done.stderr[-300:])
                    continue
                found: dict[str, dict[str, str]] = {}
                for each in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
                    kernel = found.setdefault(each["ID"] + " " + each["Kernel Name"].partition("(")[0], {})
                    kernel[each["Metric Name"]] = f"{each['Metric Value']} {each['Metric Unit']}"
                for kernel, values in found.items():
                    counted.append([*case, name, kernel, *(values.get(metric, "") for metric in METRICS)])
                    print(*counted[-1], sep=" | ", flush=True)
                with options.counters.open("w", newline="") as file:
                    csv.writer(file).writerows(counted)


if __name__ == "__main__":
    main()
