"""A model that float16 hurts for one reason, in silence: a norm written by hand squares numbers that are too large."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SquaringNorm(nn.Module):
    """RMS norm as its formula says it: x / sqrt(mean(x^2) + eps), features last.

    In float16 a square is infinite from 256 on. The norm then divides by infinity and returns zeros: the loss stays
    finite, the gradient too, and no loss scale notices.
    """

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * ((x * x).mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight  # [B, D]


class LoudMLP(nn.Module):
    """Images of any shape -> logits [B, K], through residual layers whose stream is `gain` times as loud as usual.

    A loud stream is harmless by itself: each layer normalises what it reads. The last norm is a `SquaringNorm`.
    """

    def __init__(self, channels: int, image_size: int, num_classes: int, width: int, layers: int, gain: float) -> None:
        super().__init__()
        self.stem = nn.Linear(channels * image_size**2, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = SquaringNorm(width)
        self.head = nn.Linear(width, num_classes)
        with torch.no_grad():
            for layer in (self.stem, *self.layers):
                layer.weight *= gain

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images.flatten(1))  # [B, C, H, W] -> [B, C * H * W] -> [B, D]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(F.relu(norm(x)))  # [B, D]
        return self.head(self.norm(x))  # [B, K]
