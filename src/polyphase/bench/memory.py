"""What a call allocates of a GPU's memory beside its result: its workspace."""

from __future__ import annotations

import torch

from polyphase.bench.contestants import Call


def workspace_megabytes(call: Call, device: torch.device) -> float | None:
    """The most that ``call`` holds at once, less its result, in megabytes; None on a CPU.

    It is what is requested of PyTorch's allocator, which cuDNN's workspaces come from, too, and not what that rounds it
    up to. The call should be warm: the first one may allocate what stays.
    """
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    requested = torch.cuda.memory_stats(device)
    del result
    return float(requested["requested_bytes.all.peak"] - requested["requested_bytes.all.current"]) / 1e6
