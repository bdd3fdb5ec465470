"""Ways to compute a pass, one file each; `polyphase.plan.planner` chooses among `SCHEDULES`."""

from polyphase.schedules.direct.channels import GatherChannels
from polyphase.schedules.direct.general import GatherGeneral
from polyphase.schedules.direct.tiled import GatherTiled
from polyphase.schedules.direct_wgrad.channels import WeightGradChannels
from polyphase.schedules.direct_wgrad.gemm import WeightGrad
from polyphase.schedules.direct_wgrad.windows import WeightGradWindows
from polyphase.schedules.dot_dgrad.schedule import InputGradDots
from polyphase.schedules.grouped_gemm.schedule import GatherGemm
from polyphase.schedules.implicit_gemm.schedule import ImplicitGemm
from polyphase.schedules.overlap_gemm.schedule import ScatterGemm
from polyphase.schedules.phase_gemm.long_kernels import PhaseGemm
from polyphase.schedules.phase_gemm.pixels import PixelGemm
from polyphase.schedules.schedule import Schedule
from polyphase.schedules.window_gemm.mma import InputGradGemm, WeightGradGemm
from polyphase.schedules.window_gemm.tma import InputGradBoxes, WeightGradBoxes
from polyphase.schedules.window_gemm.transposed import InputGradTurned, WeightGradTurned
from polyphase.schedules.window_gemm.wgmma import InputGradWgmma, WeightGradWgmma

SCHEDULES: tuple[Schedule, ...] = (
    ImplicitGemm(),
    GatherGemm(),
    ScatterGemm(),
    PhaseGemm(),
    PixelGemm(),
    InputGradGemm(),
    InputGradWgmma(),
    InputGradBoxes(),
    InputGradTurned(),
    InputGradDots(),
    WeightGradGemm(),
    WeightGradWgmma(),
    WeightGradBoxes(),
    WeightGradTurned(),
    GatherChannels(),
    GatherTiled(),
    GatherGeneral(),
    WeightGradChannels(),
    WeightGradWindows(),
    WeightGrad(),
)

__all__ = ["SCHEDULES", "Schedule"]
