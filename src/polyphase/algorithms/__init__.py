"""Ways to compute a pass, one file each; `polyphase.plan` chooses among `ALGORITHMS`."""

from polyphase.algorithms.base import Algorithm
from polyphase.algorithms.gather_channels import GatherChannels
from polyphase.algorithms.gather_gemm import GatherGemm
from polyphase.algorithms.gather_general import GatherGeneral
from polyphase.algorithms.gather_tiled import GatherTiled
from polyphase.algorithms.gradient_boxes import InputGradBoxes, WeightGradBoxes
from polyphase.algorithms.gradient_gemm import InputGradGemm, WeightGradGemm
from polyphase.algorithms.gradient_wgmma import InputGradWgmma, WeightGradWgmma
from polyphase.algorithms.implicit_gemm import ImplicitGemm
from polyphase.algorithms.input_grad_dots import InputGradDots
from polyphase.algorithms.phase_gemm import PhaseGemm
from polyphase.algorithms.pixel_gemm import PixelGemm
from polyphase.algorithms.scatter_gemm import ScatterGemm
from polyphase.algorithms.turned_boxes import InputGradTurned, WeightGradTurned
from polyphase.algorithms.weight_grad import WeightGrad
from polyphase.algorithms.weight_grad_channels import WeightGradChannels
from polyphase.algorithms.weight_grad_windows import WeightGradWindows

ALGORITHMS: tuple[Algorithm, ...] = (
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

__all__ = ["ALGORITHMS", "Algorithm"]
