"""The healthy cases: nets as they are trained every day, in which a diagnosis must find nothing."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from precision_lab.models import CNN, GPT, MLP
from precision_lab.task import LanguageModel

from .case import Case, classify, samples, seeded
from .nets import ConvNet, Transformer


def _torchvision(name: str) -> nn.Module:
    from torchvision import models

    return models.get_model(name, weights=None, num_classes=10)


def _vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    net = VisionTransformer(image_size=32, patch_size=8, num_layers=4, num_heads=4, hidden_dim=96, mlp_dim=192)
    nn.init.normal_(net.heads.head.weight, std=0.02)  # zero as it comes, and then nothing else has a gradient
    return net


def _swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer(
        patch_size=[4, 4], embed_dim=48, depths=[2, 2], num_heads=[3, 6], window_size=[4, 4], num_classes=10
    )


def _convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(48, 96, 2), CNBlockConfig(96, 192, 2), CNBlockConfig(192, None, 2)], num_classes=10)


def _tokens(seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(100, (8, 65), generator=draw)


SMALL = samples(8, 3, 32, 32)
_MAKERS: dict[str, tuple[Callable[[], nn.Module], Callable]] = {
    "regnet_y_400mf": (partial(_torchvision, "regnet_y_400mf"), SMALL),
    "shufflenet_v2_x0_5": (partial(_torchvision, "shufflenet_v2_x0_5"), samples(16, 3, 32, 32)),
    "resnet18": (partial(_torchvision, "resnet18"), SMALL),
    "mobilenet_v3_small": (partial(_torchvision, "mobilenet_v3_small"), samples(8, 3, 64, 64)),
    "efficientnet_b0": (partial(_torchvision, "efficientnet_b0"), SMALL),
    "vit": (_vit, SMALL),
    "swin": (_swin, SMALL),
    "convnext": (_convnext, SMALL),
    "mlp": (partial(MLP, 10, 3, 16, [128, 128]), samples(16, 3, 16, 16)),
    "cnn": (partial(CNN, 10, 3, [16, 32, 64]), SMALL),
    "plain_convnet": (ConvNet, samples(8, 3, 16, 16)),
    "plain_transformer": (Transformer, samples(8, 32, 16)),
    "gpt": (partial(GPT, 100, 64, 4, 4, 64, 0.0), _tokens),
}


def _cases(name: str) -> list[Case]:
    make, batch = _MAKERS[name]
    task = LanguageModel() if name == "gpt" else classify
    return [
        Case(
            f"{name}_{precision}",
            "healthy",
            "Nothing is wrong.",
            partial(seeded, make=make),
            task,
            batch,
            precision,
            "cuda",
        )
        for precision in ("bf16", "fp16")
    ]


HEALTHY = {case.name: case for name in _MAKERS for case in _cases(name)}
