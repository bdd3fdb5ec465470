"""The launcher on a driver that is made up: what only goes wrong when threads meet a layer together."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from polyphase.device import DeviceInfo
from polyphase.jit import launcher
from polyphase.plan import plan
from polyphase.problem import ConvTransposeProblem, Pass

THREADS = 4


class FakeDriver:
    """Kernels with a limit on shared memory each, as CUDA's, of which every load makes a new one."""

    CUfunction = CUkernel = CUdevice = staticmethod(lambda handle: handle)
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6)
    CUlaunchConfig = SimpleNamespace

    def __init__(self, version: int = 13000) -> None:
        self.version = version
        self.overlapping: list[Any] = []  # configurations of launches that may begin early
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

    def cuLaunchKernelEx(self, config: Any, function: int, *arguments: Any) -> tuple[int]:  # noqa: N802
        self.overlapping.append(config)
        return self.cuLaunchKernel(function, *(0,) * 6, config.sharedMemBytes)

    def cuLaunchKernel(self, function: int, *arguments: Any) -> tuple[int]:  # noqa: N802
        shared = arguments[6]
        return (0 if shared <= self.limits.get(function, 48 << 10) else 1,)


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


@pytest.mark.parametrize(
    ("arch", "version", "overlaps"), [("sm_90a", 12030, True), ("sm_90a", 12020, False), ("sm_80", 13000, False)]
)
def test_only_a_kernel_that_waits_by_itself_may_start_early(
    monkeypatch: pytest.MonkeyPatch, arch: str, version: int, overlaps: bool
) -> None:
    problem = ConvTransposeProblem.make((8, 64, 64, 64), 64, 3, dtype="float16")
    launch = plan(problem, Pass.FORWARD, DeviceInfo.for_arch(arch)).launch
    assert launch is not None
    assert launch.prologue is not None
    driver = FakeDriver(version)
    use(monkeypatch, driver)
    executable = launcher.Executable(launch, arch, 0, 4)
    executable.prologue(7, 1, 2)
    assert not driver.overlapping, "the prologue reads what the kernel before it has written"
    executable(7, 1, 2, 3, 4)
    assert [config.hStream for config in driver.overlapping] == [7] * overlaps
    for config in driver.overlapping:
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        assert (grid, config.blockDimX, config.sharedMemBytes) == (launch.grid, launch.block, launch.shared_bytes)
        assert [each.value.programmaticStreamSerializationAllowed for each in config.attrs] == [1]
    launcher._may_overlap.cache_clear()


def test_threads_that_meet_a_new_layer_share_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ConvTransposeProblem.make((8, 64, 64, 64), 64, 3)
    launch = plan(problem, Pass.WEIGHT_GRAD, DeviceInfo.for_arch("sm_90a")).launch
    assert launch is not None
    assert launch.shared_bytes > 48 << 10
    driver, together = FakeDriver(), threading.Barrier(THREADS)

    def compiled(source: object, arch: str) -> bytes:
        together.wait(10)  # nobody has loaded anything yet
        return b"binary"

    use(monkeypatch, driver)
    monkeypatch.setattr(launcher, "compile_kernel", compiled)

    failures: list[Exception] = []

    def call() -> None:
        try:
            launcher.Executable(launch, "sm_90a", 0, 3)(0, 1, 2, 3)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=call) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    launcher.Executable(launch, "sm_90a", 0, 3)(0, 1, 2, 3)  # and so does who comes later
    assert next(driver.handles) == 2, "the kernel was loaded more than once"
