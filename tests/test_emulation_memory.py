"""The emulated cast of a weight is kept for a region, and under no_grad too it leads back to the weight."""

import torch
from torch import nn

from precision_lab.emulation.kernels import AutocastKernels, emulated, installed


def gradients_after_a_look_without_one(emulate: bool) -> torch.Tensor:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                target = layer(x) + 1
            loss = (layer(x) - target).float().square().sum()
        loss.backward()

    if not emulate:
        step()
    else:
        with installed(AutocastKernels("cpu", emulated("cpu", []), "cpu")):
            step()
    return layer.weight.grad


def test_a_first_use_under_no_grad_takes_no_gradient_from_the_next():
    own, emulated_ = gradients_after_a_look_without_one(False), gradients_after_a_look_without_one(True)
    assert own.abs().sum() > 0
    assert torch.equal(own, emulated_)
