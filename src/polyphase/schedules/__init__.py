"""Ways to compute a pass, one file each; `polyphase.plan.planner` chooses among `SCHEDULES`."""

from polyphase.schedules.direct.channels import DirectChannels
from polyphase.schedules.direct.general import DirectGeneral
from polyphase.schedules.direct.tiled import DirectTiled
from polyphase.schedules.direct_wgrad.channels import DirectWgradChannels
from polyphase.schedules.direct_wgrad.gemm import DirectWgradGemm
from polyphase.schedules.direct_wgrad.windows import DirectWgradWindows
from polyphase.schedules.dot_dgrad.schedule import DotDgrad
from polyphase.schedules.grouped_gemm.schedule import GroupedGemm
from polyphase.schedules.implicit_gemm.schedule import ImplicitGemm
from polyphase.schedules.overlap_gemm.schedule import OverlapGemm
from polyphase.schedules.phase_gemm.long_kernels import PhaseGemm
from polyphase.schedules.phase_gemm.pixels import PhaseGemmPixels
from polyphase.schedules.schedule import Schedule
from polyphase.schedules.window_gemm.mma import WindowDgradMma, WindowWgradMma
from polyphase.schedules.window_gemm.tma import WindowDgradTma, WindowWgradTma
from polyphase.schedules.window_gemm.transposed import WindowDgradTransposed, WindowWgradTransposed
from polyphase.schedules.window_gemm.wgmma import WindowDgradWgmma, WindowWgradWgmma

SCHEDULES: tuple[Schedule, ...] = (
    ImplicitGemm(),
    GroupedGemm(),
    OverlapGemm(),
    PhaseGemm(),
    PhaseGemmPixels(),
    WindowDgradMma(),
    WindowDgradWgmma(),
    WindowDgradTma(),
    WindowDgradTransposed(),
    DotDgrad(),
    WindowWgradMma(),
    WindowWgradWgmma(),
    WindowWgradTma(),
    WindowWgradTransposed(),
    DirectChannels(),
    DirectTiled(),
    DirectGeneral(),
    DirectWgradChannels(),
    DirectWgradWindows(),
    DirectWgradGemm(),
)

__all__ = ["SCHEDULES", "Schedule"]
