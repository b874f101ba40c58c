"""What a user might write in a file of their own: data, models and tasks, known to nobody else."""

import os
import signal
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset


def line_data(samples: int = 96):
    """y = 2 x0 - x1 + 0.5, three quarters for training."""
    x = torch.randn(samples, 2, generator=torch.Generator().manual_seed(7))
    y = 2 * x[:, :1] - x[:, 1:] + 0.5
    cut = samples * 3 // 4
    return TensorDataset(x[:cut], y[:cut]), TensorDataset(x[cut:], y[cut:])


class SlowToRead(Dataset):
    """Noise in ten classes, of which a batch takes `seconds` to read."""

    def __init__(self, samples: int, seconds: float):
        draw = torch.Generator().manual_seed(7)
        self.seconds, self.images = seconds, torch.randn(samples, 1, 8, 8, generator=draw)
        self.labels = torch.randint(10, (samples,), generator=draw)

    def __len__(self):
        return len(self.labels)

    def __getitems__(self, indices):
        time.sleep(self.seconds)
        return [(self.images[i], self.labels[i]) for i in indices]

    def __getitem__(self, index):
        return self.__getitems__([index])[0]


def slow_data(seconds: float):
    return SlowToRead(512, seconds), SlowToRead(64, 0.0)


class Line(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x):
        return self.body(x)


def regression(model, batch):
    x, y = batch
    return F.mse_loss(model(x).float(), y), {}


class Regression:
    """The same with a metric of its own, which it declares: unit and better direction."""

    metrics = {"mae": ("1", "lower")}

    def __init__(self, weight: float = 1.0):
        self.weight = weight

    def __call__(self, model, batch):
        x, y = batch
        output = model(x).float()
        return self.weight * F.mse_loss(output, y), {"mae": (output - y).abs().mean()}


class NotCalled:
    """A task that was not finished."""


def no_optimizer(parameters, lr, several=False):
    return [torch.optim.SGD([parameter], lr) for parameter in parameters] if several else None


def nothing_but_nan(model, batch):
    loss, _ = regression(model, batch)
    return loss * float("nan"), {}


class Raises(Line):
    def forward(self, x):
        raise ValueError("the third gear is missing\nand a second line")


class RaisesInEvaluation(Line):
    def forward(self, x):
        if not self.training:
            raise ValueError("no evaluation today")
        return self.body(x)


class DoesNotFit(Line):
    def to(self, *_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1125899906842624 bytes.")


class Exits(Line):
    def forward(self, x):
        sys.exit(0)


class Greedy(Line):
    def forward(self, x):
        return self.body(x) + torch.empty(2**50)[: len(x), None]


class Killed(Line):
    """Sends its own process a signal at the fifth forward, as a user or a scheduler would from outside."""

    def __init__(self, name: str):
        super().__init__()
        self.name, self.forwards = name, 0

    def forward(self, x):
        self.forwards += 1
        if self.forwards == 5:
            os.kill(os.getpid(), getattr(signal, self.name))
        return self.body(x)
