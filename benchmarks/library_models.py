"""Models of the library `transformers` with a transposed convolution, from their published configurations.

`models.py` adds them where the library is installed. Weights are random; what a model reads is a tensor of features.
The library's EnCodec and Mimi read sizes from tensors on the GPU, which no CUDA graph captures: `sound_models.py` has
both.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from zoo import Model


class OfTensor(nn.Module):
    """A part of a model, of a tensor and perhaps constants, whose result is a tensor or the first of several."""

    def __init__(self, part: nn.Module, call: Callable[[Any, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.part = part
        self._call = call

    def forward(self, x: Tensor) -> Tensor:
        """What the part gives."""
        result = self.part(x) if self._call is None else self._call(self.part, x)
        return result if isinstance(result, Tensor) else result[0]


def part(
    where: str, name: str, config: str, call: Callable[[Any, Tensor], Any] | None = None, **sizes: Any
) -> nn.Module:
    """The class ``name`` of ``transformers.models.<where>`` with a configuration, which has ``sizes`` of its own."""
    folder = where.split(".")[0]
    made = getattr(importlib.import_module(f"transformers.models.{folder}.configuration_{folder}"), config)(**sizes)
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    built: nn.Module = getattr(module, name)(made)
    for each in built.modules():
        for parametrized in list(getattr(each, "parametrizations", {})):
            nn.utils.parametrize.remove_parametrizations(each, parametrized)
    return OfTensor(built, call)


LIBRARY_MODELS: dict[str, Model] = {
    "VITS vocoder": Model(partial(part, "vits", "VitsHifiGan", "VitsConfig"), 8, ((192, 128),)),
    "SpeechT5 vocoder": Model(partial(part, "speecht5", "SpeechT5HifiGan", "SpeechT5HifiGanConfig"), 8, ((128, 80),)),
    "DAC decoder (library)": Model(partial(part, "dac", "DacDecoder", "DacConfig"), 4, ((1024, 64),)),
    "ViTPose head": Model(partial(part, "vitpose", "VitPoseClassicDecoder", "VitPoseConfig"), 64, ((768, 16, 12),)),
}
