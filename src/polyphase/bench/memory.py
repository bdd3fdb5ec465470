"""What a call allocates of a GPU's memory beside its result: its workspace."""

from __future__ import annotations

import torch

from polyphase.bench.contestants import Call


def workspace_megabytes(call: Call, device: torch.device) -> float | None:
    """The most that ``call`` holds at once, less its result, in megabytes; None on a CPU.

    It is what PyTorch's allocator counts, which cuDNN's workspaces come from, too. The call should be warm: the first
    one may allocate what stays.
    """
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    most, left = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    del result
    return (most - left) / 1e6
