"""The output of a fused layer while PyTorch traces or compiles a model (`polyphase.pending`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

#: Properties that are known of a tensor without values, as methods or attributes.
SIZES = ("shape", "size", "dtype")

#: The remedy, in error messages, for outputs that are read too early.
REMEDY = "call the whole of what was fused, or polyphase.restore(model) first"


class Between:
    """A traced tensor to which modules have been applied before they are called.

    It is a plain object, which Dynamo follows. Any other use raises an error; calls that Dynamo leaves to Python are
    computed by `Pending` or `Marked`.
    """

    def __init__(self, value: Tensor, expected: Sequence[Any], place: int = 0) -> None:
        self.value = value
        self.expected = expected
        self.place = place

    def pass_through(self, module: Any) -> Tensor | Between | None:
        """The result of a module's call with it; None if it is not the next module."""
        if self.expected[self.place] is not module:
            return None
        last = self.place + 1 == len(self.expected)
        return self.value if last else Between(self.value, self.expected, self.place + 1)

    def tensor(self) -> Tensor:
        """Raise RuntimeError."""
        raise RuntimeError(
            "the output of a fused layer is read before the modules that the layer computes are called, while PyTorch "
            f"traces the model: {REMEDY}"
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Raises, for any function of PyTorch."""
        next(each for each in flat((*args, *(kwargs or {}).values())) if type(each) is Between).tensor()

    def __getattr__(self, name: str) -> Any:
        """A tensor's attribute; sizes and the type are those of the modules' result."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.value, name) if name in SIZES else self.tensor()


def flat(values: Any) -> list[Any]:
    """The values in lists and tuples."""
    return [each for value in values for each in (flat(value) if type(value) in (list, tuple) else (value,))]


# Python looks operators up in the class, without `__getattr__`.
for _name in ("add", "sub", "mul", "truediv", "pow", "matmul", "radd", "rsub", "rmul", "rtruediv", "iadd", "isub",
              "imul", "itruediv", "neg", "getitem", "setitem", "len", "iter", "bool", "float", "lt", "gt"):  # fmt: skip
    setattr(Between, f"__{_name}__", lambda self, *args: self.tensor())
