"""What KernelBench's static check asks of a file, and what makes Python text old enough for an emitted one."""

from __future__ import annotations

import re

# It looks at the text without comments, as patterns: words in a docstring count.
_FORBIDDEN = {
    "try and except": r"\btry\s*:|\bexcept\s*:|\bexcept\s+\w+",
    "the word pass": r"\bpass\b",
    "threads": r"\bthreading\b|\bmultiprocessing\b|concurrent\.futures|(Thread|Process)PoolExecutor",
    "timing functions that are assigned to": (
        r"torch\.cuda\.Event(\.record|\.elapsed_time)?\s*=|torch\.cuda\.synchronize\s*=|time\.(perf_counter|time)\s*="
    ),
    "subclasses of Tensor": r"_make_subclass|class\s+\w+.*\((torch\.)?Tensor\)|torch\.Tensor\.__new__",
}
_REQUIRED = ("__global__", "load_inline")


def broken(text: str) -> list[str]:
    """The rules that a file breaks, in words."""
    code = "\n".join(re.split(r"#|//", line, maxsplit=1)[0] for line in text.splitlines())
    found = [f"has {what}" for what, pattern in _FORBIDDEN.items() if re.search(pattern, code)]
    return found + [f"lacks {word}" for word in _REQUIRED if word not in code]


def breaks_a_rule(prose: str) -> bool:
    """Whether a docstring would do so."""
    return any(re.search(pattern, prose) for pattern in _FORBIDDEN.values())
