"""Encodes tensor maps for the driver."""

from __future__ import annotations

import ctypes

from cuda.bindings import driver

from polyphase.errors import PolyphaseError
from polyphase.program.tensor_map import TENSOR_MAP_BYTES, TensorMap

_SWIZZLES = {
    16: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
    32: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_32B,
    64: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
    128: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
}
_DTYPES = {
    "float32": driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    "tf32": driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
    "float16": driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    "bfloat16": driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
}


def encode(tensor_map: TensorMap, address: int) -> bytes:
    """The tensor map for the tensor at ``address``. Raises `PolyphaseError` if the driver refuses it.

    An empty tensor has address 0, which the driver may refuse. Nothing is loaded from it, so any other address serves.
    """
    status, found = driver.cuTensorMapEncodeTiled(
        _DTYPES[tensor_map.element],
        len(tensor_map.sizes),
        address or TENSOR_MAP_BYTES,
        [driver.cuuint64_t(size) for size in tensor_map.sizes],
        [driver.cuuint64_t(stride) for stride in tensor_map.strides],
        [driver.cuuint32_t(side) for side in tensor_map.spans],
        [driver.cuuint32_t(step) for step in tensor_map.steps],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        _SWIZZLES[tensor_map.swizzle],
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise PolyphaseError(f"the driver makes no tensor map of {tensor_map}: {status!r}")
    return ctypes.string_at(found.getPtr(), TENSOR_MAP_BYTES)
