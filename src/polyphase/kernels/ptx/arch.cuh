// Features of the architecture that is compiled for.

#pragma once

#include "specialisation.cuh"

// cp.async.bulk and mbarriers that count its bytes, from Hopper on. nvcc's pass for the host, which has no
// architecture, looks the names of these functions up, too.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define BULK_COPY 1
#else
#define BULK_COPY 0
#endif
// TMA loads of boxes (cp.async.bulk.tensor): kernels use them together with Hopper's matrix instruction alone.
#define BOX_COPY (BULK_COPY && WGMMA)
