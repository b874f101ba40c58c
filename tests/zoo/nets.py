"""The nets that faults are planted in: plain, healthy, and with a module of its own for all that may be replaced.

B samples, T tokens, F features, D width, N heads, K classes.
"""

import math

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """x + post(down(act(up(norm(x))))): [..., D] -> [..., D]; `post` does nothing."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width)
        self.post = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.post(self.down(self.act(self.up(self.norm(x)))))


class ResidualMLP(nn.Module):
    """[B, F] -> [B, K] through four residual blocks; `neck` stands before the head and does nothing."""

    def __init__(self, features: int = 32, width: int = 64, classes: int = 10, bias: bool = True):
        super().__init__()
        self.stem = nn.Linear(features, width, bias)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(4)))
        self.norm = nn.LayerNorm(width)
        self.neck = nn.Identity()
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.neck(self.norm(self.blocks(self.stem(x)))))


class ComputesLoss(nn.Module):
    """A net with its criterion inside: (inputs, labels) -> loss."""

    def __init__(self, net: nn.Module, criterion: nn.Module):
        super().__init__()
        self.net, self.criterion = net, criterion

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.criterion(self.net(inputs), labels)


class Rotary(nn.Module):
    """Rotates pairs of channels by position times frequency: [B, N, T, D/N] -> the same. Angles in float32."""

    def __init__(self, width: int, first: int = 0):
        super().__init__()
        self.first = first  # the position of the first token
        self.register_buffer("frequencies", 10_000.0 ** -torch.linspace(0, 1, width // 2), persistent=False)

    def angles(self, positions: Tensor) -> Tensor:
        return positions[:, None] * self.frequencies  # [T, D/2N]

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(self.first, self.first + x.shape[2], dtype=torch.float32)
        angles = self.angles(positions)
        cos, sin = angles.cos(), angles.sin()
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class CausalMask(nn.Module):
    """Hides what comes later: scores [B, N, T, T] -> the same, -inf where hidden."""

    def forward(self, scores: Tensor) -> Tensor:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf)


class Attention(nn.Module):
    """Causal self-attention, operation by operation: [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, heads: int, first: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.rotary = Rotary(width // heads, first)
        self.mask = CausalMask()
        self.softmax = nn.Softmax(dim=-1)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, N, T, D/N]
        scores = self.rotary(q) @ self.rotary(k).mT / math.sqrt(q.shape[-1])  # [B, N, T, T]
        mixed = self.softmax(self.mask(scores)) @ v  # [B, N, T, D/N]
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """As T5 has it, no biases: [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.act = nn.ReLU()
        self.out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.act(self.up(x)))


class TransformerBlock(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + ff(norm(x))."""

    def __init__(self, width: int, heads: int, first: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, first)
        self.ff_norm = nn.LayerNorm(width)
        self.ff = FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ff(self.ff_norm(x))


class Transformer(nn.Module):
    """[B, T, F] -> [B, K]: a linear stem, so that its stream is in low precision, and the mean over tokens."""

    def __init__(self, features: int = 16, width: int = 64, heads: int = 4, depth: int = 3, first: int = 0):
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, first) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(x))).mean(1))


class ConvNet(nn.Module):
    """[B, 3, H, W] -> [B, K]: four blocks of convolution, batch norm and ReLU."""

    def __init__(self, width: int = 16, depth: int = 4):
        super().__init__()
        self.blocks = nn.Sequential(*(self._block(width if i else 3, width, 1 + i % 2) for i in range(depth)))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(width, 10)

    @staticmethod
    def _block(c_in: int, c_out: int, stride: int) -> nn.Module:
        block = nn.Sequential()
        block.add_module("conv", nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False))
        block.add_module("norm", nn.BatchNorm2d(c_out))
        block.add_module("act", nn.ReLU())
        return block

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.blocks(x)).flatten(1))
