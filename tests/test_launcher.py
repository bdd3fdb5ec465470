"""The launcher on a driver that is made up: what only goes wrong when threads meet a layer together."""

from __future__ import annotations

import ctypes
import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver

from polyphase import prepared, runtime
from polyphase.errors import CompilationError, PolyphaseError
from polyphase.jit import encode_tensor_map, launcher
from polyphase.jit.source import KernelSource
from polyphase.plan.planner import plan
from polyphase.problem import ConvTransposeProblem, Pass
from polyphase.problem.device import DeviceInfo
from polyphase.program.params import params_of
from polyphase.program.program import Program
from polyphase.program.step import BIAS, DST, SRC, WEIGHT, WORKSPACE, Step
from polyphase.program.tensor_map import TENSOR_MAP_BYTES, TensorMap

THREADS = 4
PLACES = {BIAS: 0, SRC: 1, WORKSPACE: 2, WEIGHT: 3, DST: 4}


class FakeDriver:
    """Kernels with a limit on shared memory each, as CUDA's, of which every load makes a new one."""

    CUfunction = CUkernel = CUdevice = staticmethod(lambda handle: handle)
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6)
    CUlaunchConfig = SimpleNamespace

    def __init__(self, version: int = 13000) -> None:
        self.version = version
        self.launched: list[tuple[Any, int]] = []  # configurations and tables of parameters
        self.limits: dict[int, int] = {}
        self.handles = itertools.count(1)

    def CUlaunchAttribute(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(value=SimpleNamespace())

    def cuKernelSetAttribute(self, attribute: int, value: int, kernel: int, device: int) -> tuple[int]:  # noqa: N802
        self.limits[kernel] = value
        return (0,)

    def cuCtxGetCurrent(self) -> tuple[int, int]:  # noqa: N802
        return 0, 0

    def cuCtxSetCurrent(self, context: int) -> tuple[int]:  # noqa: N802
        return (0,)

    def cuDriverGetVersion(self) -> tuple[int, int]:  # noqa: N802
        return 0, self.version

    def cuLaunchKernelEx(self, config: Any, function: int, table: int, extra: int) -> tuple[int]:  # noqa: N802
        self.launched.append((config, table))
        return (0 if config.sharedMemBytes <= self.limits.get(function, 48 << 10) else 1,)


def use(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    """Makes the driver the launcher's, with nothing loaded and nothing to compile."""
    core = SimpleNamespace(
        Device=lambda index: SimpleNamespace(set_current=lambda: None),
        ObjectCode=SimpleNamespace(
            from_cubin=lambda binary: SimpleNamespace(
                get_kernel=lambda name: SimpleNamespace(handle=next(driver.handles))
            )
        ),
    )
    launcher._may_overlap.cache_clear()
    monkeypatch.setattr(launcher, "_loaded", {})
    monkeypatch.setattr(launcher, "_driver", lambda: driver)
    monkeypatch.setattr(launcher, "cuda_core", lambda: core)
    monkeypatch.setattr(launcher, "compile_kernel", lambda source, arch: b"binary")


def executable_of(step: Step) -> launcher.Executable:
    """The step alone, whose operands are the addresses that it is called with."""
    return launcher.Executable(Program((step,)), "sm_90a", 0, {name: i for i, name in enumerate(step.operands)})


@pytest.mark.parametrize(
    ("arch", "version", "overlaps"), [("sm_90a", 12030, True), ("sm_90a", 12020, False), ("sm_80", 13000, False)]
)
def test_only_a_kernel_that_waits_by_itself_may_start_early(
    monkeypatch: pytest.MonkeyPatch, arch: str, version: int, overlaps: bool
) -> None:
    problem = ConvTransposeProblem.make((8, 64, 64, 64), 64, 3, dtype="float16")
    program = plan(problem, Pass.FORWARD, DeviceInfo.for_arch(arch)).program
    assert program is not None
    assert len(program.steps) == 2
    program = program.with_main(replace(program.main, tensor_maps=()))  # which the real driver encodes
    driver = FakeDriver(version)
    use(monkeypatch, driver)
    executable = launcher.Executable(program, arch, 0, PLACES)
    for stream, addresses in ((7, [11, 12, 13, 14, 15]), (7, [21, 22, 23, 24, 25]), (8, [31, 32, 33, 34, 35])):
        driver.launched.clear()
        executable(stream, addresses)
        assert len(driver.launched) == 2
        for step, (config, table) in zip(program.steps, driver.launched):
            assert config.hStream == stream
            grid = config.gridDimX, config.gridDimY, config.gridDimZ
            assert (grid, config.blockDimX, config.sharedMemBytes) == (step.grid, step.block, step.shared_bytes)
            operands = [ctypes.c_uint64.from_address(at).value for at in parameters(table, len(step.operands))]
            assert operands == [addresses[PLACES[name]] for name in step.operands]
            *_, params = parameters(table, len(step.operands) + 1)
            assert ctypes.string_at(params, len(step.params)) == step.params
        (pack, _), (main, _) = driver.launched
        assert not hasattr(pack, "attrs"), "packing reads what the kernel before it has written"
        assert [each.value.programmaticStreamSerializationAllowed for each in getattr(main, "attrs", ())] == [
            1
        ] * overlaps
    launcher._may_overlap.cache_clear()


def test_two_programs_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    step = replace(step_with_tensor_map(), tensor_maps=())
    first, second = ({name: 2 * i + odd for i, name in enumerate(step.operands)} for odd in (0, 1))
    driver = FakeDriver()
    use(monkeypatch, driver)
    both = launcher.Executable(Program((step,)), "sm_90a", 0, first).then(
        launcher.Executable(Program((step,)), "sm_90a", 0, second)
    )
    addresses = [10 + i for i in range(2 * len(step.operands))]
    for stream in (7, 8):
        driver.launched.clear()
        both(stream, addresses)
        assert [config.hStream for config, _ in driver.launched] == [stream, stream]
        for (_, table), places in zip(driver.launched, (first, second)):
            operands = [ctypes.c_uint64.from_address(at).value for at in parameters(table, len(step.operands))]
            assert operands == [addresses[places[name]] for name in step.operands]


def parameters(table: int, count: int) -> list[int]:
    """Where the driver finds a kernel's parameters."""
    return list((ctypes.c_uint64 * count).from_address(table))


def test_threads_do_not_share_what_the_driver_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads a launch's addresses while other threads run."""
    step = replace(step_with_tensor_map(), tensor_maps=())
    driver, together = FakeDriver(), threading.Barrier(THREADS)
    read: list[list[int]] = []

    def launch(config: Any, function: int, table: int, extra: int) -> tuple[int]:
        together.wait(10)  # all have written their addresses
        read.append([config.hStream, *(ctypes.c_uint64.from_address(at).value for at in parameters(table, 4))])
        return (0,)

    use(monkeypatch, driver)
    driver.cuLaunchKernelEx = launch  # type: ignore[method-assign]
    executable = executable_of(step)
    given = [[thread, *range(10 * thread, 10 * thread + 4)] for thread in range(1, THREADS + 1)]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda each: executable(each[0], each[1:]), given))
    assert sorted(read) == given


