"""The package as others install it: what importing it costs, what it needs, what it says is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import polyphase
from polyphase.jit import compiler
from processes import run_python

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import package_source
import snippets

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

#: Processor time that `import polyphase` may take beyond PyTorch's own, as a share of that: 0.15 seconds on a core that
#: imports PyTorch in one.
IMPORT = 0.15


def test_importing_takes_little_beside_torch() -> None:
    """In new processes, the least of several: other processes can only make it slower."""
    script = """
import sys, time
start = time.process_time()
import torch
before, middle = set(sys.modules), time.process_time()
import polyphase
end = time.process_time()
assert {"polyphase.functional", "polyphase.convert"} <= set(sys.modules) - before
print((end - middle) / (middle - start))
"""
    command = [sys.executable, "-c", script]
    shares = []
    while len(shares) < 5 and min(shares, default=IMPORT) >= IMPORT:
        shares.append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert 1e-3 < min(shares) < IMPORT, shares  # less than a thousandth imports nothing


@pytest.mark.slow
@pytest.mark.parametrize("first", ["polyphase", "torch.utils.flop_counter"])
def test_flops_are_counted_whoever_is_imported_first(first: str) -> None:
    """The counter may import Triton, and so is not imported for its formulas."""
    printed = run_python(f"""
        import {first}, sys, torch
        counter = "torch.utils.flop_counter"
        assert (counter in sys.modules) == ({first!r} == counter)
        import polyphase
        from torch.utils.flop_counter import FlopCounterMode
        with FlopCounterMode(display=False) as counted:
            polyphase.conv_transpose2d(torch.randn(1, 3, 4, 5), torch.randn(3, 2, 3, 3)).relu()
            polyphase.fused.conv_transpose2d(torch.randn(1, 3, 4, 5), torch.randn(3, 2, 3, 3), epilogue=["relu"])
        print(counted.get_total_flops())
    """)
    assert int(printed) == 2 * 2 * 3 * 4 * 5 * 2 * 3 * 3


def test_printing_a_report_needs_no_extra() -> None:
    script = """
