"""A model file in KernelBench's form: ``Model``, ``get_inputs`` and ``get_init_inputs``; and what it would run.

What a model does with an input is learnt on PyTorch's ``meta`` device: shapes are computed, numbers are not. So the
transposed convolutions that a model runs, their sizes and their cost are known before anything expensive is done, and
an input can be cut to what a CPU computes in seconds, in a way that the model accepts.
"""

from __future__ import annotations

import copy
import importlib
import importlib.machinery
import importlib.util
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from polyphase.bench.layers import cut_side
from polyphase.problem import DTYPE_BYTES, ConvTransposeProblem
from polyphase.torch_op.memory_format import is_channels_last

_FORM = "a model file's returns a list of what {takes}"
_SHOWN_LINES = 4  # of an exception's text: PyTorch's may be followed by a trace of its C++


class ModelFileError(ValueError):
    """A model file that cannot be loaded, lacks one of its three names, or does not run."""


@contextmanager
def naming_the_line(path: Path, what: str, only_modules: bool = False) -> Iterator[None]:
    """Raise what a model file raises as `ModelFileError`, with the file's own line that led there.

    With ``only_modules``, what neither the file nor a call of a module has to do with is raised as it is.
    """
    try:
        yield
    except ModelFileError:
        raise
    except (Exception, SystemExit) as failure:
        frames = traceback.extract_tb(failure.__traceback__)
        own = [frame for frame in frames if Path(frame.filename).resolve() == path.resolve()]
        called = any(frame.filename.endswith(str(Path("torch/nn/modules/module.py"))) for frame in frames)
        if only_modules and not own and not called:
            raise
        text = "\n".join(str(failure).strip().splitlines()[:_SHOWN_LINES])
        line = f"\n  {path}, line {own[-1].lineno}, in {own[-1].name}\n    {own[-1].line}" if own else ""
        raise ModelFileError(
            f"{path}: {what} raises {type(failure).__name__}{': ' if text else ''}{text}{line}"
        ) from failure


@contextmanager
def on_the_path(folder: Path) -> Iterator[None]:
    """Have ``folder`` first on the path, as ``python FILE`` has that of FILE. Afterwards the path is as it was.

    What was imported from the folder is then forgotten: modules beside another file may have the same names.
    """
    before, known, first = list(sys.path), set(sys.modules), str(folder.resolve())
    importlib.invalidate_caches()
    sys.path.insert(0, first)
    try:
        yield
    finally:
        sys.path[:] = before
        for name in set(sys.modules) - known:
            if name.partition(".")[0] not in known and _is_found_in(name.partition(".")[0], first):
                del sys.modules[name]


def _is_found_in(name: str, folder: str) -> bool:
    """Whether a module that is imported, of no package, is the one that lies in a folder."""
    found = importlib.machinery.PathFinder.find_spec(name, [folder])
    imported = getattr(sys.modules.get(name), "__spec__", None)
    return found is not None and imported is not None and found.origin == imported.origin


