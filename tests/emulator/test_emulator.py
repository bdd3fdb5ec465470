"""The emulator itself: it must run right kernels rightly, and must catch every kind of wrong one."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest
import torch

from . import ORDERS, EmulatedKernel, EmulationError, available

pytestmark = pytest.mark.skipif(not available(), reason="the emulator needs Linux and g++")


def kernel(body: str, parameters: str = "float* out") -> EmulatedKernel:
    return EmulatedKernel(f'extern "C" __global__ void __launch_bounds__(256) f({parameters}) {{\n{body}\n}}', "f")


REVERSE = """
    extern __shared__ __align__(sizeof(float4)) unsigned char shared_memory[];
    float* tile = reinterpret_cast<float*>(shared_memory);
    #pragma unroll
    for (int i = 0; i < 3; ++i) {
        tile[threadIdx.x] = out[threadIdx.x] + 1;
        BARRIER
        out[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
        __syncthreads();
    }"""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("block", [1, 40, 256])
def test_barriers_order_shared_memory(order, block):
    out = torch.arange(float(block))
    kernel(REVERSE.replace("BARRIER", "__syncthreads();")).launch(1, block, 4 * block, [out], order)
    torch.testing.assert_close(out, torch.arange(float(block)).flip(0) + 3, rtol=0, atol=0)


def test_missing_barrier_is_a_race():
    kernel(REVERSE.replace("BARRIER", "__syncthreads();")).launch_in_every_order(2, 64, 256, [torch.zeros(64)])
    broken = kernel(REVERSE.replace("BARRIER", ""))
    with pytest.raises(EmulationError, match="f races: argument 0"):
        broken.launch_in_every_order(1, 64, 256, [torch.arange(64.0)])


def test_static_shared_memory_is_poisoned_and_belongs_to_the_block():
    source = """
    template <int N> struct Sum {
        __device__ __forceinline__ static float of(float value) {
            __shared__ float parts[N];
            parts[threadIdx.x] += value;   // never initialised
            __syncthreads();
            return parts[N - 1 - threadIdx.x];
        }
    };
    extern "C" __global__ void f(float* out) { out[threadIdx.x + 64 * blockIdx.x] = Sum<64>::of(1) + Sum<128>::of(1); }
    """
    out = torch.zeros(128)
    EmulatedKernel(source, "f").launch(2, 64, 0, [out])
    assert out.isnan().all()


def test_grid_and_block_in_three_dimensions():
    out = torch.zeros(2, 3, 4, 2, 4, 5, dtype=torch.int32)
    body = """
    int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[block * 40 + thread] += 1 + block * 40 + thread;"""
    for order in ORDERS:
        kernel(body, "int* out").launch((4, 3, 2), (5, 4, 2), 0, [out.zero_()], order)
        assert out.flatten().tolist() == list(range(1, 961))


def test_shuffles_and_partial_warps():
    out = torch.zeros(40, dtype=torch.int32)
    body = """
    int value = threadIdx.x;
    for (int by = 4; by; by /= 2) value += __shfl_xor_sync(~0u, value, by);
    out[threadIdx.x] = value + 1000 * __shfl_down_sync(~0u, int(threadIdx.x), 1, 8);"""
    kernel(body, "int* out").launch_in_every_order(1, 40, 0, [out])
    lanes = range(40)
    assert out.tolist() == [8 * (i - i % 8) + 28 + 1000 * (i % 32 + (i % 8 < 7) + i // 32 * 32) for i in lanes]


FAULTS = {
    "out[64 * blockIdx.x + threadIdx.x] = 0;": (
        r"block \(1, 0, 0\), thread \(40, 0, 0\), f.cu:2: illegal write at byte 416 of argument 0 \(416 bytes\)"
    ),
    "out[threadIdx.x] = out[int(threadIdx.x) - (1 << 18)];": "illegal read at byte -1048576 of argument 0",
    "out[-1] = 0;": "wrote beside argument 0",
    "extern __shared__ float4 tile[];\nout[0] = tile[threadIdx.x].x;": (
        r"thread \(16, 0, 0\), f.cu:3: illegal read at byte 256 of dynamic shared memory"
    ),
    "__shared__ float tile[32]; tile[threadIdx.x] = 0;": r"\(32, 0, 0\), f.cu:2: array index out of bounds",
    "out[0] = reinterpret_cast<float4*>(out + threadIdx.x)->y;": r"\(1, 0, 0\), f.cu:2: misaligned address",
    "int big = 1 << 30; out[0] = big * int(threadIdx.x);": r"\(2, 0, 0\), f.cu:2: signed integer overflow",
    "if (threadIdx.x == 9)\n__trap();": r"thread \(9, 0, 0\), f.cu:3: __trap",
    "if (threadIdx.x < 8)\n__syncwarp();\nelse\n__syncthreads();": (
        r"deadlock: 8 of 64 threads \(the first: 0\) wait for ever in __syncwarp at f.cu:3, "
        r"56 of 64 threads \(the first: 8\) wait for ever in __syncthreads at f.cu:5"
    ),
    "__shared__ emulator::Barrier b; emulator::barrier_init(&b, 65);\n__syncthreads(); emulator::barrier_arrive(&b);\n"
    "emulator::barrier_wait(&b, 0);": (
        r"deadlock: 64 of 64 threads \(the first: 0\) wait for ever in barrier_wait at f.cu:4"
    ),
    "__shared__ emulator::Barrier b; emulator::barrier_arrive(&b);": r"f.cu:2: the barrier was not initialised",
    "__shared__ float x; emulator::copy_later(&x, 1.f);": "ended without waiting for its copies",
    "__syncwarp(0xff);": r"thread \(8, 0, 0\), f.cu:2: the lane is not in its own mask",
    "volatile char big[1 << 20]; for (int i = 0; i < 1 << 20; ++i) big[i] = 0;": "of the thread's stack",
    "while (*(volatile float*)out == 0) ;": "f.cu:2: still running when the time was up",
}


@pytest.mark.parametrize(("body", "what"), FAULTS.items())
def test_faults_are_reported(body, what):
    out = torch.zeros(104)  # 13 times 32 bytes: no slack for its alignment
    with pytest.raises(EmulationError, match=what):
        kernel(body).launch(2, 64, 256, [out], timeout=1)
    kernel("out[threadIdx.x] = 1;").launch(1, 104, 0, [out])  # the process goes on
    assert out.sum() == 104


def test_a_warp_wide_matrix_product_on_the_host():
    """How the host branch of ``mma.m8n8k4`` sees its operands: lane ``4·i + k`` holds ``a[i][k]``, ``b[k][i]``."""
    body = """
    auto a = emulator::all_lanes(~0u, left[threadIdx.x]), b = emulator::all_lanes(~0u, right[threadIdx.x]);
    int row = threadIdx.x / 4, first = threadIdx.x % 4 * 2;
    for (int column = first; column < first + 2; ++column)
        for (int k = 0; k < 4; ++k) out[row * 8 + column] += a.of[row * 4 + k] * b.of[column * 4 + k];"""
    left, right = torch.arange(32.0).view(8, 4).double(), torch.arange(32.0).view(8, 4).double()
    out = torch.zeros(8, 8, dtype=torch.float64)
    kernel(body, "const double* left, const double* right, double* out").launch(1, 32, 0, [left, right, out])
    assert torch.equal(out, left @ right.T)


def test_scratch_memory_lives_as_long_as_its_block():
    body = """
    int* const mine = (int*)emulator::scratch(20);
    for (int i = 0; i < 5; ++i) mine[i] = 100 * threadIdx.x + i;
    __syncthreads();
    int sum = (std::size_t)mine % 16;
    for (int i = 0; i < 5; ++i) sum += mine[i];
    out[blockIdx.x * 64 + threadIdx.x] = sum;"""
    out = torch.zeros(2, 64, dtype=torch.int32)
    kernel(body, "int* out").launch_in_every_order(2, 64, 0, [out])
    assert out.tolist() == [[500 * thread + 10 for thread in range(64)]] * 2


RING = """
    // Half of the threads fill slots of a ring, the others empty them; each slot has two mbarriers.
    __shared__ float slots[2][32];
    __shared__ emulator::Barrier full[2], empty[2];
    if (threadIdx.x < 2) {
        emulator::barrier_init(full + threadIdx.x, 32);
        emulator::barrier_init(empty + threadIdx.x, 32);
    }
    __syncthreads();
    for (int i = 0; i < 7; ++i) {
        const int slot = i % 2, parity = i / 2 % 2;
        if (threadIdx.x < 32) {
            emulator::barrier_wait(empty + slot, parity ^ 1);
            emulator::copy_later(&slots[slot][threadIdx.x], out[threadIdx.x] + i);
            emulator::commit(emulator::Async::copies);
            WAIT
            emulator::barrier_arrive(full + slot);
        } else {
            emulator::barrier_wait(full + slot, parity);
            out[threadIdx.x] += slots[slot][63 - threadIdx.x];
            EMPTIED
        }
    }
    emulator::wait(emulator::Async::copies, 0);"""
WAIT, EMPTIED = "emulator::wait(emulator::Async::copies, 0);", "emulator::barrier_arrive(empty + slot);"


def test_barriers_and_asynchronous_copies():
    out = torch.arange(64.0)
    kernel(RING.replace("WAIT", WAIT).replace("EMPTIED", EMPTIED)).launch_in_every_order(1, 64, 0, [out])
    assert out[32:].tolist() == [i + 7 * (63 - i) + 21 for i in range(32, 64)]
    for seed in range(8):  # warps that run ahead
        kernel(RING.replace("WAIT", WAIT).replace("EMPTIED", EMPTIED)).launch(1, 64, 0, [out.clone()], seed)


def test_copies_that_nobody_waits_for_have_not_come():
    out = torch.arange(64.0)
    kernel(RING.replace("WAIT", "emulator::wait(emulator::Async::copies, 1);").replace("EMPTIED", EMPTIED)).launch(
        1, 64, 0, [out]
    )
    assert out[32:].isnan().all()


def test_named_barriers():
    body = """
    __shared__ float values[96];
    values[threadIdx.x] = threadIdx.x;
    if (threadIdx.x < 64) {
        emulator::threads_sync(1, THREADS);
        out[threadIdx.x] = values[63 - threadIdx.x];
    }"""
    for seed in range(4):
        out = torch.zeros(96)
        kernel(body.replace("THREADS", "64")).launch(1, 96, 0, [out], seed)
        assert out.tolist() == [*range(63, -1, -1), *[0] * 32]
    with pytest.raises(EmulationError, match=r"deadlock: 64 of 96 threads .* wait for ever in threads_sync at f.cu:6"):
        kernel(body.replace("THREADS", "96")).launch(1, 96, 0, [torch.zeros(96)])


def test_addresses_of_shared_memory():
    body = """
    extern __shared__ __align__(16) unsigned char dynamic[];
    __shared__ float fixed[16];
    const std::size_t first = __cvta_generic_to_shared(dynamic), other = __cvta_generic_to_shared(fixed);
    out[0] = first % 16, out[1] = other < first && first < 1 << 20;
    *(float*)__cvta_shared_to_generic(first + 60) = 3, out[2] = ((float*)dynamic)[15];
    *(float*)__cvta_shared_to_generic(other + 8) = 4, out[3] = fixed[2];"""
    out = torch.zeros(4)
    kernel(body).launch(1, 1, 64, [out])
    assert out.tolist() == [0, 1, 3, 4]
    with pytest.raises(EmulationError, match="lies not in shared memory"):
        kernel("out[0] = __cvta_generic_to_shared(out);").launch(1, 1, 64, [out])


def test_exited_threads_are_counted_out():
    out = torch.zeros(64)
    kernel("if (threadIdx.x % 3) return; __syncwarp(); __syncthreads(); out[threadIdx.x] = 1;").launch(1, 64, 0, [out])
    assert out.sum() == 22


def test_arguments():
    class Sizes(ctypes.Structure):
        _fields_ = (("height", ctypes.c_int), ("scale", ctypes.c_double))

    source = """struct Sizes { int height; double scale; };
    extern "C" __global__ void f(const float* bias, short* __restrict__ out, const Sizes sizes, int n, unsigned char c,
                                 float x, bool b) {
        out[4 * threadIdx.x] = (bias ? 1 : 0) + sizes.height * sizes.scale + n + c + x + b;
    }"""
    f = EmulatedKernel(source, "f")
    out = torch.full((2, 8), -1, dtype=torch.int16)
    columns = out[:, ::4]  # a view with gaps, which must survive
    f.launch(1, 4, 0, [None, columns, Sizes(5, 2.0), np.int32(100), ctypes.c_uint8(200), 1000.0, True])
    assert out.flatten().tolist() == [1311, -1, -1, -1] * 4
    with pytest.raises(TypeError, match=r"argument 3 of f \(integer, 4 bytes\): given int64, 8 bytes"):
        f.launch(1, 4, 0, [None, columns, Sizes(5, 2.0), np.int64(100), 0, 1.0, True])
    with pytest.raises(TypeError, match="f takes 7 arguments, given 2"):
        f.launch(1, 4, 0, [None, columns])
    with pytest.raises(ValueError, match="two tensors share memory"):
        f.launch(1, 4, 0, [out, columns, Sizes(5, 2.0), 1, 1, 1.0, True])


def test_wrong_source_is_reported():
    with pytest.raises(EmulationError, match=r"f\.cu:2.*nonsense"):
        kernel("nonsense;")


def test_fast_enough_for_ci():
    f = kernel("for (int i = 0; i < 50; ++i) { out[threadIdx.x] += 1; __syncthreads(); }")
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        f.launch(1, 256, 0, [torch.zeros(256)])
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.02  # below 1 ms on an idle machine
