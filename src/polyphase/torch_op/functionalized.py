"""`torch.func.functionalize`: PyTorch has no rule for autograd.Function. Ours, which changes no operand, get one."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def give_rule(function: type[torch.autograd.Function]) -> None:
    """Makes ``functionalize`` support an autograd.Function that changes none of its operands and returns one tensor."""
    from torch._C._functorch import TransformType
    from torch._functorch.autograd_function import custom_function_call
    from torch._functorch.eager_transforms import _maybe_unwrap_functional_tensor, _maybe_wrap_functional_tensor

    rules = custom_function_call.functorch_table
    for_others = rules[TransformType.Functionalize]

    def rule(interpreter: Any, given: Any, *operands: Any) -> Any:
        if given is not function:
            return for_others(interpreter, given, *operands)
        views = interpreter.functionalize_add_back_views()
        plain = [
            _maybe_unwrap_functional_tensor(each, reapply_views=views) if isinstance(each, torch.Tensor) else each
            for each in operands
        ]
        with interpreter.lower():
            result = custom_function_call(function, *plain)
        return _maybe_wrap_functional_tensor(result, interpreter.level())

    rules[TransformType.Functionalize] = rule


def functionalizes() -> bool:
    """Whether ``functionalize`` is among the active transforms."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(each.key() == torch._C._functorch.TransformType.Functionalize for each in stack)
