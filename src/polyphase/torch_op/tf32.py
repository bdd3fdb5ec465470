"""Whether PyTorch's flags allow TF32 for float32."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

_cudnn_enabled: Callable[[], bool] = torch._C._get_cudnn_enabled
_legacy_flag: Callable[[], bool] = torch._C._get_cudnn_allow_tf32
_precision: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)  # PyTorch ≥ 2.9


def _by_precision() -> bool:
    # PyTorch resolves the inheritance ("none" is the level above). Its legacy getter raises where both APIs were used.
    return _precision is not None and _precision("cuda", "conv") == "tf32" and _cudnn_enabled()


def _by_legacy_flag() -> bool:
    return _legacy_flag() and _cudnn_enabled()


def _never() -> bool:
    return False


def _choose() -> Callable[[], bool]:
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":  # read once, as cuDNN does
        return _never
    return _by_legacy_flag if _precision is None else _by_precision


tf32_allowed: Callable[[], bool] = _choose()
"""Whether PyTorch's flags let a float32 convolution on CUDA round its operands to TF32 at this moment.

The flags are ``torch.backends.cudnn.allow_tf32`` and, from PyTorch 2.9 on, ``fp32_precision`` of
``torch.backends.cudnn.conv``, ``torch.backends.cudnn`` and ``torch.backends``; they allow it until they are set. Where
``torch.backends.cudnn.enabled`` is False, convolutions are products by cuBLAS, which does not round unless told to:
that counts as forbidden. ``torch.set_float32_matmul_precision`` has no say. Touches no CUDA.
"""
