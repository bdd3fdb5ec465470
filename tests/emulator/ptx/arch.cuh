// The host has what kernels for Hopper need.

#pragma once

#include "specialisation.cuh"

#define BULK_COPY WGMMA
#define BOX_COPY WGMMA