def test_what_the_driver_refuses_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    use(monkeypatch, driver)
    driver.cuLaunchKernelEx = lambda *arguments: ("CUDA_ERROR",)  # type: ignore[method-assign]
    step = replace(step_with_tensor_map(), tensor_maps=())
    with pytest.raises(PolyphaseError, match=rf"launching {step.source.kernel} on CUDA device 0 failed: 'CUDA_ERROR'"):
        executable_of(step)(0, [1, 2, 3, 4])


def test_nothing_of_an_empty_grid_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    use(monkeypatch, driver)
    executable_of(replace(step_with_tensor_map(), grid=(0, 1, 1)))(0, [1, 2, 3, 4])
    assert not driver.launched


def test_threads_that_meet_a_new_layer_share_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ConvTransposeProblem.make((8, 64, 64, 64), 64, 3)
    program = plan(problem, Pass.WEIGHT_GRAD, DeviceInfo.for_arch("sm_80")).program
    assert program is not None
    step = program.main
    assert step.shared_bytes > 48 << 10
    assert not step.tensor_maps
    driver, together = FakeDriver(), threading.Barrier(THREADS)

    def compiled(source: object, arch: str) -> bytes:
        together.wait(10)  # nobody has loaded anything yet
        return b"binary"

    use(monkeypatch, driver)
    monkeypatch.setattr(launcher, "compile_kernel", compiled)

    failures: list[Exception] = []

    def call() -> None:
        try:
            executable_of(step)(0, [1, 2, 3])
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=call) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    executable_of(step)(0, [1, 2, 3])  # and so does who comes later
    assert next(driver.handles) == 2, "the kernel was loaded more than once"


