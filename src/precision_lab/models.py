"""Models: plain modules from a batch to logits. They know nothing about precision, tasks or data.

Shape legend: B samples, C channels, H = W = image_size, K classes,
T tokens (at most `context`), V vocabulary, D width, N heads.
"""

import difflib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precision_lab.errors import InputError


class MLP(nn.Module):
    """Flattened pixels through Linear-ReLU layers of the widths in `hidden`, then a linear head."""

    def __init__(self, num_classes: int, channels: int, image_size: int, hidden: list[int]) -> None:
        super().__init__()
        widths = [channels * image_size**2, *hidden]
        layers = [
            nn.Sequential(nn.Linear(d_in, d_out), nn.ReLU())
            for d_in, d_out in zip(widths[:-1], widths[1:], strict=True)
        ]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)  # [B, C*H*W]
        x = self.layers(x)  # [B, hidden[-1]]
        return self.head(x)  # [B, K]


class CNN(nn.Module):
    """Conv-BatchNorm-ReLU blocks, one for each of `widths`, for images of 8 x 8 and larger.

    All blocks but the first halve the resolution by a stride. Max-pooling would keep int64
    indices for backward, which no precision makes smaller: a CNN with it saves 0.59 to 0.65 of
    its fp32 activation bytes under bf16 autocast, this one 0.50 (torch 2.14.1).
    """

    def __init__(self, num_classes: int, channels: int, widths: list[int]) -> None:
        super().__init__()
        if not widths:
            raise InputError("model.widths is empty: a CNN needs at least one block, e.g. [32,64].")
        blocks = [
            _conv_block(c_in, c_out, stride=1 if i == 0 else 2)
            for i, (c_in, c_out) in enumerate(zip([channels, *widths[:-1]], widths, strict=True))
        ]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(images)  # [B, C, H, W] -> [B, widths[-1], h, w]
        x = x.mean(dim=(2, 3))  # [B, widths[-1]], global average pool
        return self.head(x)  # [B, K]


def _conv_block(c_in: int, c_out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, kernel_size=3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(c_out),
        nn.ReLU(),
    )


class GPT(nn.Module):
    """Decoder-only transformer: learned positions, pre-norm blocks, output tied to the embedding.

    Initialised as GPT-2: normal(0, 0.02), the projections that write into the residual stream
    scaled by 1 / sqrt(2 * layers), so that its variance does not grow with depth.
    """

    def __init__(self, vocab_size: int, context: int, layers: int, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        if heads < 1:
            raise InputError(f"model.heads={heads} is too small; it must be at least 1.")
        if width % heads:
            raise InputError(f"model.width={width} is not a multiple of model.heads={heads}.")
        self.context = context
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.token_embedding.weight
        self._initialise(residual_std=0.02 / math.sqrt(2 * max(layers, 1)))

    def _initialise(self, residual_std: float) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:  # every matrix; norm weights are vectors and stay 1
                into_residual = name.endswith(("attention.out.weight", "mlp.out.weight"))
                nn.init.normal_(parameter, std=residual_std if into_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.context:
            raise InputError(
                f"The samples have {length} tokens, but model.context={self.context}: "
                "set dataset.context to at most model.context, or leave it null."
            )
        positions = torch.arange(length, device=tokens.device)  # [T]
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # [B, T, D]
        x = self.blocks(self.dropout(x))  # [B, T, D]
        return self.head(self.norm(x))  # [B, T, V]


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = FeedForward(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))  # [B, T, D]
        return x + self.mlp(self.mlp_norm(x))  # [B, T, D]


class CausalSelfAttention(nn.Module):
    """Every position attends to itself and those before it: [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # q, k, v: [B, N, T, D/N]
        attention_dropout = self.dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=attention_dropout, is_causal=True)
        y = y.transpose(1, 2).flatten(2)  # [B, N, T, D/N] -> [B, T, D]
        return self.dropout(self.out(y))  # [B, T, D]


class FeedForward(nn.Module):
    """Position by position: up to 4 D, GELU, back to D."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.up(x))  # [B, T, 4D]
        return self.dropout(self.out(x))  # [B, T, D]


def torchvision_model(name: str, num_classes: int, channels: int, image_size: int, **arguments: Any) -> nn.Module:
    """Any torchvision classification model, untrained: images [B, 3, H, W] -> logits [B, K].

    `arguments` go to torchvision's constructor. inception_v3 and googlenet return a namedtuple
    with auxiliary logits in training mode.
    Raises InputError for an unknown name, another kind of model, channels other than 3,
    arguments the model does not take, and an image size it cannot run on.
    """
    from torchvision import models  # costs more than a second: only who asks for it pays

    _check_classification(name, models)
    if channels != 3:
        raise InputError(f"torchvision's {name} takes 3-channel images, not {channels}: set dataset.channels=3.")
    # The defaults of these families are fixed at 224 pixels, or initialise with slow
    # truncated normals and a FutureWarning.
    if name.startswith("vit_"):
        arguments = {"image_size": image_size, **arguments}
    elif name.startswith("maxvit_"):
        arguments = {"input_size": (image_size, image_size), **arguments}
    elif name in ("googlenet", "inception_v3"):
        arguments = {"init_weights": False, **arguments}
    try:
        model = models.get_model(name, weights=None, num_classes=num_classes, **arguments)
        _dry_run(model, torch.empty(2, channels, image_size, image_size, device="meta"))
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise InputError(
            f"torchvision's {name} cannot be used with image_size={image_size} and the model "
            f"arguments given: {reason}. All models take 224, inception_v3 takes 299."
        ) from error
    return model


def _check_classification(name: str, models: Any) -> None:
    classification = models.list_models(module=models)
    if name in classification:
        return
    if name in models.list_models():
        package = models.get_model_builder(name).__module__.split(".")[2]
        raise InputError(
            f"model.name={name} is not a classification model that can be trained: it is from "
            f"torchvision.models.{package}. Use a task and model of your own (model=custom)."
        )
    near = difflib.get_close_matches(name.lower(), classification, n=3, cutoff=0.4)
    hint = f"near matches: {', '.join(near)}" if near else "none is near"
    raise InputError(
        f"model.name={name} is not one of torchvision's {len(classification)} classification models; {hint}."
    )


def _dry_run(model: nn.Module, images: Tensor) -> None:
    """Run shapes only: parameters and buffers stand in as meta tensors, the model is untouched."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        torch.func.functional_call(model, {k: v.to("meta") for k, v in state.items()}, (images,))
