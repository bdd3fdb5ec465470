"""What is computed: the layer, how its tensors lie, the sizes plans are made at, and the device."""

from polyphase.problem.problem import DTYPE_BYTES, Axis, ConvTransposeProblem, Pass, accumulator_bytes

__all__ = ["DTYPE_BYTES", "Axis", "ConvTransposeProblem", "Pass", "accumulator_bytes"]
