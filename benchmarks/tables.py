"""Writes the tables of figures in docs again, from the records in benchmarks/results.

    PYTHONPATH=src python benchmarks/tables.py            # after a new record
    PYTHONPATH=src python benchmarks/tables.py --check    # exit status 1 where a table is not that of the record

A table is found by its head, the line of column names, which has to stand in its file once. Its rows are replaced, and
no word around it.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from polyphase.bench.records import PASS_TITLES, Record, Summary, geometric_mean, read_csv, summaries

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"

#: The records of one GPU, all formats and passes, in which losses and what is far from its floor are looked for.
ON_H200 = (
    "h200.csv", "h200-gradients.csv", "h200-channels-last.csv", "h200-gradients-channels-last.csv", "h200-models.csv",
)  # fmt: skip
FARTHEST, MOST_MEMORY = 10, 4  # rows of these tables
LEAST_FLOOR_MS = 0.01  # a launch takes as long as shorter ones

#: What bounds a layer: the class, its layers as the table names them, and as the records do.
CLASSES = [
    (
        "stride 1, 48 channels or more",
        "KernelBench 57, 69, 65, 61",
        ["KernelBench 57", "KernelBench 69", "KernelBench 65", "KernelBench 61"],
    ),
    ("stride 1, 32 channels", "KernelBench 78", ["KernelBench 78"]),
    (
        "kernel = stride",
        "U-Net (both), SAM, Mask R-CNN, nnU-Net",
        [
            "U-Net, deepest up", "U-Net, last up", "SAM mask decoder, 1st", "Mask R-CNN mask predictor",
            "nnU-Net 3-D up",
        ],
    ),
    (
        "overlapping taps, stride above 1",
        "DCGAN 4th, pose head, pix2pix (both), HiFi-GAN, 75 ungrouped",
        [
            "DCGAN generator, 4th", "SimpleBaseline pose head, 3rd", "CycleGAN/pix2pix up 1", "CycleGAN/pix2pix up 2",
            "HiFi-GAN up 1", "75 ungrouped, every parameter",
        ],
    ),
    ("tiny images", "DCGAN 2nd", ["DCGAN generator, 2nd"]),
]  # fmt: skip


class TableOf(NamedTuple):
    """A table: where it stands, the names of its columns, and what makes its rows."""

    file: str
    columns: tuple[str, ...]
    rows: Callable[[], Iterable[list[str]]]

    @property
    def head(self) -> str:
        """The first line."""
        return line(self.columns)


def line(cells: Iterable[str]) -> str:
    """A row."""
    return f"| {' | '.join(cells)} |"


def rewritten(text: str, table: TableOf) -> str:
    """``text`` with the rows of one table replaced."""
    lines = text.splitlines()
    if lines.count(table.head) != 1:
        raise ValueError(f"{table.file} has {lines.count(table.head)} tables with the head {table.head}, not one")
    start = lines.index(table.head) + 2
    stop = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    lines[start:stop] = map(line, table.rows())
    return "\n".join(lines) + "\n"


def records(*names: str) -> list[Record]:
    """What was measured well, in the order of the files."""
    return [record for name in names for record in read_csv(RESULTS / name) if record.ms is not None]


def by_layer(found: Iterable[Record]) -> dict[str, dict[tuple[str, str], Record]]:
    """The records of each layer, by pass and dtype."""
    layers: dict[str, dict[tuple[str, str], Record]] = {}
    for record in found:
        layers.setdefault(record.layer, {})[record.pass_name, record.dtype] = record
    return layers


def ms(value: float | None, fine: bool = False) -> str:
    """Milliseconds; ``fine`` gives short times another digit."""
    assert value is not None
    return f"{value:.4f}" if fine and value < 0.1 else f"{value:.3f}"


def times(value: float | None, notable: float = float("inf")) -> str:
    """A speed-up, in bold from ``notable`` on."""
    assert value is not None
    return f"**{value:.2f}×**" if value >= notable else f"{value:.2f}×"


def compared(*names: str) -> Iterable[tuple[Summary, str, str]]:
    """The means of each pass and dtype, and on how many layers polyphase is faster: than PyTorch, than its search."""
    found = records(*names)
    for of in sorted(summaries(found), key=lambda of: (list(PASS_TITLES).index(of.pass_name), of.dtype == "bfloat16")):
        measured = [each for each in found if (each.pass_name, each.dtype) == (of.pass_name, of.dtype)]
        faster = sum((record.speedup or 0.0) >= 1 for record in measured)
        searched = f"{of.benchmark_speedup:.2f}, on {of.benchmarked - of.slower}" if of.benchmarked else "–"
        yield of, f"{faster} of {len(measured)}", searched


def means() -> Iterable[list[str]]:
    """Geometric means of each pass and dtype."""
    for of, *counts in compared("h200.csv", "h200-gradients.csv"):
        floors = (f"{of.times_floor:.1f}", f"{of.torch_times_floor:.1f}")
        yield [of.pass_name, of.dtype, *floors, f"{of.speedup:.2f}", *counts]


def every_pass() -> Iterable[list[str]]:
    """All layers, all passes."""
    for name, found in by_layer(records("h200.csv", "h200-gradients.csv")).items():
        for pass_name, title in PASS_TITLES.items():
            single, half = found[pass_name, "float32"], found[pass_name, "bfloat16"]
            yield [
                name, title, ms(single.floor_ms), ms(single.ms), ms(single.torch_default_ms), times(single.speedup),
                ms(half.ms), ms(half.torch_default_ms), times(half.speedup),
            ]  # fmt: skip


def strict() -> Iterable[list[str]]:
    """float32 without TF32."""
    for record in records("h200-strict.csv"):
        yield [
            record.layer, ms(record.ms), ms(record.torch_default_ms), times(record.speedup), f"{record.error:.1e}",
            record.algorithm,
        ]  # fmt: skip


def models() -> Iterable[list[str]]:
    """Layers of further models, against the faster of PyTorch's two ways."""
    for name, found in by_layer(records("h200-models.csv")).items():
        single, half = found["forward", "float32"], found["forward", "bfloat16"]
        yield [name, ms(single.floor_ms, fine=True), *against_the_faster(single), *against_the_faster(half)]


