"""The description of the work: the layer, its tensors' layouts, the sizes at which plans are made, and the device."""

from polyphase.problem.problem import DTYPE_BYTES, Axis, ConvTransposeProblem, Pass, accumulator_bytes

__all__ = ["DTYPE_BYTES", "Axis", "ConvTransposeProblem", "Pass", "accumulator_bytes"]
