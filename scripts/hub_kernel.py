"""Writes polyphase as a kernel of Hugging Face's Hub, from the sources of this checkout.

    python scripts/hub_kernel.py build/hub
    python -c "import pathlib, kernels; print(kernels.get_local_kernel(pathlib.Path('build/hub')).accelerate)"

A kernel is loaded under a name of its own, and twice in a process by two names: imports become relative, and operators
are of a namespace that is a digest of the sources. Command line, benchmark and `emit` stay behind. What is left imports
torch and the standard library alone, and on a GPU cuda-core and cuda-bindings, as the package does.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "polyphase"
LEFT_OUT = ("bench", "commands", "emit", "__main__.py", "__init__.py")
VARIANT = "torch-universal"

INIT = '''"""Transposed convolutions for PyTorch with CUDA kernels of their own: the same layer, faster."""

from .api import *
from .api import __all__

__version__ = {version!r}
'''


def relative(text: str, depth: int) -> str:
    """The text of a module ``depth`` folders below the package, with relative imports of the package."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "polyphase":
            inside = (node.module or "")[len("polyphase") :]
            dots = "." * (depth + 1)
            before, after = f"from {node.module} import", f"from {dots}{inside.lstrip('.')} import"
            assert before in lines[node.lineno - 1], lines[node.lineno - 1]
            lines[node.lineno - 1] = lines[node.lineno - 1].replace(before, after, 1)
        elif isinstance(node, ast.Import) and any(name.name.split(".")[0] == "polyphase" for name in node.names):
            raise ValueError(f"line {node.lineno} imports polyphase by its name")
    return "".join(lines)


def in_namespace(text: str, namespace: str) -> str:
    """The text with operators of that namespace."""
    text = re.sub(r"\btorch\.ops\.polyphase\b", f"torch.ops.{namespace}", text)
    text = re.sub(r'Library\("polyphase"', f'Library("{namespace}"', text)
    return re.sub(r'"polyphase::', f'"{namespace}::', text)


def sources() -> list[Path]:
    """The files of the kernel."""
    found = (path for path in sorted(SOURCES.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return [path for path in found if path.relative_to(SOURCES).parts[0] not in LEFT_OUT]


def main(target: Path) -> None:
    """Writes the kernel's repository."""
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources())).hexdigest()[:12]
    namespace = f"polyphase_{digest}"
    folder = target / "build" / VARIANT
    shutil.rmtree(folder, ignore_errors=True)
    for path in sources():
        place = path.relative_to(SOURCES)
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".py":
            text = relative(path.read_text(encoding="utf-8"), len(place.parts) - 1)
            (folder / place).write_text(in_namespace(text, namespace), encoding="utf-8")
        else:
            shutil.copy(path, folder / place)
    found = re.search(r'^__version__ = "([^"]+)"$', (SOURCES / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    (folder / "__init__.py").write_text(INIT.format(version=found[1]), encoding="utf-8")
    about = {
        "name": "polyphase",
        "id": namespace,
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda"},
    }
    (folder / "metadata.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    print(f"{len(sources())} files in {folder}, operators in torch.ops.{namespace}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