def test_a_prologue_is_compiled_beside_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ConvTransposeProblem.make((8, 64, 64, 64), 64, 3, dtype="float16")
    program = plan(problem, Pass.FORWARD, DeviceInfo.for_arch("sm_90a")).program
    assert program is not None
    assert len(program.steps) == 2
    use(monkeypatch, FakeDriver())
    together, compiled = threading.Barrier(2), []

    def compile_kernel(source: KernelSource, arch: str) -> bytes:
        together.wait(10)  # for the other one
        compiled.append(source.kernel)
        return b"binary"

    monkeypatch.setattr(launcher, "compile_kernel", compile_kernel)
    for _ in range(2):
        launcher.Executable(program, "sm_90a", 0, PLACES)
        assert sorted(compiled) == ["implicit_gemm", "pack_weights"]


def test_a_prologue_that_does_not_compile_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ConvTransposeProblem.make((8, 64, 64, 64), 64, 3, dtype="float16")
    program = plan(problem, Pass.FORWARD, DeviceInfo.for_arch("sm_90a")).program
    assert program is not None
    use(monkeypatch, FakeDriver())

    def compile_kernel(source: KernelSource, arch: str) -> bytes:
        if source.kernel == "pack_weights":
            raise CompilationError("no", log="", source_path=None)
        return b"binary"

    monkeypatch.setattr(launcher, "compile_kernel", compile_kernel)
    with pytest.raises(CompilationError, match="no"):
        launcher.Executable(program, "sm_90a", 0, PLACES)


# Tensor maps


def step_with_tensor_map() -> Step:
    problem = ConvTransposeProblem.make((8, 64, 32, 32), 64, 3, dtype="float16", channels_last=True)
    program = plan(problem, Pass.FORWARD, DeviceInfo.for_arch("sm_90a")).program
    assert program is not None
    assert program.main.tensor_maps
    return program.main


def test_another_tensor_has_another_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """The map is that of the first pointer, of which a launch remembers some, whichever thread calls."""
    step = step_with_tensor_map()
    encoded: list[int] = []

    def encode(boxes: TensorMap, address: int) -> bytes:
        assert boxes in step.tensor_maps
        encoded.append(address)
        return bytes([address]) * TENSOR_MAP_BYTES

    use(monkeypatch, FakeDriver())
    monkeypatch.setattr(encode_tensor_map, "encode", encode)
    monkeypatch.setattr(launcher, "_MOST_MAPS", 2)
    executable = executable_of(step)
    (place,) = params_of(step.source).tensor_maps

    def call(*pointers: int) -> None:
        executable(0, pointers)
        geometry = executable._local.launches.params[0].raw
        end = place + TENSOR_MAP_BYTES
        assert geometry[place:end] == bytes([pointers[0]]) * TENSOR_MAP_BYTES
        assert geometry[:place] + geometry[end:] == step.params[:place] + step.params[end:]

    for pointers, known in (
        ((1, 2, 3, 4), [1]),
        ((1, 7, 8, 9), [1]),
        ((5, 2, 3, 4), [1, 5]),
        ((1, 2, 3, 4), [1, 5]),
        ((6, 2, 3, 4), [1, 5, 6]),
        ((1, 2, 3, 4), [1, 5, 6, 1]),
    ):
        call(*pointers)
        assert encoded == known
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call, 6, 2, 3, 4).result()
    call(1, 2, 3, 4)
    assert encoded == [1, 5, 6, 1]


