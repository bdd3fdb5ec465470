"""Where the host's time of a warm fused chain goes, without a GPU.

python fused.py [--profile]      a layer, and chains of it that `accelerate(fuse=True)` computes
"""

from __future__ import annotations

import cProfile
import pstats
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import no_gpu

no_gpu.restart_with_driver()
no_gpu.pretend()

import torch  # noqa: E402
from host_time import counted, fastest  # noqa: E402
from torch import nn  # noqa: E402

import polyphase  # noqa: E402


def layer() -> nn.Module:
    return nn.ConvTranspose2d(64, 32, 4, 2, 1)


class Joined(nn.Module):
    """A decoder's level: what a layer computes joined with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up = layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 64, H, W) to (N, 64, 2 H, 2 W)."""
        return torch.cat([SKIP, self.up(x)], 1)


MODELS = {
    "layer, concatenation": lambda: Joined(),
    "layer": lambda: nn.Sequential(layer()),
    "layer, ReLU": lambda: nn.Sequential(layer(), nn.ReLU()),
    "layer, BatchNorm, ReLU": lambda: nn.Sequential(layer(), nn.BatchNorm2d(32), nn.ReLU()),
    "ReLU, layer": lambda: nn.Sequential(nn.ReLU(), layer()),
}


def move(model: nn.Module) -> None:
    """Puts parameters and buffers on the device that computes nothing, which cannot copy them."""
    for module in model.modules():
        for home in (module._parameters, module._buffers):
            for name, each in home.items():
                if each is not None and each.dim():
                    there = torch.empty_strided(each.shape, each.stride(), device="threaded")
                    home[name] = nn.Parameter(there) if home is module._parameters else there


SKIP = torch.empty_strided((1, 32, 32, 32), (32 * 1024, 1024, 32, 1), device="threaded")
library = torch.library.Library("aten", "IMPL")
library.impl("as_strided", lambda of, size, stride, offset=None: torch.empty_strided(size, stride, device="threaded"), "PrivateUse1")
library.impl("copy_", lambda to, source, blocking=False: to, "PrivateUse1")


def main() -> None:
    profile = "--profile" in sys.argv
    for name, make in MODELS.items():
        for fusing in (False, True):
            model = make().eval()
            polyphase.accelerate(model, fuse=fusing)
            move(model)
            x = torch.empty_strided((1, 64, 16, 16), (64 * 256, 256, 16, 1), device="threaded")
            with torch.inference_mode():
                call = lambda: model(x)  # noqa: E731
                try:
                    call()
                except Exception as failure:
                    print(name, fusing, "failed:", str(failure)[:100])
                    continue
                print(
                    f"{name:30} {'fused' if fusing else 'swapped':8} {fastest(call, rounds=100):7.2f} us", counted(call)
                )
                if profile and fusing:
                    run = cProfile.Profile()
                    run.enable()
                    for _ in range(2000):
                        call()
                    run.disable()
                    pstats.Stats(run).sort_stats("tottime").print_stats(22)


main()
