// The elementwise operations of an epilogue, after the bias. `operations_text` (jit/epilogue.py) generates such a text
// for each kernel that includes epilogue/finish.cuh. The text below is that of an epilogue without operations.

#pragma once

#include "specialisation.cuh"
#include "core/types.cuh"

#define EPILOGUE 0
#define EPILOGUE_NORMALIZES 0                                                // over the channels of a pixel
#define EPILOGUE_PARAMETERS                                                  // of a kernel, behind its bias
#define EPILOGUE_OPERANDS(bias, dst, sample_stride) ((const scalar_t*)bias)  // what `channel_terms` takes
#define EPILOGUE_READS_PLACES 0  // whether operations ask where an output lies
#define EPILOGUE_RESIDUALS 0     // tensors of the output's shape that they read