def against_the_faster(record: Record) -> list[str]:
    """Times of polyphase and of PyTorch's two ways, and the speed-up over the faster one."""
    found = (record.ms, record.torch_default_ms, record.torch_benchmark_ms)
    return [*(ms(time, fine=True) for time in found), times(of_the_faster(record))]


def channels_last_means() -> Iterable[list[str]]:
    """Geometric means in channels_last, against PyTorch in the same format."""
    for of, *counts in compared("h200-channels-last.csv", "h200-gradients-channels-last.csv"):
        yield [PASS_TITLES[of.pass_name], of.dtype, f"{of.times_floor:.1f}", f"{of.speedup:.2f}", *counts]


def losses() -> Iterable[list[str]]:
    """Where PyTorch's faster way is faster than polyphase, the worst first."""
    found = [record for record in records(*ON_H200) if of_the_faster(record) < 0.995]
    for record in sorted(found, key=of_the_faster):
        best = min(filter(None, (record.torch_default_ms, record.torch_benchmark_ms)))
        yield [
            record.layer, PASS_TITLES[record.pass_name], record.dtype, record.layout, ms(record.ms, fine=True),
            ms(best, fine=True), times(of_the_faster(record)), f"{record.times_floor:.1f}",
        ]  # fmt: skip


def farthest() -> Iterable[list[str]]:
    """What is farthest from its floor, launches of a few microseconds left out."""
    long = [record for record in records(*ON_H200) if (record.floor_ms or 0.0) >= LEAST_FLOOR_MS]
    found = sorted(long, key=lambda record: -(record.times_floor or 0.0))
    for record in found[:FARTHEST]:
        yield [
            record.layer, PASS_TITLES[record.pass_name], record.dtype, record.layout, ms(record.floor_ms, fine=True),
            ms(record.ms, fine=True), f"{record.times_floor:.1f}", times(of_the_faster(record)),
        ]  # fmt: skip


def of_the_faster(record: Record) -> float:
    """The speed-up over PyTorch's faster way."""
    return min(filter(None, (record.speedup, record.benchmark_speedup)))


def workspaces() -> Iterable[list[str]]:
    """The forward passes that allocate most beside their result."""
    found = records("h200.csv", "h200-models.csv")
    for record in sorted(found, key=lambda record: -(record.workspace_megabytes or 0.0))[:MOST_MEMORY]:
        megabytes = (record.workspace_megabytes, record.torch_workspace_megabytes)
        yield [record.layer, record.dtype, *(f"{amount or 0.0:.1f}" for amount in megabytes)]


