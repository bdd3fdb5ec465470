"""Properties of GPUs that the planner and the compiler need, known without a GPU present.

Only the cost model uses the rates: they rank candidates, and no result depends on them. The H200's rates are measured
(`python -m polyphase bench` measures the ceilings of its machine); the others are the vendors', bandwidths about six
sevenths of the vendors'. Plans use the rates of an architecture; `Card` has a card's own rates for reported times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from polyphase.errors import UnsupportedError

if TYPE_CHECKING:
    import torch


#: Registers of a multiprocessor, on every architecture.
REGISTERS = 65536


@dataclass(frozen=True)
class DeviceInfo:
    """One kind of device. ``arch`` is the compiler's name for it, or ``"portable"`` for devices without own kernels."""

    arch: str
    multiprocessors: int = 1
    clock_hz: float = 1e9
    copy_bytes_per_second: float = 1e11
    shared_bytes_per_block: int = 0
    shared_bytes_per_multiprocessor: int = 0

    @property
    def capability(self) -> int:
        """The compute capability of a CUDA device, 90 for 9.0."""
        return capability_of(self.arch)

    @property
    def has_wgmma(self) -> bool:
        """Whether the device has wgmma, Hopper's instruction for a warpgroup, which newer architectures lack."""
        return self.arch == "sm_90a"

    @property
    def has_tma(self) -> bool:
        """Whether the device has the Tensor Memory Accelerator (TMA)."""
        return self.capability >= 90

    @property
    def is_cuda(self) -> bool:
        """Whether own kernels run on the device."""
        return self.arch.startswith("sm_")

    @staticmethod
    def for_arch(arch: str) -> DeviceInfo:
        """A typical device of an architecture, e.g. ``"sm_90a"`` (the letter may be left out), or of one of `CARDS`."""
        if arch == PORTABLE.arch or arch == "cpu":
            return PORTABLE
        known = {info.arch.rstrip("af"): info for info in _TYPICAL}
        info = known.get(CARDS.get(_card_name(arch), arch).rstrip("af"))
        if info is None:
            raise UnsupportedError(
                f"unknown architecture {arch!r}; known are {', '.join(ARCHITECTURES)}, and the cards {', '.join(CARDS)}"
            )
        return info

    @staticmethod
    def of(device: torch.device) -> DeviceInfo:
        """The device of a tensor. Raises `UnsupportedError` for a GPU older than compute capability 7.5."""
        import torch

        if device.type != "cuda" or torch.version.cuda is None:
            return PORTABLE
        return _of_cuda(torch.cuda.current_device() if device.index is None else device.index)

    def registers_of(self, threads: int) -> int:
        """Most registers of a thread with ``threads`` resident on a multiprocessor."""
        return min(255, REGISTERS // threads // 8 * 8)

    def shared_bytes_of(self, resident: int) -> int:
        """Most bytes of shared memory of a block with ``resident`` blocks on a multiprocessor."""
        return min(self.shared_bytes_per_block, self.shared_bytes_per_multiprocessor // resident - 1024)


def capability_of(arch: str) -> int:
    """The compute capability in the compiler's name of an architecture, 90 for ``"sm_90a"``."""
    return int(arch.rstrip("af")[3:])


PORTABLE = DeviceInfo("portable")

_TYPICAL = (
    DeviceInfo("sm_75", 40, 1.6e9, 2.7e11, 64 << 10, 64 << 10),
    DeviceInfo("sm_80", 108, 1.4e9, 1.7e12, 163 << 10, 164 << 10),
    DeviceInfo("sm_86", 82, 1.7e9, 8.0e11, 99 << 10, 100 << 10),
    DeviceInfo("sm_89", 128, 2.4e9, 8.7e11, 99 << 10, 100 << 10),
    DeviceInfo("sm_90a", 132, 1.75e9, 4.28e12, 227 << 10, 228 << 10),
    DeviceInfo("sm_100a", 148, 1.9e9, 7.0e12, 227 << 10, 228 << 10),
    DeviceInfo("sm_120", 170, 2.4e9, 1.6e12, 99 << 10, 100 << 10),
)

#: Architectures with own kernels, as the compiler calls them.
ARCHITECTURES = tuple(info.arch for info in _TYPICAL)

#: Architectures of cards, by the cards' usual names.
CARDS = {
    "t4": "sm_75", "a100": "sm_80", "a10": "sm_86", "rtx3090": "sm_86", "l4": "sm_89", "l40s": "sm_89",
    "rtx4090": "sm_89", "h100": "sm_90a", "h200": "sm_90a", "b200": "sm_100a", "rtx5090": "sm_120",
}  # fmt: skip

#: Bytes per second of a copy on cards that differ from the typical device of their architecture. The H100's is measured
#: (benchmarks/results/h100-80gb-hbm3.csv), the others are six sevenths of the vendor's bandwidth.
_COPY_BYTES_PER_SECOND = {"a10": 5.1e11, "l4": 2.6e11, "l40s": 7.4e11, "h100": 3.01e12}


def _card_name(text: str) -> str:
    return text.lower().replace(" ", "")


@dataclass(frozen=True)
class Card:
    """The card for which times are predicted. Plans are made for ``device``, a typical one of its architecture.

    ``rates`` is the device with the card's own copy bandwidth, which predicted times and floors assume.
    """

    name: str
    device: DeviceInfo
    rates: DeviceInfo

    @staticmethod
    def of(what: str | DeviceInfo | Card) -> Card:
        """From the name of a card or architecture, or a device with its own rates. Raises `UnsupportedError`."""
        if isinstance(what, Card):
            return what
        if isinstance(what, DeviceInfo):
            return Card(what.arch, what, what)
        device, name = DeviceInfo.for_arch(what), _card_name(what)
        own = _COPY_BYTES_PER_SECOND.get(name, device.copy_bytes_per_second)
        return Card(what if name in CARDS else device.arch, device, replace(device, copy_bytes_per_second=own))

    def __str__(self) -> str:
        return self.name if self.name == self.device.arch else f"{self.name} ({self.device.arch})"


@lru_cache(maxsize=64)
def _of_cuda(index: int) -> DeviceInfo:
    import torch

    properties = torch.cuda.get_device_properties(index)
    major, minor = properties.major, properties.minor
    if (major, minor) < (7, 5):
        raise UnsupportedError(
            f"{properties.name} has compute capability {major}.{minor}; polyphase's CUDA kernels need 7.5 or newer"
        )
    arch = f"sm_{major}{minor}" + ("a" if major in (9, 10) else "")
    not_newer = (info for info in _TYPICAL if info.capability <= capability_of(arch))
    typical = max(not_newer, key=lambda info: info.capability)
    return replace(
        typical,
        arch=arch,
        multiprocessors=properties.multi_processor_count,
        shared_bytes_per_block=getattr(properties, "shared_memory_per_block_optin", typical.shared_bytes_per_block),
        shared_bytes_per_multiprocessor=getattr(
            properties, "shared_memory_per_multiprocessor", typical.shared_bytes_per_multiprocessor
        ),
    )
