"""How an instrument leaves no trace: what a pass through a model changes is put back.

Knows gradients, buffers, training mode and the default generators; refuses to know what the pass is for.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch
from torch import Tensor, nn


@contextmanager
def leaves_no_trace(model: nn.Module) -> Iterator[None]:
    """Put back what a forward and a backward of `model` change, also if they raise.

    Gradients (the same tensor objects; None inside, so that no kept gradient is added to),
    buffers, training mode, and the default generators of Python, numpy, and torch on the CPU, on CUDA and on MPS.
    Generators that the caller made, and plain Python attributes, are the caller's to mind.
    """
    cuda = torch.cuda.is_initialized()  # a query that would not itself start CUDA
    mps = torch.backends.mps.is_available()
    python_rng, numpy_rng, cpu_rng = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda_rng = torch.cuda.get_rng_state_all() if cuda else []
    mps_rng = torch.mps.get_rng_state() if mps else None
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, None if _is_expanded(buffer) else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    for parameter, _ in grads:
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                setattr(module, name, buffer)  # the forward may have put another tensor there
                if before is not None:
                    buffer.copy_(before)
        for module, training in modes:
            module.training = training
        for parameter, grad in grads:
            parameter.grad = grad
        random.setstate(python_rng)
        numpy.random.set_state(numpy_rng)
        torch.set_rng_state(cpu_rng)
        if cuda:
            torch.cuda.set_rng_state_all(cuda_rng)
        if mps:
            torch.mps.set_rng_state(mps_rng)


def _is_expanded(buffer: Tensor) -> bool:
    """Whether elements share memory: torch refuses to write to it, so nobody can have."""
    if buffer.layout != torch.strided:
        return False
    return any(n > 1 and stride == 0 for n, stride in zip(buffer.shape, buffer.stride(), strict=True))
