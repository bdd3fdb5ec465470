"""Models of the library `transformers` with a transposed convolution, from their published configurations.

`models.py` adds them where the library is installed. Weights are random; what a model reads is a tensor of features.
The library's EnCodec and Mimi read sizes from tensors on the GPU, which no CUDA graph captures: `sound_models.py` has
both.
"""

from __future__ import annotations

import importlib
from functools import partial

from torch import Tensor, nn
from zoo import Model


class OfTensor(nn.Module):
    """A part of a model, of a tensor, whose result is a tensor or the first of several."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        """What the part gives."""
        result = self.part(x)
        return result if isinstance(result, Tensor) else result[0]


def part(folder: str, name: str, config: str) -> nn.Module:
    """The class ``name`` of ``transformers.models.<folder>`` with a configuration's published sizes."""
    made = getattr(importlib.import_module(f"transformers.models.{folder}.configuration_{folder}"), config)()
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    built: nn.Module = getattr(module, name)(made)
    for each in built.modules():
        for parametrized in list(getattr(each, "parametrizations", {})):
            nn.utils.parametrize.remove_parametrizations(each, parametrized)
    return OfTensor(built)


LIBRARY_MODELS: dict[str, Model] = {
    "VITS vocoder": Model(partial(part, "vits", "VitsHifiGan", "VitsConfig"), 8, ((192, 128),)),
    "SpeechT5 vocoder": Model(partial(part, "speecht5", "SpeechT5HifiGan", "SpeechT5HifiGanConfig"), 8, ((128, 80),)),
    "DAC decoder (library)": Model(partial(part, "dac", "DacDecoder", "DacConfig"), 4, ((1024, 64),)),
    "ViTPose head": Model(partial(part, "vitpose", "VitPoseClassicDecoder", "VitPoseConfig"), 64, ((768, 16, 12),)),
}