def run_file(path: Path, prefix: str) -> Any:
    """The module that the file at ``path`` makes. Raises `ModelFileError`, with what the file raises as its cause."""
    spec = importlib.util.spec_from_file_location(f"{prefix}_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ModelFileError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as failure:
        frames = [each for each in traceback.extract_tb(failure.__traceback__) if each.filename == str(path)]
        line = f"\n  {path}, line {frames[-1].lineno}\n    {frames[-1].line}" if frames else ""
        raise ModelFileError(f"{path} does not run: {type(failure).__name__}: {failure}{line}") from failure
    return module


@dataclass(frozen=True)
class ModelFile:
    """The three names of a model file. ``making``: the call that makes the model, as messages name it."""

    path: Path
    make_model: Callable[..., nn.Module]
    get_inputs: Callable[[], Sequence[Any]]
    get_init_inputs: Callable[[], Any]
    making: str = "Model(*get_init_inputs())"

    @classmethod
    def load(cls, path: Path) -> ModelFile:
        """Run the file at ``path``. Raises `ModelFileError`; what the file itself raises comes as its cause."""
        module = run_file(path, "polyphase_model")
        missing = [name for name in ("Model", "get_inputs", "get_init_inputs") if not hasattr(module, name)]
        if missing:
            raise ModelFileError(
                f"{path} lacks {', '.join(missing)}: a model file has a class Model, and functions "
                "get_inputs() and get_init_inputs() that return what its forward and its constructor take"
            )
        return cls(path, module.Model, module.get_inputs, module.get_init_inputs)

    def build(self, device: torch.device, dtype: torch.dtype, seed: int) -> nn.Module:
        """The model with the random weights of ``seed``, on ``device`` and in ``dtype``. Raises `ModelFileError`."""
        torch.manual_seed(seed)
        with naming_the_line(self.path, "get_init_inputs()"):
            arguments = self.get_init_inputs()
        if not isinstance(arguments, (dict, list, tuple)):
            raise self._is_not("get_init_inputs", arguments, "the constructor takes, such as [64, 32]")
        with torch.device(device), naming_the_line(self.path, self.making):
            # KernelBench writes the arguments as a list, or as a list of a list and a dictionary of keywords.
            if isinstance(arguments, dict):
                model = self.make_model(**arguments)
            elif len(arguments) == 2 and isinstance(arguments[0], list) and isinstance(arguments[1], dict):
                model = self.make_model(*arguments[0], **arguments[1])
            else:
                model = self.make_model(*arguments)
        if not isinstance(model, nn.Module):
            raise ModelFileError(f"{self.path}: {self.making} is no torch.nn.Module, but of type {_type(model)}")
        return model.to(device=device, dtype=dtype)

    def inputs(self, device: torch.device, dtype: torch.dtype) -> list[Any]:
        """One call of ``get_inputs``, floating-point tensors in ``dtype``. Tensors are made on ``device``.

        Raises `ModelFileError` for what is no list of arguments.
        """
        with torch.device(device), naming_the_line(self.path, "get_inputs()"):
            inputs = self.get_inputs()
        if isinstance(inputs, (Mapping, torch.Tensor, str)) or not isinstance(inputs, Iterable):
            raise self._is_not("get_inputs", inputs, "forward takes, such as [torch.rand(8, 64, 32, 32)]")
        return [place(value, device, dtype) for value in inputs]

    def _is_not(self, name: str, found: object, takes: str) -> ModelFileError:
        return ModelFileError(
            f"{self.path}: {name}() returns something of type {_type(found)}; {_FORM.format(takes=takes)}"
        )


def _type(value: object) -> str:
    return type(value).__name__


def place(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A tensor on ``device``, in ``dtype`` if it is floating-point; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device=device, dtype=dtype if value.is_floating_point() else value.dtype)


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model, also where modules keep tensors that were computed, of which PyTorch makes no copy.

    `torch.nn.utils.weight_norm` keeps the weight of the last call, and computes it anew before the next one.
    """
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                vars(module)[name] = value.detach()
    return copy.deepcopy(model)


@dataclass(frozen=True)
class Run:
    """What a model does with one set of inputs.

    Its transposed convolutions by name (None for a dtype without kernels), the flops of everything in it, whether one
    convolution is all it computes, and how many transposed ones it calls that belong to no module.
    """

    problems: list[tuple[str, ConvTransposeProblem | None]]
    flops: int
    single: bool
    functional: int


def trace(model: nn.Module, inputs: Sequence[Any]) -> Run:
    """Run ``model`` on shapes alone. Raises what the model raises for them."""
    from torch.utils.flop_counter import FlopCounterMode

    meta = torch.device("meta")
    shadow = copied(model).to(meta)
    problems: list[tuple[str, ConvTransposeProblem | None]] = []
    counter, operators = FlopCounterMode(display=False), _Operators()
    for name, module in shadow.named_modules(remove_duplicate=True):
        if isinstance(module, _ConvTransposeNd):
            module.register_forward_pre_hook(operators.enter)
            module.register_forward_hook(operators.leave)
            module.register_forward_hook(recorder(name, problems))
    shadows = [_like(value) for value in inputs]
    with torch.no_grad(), counter, operators, meta:
        shadow(*shadows)
    computing = [name for name in operators.names if name not in ("unsqueeze", "squeeze", "view", "detach", "alias")]
    return Run(problems, int(counter.get_total_flops()), computing == ["convolution"], operators.functional)


def on_shapes(file: ModelFile, dtype: torch.dtype) -> tuple[nn.Module, list[Any], Run]:
    """A model on the meta device, its inputs there, and what it runs with them. Raises `ModelFileError`."""
    meta = torch.device("meta")
    model = file.build(meta, dtype, seed=0)
    inputs = file.inputs(meta, dtype)
    what = "the model does not run on shapes alone, so its layers are not known: it"
    with naming_the_line(file.path, what, only_modules=True):
        return model, inputs, trace(model, inputs)


def unlike(shown: str, module: nn.Module, problem: ConvTransposeProblem | None) -> str:
    """Why a problem that was traced has no kernels, or is none of the layer that is ``shown``; "" where it is fine."""
    if problem is None:
        return f"the input of {shown} has a dtype without kernels: not real, or not floating-point"
    if problem.in_channels != module.in_channels:
        return f"{shown} has in_channels={module.in_channels}, and get_inputs() gives it {problem.in_channels}"
    return ""


class _Operators(TorchDispatchMode):
    """Notes the names of the operators that run within it, and transposed convolutions outside their modules."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.functional = 0
        self._entered = 0

    def enter(self, *_: object) -> None:
        """A module of transposed convolution begins."""
        self._entered += 1

    def leave(self, *_: object) -> None:
        """It ends."""
        self._entered -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        transposed = func is torch.ops.aten.convolution.default and args[6]
        self.functional += bool(transposed and not self._entered)
        return func(*args, **(kwargs or {}))


def recorder(name: str, problems: list[tuple[str, ConvTransposeProblem | None]]) -> Callable[..., None]:
    """A forward hook of a layer: notes what it solves."""

    def record(module: _ConvTransposeNd, arguments: tuple[Any, ...], output: torch.Tensor) -> None:
        problems.append((name, problem_of(module, arguments[0], output)))

    return record


def problem_of(module: _ConvTransposeNd, x: torch.Tensor, output: torch.Tensor) -> ConvTransposeProblem | None:
    """The problem that a layer solved; None for a dtype without kernels (complex, integers).

    In one dimension it is that of contiguous tensors: PyTorch has no other memory format there.
    """
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        return None
    dims = len(module.kernel_size)
    shape, out_shape = ((1, *t.shape) if t.dim() == dims + 1 else tuple(t.shape) for t in (x, output))
    problem = ConvTransposeProblem.make(
        shape,
        module.out_channels,
        module.kernel_size,
        stride=module.stride,
        padding=module.padding,  # type: ignore[arg-type]  # a transposed convolution's is never a string
        groups=module.groups,
        bias=module.bias is not None,
        dilation=module.dilation,
        dtype=dtype,
        channels_last=dims > 1 and (is_channels_last(x) or is_channels_last(module.weight)),
    )
    # The argument `output_size` acts as output padding; the sizes tell.
    return replace(problem, output_padding=tuple(a - b for a, b in zip(out_shape[2:], problem.output_size)))


@dataclass(frozen=True)
class Cut:
    """How inputs are cut: by ``factor`` along the batch, and along image sides too if ``sides``."""

    factor: int = 1
    sides: bool = True

    def apply(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs, cut. Tensors of three and more dimensions are taken for batches of images."""
        return [self._tensor(value) if isinstance(value, torch.Tensor) else value for value in inputs]

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if self.factor == 1 or value.dim() == 0:
            return value
        cut = value[: math.ceil(value.shape[0] / self.factor)]
        if self.sides:
            for dim in range(2, value.dim()):
                cut = cut.narrow(dim, 0, cut_side(value.shape[dim], self.factor))
        return cut.clone()  # a copy of its own, so that the whole can go

    def __str__(self) -> str:
        if self.factor == 1:
            return "of full size"
        return f"with batch {'and image sides ' if self.sides else ''}cut to 1/{self.factor}"


def find_cut(model: nn.Module, inputs: Sequence[Any], flops: float) -> Cut:
    """The mildest cut with which ``model`` accepts ``inputs`` and costs at most ``flops``, or comes nearest to it.

    Image sides are left alone where the model insists on them (a linear layer behind a flatten, say).
    """
    if _cost(model, inputs) <= flops:
        return Cut()
    for sides in (True, False):
        best, cost = Cut(), math.inf
        for factor in (2**power for power in range(1, 11)):
            cut = Cut(factor, sides)
            now = _cost(model, cut.apply([_like(value) for value in inputs]))
            if now >= cost:
                break
            best, cost = cut, now
            if cost <= flops:
                break
        if best.factor > 1:
            return best
    return Cut()


def _cost(model: nn.Module, inputs: Sequence[Any]) -> float:
    try:
        return trace(model, inputs).flops
    except Exception:  # the model does not take these shapes (or not without numbers): no cut to be had here
        return math.inf


def _like(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def sizes_of(inputs: Sequence[Any]) -> str:
    """The shapes of those inputs that are tensors."""
    return ", ".join("×".join(map(str, value.shape)) for value in inputs if isinstance(value, torch.Tensor))


def leaves(tree: Any) -> list[torch.Tensor]:
    """The floating-point and complex tensors in a model's output, in order."""
    flat = pytree.tree_leaves(tree)
    return [leaf for leaf in flat if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())]
