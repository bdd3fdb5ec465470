"""The check of the docs' figures: what counts as one, what counts as a source, what must exist."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import processes

_SCRIPT = processes.ROOT / "benchmarks" / "check_figures.py"
_spec = importlib.util.spec_from_file_location("check_figures", _SCRIPT)
assert _spec is not None
assert _spec.loader is not None
check_figures = importlib.util.module_from_spec(_spec)
sys.modules["check_figures"] = check_figures  # its tuples look their annotations up there
_spec.loader.exec_module(check_figures)

NOTEBOOK = """# Log

## Kernel = stride: `some_gemm`

| step | ms |
|-|-|
| 3. first | 1.0 |
| 3b. second | 0.9 |

- *Step 7* was slower. (steps 10 to 12, and steps 20 and 21)
"""
SOURCE = "[log](../notebook.md#kernel--stride-some_gemm)"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository of a record, an experiment and a notebook."""
    for folder in ("docs/kernels", "benchmarks/results", "benchmarks/experiments/001-stores"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "benchmarks/results/h200.csv").write_text("layer\n")
    (tmp_path / "benchmarks/experiments/001-stores/run.py").write_text("")
    (tmp_path / "benchmarks/experiments/001-stores/out.csv").write_text("")
    (tmp_path / "docs/notebook.md").write_text(NOTEBOOK)
    return tmp_path


def complaints(root: Path, text: str, page: str = "docs/kernels/some.md") -> list[str]:
    """What the check says of a page."""
    (root / page).write_text(text)
    return [problem.what for problem in check_figures.problems(root)]


def test_docs_of_this_repository_have_their_sources() -> None:
    done = subprocess.run([sys.executable, str(_SCRIPT)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "It takes 0.3 ms.", "A launch is 5 µs.", "The first call takes 1.2 s.", "A copy reaches 4.2 TB/s.",
        "Products: 800 TFLOP/s.", "It is **3.7×** as fast.", "It stands at 1.3 × its floor.", "It is 2.2 times slower.",
        "1.5 to 2 times PyTorch's speed", "Choices are 3 % slower.", "0.28 → 0.24", "KernelBench 57 2.33 → **2.64**",
        "- an item: 0.3 ms", "| layer | ms |\n|-|-|\n| one | 0.3 |", "| layer | × floor |\n|-|-|\n| one | 2 |",
        "| idea | why |\n|-|-|\n| one | 0.2 ms more |", "broken\nover lines: 0.3\nms",
    ],
)  # fmt: skip
def test_figures_want_a_source(root: Path, text: str) -> None:
    assert [what for what in complaints(root, f"# Some\n\n{text}\n") if "without a source" in what]


@pytest.mark.parametrize(
    "text",
    [
        "8×64×1024 → 64 with k=4, s=2", "tiles of 16 × 8, and FSRCNN ×4", "fitted to 60 times of 18 layers",
        "three times as fast", "64 MB of planes", "a float32 of 3.5e-7", "    python bench.py  # 0.3 ms",
        "```\n0.3 ms\n```", "| layer | channels |\n|-|-|\n| one | 64 |",
        "[step 3](../notebook.md#kernel--stride-some_gemm)",
    ],
)  # fmt: skip
def test_other_numbers_want_none(root: Path, text: str) -> None:
    assert complaints(root, f"# Some\n\n{text}\n") == []


@pytest.mark.parametrize(
    "text",
    [
        f"It takes 0.3 ms ({SOURCE}).",
        "It takes 0.3 ms ([record](../../benchmarks/results/h200.csv)).",
        "It takes 0.3 ms (`benchmarks/experiments/001-stores`).",
        f"Its section opens with {SOURCE}.\n\nIt takes 0.3 ms.\n\n- 0.4 ms\n- 0.5 ms",
        f"Some words.\n\nThe table of {SOURCE}:\n\n| layer | ms |\n|-|-|\n| one | 0.3 |",
        f"Some words.\n\nThe list of {SOURCE}:\n\n- 0.3 ms\n- 0.4 ms",
    ],
)
def test_sources_near_by_count(root: Path, text: str) -> None:
    assert complaints(root, f"# Some\n\n{text}\n") == []


@pytest.mark.parametrize(
    "text",
    [
        f"{SOURCE}\n\n## Another section\n\nIt takes 0.3 ms.",
        f"Words.\n\nMore of {SOURCE}.\n\nIt takes 0.3 ms.",
        f"Words.\n\nOf {SOURCE}:\n\n| a | ms |\n|-|-|\n| b | 0.3 |\n\n| a | ms |\n|-|-|\n| b | 0.4 |",
        f"Words.\n\n- {SOURCE}\n- 0.3 ms",
    ],
)
def test_sources_far_away_do_not_count(root: Path, text: str) -> None:
    assert any("without a source" in what for what in complaints(root, f"# Some\n\n{text}\n"))


def test_what_is_named_has_to_exist(root: Path) -> None:
    page = "# Some\n\n0.3 ms, `benchmarks/results/h100.csv`\n"
    assert any("no h100.csv" in what for what in complaints(root, page))
    page = "# Some\n\n0.3 ms, `benchmarks/experiments/002-loads`\n"
    assert any("no 002-loads" in what for what in complaints(root, page))
    (root / "benchmarks/experiments/002-loads").mkdir()
    (root / "benchmarks/experiments/002-loads/out.csv").write_text("")
    assert any("no 002-loads" in what for what in complaints(root, page))  # a script is missing still
    (root / "benchmarks/experiments/002-loads/run.cu").write_text("")
    assert complaints(root, page) == []
    page = "# Some\n\n0.3 ms ([log](../notebook.md#kernel-stride))\n"
    assert any("no notebook.md#kernel-stride" in what for what in complaints(root, page))


def test_steps_have_to_exist(root: Path) -> None:
    assert check_figures.steps_in(NOTEBOOK) == {3, 7, 10, 11, 12, 20, 21}
    assert complaints(root, "# Some\n\nsteps 3, 7 and 11\n") == []
    assert complaints(root, "# Some\n\nsteps 3, 8 and 11\n") == ["the notebook has no step 8"]
    table = f"# Some\n\n{SOURCE}\n\n| idea | measured | step |\n|-|-|-|\n| one | 0.3 | P 7 |\n| two | 0.4 | 13 |\n"
    assert complaints(root, table) == ["the notebook has no step 13"]


def test_links_and_headings_have_to_exist(root: Path) -> None:
    readme = "# Some\n\n[one](docs/notebook.md) [two](docs/nothing.md) [three](docs/notebook.md#log) [four](#some)\n"
    assert complaints(root, readme + "\n[five](#other) [six](https://example.org/x)\n", "README.md") == [
        "a link to docs/nothing.md, which does not exist",
        "a link to #other, a heading that does not exist",
    ]


def test_pages_stay_short(root: Path) -> None:
    assert complaints(root, "# Some\n" + "\nWords.\n" * 74) == []
    assert complaints(root, "# Some\n" + "\nWords.\n" * 75) == ["151 lines, of at most 150"]
