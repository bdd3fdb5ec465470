"""`polyphase report`: what it says of a model in short and as a page, predictions and measured."""

from __future__ import annotations

import copy
import re
import sys
import warnings
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from polyphase.__main__ import app
from polyphase.bench.model_file import Cut, ModelFileError
from polyphase.bench.model_report import ModelReport, report_on
from polyphase.bench.report_page import page, summary
from polyphase.bench.target import load_target
from polyphase.bench.trial import CheckResult, Options
from polyphase.problem.device import ARCHITECTURES, CARDS, PORTABLE

MODEL = """
import torch
from torch import nn

class Other(nn.ConvTranspose2d):
    pass

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Conv2d(3, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 4, 2, 1)
        self.add_module("<script>", nn.ConvTranspose2d(8, 3, 2, 2))
        self.other = Other(3, 3, 1)

    def forward(self, x):
        x = torch.relu(self.encode(x))
        x = torch.relu(self.up(self.up(x)))
        x = self.other(self.get_submodule("<script>")(x))
        return nn.functional.conv_transpose2d(x, x.new_ones(3, 1, 1, 1), groups=3)

def get_inputs():
    return [torch.rand(2, 3, 6, 8)]

def get_init_inputs():
    return []

def both():
    return Model(), get_inputs()

def alone():
    return Model()

def needs(channels):
    return Model(), get_inputs()

def by_name():
    return Model(), {"x": get_inputs()[0]}

class Sum(nn.Module):
    def __init__(self, channels, kernel=2):
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, 3, kernel)

    def forward(self, x, y):
        return self.up(x) + y

class Config:
    def __init__(self, kernel=1, **rest):
        self.kernel = kernel
        self.channels = rest["channels"]

class Pretrained(Sum):
    config_class = Config

    def __init__(self, config):
        super().__init__(config.channels, config.kernel)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


class Checker(HTMLParser):
    """Whether every element that is opened is closed, in order, and nothing is loaded from elsewhere."""

    VOID = ("meta", "br", "!doctype")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        assert not {"src", "href", "onclick"} & {name for name, _ in attrs}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(text: str) -> str:
    """The page's words, once it is found to be well formed and to need nothing else."""
    checker = Checker()
    checker.feed(text)
    assert not checker.open
    assert not checker.seen & {"link", "img", "iframe"}
    assert text.count("<script>") == 1  # which sorts tables, and loads nothing
    assert not re.search(r"fetch|import|http|XMLHttpRequest", text[text.index("<script>") : text.index("</script>")])
    assert "url(" not in text
    assert len(re.findall("<tr>", text)) > 5
    return " ".join(
        re.sub("<[^>]*>", " ", re.sub("<(style|script)>.*?</(style|script)>", "", text, flags=re.DOTALL)).split()
    )