def sources() -> Iterable[list[str]]:
    """What each record was measured on, and by which command."""
    for path in sorted(RESULTS.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        commits = sorted({row["commit"][:7] for row in rows})
        library = f"torch {rows[0]['torch']}" + (f", cuDNN {rows[0]['cudnn']}" if rows[0].get("cudnn") else "")
        yield [
            linked(path.name), rows[0].get("gpu") or "CPU", library,
            ", ".join(commits), rows[-1]["date"][:10], f"`{rows[0]['command']}`",
        ]  # fmt: skip


def whole_models() -> Iterable[list[str]]:
    """Whole models as CUDA graphs, and how many times as fast they are with polyphase's layers, and fused."""
    with (RESULTS / "h200-whole-models.csv").open(newline="", encoding="utf-8") as file:
        rows = {
            (row["model"], row["run"], int(row["batch"]), row["dtype"]): row
            for row in csv.DictReader(file)
            if row["mode"] == "graph"
        }
    for name, run, batch, dtype in rows:
        if dtype == "float32":
            cells = [name, run, str(batch)]
            for each in ("float32", "bfloat16"):
                row = rows[name, run, batch, each]
                cells.append(ms(float(row["torch_ms"])))
                cells += [times(float(row[of]), notable=1.995) for of in ("swapped_over_torch", "fused_over_torch")]
            yield cells


def linked(name: str) -> str:
    """A record's name, for a page in docs."""
    return f"[{name}](../benchmarks/results/{name})"


def ceilings() -> Iterable[list[str]]:
    """What the GPU of each record was measured to reach."""
    for name in (*ON_H200, "h100-80gb-hbm3.csv"):
        record = records(name)[0]
        copy, products = record.ceilings.split("; products ")
        yield [linked(name), record.gpu, copy.removeprefix("copy "), products]


def classes() -> Iterable[list[str]]:
    """Geometric means of the forward pass by what bounds a layer."""
    layers = by_layer(records("h200.csv"))
    for title, shown, names in CLASSES:
        cells = []
        for dtype in ("float32", "bfloat16"):
            found = [layers[name]["forward", dtype] for name in names]
            cells += [f"{geometric_mean(record.times_floor for record in found):.1f}"]
            cells += [times(geometric_mean(record.speedup for record in found))]
        yield [title, shown, *cells]


def portable() -> Iterable[list[str]]:
    """The portable path on a CPU: its time over PyTorch's."""
    layers = by_layer(records("cpu.csv"))

    def ratios(name: str) -> list[float]:
        return [1 / (layers[name][pass_name, "float32"].speedup or float("nan")) for pass_name in PASS_TITLES]

    for name in layers:
        yield [name, *(f"{ratio:.2f}" if ratio < 0.995 else f"{ratio:.1f}" for ratio in ratios(name))]
    yield ["**geometric mean**", *(f"**{geometric_mean(column):.1f}**" for column in zip(*map(ratios, layers)))]


_BOTH = ("polyphase", "PyTorch", "speed-up")
_THREE = ("polyphase", "PyTorch", "benchmark mode", "speed-up")
_CASE = ("layer", "pass", "dtype", "format")
_PERFORMANCE, _LAYERS, _MODELS = "docs/performance.md", "docs/layers.md", "docs/models.md"


def paired(first: tuple[str, ...], columns: tuple[str, ...], floor: bool = True) -> tuple[str, ...]:
    """Names of columns for float32, and again for bfloat16."""
    single = ("floor", *columns) if floor else columns
    return (*first, f"float32: {single[0]}", *single[1:], f"bfloat16: {columns[0]}", *columns[1:])


TABLES = [
    TableOf(_PERFORMANCE, ("record", "GPU", "copy", "products"), ceilings),
    TableOf(
        _PERFORMANCE,
        (
            "pass", "dtype", "× floor", "PyTorch's × floor", "speed-up", "layers where polyphase is faster",
            "than benchmark mode",
        ),
        means,
    ),
    TableOf(
        _PERFORMANCE,
        (
            "pass, channels_last", "dtype", "× floor", "speed-up", "layers where polyphase is faster",
            "than benchmark mode",
        ),
        channels_last_means,
    ),
    TableOf(_PERFORMANCE, paired(("class", "layers"), ("× floor", "speed-up"), floor=False), classes),
    TableOf(_PERFORMANCE, (*_CASE, "polyphase", "PyTorch's faster way", "speed-up", "× floor"), losses),
    TableOf(_PERFORMANCE, (*_CASE, "floor", "polyphase", "× floor", "speed-up over the faster way"), farthest),
    TableOf(_PERFORMANCE, ("layer", "dtype", "polyphase's workspace, MB", "PyTorch's, MB"), workspaces),
    TableOf(_LAYERS, paired(("layer", "pass"), _BOTH), every_pass),
    TableOf(_LAYERS, ("layer", *_BOTH, "error", "kernel"), strict),
    TableOf(_LAYERS, paired(("layer",), _THREE), models),
    TableOf(_LAYERS, ("layer", "forward", "input gradient", "weight gradient"), portable),
    TableOf(_MODELS, paired(("model", "run", "batch"), ("PyTorch", "layers", "fused"), floor=False), whole_models),
    TableOf(_LAYERS, ("record", "GPU", "versions", "commit", "date", "command"), sources),
]  # fmt: skip


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing: exit status 1 where a table differs.")] = False,
) -> None:
    """Write the tables again."""
    before = {table.file: (ROOT / table.file).read_text(encoding="utf-8") for table in TABLES}
    after = dict(before)
    for table in TABLES:
        try:
            after[table.file] = rewritten(after[table.file], table)
        except (KeyError, AssertionError) as lacking:
            print(f"the record lacks something of the table {table.head}: {lacking!r}")
            raise typer.Exit(1) from None
    differ = [name for name in before if after[name] != before[name]]
    for name in [] if check else differ:
        (ROOT / name).write_text(after[name], encoding="utf-8")
    print(", ".join(differ) or "nothing", "differs from the records" if check else "written")
    raise typer.Exit(check and bool(differ))


if __name__ == "__main__":
    typer.run(main)