def test_no_map_without_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeDriver())
    monkeypatch.setattr(encode_tensor_map, "encode", lambda boxes, address: pytest.fail("a map that nobody reads"))
    executable_of(replace(step_with_tensor_map(), tensor_maps=()))(0, [1, 2, 3, 4])


def test_more_maps_than_the_kernel_has(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeDriver())
    step = step_with_tensor_map()
    with pytest.raises(ValueError, match="shorter"):
        executable_of(replace(step, tensor_maps=step.tensor_maps * 3))(0, [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("boxes", "dtype", "swizzle"),
    [
        (TensorMap("float32", (96, 9, 8, 1, 2), (384, 3456, 16, 27648), (16, 5, 4, 1, 2), 64, True), "TFLOAT32", "64B"),
        (TensorMap("float32", (96, 9, 8, 1, 2), (384, 3456, 16, 27648), (8, 5, 4, 1, 2), 32, False), "FLOAT32", "32B"),
        (
            TensorMap("bfloat16", (64, 9, 8, 1, 2), (128, 1152, 16, 9216), (64, 5, 4, 1, 2), 128, True),
            "BFLOAT16",
            "128B",
        ),
        (TensorMap("float16", (16, 9, 1, 2, 40), (32, 16, 11520, 288), (16, 5, 1, 2, 16), 16, True), "FLOAT16", "NONE"),
    ],
    ids=str,
)
def test_maps_say_what_boxes_are(monkeypatch: pytest.MonkeyPatch, boxes: TensorMap, dtype: str, swizzle: str) -> None:
    found = ctypes.create_string_buffer(bytes(range(TENSOR_MAP_BYTES)), TENSOR_MAP_BYTES)
    given: list[Any] = []

    def encode(*arguments: Any) -> tuple[int, Any]:
        given.extend(arguments)
        return 0, SimpleNamespace(getPtr=lambda: ctypes.addressof(found))

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode)
    assert encode_tensor_map.encode(boxes, 1 << 40) == found.raw
    element, rank, address, sizes, strides, box, steps, interleave, swizzled, _, fill = given
    assert element.name == f"CU_TENSOR_MAP_DATA_TYPE_{dtype}"
    assert (rank, address) == (5, 1 << 40)
    assert tuple(map(int, sizes)) == boxes.sizes
    assert tuple(map(int, strides)) == boxes.strides
    assert tuple(map(int, box)) == boxes.box
    assert [int(step) for step in steps] == [1] * 5
    assert swizzled.name == f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"
    assert interleave.name.endswith("INTERLEAVE_NONE")
    assert fill.name.endswith("OOB_FILL_NONE")  # zeros
    given.clear()
    encode_tensor_map.encode(boxes, 0)  # of an empty tensor
    assert given[2] > 0
    assert given[2] % 16 == 0


def test_a_map_that_the_driver_refuses_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_with_tensor_map()
    use(monkeypatch, FakeDriver())
    refusal = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", lambda *arguments: (refusal, None))
    executable = executable_of(step)
    for _ in range(2):  # a map that was not made is not taken for one that was
        with pytest.raises(PolyphaseError, match=r"the driver makes no tensor map of TensorMap\(.*INVALID_VALUE"):
            executable(0, [1 << 40, 2, 3, 4])


