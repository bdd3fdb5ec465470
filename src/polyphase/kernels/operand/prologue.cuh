// The elementwise operations of a prologue. `prologue_text` (jit/epilogue.py) generates such a text for each kernel
// that includes operand/input_value.cuh. The text below is that of a prologue without operations.

#pragma once

#include "specialisation.cuh"
#include "core/types.cuh"

#define PROLOGUE 0
#define PROLOGUE_PARAMETERS  // of a kernel, behind those of its epilogue
#define PROLOGUE_OPERANDS (PrologueOperands{})
struct PrologueOperands {};
