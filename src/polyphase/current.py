"""The current CUDA device and stream, by private functions: PyTorch's public ones take microseconds."""

from __future__ import annotations

from collections.abc import Callable

import torch

#: Returns the raw stream of a device.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)