def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the interpreter shuts down: both kernels are then compiled one after the other."""

    def none_left(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(launcher.ThreadPoolExecutor, "submit", none_left)
    source = KernelSource("pack_weights", "float32", False, ())
    assert launcher._compile_in_thread(source, "sm_90a", 0) is None


def test_kernels_for_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the thread has begun is waited for; one that waits is compiled by who needs it, as a failed one is."""
    begun, go = threading.Event(), threading.Event()

    def compile_kernel(source: KernelSource, arch: str) -> bytes:
        by_thread = threading.current_thread() is not threading.main_thread()
        if by_thread:
            begun.set()
            assert go.wait(10)
            if source.kernel == "failing":
                raise CompilationError("in the thread")
        return b"thread" if by_thread else b"caller"

    monkeypatch.setattr(launcher, "compile_kernel", compile_kernel)
    monkeypatch.setattr(launcher, "_meanwhile", {})
    first, second, failing = (KernelSource(name, "float32", False, ()) for name in ("first", "second", "failing"))
    for source in (first, second, first):
        launcher.compile_meanwhile(source, "sm_90a", 0)
    assert begun.wait(10)
    assert launcher._compiled(second, "sm_90a") == b"caller"
    go.set()
    assert launcher._compiled(first, "sm_90a") == b"thread"
    assert launcher._compiled(first, "sm_90a") == b"caller"
    launcher.compile_meanwhile(failing, "sm_90a", 0)
    assert launcher._compiled(failing, "sm_90a") == b"caller"
    assert not launcher._meanwhile
    with launcher.quiet():
        launcher.compile_meanwhile(first, "sm_90a", 0)
    assert not launcher._meanwhile


@pytest.mark.parametrize("one_way", [False, True])
@pytest.mark.parametrize("capturing", [False, True])
def test_a_graph_is_captured_with_the_kernel_that_is_loaded(
    capturing: bool, one_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a size whose own kernel is not there yet; the thread compiles that meanwhile."""
    small = ConvTransposeProblem.make((1, 256, 32, 24), 256, 4, 2, 1, tf32=True)
    problem = small if one_way else ConvTransposeProblem.make((1, 1, 256, 256), 1, 4, 2, 1)
    device = DeviceInfo.for_arch("sm_90a")
    chosen = plan(problem, Pass.FORWARD, device)
    assert chosen.program is not None
    _, other = chosen.programs
    launched, compiled = [], []
    there = set(other.sources)
    if one_way:
        assert other.main.one_way is not None
        there = {other.main.one_way, *other.sources} - {other.main.source}
    monkeypatch.setattr(runtime, "DeviceInfo", SimpleNamespace(of=lambda _: device))
    monkeypatch.setattr(prepared, "Executable", lambda program, *_: launched.append(program.main.source))
    monkeypatch.setattr(runtime, "compile_meanwhile", lambda source, *_: compiled.append(source))
    for module in (runtime, launcher):
        monkeypatch.setattr(module, "is_loaded", lambda source, *_: source in there)
    monkeypatch.setattr(launcher, "is_cached", lambda *_: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    x, weight = torch.empty(problem.input_shape), torch.empty(problem.weight_shape)
    runtime._prepare(Pass.FORWARD, problem, x, None, weight)
    first, second = (each.main.one_way or each.main.source for each in chosen.programs)
    assert launched == [second if capturing else first]
    assert {chosen.program.main.source, other.main.source} <= set(
        compiled
    )  # but what is loaded, which the real one knows


def test_the_kernel_that_can_be_there_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one for tensors that lie alike, unless the one for all is here, on the disk, or on its way."""
    problem = ConvTransposeProblem.make((4, 64, 32, 32), 64, 4, 2, 1, tf32=True)
    program = plan(problem, Pass.FORWARD, DeviceInfo.for_arch("sm_90a")).program
    assert program is not None
    step = program.main
    assert step.one_way is not None
    loaded: set[KernelSource] = set()
    cached: set[KernelSource] = set()
    monkeypatch.setattr(launcher, "is_loaded", lambda source, *_: source in loaded)
    monkeypatch.setattr(launcher, "is_cached", lambda source, _: source in cached)
    monkeypatch.setattr(launcher, "_meanwhile", {})

    def soonest() -> KernelSource:
        return launcher.soonest(program, "sm_90a", 0).main.source

    assert soonest() == step.one_way
    launcher._meanwhile[step.source, "sm_90a"] = Future()
    assert soonest() == step.source
    loaded.add(step.one_way)
    assert soonest() == step.one_way
    launcher._meanwhile.clear()
    loaded.clear()
    cached.add(step.source)
    assert soonest() == step.source
    loaded |= {step.source, step.one_way}
    assert soonest() == step.source
    assert launcher.soonest(program.with_main(replace(step, one_way=None)), "sm_90a", 0).main.source == step.source