def test_without_a_gpu_it_predicts(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "page.html"
    result = invoke(model, "--device", "cpu", "--card", "H100", "-o", output)
    assert result.exit_code == 0, result.output
    for words in (
        "3 calls of transposed convolutions", "of the model's flops", "forward of the swapped layers: 0.",
        "weight gradient of the swapped layers: 0.", "on H100",
        "assume H100's copy bandwidth, 3.01 TB/s", "floor: the least time", "are not known without a GPU",
        "with fuse=True, in evaluation mode:\n  up: not fused: it is called more than once",
        "agree with float64 as PyTorch's do (tested: the portable path on this machine, not H100's kernels)",
        "left alone: other: Other(3, 3, kernel_size=(1, 1)",
        "left alone: 1 call outside modules", "\npolyphase.accelerate(model)\n", "written to",
    ):  # fmt: skip
        assert words in result.output
    assert "planning up, weight_grad" in result.stderr
    words = checked(output.read_text(encoding="utf-8"))
    for part in (
        "up 2×8×6×8 → 8, k=4, s=2, p=1", "up 2×8×12×16 → 8", "&lt;script&gt; 2×8×24×32 → 3, k=2, s=2",
        "times predicted for H100", "are not known without a GPU: run the same command on a GPU",
        "so that small layers are many times over their floor",
        "∂ up.weight", "is a subclass of ConvTranspose2d",
        "fuses into each layer's kernel in evaluation mode", "up: not fused: it is called more than once",
        "polyphase.accelerate(model)",
    ):  # fmt: skip
        assert part in words
    assert "PyTorch, ms" not in words


def test_only_what_is_swapped_is_counted(model: Path) -> None:
    found = report_on("m", load_target(str(model)), Options(torch.device("cpu"), trials=1), *_hopper(), measure=False)
    assert [layer.names for layer in found.layers] == [("up",), ("up",), ("<script>",)]
    assert found.share_of_flops is not None
    assert 0 < found.share_of_flops < 1
    for layer in found.layers:
        for record in layer.records:
            assert record.predicted_ms
            assert record.floor_ms
            assert record.ms is None


def _hopper() -> tuple[object, str]:
    from polyphase.problem.device import DeviceInfo

    return DeviceInfo.for_arch("sm_90a"), "h200"


def test_what_is_measured(model: Path) -> None:
    """On the CPU, where the portable path is slower: its layers are to be left out."""
    found = report_on(
        "model.py", load_target(str(model)), Options(torch.device("cpu"), trials=1), PORTABLE, "this CPU", measure=True
    )
    assert len(found.check.races) == 2
    assert all(record.ms and record.torch_default_ms for layer in found.layers for record in layer.records)
    text = "\n".join(summary(found))
    assert re.search(r"forward and backward: PyTorch [\d.]+ ms, polyphase [\d.]+ ms, [\d.]+ times as fast", text)
    words = checked(page(found))
    assert "without a GPU" not in text + words
    for part in ("measured on this CPU", "forward, whole model", "PyTorch, ms", "speed-up"):
        assert part in words
    for layer in found.layers:
        for record in layer.records:
            record.ms, record.torch_default_ms = 1.0, 2.0
    assert found.slower == []
    found.check.races[:] = [
        replace(race, ours=replace(race.ours, ms=3.0), torch=replace(race.torch, ms=2.0)) for race in found.check.races
    ]
    assert "forward, forward and backward: slower, though no layer is" in "\n".join(summary(found))
    assert "a CUDA graph the layers' gain shows" in checked(page(found)).replace("&#x27;", "'")
    found.layers[-1].records[0].ms = 9.0
    assert found.slower == ["<script>"]
    assert "leave = {'<script>'}" in found.recipe
    found.layers[0].records[0].ms, found.layers[1].records[0].ms = 5.5, 1.0  # lost at one size, won at the other
    assert found.slower == ["<script>"]
    compile(found.recipe, "recipe", "exec")

    assert found.ok
    failed = found.layers[0].records[0]
    failed.status, failed.reason, failed.ms, failed.predicted_ms = "wrong", "7 <of> 8 elements", None, 3.25
    assert not found.ok
    assert found.faults == ["up, forward: wrong: 7 <of> 8 elements"]
    assert "up, forward: wrong: 7 <of> 8 elements" in "\n".join(summary(found))
    words = checked(page(found))
    assert "wrong: 7 &lt;of&gt; 8 elements" in words
    assert "3.250" not in words  # a prediction is no measurement


def test_the_recipe_leaves_what_it_says(model: Path) -> None:
    import polyphase

    made = load_target(f"{model}:both").build(torch.device("cpu"), torch.float32, 0)
    fused = nn.Sequential(nn.ConvTranspose2d(3, 2, 3), nn.ReLU())
    swapped = polyphase.accelerate(nn.ConvTranspose2d(3, 2, 3))
    report = ModelReport("m", "c", True, "float32", "", check=CheckResult(Cut(), swapped))
    exec(report.recipe, {"model": made})
    assert type(made.up) is polyphase.ConvTranspose2d
    assert "fuse" not in report.recipe
    report.check.blocks = polyphase.accelerate(copy.deepcopy(fused), fuse=True).blocks
    (line,) = re.findall(r"^# or, for inference: (.*)$", report.recipe, re.MULTILINE)
    exec(line, {"model": fused, "polyphase": polyphase})
    assert type(fused[0]) is polyphase.ConvTranspose2d
    assert not fused.training
    assert "  0: fused with 1 (ReLU); ends there: the next thing is the model's output" in summary(report)
    many = nn.Sequential(*(nn.ConvTranspose2d(3, 3, 3) for _ in range(8)), nn.ReLU())
    report.check.blocks = polyphase.accelerate(many, fuse=True).blocks
    lines = summary(report)
    first = lines.index("with fuse=True, in evaluation mode:") + 1
    assert lines[first].startswith("  7: fused with 8 (ReLU)")
    assert lines[first + 6] == "  and 2 more layers, on the page"


def test_the_recipe_reaches_calls_of_functions(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model.write_text(
        "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n"
        "        return torch.nn.functional.conv_transpose1d(x, x.new_ones(3, 2, 4))\n"
        "def get_inputs():\n    return [torch.rand(2, 3, 9)]\ndef get_init_inputs():\n    return []\n"
    )
    result = invoke(model, "--device", "cpu")
    assert "1 call outside modules: run it within polyphase.override()" in result.output
    assert "polyphase.accelerate(model)" not in result.output
    (recipe,) = re.findall(r"^import polyphase.*?model\(x\)", result.output, re.MULTILINE | re.DOTALL)
    names = {"model": lambda x: torch.nn.functional.conv_transpose1d(x, x.new_ones(3, 2, 4)), "x": torch.rand(2, 3, 9)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `override` warns where PyTorch finds no CUDA device
        exec(recipe, names)
    assert names["y"].shape == (2, 2, 12)  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", ["file", "module"])
def test_a_function_that_returns_model_and_inputs(form: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    monkeypatch.delitem(sys.modules, "model", raising=False)
    target = f"{model}:both" if form == "file" else "model:both"
    result = invoke(target, "--device", "cpu", "--no-grad", "--card", "sm_80")
    assert result.exit_code == 0, result.output
    assert "forward of the swapped layers: " in result.output
    assert "weight gradient" not in result.output
    assert (model.parent / "model-report.html").is_file()
    sys.modules.pop("model", None)


@pytest.mark.parametrize(("name", "kernel"), [("Sum", 3), ("Pretrained", 1)])
def test_a_library_s_class(name: str, kernel: int, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built of keywords, or of a config that is built of them."""
    monkeypatch.chdir(model.parent)
    config = '{"channels": 4, "kernel": 3}' if name == "Sum" else "config.json"
    Path("config.json").write_text('{"channels": 4}')
    shapes = "--input", "2x4x5x5", "--input", f"2,3,{4 + kernel},{4 + kernel}"
    result = invoke(f"{model}:{name}", *shapes, "--config", config, "--device", "cpu", "--no-grad")
    assert result.exit_code == 0, result.output
    assert f"{name} on 2×4×5×5, 2×3×{4 + kernel}×{4 + kernel}" in result.output
    assert f"k={kernel}" in checked(Path(f"{name}-report.html").read_text())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (":Sum", [], "Sum is a class, for `report`: --input gives the shape"),
        (":Sum", ["--input", "3by4"], "takes a shape such as 1x3x64x64, not '3by4'"),
        (":Sum", ["--input", "1x4x5x5", "--config", "{"], "--config takes JSON"),
        (":Sum", ["--input", "1x4x5x5", "--config", "no.json"], "--config takes JSON"),
        (":Sum", ["--input", "1x4x5x5", "--config", "[4]"], "--config takes keywords"),
        (":Sum", ["--input", "1x4x5x5"], "missing 1 required positional argument: 'channels'"),
        (":both", ["--input", "1x4x5x5"], "are for a model's class"),
        ("", ["--config", "{}"], "are for a model's class"),
    ],
)
def test_what_is_wrong_with_a_class(name: str, options: list[str], message: str, model: Path) -> None:
    result = invoke(f"{model}{name}", *options, "--device", "cpu")
    assert result.exit_code == 2
    assert message in " ".join(re.sub("[│\n]", " ", result.output).split())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("{path}:nothing", "has no function nothing"),
        ("{path}:alone", "returns something of type Model; it has to return the model and a list of its inputs"),
        ("{path}:by_name", "returns inputs of type dict"),
        ("no_such_module:f", "no_such_module cannot be imported"),
        ("nowhere.py", "nowhere.py is not a file"),
        ("nowhere.py:f", "nowhere.py is not a file"),
        ("nowhere", "nowhere is not a file, nor module:function"),
        ("{path}:needs", "needs(), called without arguments, raises TypeError: needs() missing 1 required"),
    ],
)
def test_what_is_no_target(target: str, message: str, model: Path) -> None:
    with pytest.raises(ModelFileError, match=re.escape(message)):
        load_target(target.format(path=model)).build(torch.device("cpu"), torch.float32, 0)
    result = invoke(target.format(path=model), "--device", "cpu")
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_a_model_with_nothing_to_swap_ends_with_1(model: Path, tmp_path: Path) -> None:
    model.write_text(MODEL.replace("nn.ConvTranspose2d(8", "Other(8"))
    result = invoke(model, "--device", "cpu", "-o", tmp_path / "page.html")
    assert result.exit_code == 1
    assert "no module is swapped" in result.output
    assert "left alone: up: Other(" in result.output
    assert "1 call outside modules" in result.output
    assert "accelerate" not in result.output
    assert "polyphase has kernels for" in (tmp_path / "page.html").read_text()


def test_a_model_without_transposed_convolutions_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\ndef Model():\n    return torch.nn.Conv2d(3, 3, 3)\n"
        "def get_inputs():\n    return [torch.rand(2, 3, 9, 9)]\ndef get_init_inputs():\n    return []\n"
    )
    result = invoke(path, "--device", "cpu", "-o", tmp_path / "page.html")
    assert result.exit_code == 1
    assert "nothing to add to the program" in result.output
    assert "no ConvTranspose1d/2d/3d module found" in result.output
    assert not re.search(r"accelerate|accuracy|0%|override", result.output)
    text = (tmp_path / "page.html").read_text()
    assert "Nothing to add." in text
    assert "every transposed convolution is swapped" not in text
    assert "polyphase.accelerate" not in checked(text)


BESIDE = "import torch\nfrom torch import nn\n\ndef layer(): return nn.ConvTranspose1d(3, {channels}, 2)\n"
USING = """
import layers_of_it

def Model():
    import more_of_it
    return more_of_it.Model(layers_of_it.layer())
def get_inputs():
    return [layers_of_it.torch.rand(2, 3, 9)]
def get_init_inputs():
    return []
def both():
    return Model(), get_inputs()
"""
LATER = """
from torch import nn
class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
    def forward(self, x):
        import layers_of_it
        assert layers_of_it.layer().out_channels == self.layer.out_channels
        return self.layer(x)
"""


def files_beside(folder: Path, channels: int) -> Path:
    """A model file, and two modules in its folder, of which one is imported again in forward."""
    folder.mkdir()
    (folder / "layers_of_it.py").write_text(BESIDE.format(channels=channels))
    (folder / "more_of_it.py").write_text(LATER)
    (folder / "voc.py").write_text(USING)
    return folder / "voc.py"


@pytest.mark.parametrize("command", ["report", "check", "explain"])
def test_modules_beside_a_model_file(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are imported, as by ``python FILE``; and nothing of that is left for the next file, which has its own."""
    paths = [files_beside(tmp_path / f"folder{channels}", channels) for channels in (4, 5)]
    monkeypatch.chdir(tmp_path)
    before, modules = list(sys.path), set(sys.modules)
    for targets in ([f"{path}{name}" for path in paths] for name in ("", ":both")):
        for some in [targets] if command != "report" else [[each] for each in targets]:
            options = ["--device", "sm_90a"] if command == "explain" else ["--device", "cpu", "--no-grad"]
            result = CliRunner().invoke(app, [command, *some, *options])
            assert result.exit_code == 0, result.output
            if command == "explain":
                assert "3×9 → 4" in result.output
                assert "3×9 → 5" in result.output
    monkeypatch.chdir(paths[0].parent)
    assert CliRunner().invoke(app, [command, "voc:both", *options]).exit_code == 0
    assert sys.path == before
    assert not {"layers_of_it", "more_of_it", "voc"} & (set(sys.modules) - modules)


def test_emit_finds_modules_beside_a_model_file(tmp_path: Path) -> None:
    """And says that an emitted file cannot have them, and not that they are missing."""
    result = CliRunner().invoke(
        app, ["emit", str(files_beside(tmp_path / "folder", 4)), "-o", str(tmp_path / "out.py")]
    )
    assert result.exit_code == 2
    assert "imports layers_of_it: an emitted file carries" in " ".join(re.sub("[│\n]", " ", result.output).split())


def test_cards_are_of_known_architectures() -> None:
    assert set(CARDS.values()) <= set(ARCHITECTURES)
    result = invoke("x.py", "--device", "cpu", "--card", "abacus")
    assert result.exit_code == 2
    assert "h100" in result.output
