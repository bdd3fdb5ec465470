"""The interface of schedules to the planner: supported layers, configs, predicted times, programs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyphase.problem.epilogue import Epilogue
from polyphase.problem.layouts import Layouts
from polyphase.problem.problem import LARGE, ConvTransposeProblem, Pass
from polyphase.problem.sizes import standard
from polyphase.program.program import Program
from polyphase.schedules.tensor_cores import lacks_cores

if TYPE_CHECKING:
    from polyphase.problem.device import DeviceInfo

_TITLES = {Pass.FORWARD: "forward pass", Pass.INPUT_GRAD: "input gradient", Pass.WEIGHT_GRAD: "weight gradient"}

#: Predicted seconds, and whether ``"bytes"`` or ``"instructions"`` bound them.
Cost = tuple[float, str]


@dataclass(frozen=True)
class Candidate:
    """One config of a schedule for a problem, with its predicted time and what bounds it."""

    schedule: str
    config: Any
    seconds: float
    bound: str

    def describe(self) -> str:
        """The config in one line."""
        settings = (f"{name}={value}" for name, value in self.config._asdict().items())
        return f"{self.schedule}({', '.join(settings)})"


class Schedule:
    """One way to compute a pass. It predicts the cost of a config; only `polyphase.plan.shortlist` ranks configs.

    A layer has one short list of configs for all batch and image sizes, so that new sizes compile few kernels. The
    list is ranked at the size `ranked_at`, and partly at the sizes `others` and `own`.

    ``passes``: the passes that it computes. ``on_tensor_cores``: whether it uses them.

    ``adapts``: gradients also use another config of the list if it is clearly faster at the actual size. ``offered``:
    the most configs of the list. ``kept``: whether the list is kept on disk, as making it takes longer than reading it.
    ``compared``: number of first configs that are also compared at `others`. ``best``: number of configs listed before
    the winners at the sizes of `own`. ``prunes``: whether `search` returns only as many configs as asked for.
    ``behind``: schedules preferred to this one unless it is predicted far faster, because its predictions for small
    layers are too low. ``any_constants``: whether strides, dilations and paddings may be huge: kernels that list
    phases, or compute whole tiles of cells, overflow.
    """

    name: str
    passes: tuple[Pass, ...]
    on_tensor_cores = False
    adapts = False
    offered = 6
    kept = False
    compared = 0
    best = 0
    prunes = False
    behind: tuple[str, ...] = ()
    any_constants = False

    def supports(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        """Why the schedule cannot compute the pass, or None if it can, provided that a tile fits.

        Cheap: only arithmetic on the problem. It neither ranks configs nor searches tiles.
        """
        if pass_ not in self.passes:
            return f"computes the {' and the '.join(_TITLES[each] for each in self.passes)} only"
        # `Epilogue.planned`, as plans know an epilogue; the planner also checks the whole one (`epilogue_refusal`).
        if problem.epilogue and (reason := self.epilogue_limits(problem)) is not None:
            return reason
        if problem.largest_constant > LARGE and not self.any_constants:
            return f"strides, dilations and paddings above {LARGE}"
        if self.on_tensor_cores and (reason := lacks_cores(problem, device)) is not None:
            return reason
        return self.limits(problem, pass_, device)

    def limits(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> str | None:
        """The schedule's own reasons, for a pass that it computes; as cheap as `supports`."""
        return None

    def epilogue_limits(self, problem: ConvTransposeProblem) -> str | None:
        """Why the kernel cannot compute the epilogue of ``problem``, which has an operation; None if it can."""
        return "its blocks do not have all channels of a pixel" if problem.epilogue.normalizes else None

    def prologue_seconds(
        self, problem: ConvTransposeProblem, prologue: Epilogue, device: DeviceInfo, layouts: Layouts, config: Any
    ) -> float | None:
        """Seconds that a prologue adds if the config's kernel computes it; None if it reads operands in place."""
        return None

    def any_size(self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo) -> bool:
        """Whether a layer that has a config has one at every size, output padding included."""
        return True

    def nothing_fits(self, problem: ConvTransposeProblem, device: DeviceInfo) -> str:
        """Why a supported layer has no config."""
        return f"no tile fits {device.shared_bytes_per_block} bytes of shared memory"

    def ranked_at(self, problem: ConvTransposeProblem, pass_: Pass, layouts: Layouts) -> Hashable:
        """The layer at the size at which its configs are ranked, as the schedule sees it.

        The list may depend only on these properties of batch and images: whether images are tiny or are whole lines of
        memory, how even their rows are, and whether TMA loads their pixels as operands. None if the schedule cannot
        read or write tensors of these strides. By default the layer at the `standard` size, for all strides.
        """
        return standard(problem)

    def configs(self, at: Any, pass_: Pass, device: DeviceInfo) -> Iterable[Any]:
        """Every config of a layer for which its kernel compiles. Of equally fast ones the planner prefers the first.

        Tiles need not fit: a config without a tile has a `cost` of None, and is left out.
        """
        raise NotImplementedError

    def seconds(self, at: Any, pass_: Pass, device: DeviceInfo, config: Any) -> float:
        """Predicted seconds by which configs are ranked at a size, infinite if no tile fits.

        If `ranked_at` returns a problem, by default the cost at its size, for dense tensors.
        """
        cost = self.cost(at, pass_, device, Layouts.dense(at), config)
        return math.inf if cost is None else cost[0]

    def search(
        self, at: Any, pass_: Pass, device: DeviceInfo, most: int | None = None, below: float = math.inf
    ) -> dict[Any, float]:
        """Configs that have a tile, with their `seconds`; of equally fast ones the planner prefers the first.

        ``most``: number of the fastest that are needed; None for all. ``below``: slower ones are not needed. A schedule
        with many configs uses both to skip configs that cannot be among the needed ones.
        """
        found = ((config, self.seconds(at, pass_, device, config)) for config in self.configs(at, pass_, device))
        return {config: seconds for config, seconds in found if seconds < math.inf}

    def others(self, at: Any) -> Sequence[Any]:
        """Other sizes at which the first configs are compared, each like a result of `ranked_at`."""
        return ()

    def score(self, at: Any, seconds: Sequence[float]) -> float:
        """The score of ``seconds`` at the ranking size and at the sizes of `others`; less is better."""
        return sum(map(math.log, seconds))

    def own(self, at: Any) -> Sequence[Any]:
        """Sizes whose best config is also offered, if it is faster there than the configs already offered."""
        return ()

    def arranged(self, order: list[Any]) -> list[Any]:
        """The order in which configs are offered, from configs in rising order of their `score`."""
        return order

    def refined(self, at: Any, device: DeviceInfo, config: Any) -> Any:
        """A config of the list as it is offered."""
        return config

    def cost(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: Any
    ) -> Cost | None:
        """The predicted time of a config at the actual size, and what bounds it; None if no tile fits."""
        raise NotImplementedError

    def program(
        self, problem: ConvTransposeProblem, pass_: Pass, device: DeviceInfo, layouts: Layouts, config: Any
    ) -> Program:
        """The program of one config."""
        raise NotImplementedError
