// How tensor cores read a kernel's operands.

#pragma once

#include "core/types.cuh"

template <class T>
constexpr emulator::Operand operand_of = emulator::Operand::tf32;
template <>
constexpr emulator::Operand operand_of<float16> = emulator::Operand::float16;
template <>
constexpr emulator::Operand operand_of<bfloat16> = emulator::Operand::bfloat16;
