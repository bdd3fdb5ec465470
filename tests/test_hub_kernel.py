"""The kernel for Hugging Face's Hub: what `scripts/hub_kernel.py` writes, loaded as `kernels` does."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch

from processes import ROOT, run_python

sys.path.insert(0, str(ROOT / "scripts"))

import hub_kernel

#: What functions import, on a GPU and for tables; of `jit`, which the first call on a GPU imports, also its modules.
WHERE_NEEDED = {"cuda", "rich", "numpy"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("hub")
    hub_kernel.main(target)
    return target


def test_imports_torch_and_the_standard_library_alone(repository: Path) -> None:
    for path in (repository / "build" / hub_kernel.VARIANT).rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        at_once = {id(node) for node in tree.body}
        for node in ast.walk(tree):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in (name.split(".")[0] for name in names):
                known = name == "torch" or name in sys.stdlib_module_names
                late = id(node) not in at_once or path.parent.name == "jit"
                assert known or (name in WHERE_NEEDED and late), f"{path}:{node.lineno}: {name}"


LOADED = """
    import importlib.util, pathlib, sys, torch
    repository, library = pathlib.Path({repository!r}), {library!r}
    if library:
        import kernels
        kernel = kernels.get_local_kernel(repository)
    else:
        folder = repository / "build" / "torch-universal"
        spec = importlib.util.spec_from_file_location("some_kernel", folder / "__init__.py")
        sys.modules["some_kernel"] = kernel = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(kernel)
    assert "polyphase" not in sys.modules
    import polyphase  # beside it

    device = {device!r}
    model = torch.nn.Sequential(torch.nn.ConvTranspose2d(3, 4, 3, 2), torch.nn.ReLU()).to(device)
    x = torch.randn(2, 3, 5, 6, device=device, requires_grad=True)
    torch.backends.cudnn.allow_tf32 = False
    expected = model(x)
    kernel.accelerate(model)
    assert isinstance(model[0], kernel.ConvTranspose2d) and not isinstance(model[0], polyphase.ConvTranspose2d)
    assert "polyphase.ConvTranspose2d" in str(model)
    torch.testing.assert_close(model(x), expected)
    model(x).sum().backward()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    problem = kernel.ConvTransposeProblem.make((8, 64, 32, 32), 32, 4, stride=2, padding=1)
    assert kernel.explain(problem, device="sm_90a") == polyphase.explain(
        polyphase.ConvTransposeProblem.make((8, 64, 32, 32), 32, 4, stride=2, padding=1), device="sm_90a"
    )
    print("right")
"""


@pytest.mark.slow
@pytest.mark.parametrize("library", [False, True])
def test_loads_beside_the_package(repository: Path, library: bool, device: torch.device) -> None:
    """By the library where it is installed, and by what it does."""
    if library:
        pytest.importorskip("kernels")
    script = LOADED.format(repository=str(repository), library=library, device=device.type)
    assert run_python(script).strip().endswith("right")
