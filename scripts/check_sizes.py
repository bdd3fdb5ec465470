"""Holds functions and files to the limits of CONTRIBUTING.md; needs `lizard`.

Python functions have at most 60 lines and a complexity of 20, CUDA functions 120 lines and 30; Python files 450 lines,
CUDA files and tests 750. Functions that are straight-line code, or generated, are named below with the reason.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lizard

ROOT = Path(__file__).parent.parent
PYTHON, CUDA = (60, 20), (120, 30)  # lines and complexity of a function
LINES, LINES_OF_KERNELS_AND_TESTS = 450, 750

#: Functions of more lines than others may have, and why that is right.
ALLOWED = {
    f"{name}.py:{function}": "the options of a command are declared in its signature"
    for name, function in (
        ("bench", "bench"),
        ("check", "check"),
        ("compile", "compile_kernels"),
        ("emit", "emit"),
        ("explain", "explain"),
        ("report", "report"),
        ("tune", "tune"),
    )
}

#: What is larger still: it may become smaller, and no larger. Lines of files; lines and complexity of functions.
LARGE_FILES = {
    "tests/test_gpu.py": 957,
}
LARGE_FUNCTIONS = {
    "implicit_gemm.cu:implicit_gemm": (213, 67),
}


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository."""
    found = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in found.stdout.splitlines() if (ROOT / name).exists()]


def long_files() -> list[str]:
    """Files of more lines than they may have."""
    found = []
    for path in tracked("src/*.py", "src/*.cu", "src/*.cuh", "tests/*.py", "benchmarks/*.py", "scripts/*.py"):
        python_of_package = path.suffix == ".py" and "tests" not in path.parts
        most = LINES if python_of_package else LINES_OF_KERNELS_AND_TESTS
        most = LARGE_FILES.get(str(path.relative_to(ROOT)), most)
        count = len(path.read_text(encoding="utf-8").splitlines())
        if count > most:
            found.append(f"{path.relative_to(ROOT)}: {count} lines, at most {most}")
    return found


def large_functions() -> list[str]:
    """Functions of the package that are longer or more complex than they may be."""
    found = []
    for path in tracked("src/*.py", "src/*.cu", "src/*.cuh"):
        python = path.suffix == ".py"
        most_lines, most_complex = PYTHON if python else CUDA
        name = str(path.relative_to(ROOT)) if python else f"{path.relative_to(ROOT)}.cpp"  # lizard goes by the suffix
        analysis = lizard.analyze_file.analyze_source_code(name, path.read_text(encoding="utf-8"))
        for function in analysis.function_list:
            key = f"{path.name}:{function.name}"
            lines, complexity = LARGE_FUNCTIONS.get(key, (most_lines, most_complex))
            too_long = function.length > lines and key not in ALLOWED
            if too_long or function.cyclomatic_complexity > complexity:
                found.append(
                    f"{path.relative_to(ROOT)}:{function.start_line}: {function.name} has {function.length} lines "
                    f"(at most {lines}), complexity {function.cyclomatic_complexity} (at most {complexity})"
                )
    return found


def main() -> int:
    """Prints what is too large; the exit status is 1 if anything is."""
    found = [*long_files(), *large_functions()]
    print("\n".join(found) if found else "no function and no file is too large")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
