"""The eleven schedules. Several of them have more than one kernel, each described by a class of its own.

`polyphase.plan.planner` chooses by cost among the kernels of all schedules, `SCHEDULES`.
"""

from itertools import chain

from polyphase.schedules.col2im.cells import Col2imCells
from polyphase.schedules.col2im.direct import Col2imDirect
from polyphase.schedules.col2im.schedule import Col2im, Col2imTma
from polyphase.schedules.direct.channels import DirectChannels
from polyphase.schedules.direct.general import DirectGeneral
from polyphase.schedules.direct.tiled import DirectTiled
from polyphase.schedules.direct_wgrad.channels import DirectWgradChannels
from polyphase.schedules.direct_wgrad.gemm import DirectWgradGemm
from polyphase.schedules.direct_wgrad.long import DirectWgradLong
from polyphase.schedules.direct_wgrad.windows import DirectWgradWindows
from polyphase.schedules.dot_dgrad.schedule import DotDgrad
from polyphase.schedules.grouped_gemm.schedule import GroupedGemm
from polyphase.schedules.grouped_gemm.window import GroupedGemmWindow
from polyphase.schedules.implicit_gemm.schedule import ImplicitGemm
from polyphase.schedules.implicit_gemm.transposed import ImplicitGemmTransposed
from polyphase.schedules.overlap_gemm.schedule import OverlapGemm
from polyphase.schedules.phase_gemm.pixels import PhaseGemmPixels
from polyphase.schedules.schedule import Schedule
from polyphase.schedules.tap_gemm.mma import TapGemm, TapGemmWgrad
from polyphase.schedules.tap_gemm.tma import TapGemmTma
from polyphase.schedules.tap_gemm.wgrad_tma import TapGemmWgradTma
from polyphase.schedules.window_gemm.fma import WindowDgradFma
from polyphase.schedules.window_gemm.mma import WindowDgradMma, WindowWgradMma
from polyphase.schedules.window_gemm.tma import WindowDgradTma, WindowWgradTma
from polyphase.schedules.window_gemm.transposed import WindowDgradTransposed, WindowWgradTransposed
from polyphase.schedules.window_gemm.wgmma import WindowDgradWgmma, WindowWgradWgmma

#: The kernels of each schedule, in the order in which the planner asks them.
KERNELS: dict[str, tuple[Schedule, ...]] = {
    "implicit_gemm": (ImplicitGemm(), ImplicitGemmTransposed()),
    "grouped_gemm": (GroupedGemm(), GroupedGemmWindow()),
    "overlap_gemm": (OverlapGemm(),),
    "col2im": (Col2im(), Col2imTma(), Col2imDirect(), Col2imCells()),
    "phase_gemm": (PhaseGemmPixels(),),
    "window_dgrad": (
        WindowDgradMma(),
        WindowDgradWgmma(),
        WindowDgradTma(),
        WindowDgradTransposed(),
        WindowDgradFma(),
    ),
    "dot_dgrad": (DotDgrad(),),
    "window_wgrad": (WindowWgradMma(), WindowWgradWgmma(), WindowWgradTma(), WindowWgradTransposed()),
    "tap_gemm": (TapGemmTma(), TapGemm(), TapGemmWgradTma(), TapGemmWgrad()),
    "direct": (DirectChannels(), DirectTiled(), DirectGeneral()),
    "direct_wgrad": (DirectWgradChannels(), DirectWgradLong(), DirectWgradWindows(), DirectWgradGemm()),
}

#: All of them.
SCHEDULES: tuple[Schedule, ...] = tuple(chain.from_iterable(KERNELS.values()))

__all__ = ["KERNELS", "SCHEDULES", "Schedule"]
