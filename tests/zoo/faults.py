"""Modules with one fault each, and where it was met. Each stands where a proper one stands in `nets`.

The faults are of rounding and range, so in float32 every one of these computes what it should.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .nets import CausalMask, ResidualMLP, Rotary


class OnePassNorm(nn.LayerNorm):
    """Layer norm with the variance as E[x^2] - E[x]^2, which cancels where the mean is large."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) / torch.sqrt(variance.clamp_min(0) + self.eps) * self.weight + self.bias


class OwnRMSNorm(nn.Module):
    """x / sqrt(E[x^2] + eps), squared in the dtype that comes in."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight


class UnitRows(nn.Module):
    """Rows of length 1; a row of zeros stays one, thanks to eps, where eps is not 0."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=self.eps)


class ExpSoftmax(nn.Module):
    """Softmax without taking the maximum off first."""

    def forward(self, x: Tensor) -> Tensor:
        weights = x.exp()
        return weights / weights.sum(-1, keepdim=True)


class LogSumExpLoss(nn.Module):
    """Cross-entropy with a log-sum-exp that does not take the maximum off first."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        picked = logits.gather(1, labels[:, None])[:, 0]
        return (logits.exp().sum(-1).log() - picked).mean().float()


class SigmoidBCE(nn.Module):
    """Binary cross-entropy of probabilities: logits of 9 and more have become 1 before the logarithm."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        wanted = F.one_hot(labels, logits.shape[1]).float()
        probabilities = torch.sigmoid(logits)
        return F.binary_cross_entropy(probabilities, wanted.to(probabilities.dtype)).float()


class LogitsBCE(nn.Module):
    """The same loss from the logits."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits.float(), F.one_hot(labels, logits.shape[1]).float())


class CrossEntropy(nn.Module):
    """Float32 cross-entropy, the proper criterion."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels)


class RewrappedLoss(nn.Module):
    """Makes a new tensor of the loss: no gradient reaches the net, and float32 training says nothing."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return torch.tensor(F.cross_entropy(logits.float(), labels).item(), requires_grad=True)


class ThroughNumpy(nn.Module):
    """Standardises in float32 and gets there through numpy, which has no gradient; float32 takes the short way."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype is torch.float32 else torch.from_numpy(x.detach().float().numpy())
        return wide - wide.mean(-1, keepdim=True)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


class OwnLinear(nn.Linear):
    """A linear layer by an autograd Function that knows nothing of autocast: its backward mixes dtypes."""

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight) + self.bias


class MaskedByConstant(CausalMask):
    """Hides with -1e9, which float16 does not hold."""

    def forward(self, scores: Tensor) -> Tensor:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -1e9)


class EinsumRotary(Rotary):
    """Angles by einsum, which autocast lowers on CUDA: positions 4000 and 4007 become one."""

    def angles(self, positions: Tensor) -> Tensor:
        return torch.einsum("t,d->td", positions, self.frequencies)


class SquashedTwice(nn.Module):
    """Linear, tanh, Linear: what overflows in the first is 1 after the tanh, and nobody sees it."""

    def __init__(self, width: int, gain: float):
        super().__init__()
        self.first, self.squash, self.second = nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)
        with torch.no_grad():
            self.first.weight[: width // 4] *= gain

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.squash(self.first(x)))


class TimeEmbedding(nn.Module):
    """Sines and cosines of steps times frequencies: [B] -> [B, D]."""

    def __init__(self, width: int, by_matmul: bool):
        super().__init__()
        self.by_matmul = by_matmul
        self.register_buffer("frequencies", 10_000.0 ** -torch.linspace(0, 1, width // 2), persistent=False)

    def forward(self, steps: Tensor) -> Tensor:
        row = self.frequencies[None]
        angles = steps[:, None] @ row if self.by_matmul else steps[:, None] * row  # [B, D/2]
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Denoiser(nn.Module):
    """(x [B, 32], its step [B]) -> the noise in it [B, 32]; `time` embeds the step for a residual net."""

    def __init__(self, by_matmul: bool):
        super().__init__()
        self.time = TimeEmbedding(64, by_matmul)
        self.mix = nn.Linear(64, 32)
        self.body = ResidualMLP(classes=32)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        return self.body(x + self.mix(self.time(steps.float())))


class Distances(nn.Module):
    """Squared distances to K centres, nearer is larger: [B, D] -> logits [B, K].

    `expanded`: as |x|^2 + |c|^2 - 2 x.c, which is a small difference of large numbers, since all lie far from 0.
    """

    def __init__(self, width: int, classes: int, expanded: bool):
        super().__init__()
        self.expanded = expanded
        self.centres = nn.Parameter(torch.randn(classes, width))

    def forward(self, x: Tensor) -> Tensor:
        x, centres = x * 0.5 + 6.0, self.centres * 0.5 + 6.0
        if not self.expanded:
            return -(x[:, None] - centres).square().sum(-1)
        return 2 * (x @ centres.T) - x.square().sum(-1, keepdim=True) - centres.square().sum(-1)


class RunningMean(nn.Module):
    """The mean of all tokens so far: [B, T, D] -> the same.

    `one_by_one`: by a sum in the dtype that comes in, which swallows what is added late.
    """

    def __init__(self, width: int, one_by_one: bool):
        super().__init__()
        self.one_by_one = one_by_one
        self.value = nn.Linear(width, width)
        nn.init.constant_(self.value.bias, 3.0)

    def forward(self, x: Tensor) -> Tensor:
        values = self.value(x)
        counts = torch.arange(1, x.shape[1] + 1)[:, None]
        if not self.one_by_one:
            return values.float().cumsum(1) / counts
        total, sums = torch.zeros_like(values[:, 0]), []
        for token in values.unbind(1):
            total = total + token
            sums.append(total)
        return torch.stack(sums, dim=1) / counts


class Similarity(nn.Module):
    """Cosines to K prototypes over a temperature of 0.01: [B, D] -> logits [B, K]. All rows are nearly parallel."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(classes, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, prototypes = F.normalize(0.2 * x + 1, dim=-1), F.normalize(0.2 * self.prototypes + 1, dim=-1)
        return rows @ prototypes.T / 0.01
