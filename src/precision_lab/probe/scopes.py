"""Which module an operation belongs to, forward and backward. Knows names; refuses to know what an operation does."""

import sys
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class ModuleScopes:
    """Names the module that an operation belongs to.

    Forward: a stack kept by forward hooks. Backward: every autograd node carries the sequence
    number it got in the forward, so the module that was running then is looked up by number.
    `torch.utils.module_tracker.ModuleTracker` leaves a module in backward only when a gradient
    for its input arrives: where the input needs none (a stem on the batch, two towers on it),
    the name sticks to all that follows (checked on 2.14.1).
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._stack = [""]
        self.raised_in: str | None = None  # the innermost module whose forward raised
        # Nodes numbered from _starts[i] up to _starts[i + 1] were made inside _owners[i].
        self._starts, self._owners = [0], [""]

    @contextmanager
    def tracked(self) -> Iterator[None]:
        enter = register_module_forward_pre_hook(self._enter)
        leave = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            enter.remove()
            leave.remove()

    def current(self) -> str:
        node = torch._C._current_autograd_node()
        # In backward the stack is empty, unless checkpointing repeats a forward.
        return self._stack[-1] if node is None or len(self._stack) > 1 else self.made_in(node)

    def made_in(self, node: torch.autograd.graph.Node) -> str:
        """The module in whose forward an autograd node was made."""
        return self._owners[bisect_right(self._starts, node._sequence_nr()) - 1]

    @contextmanager
    def inside(self, function: str) -> Iterator[None]:
        """Within: operations, and their backward, are of `<module>()<function>`."""
        self._stack.append(f"{self._stack[-1].partition('()')[0]}(){function}")
        self._mark()
        try:
            yield
        finally:
            self._stack.pop()
            self._mark()

    def _enter(self, module: nn.Module, args: object) -> None:
        # A module from outside the model (a loss module) goes by the name of what called it.
        self._stack.append(self._names.get(module, self._stack[-1]))
        self._mark()

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        if self.raised_in is None and sys.exc_info()[0] is not None:
            self.raised_in = self._stack[-1]
        self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        if not in_backward():  # a backward thread has a counter of its own
            self._starts.append(torch.autograd._get_sequence_nr())
            self._owners.append(self._stack[-1])


def in_backward() -> bool:
    """Whether autograd is running a backward pass."""
    return torch._C._current_graph_task_id() != -1