import sys, torch
sys.modules["rich"] = sys.modules["typer"] = sys.modules["numpy"] = sys.modules["matplotlib"] = None
import polyphase
print(polyphase.accelerate(torch.nn.Sequential(torch.nn.ConvTranspose2d(4, 4, 3), torch.nn.ReLU())))
x = torch.randn(1, 4, 5, 5)
assert polyphase.ConvTranspose2d(4, 4, 3)(x).shape == (1, 4, 7, 7)
print(polyphase.explain(polyphase.ConvTranspose2d(4, 4, 3), x.shape, "sm_90a"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 swapped, 0 already done, 0 left alone" in done.stdout
    assert "weight_grad:" in done.stdout


def test_nothing_is_imported_that_is_no_module_before_pytorch_2_5() -> None:
    """What lies deeper than `torch._C.NAME` is an attribute there."""
    for path in (ROOT / "src").glob("**/*.py"):
        assert not re.search(r"^\s*(from|import) torch\._C\.\w+\.", path.read_text(encoding="utf-8"), re.MULTILINE), (
            path
        )


PIP = """#!/usr/bin/env bash
shift 2  # -m pip
[[ $* != *+cpu* ]] || { echo "ERROR: MESSAGE"; exit 1; }
echo "pip $*"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="others have no such builds")
@pytest.mark.parametrize(
    ("message", "goes_on"),
    [
        ("No matching distribution found for torch==2.13.0+cpu", True),
        ("ResolutionImpossible: for help visit https://pip.pypa.io", True),  # under constraints that name torch
        ("No space left on device", False),
    ],
)
def test_set_up_goes_on_where_pip_finds_no_cpu_build(message: str, goes_on: bool, tmp_path: Path) -> None:
    pip = tmp_path / "python"
    pip.write_text(PIP.replace("MESSAGE", message))
    pip.chmod(0o755)
    script = f"set -euo pipefail; source {ROOT}/scripts/environment.sh; python={pip}; install_cpu_torch"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == goes_on, done.stderr
    assert ("pip install torch==" in done.stdout) == goes_on
    assert ("gigabytes" in done.stderr or "3 GB" in done.stderr) == goes_on, "what will be downloaded is told before"
    assert (message in done.stderr) != goes_on


def test_the_core_requires_what_its_modules_import() -> None:
    required = {re.match(r"[\w-]+", line)[0] for line in PROJECT["dependencies"]}  # type: ignore[index]
    assert required == {"torch", "cuda-core", "cuda-bindings"}
    assert PROJECT["name"] == "torch-polyphase"


def test_every_pip_line_names_the_distribution_and_an_extra_that_is_there() -> None:
    """`polyphase` alone is another project's name."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py"), *ROOT.glob("tests/*.py")]
    known = {"torch-polyphase", *(f"torch-polyphase[{name}]" for name in PROJECT["optional-dependencies"])}
    named = []
    for path in files:
        if path.name == "notebook.md" or path == Path(__file__):
            continue
        for found in re.findall(
            r"pip install (?:-\w+ )*\\?[\"']?([\w.\-\[\]{},]*polyphase[\w\-\[\]{},]*)", path.read_text()
        ):
            variants = [found.replace("{major}", major) for major in ("12", "13")]
            assert set(variants) <= known, f"{path}: {found}"
            named.append(found)
    assert len(named) >= 5


@pytest.mark.parametrize(("cuda", "extra"), [("12.4", "cu12"), ("13.0", "cu13"), (None, "cu13")])
def test_without_nvrtc_the_error_names_the_extra_of_pytorch_s_cuda(
    cuda: str | None, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda.bindings import nvrtc

    def not_found() -> None:
        raise RuntimeError('Failure finding "libnvrtc.so"')

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(nvrtc, "nvrtcVersion", not_found)
    compiler._nvrtc_version.cache_clear()
    try:
        with pytest.raises(polyphase.UnsupportedError, match=re.escape(f'pip install "torch-polyphase[{extra}]"')):
            compiler.compiler_version()
    finally:
        compiler._nvrtc_version.cache_clear()


def test_the_citation_has_the_version() -> None:
    assert f"\nversion: {polyphase.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_links_of_a_released_readme_lead_to_the_repository() -> None:
    text = "[![a](b.png)](docs/c.md), [d](#e), [f](https://g.h), ![i](benchmarks/j.svg), [k](docs/l.md#m)"
    assert package_source.with_home(text, "https://x.y/z") == (
        "[![a](https://x.y/z/raw/main/b.png)](https://x.y/z/blob/main/docs/c.md), [d](#e), [f](https://g.h), "
        "![i](https://x.y/z/raw/main/benchmarks/j.svg), [k](https://x.y/z/blob/main/docs/l.md#m)"
    )


def test_snippets_are_found_and_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        '# A\n\n```python title="a.py"\nA = 1\n```\n\n```python\nimport a\nb = a.A\n```\n\n- list\n\n'
        "  ```python\n  assert b == 1\n  ```\n\n```sh\npip install torch-polyphase[cli]  # all\npython a.py\n```\n\n"
        "<!-- not run: no such thing -->\n```sh\nrm nothing\n```\n\n```text\n1\n```\n"
    )
    assert snippets.run_page(page, gpu=False) == 4
    for block, words in (
        ("python\nassert 0", "AssertionError"),
        ("sh\nls", "nothing runs 'ls'"),
        ("sh\npip install polyphase", "is torch-polyphase"),
        ("rust\n1", "nothing runs a block of rust"),
    ):
        page.write_text(f"```{block}\n```\n")
        with pytest.raises(snippets.BrokenSnippetError, match=words):
            snippets.run_page(page, gpu=False)
