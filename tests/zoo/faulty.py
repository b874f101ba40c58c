"""The faulty cases: a healthy net with one module replaced, and the name that a diagnosis must come to."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import faults
from .case import Build, Case, classify, own_loss, samples, seeded
from .nets import ComputesLoss, ConvNet, ResidualMLP, Transformer

Change = Callable[[Any], object]
MLP_BATCH, TOKENS, IMAGES = samples(32, 32), samples(8, 32, 16), samples(8, 3, 16, 16)


def planted(net: Callable[[], nn.Module], *changes: Change) -> Build:
    """Of a seed: the net that `net` makes, changed."""

    def make() -> nn.Module:
        model = net()
        with torch.no_grad():
            for change in changes:
                change(model)
        return model

    return partial(seeded, make=make)


def put(path: str, make: Callable[[], nn.Module]) -> Change:
    """A change: another module at `path`, with the weights that it has in common with the old one."""

    def change(model: nn.Module) -> None:
        old, new = model.get_submodule(path).state_dict(), make()
        new.load_state_dict({name: value for name, value in old.items() if name in new.state_dict()}, strict=False)
        model.set_submodule(path, new)

    return change


def scaled(path: str, factor: float) -> Change:
    """A change: the parameter at `path` times `factor`."""
    return lambda model: model.get_parameter(path).mul_(factor)


def sharpened(*blocks: int, gain: float) -> Change:
    """A change: larger queries and keys in these blocks, so that attention is no plain mean."""

    def change(model: Transformer) -> None:
        for block in blocks:
            qkv = model.blocks[block].attention.qkv
            qkv.weight[: 2 * qkv.in_features] *= gain

    return change


def shifted(path: str, by: float) -> Change:
    """A change: the parameter at `path` plus `by`."""
    return lambda model: model.get_parameter(path).add_(by)


def with_loss(criterion: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: ComputesLoss(ResidualMLP(), criterion())


def tiny_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that is one small term of many."""
    loss, _ = classify(model, batch)
    return 1e-4 * loss, {}


def denoise(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean squared error of the noise that a model finds."""
    noisy, steps, noise = batch
    return F.mse_loss(model(noisy, steps).float(), noise), {}


def noisy_samples(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """([B, F], late steps of 1000 [B], [B, F])"""
    draw = torch.Generator().manual_seed(1000 + seed)
    steps = torch.randint(500, 1000, (32,), generator=draw)
    return torch.randn(32, 32, generator=draw), steps, torch.randn(32, 32, generator=draw)


def with_silent_rows(seed: int) -> tuple[Tensor, Tensor]:
    """As MLP_BATCH, where every fourth sample is all zeros."""
    inputs, labels = MLP_BATCH(seed)
    return inputs * (torch.arange(32) % 4 > 0)[:, None], labels


def wiring() -> Iterable[Case]:
    """Faults that no kept module heals, and settings."""
    yield Case(
        "rewrapped_loss",
        "P01",
        "The loss is made a new tensor, so that no parameter gets a gradient.",
        planted(with_loss(faults.RewrappedLoss)),
        own_loss,
        MLP_BATCH,
        "fp16",
        "cuda",
        culprit=("criterion",),
        cure="mended",
        mended=planted(with_loss(faults.CrossEntropy)),
    )
    yield Case(
        "half_prelu",
        "P02",
        "One PReLU holds its weight in float16, whose gradient cannot be unscaled.",
        planted(ResidualMLP, put("blocks.1.act", lambda: nn.PReLU().half())),
        classify,
        MLP_BATCH,
        "fp16",
        "cuda",
        culprit=("blocks.1.act", "blocks.1.act.weight"),
        cure="mended",
        mended=planted(ResidualMLP, put("blocks.1.act", nn.PReLU)),
    )
    yield Case(
        "bf16_layer_with_scaler",
        "P03",
        "One layer was loaded in bfloat16, and a scaler unscales no such gradient on CUDA, while a CPU lets it pass.",
        planted(ResidualMLP, lambda model: model.blocks[2].up.bfloat16()),
        classify,
        MLP_BATCH,
        "fp16",
        "cuda",
        culprit=("blocks.2.up", "blocks.2.up.weight"),
        cure="mended",
        mended=planted(ResidualMLP),
    )
    yield Case(
        "underflow_without_scaler",
        "P19",
        "A small loss without a loss scale: gradients are flushed to zero in float16.",
        planted(ResidualMLP),
        tiny_loss,
        MLP_BATCH,
        "fp16_unscaled",
        "cuda",
        culprit=("precision.grad_scaling",),
    )
    yield Case(
        "lost_updates",
        "P42",
        "Weights in bfloat16 do not move by updates of 1e-5.",
        planted(ResidualMLP),
        classify,
        MLP_BATCH,
        "bf16_pure",
        "cuda",
        culprit=("precision.param_dtype",),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-5),
    )


def losses() -> Iterable[Case]:
    """Criteria written out by hand."""
    loud = scaled("net.head.weight", 20.0)
    for target in ("cuda", "cpu"):
        does = "is refused" if target == "cuda" else "saturates in silence"
        yield Case(
            f"sigmoid_bce_{target}",
            "P26",
            f"Sigmoid followed by binary cross-entropy {does}.",
            planted(with_loss(faults.SigmoidBCE), loud),
            own_loss,
            MLP_BATCH,
            "bf16",
            target,
            culprit=("criterion", "binary_cross_entropy", "sigmoid"),
            mended=planted(with_loss(faults.LogitsBCE), loud),
        )
    yield Case(
        "log_sum_exp",
        "own log-sum-exp",
        "A log-sum-exp without its maximum taken off: exp overflows in float16.",
        planted(with_loss(faults.LogSumExpLoss), loud),
        own_loss,
        MLP_BATCH,
        "fp16",
        "cpu",
        culprit=("criterion", "exp"),
        mended=planted(with_loss(faults.CrossEntropy), loud),
    )
    yield Case(
        "small_temperature",
        "contrastive head",
        "Similarities of nearly parallel rows, rounded and then divided by a small temperature.",
        planted(ResidualMLP, put("head", lambda: faults.Similarity(64, 10))),
        classify,
        MLP_BATCH,
        "bf16",
        "cuda",
        culprit=("head", "mm", "matmul"),
    )
    yield Case(
        "expanded_distances",
        "distance head",
        "Squared distances as a difference of large numbers.",
        planted(ResidualMLP, put("head", lambda: faults.Distances(64, 10, expanded=True))),
        classify,
        MLP_BATCH,
        "bf16",
        "cuda",
        culprit=("head", "mm", "matmul"),
        mended=planted(ResidualMLP, put("head", lambda: faults.Distances(64, 10, expanded=False))),
    )


def norms() -> Iterable[Case]:
    """Norms written out by hand."""
    off_centre = shifted("stem.bias", 6.0)
    yield Case(
        "one_pass_variance_bf16",
        "E[x^2] - E[x]^2",
        "The variance is a difference of two large means.",
        planted(ResidualMLP, off_centre, put("blocks.2.norm", lambda: faults.OnePassNorm(64))),
        classify,
        MLP_BATCH,
        "bf16",
        "cuda",
        culprit=("blocks.2.norm",),
        mended=planted(ResidualMLP, off_centre),
    )
    far = shifted("stem.bias", 20.0)
    yield Case(
        "one_pass_variance_fp16",
        "E[x^2] - E[x]^2",
        "The variance is a difference of two large means.",
        planted(Transformer, far, put("blocks.1.ff_norm", lambda: faults.OnePassNorm(64))),
        classify,
        TOKENS,
        "fp16",
        "cuda",
        culprit=("blocks.1.ff_norm",),
        mended=planted(Transformer, far),
    )
    quiet = scaled("blocks.2.down.weight", 1e-4), scaled("blocks.2.down.bias", 1e-4)
    yield Case(
        "eps_too_small",
        "P40",
        "An eps of 1e-8 and squares of small numbers are 0 in float16, and the norm divides by it.",
        planted(ResidualMLP, *quiet, put("blocks.2.post", lambda: faults.OwnRMSNorm(64, 1e-8))),
        classify,
        MLP_BATCH,
        "fp16",
        "cuda",
        culprit=("blocks.2.post",),
        mended=planted(ResidualMLP, *quiet, put("blocks.2.post", lambda: nn.RMSNorm(64, eps=1e-8))),
    )
    yield Case(
        "normalize_zero_rows",
        "P40",
        "F.normalize of a row of zeros: its eps of 1e-12 is 0 in float16.",
        planted(partial(ResidualMLP, bias=False), put("blocks.0.norm", lambda: faults.UnitRows(1e-12))),
        classify,
        with_silent_rows,
        "fp16",
        "cpu",
        culprit=("blocks.0.norm",),
        cure="mended",
        mended=planted(partial(ResidualMLP, bias=False), put("blocks.0.norm", lambda: faults.UnitRows(1e-3))),
    )
    large = scaled("blocks.2.down.weight", 2000.0), scaled("blocks.2.down.bias", 2000.0)
    yield Case(
        "squares_overflow",
        "own RMS norm",
        "Squares of numbers above 256 overflow in float16, and the norm returns zeros.",
        planted(ResidualMLP, *large, put("blocks.2.post", lambda: faults.OwnRMSNorm(64, 1e-6))),
        classify,
        MLP_BATCH,
        "fp16",
        "cuda",
        culprit=("blocks.2.post",),
        mended=planted(ResidualMLP, *large, put("blocks.2.post", lambda: nn.RMSNorm(64, eps=1e-6))),
    )


def ranges() -> Iterable[Case]:
    """Values beyond what float16 holds."""
    yield Case(
        "t5_feed_forward",
        "P37",
        "The feed-forward of one block overflows in float16.",
        planted(Transformer, scaled("blocks.1.ff.up.weight", 300.0), scaled("blocks.1.ff.out.weight", 1500.0)),
        classify,
        TOKENS,
        "fp16",
        "cuda",
        culprit=("blocks.1.ff.out", "blocks.1.ff"),
    )
    wide = scaled("norm.weight", 100.0)
    yield Case(
        "hidden_infinity",
        "P38",
        "A layer overflows, a tanh makes 1 of it, and neither loss nor scaler notices.",
        planted(ResidualMLP, wide, put("neck", lambda: faults.SquashedTwice(64, 20_000.0))),
        classify,
        MLP_BATCH,
        "fp16",
        "cuda",
        culprit=("neck.first", "neck"),
        mended=planted(ResidualMLP, wide, put("neck", lambda: faults.SquashedTwice(64, 1.0))),
    )
    yield Case(
        "poisoned_batch_norm",
        "P51",
        "A convolution overflows: the step is skipped, but the batch norm behind it has kept the infinity.",
        planted(ConvNet, scaled("blocks.1.conv.weight", 2e5)),
        classify,
        IMAGES,
        "fp16",
        "cuda",
        culprit=("blocks.1.conv", "blocks.1", "blocks.1.norm"),
        mended=planted(ConvNet),
    )
    peaked = sharpened(1, gain=4.0)
    yield Case(
        "exp_softmax",
        "P53",
        "A softmax by exp without its maximum taken off: exp(12) is infinite in float16.",
        planted(Transformer, peaked, put("blocks.1.attention.softmax", faults.ExpSoftmax)),
        classify,
        TOKENS,
        "fp16",
        "cpu",
        culprit=("blocks.1.attention.softmax", "exp"),
        mended=planted(Transformer, peaked),
    )
    yield Case(
        "mask_constant",
        "constant",
        "A mask of -1e9 is no float16 number.",
        planted(Transformer, put("blocks.1.attention.mask", faults.MaskedByConstant)),
        classify,
        TOKENS,
        "fp16",
        "cuda",
        culprit=("blocks.1.attention.mask", "masked_fill"),
        mended=planted(Transformer),
    )


def roundings() -> Iterable[Case]:
    """What must not be rounded, and dtypes that do not meet."""
    yield Case(
        "through_numpy",
        "P01",
        "A module gets to float32 through numpy, and there the gradient ends.",
        planted(ResidualMLP, put("neck", faults.ThroughNumpy)),
        classify,
        MLP_BATCH,
        "bf16",
        "cpu",
        culprit=("neck",),
        mended=planted(ResidualMLP),
    )
    yield Case(
        "own_function",
        "P27",
        "The backward of an autograd Function without custom_fwd multiplies bfloat16 by float32.",
        planted(ResidualMLP, put("blocks.2.up", lambda: faults.OwnLinear(64, 128))),
        classify,
        MLP_BATCH,
        "bf16",
        "cuda",
        culprit=("blocks.2.up",),
        mended=planted(ResidualMLP),
    )
    late, peaked = partial(Transformer, first=4000), sharpened(0, 1, 2, gain=4.0)
    yield Case(
        "rotary_by_einsum",
        "P47",
        "Rotary angles by einsum: bfloat16 does not hold positions above 256.",
        planted(late, peaked, put("blocks.1.attention.rotary", lambda: faults.EinsumRotary(16, 4000))),
        classify,
        TOKENS,
        "bf16",
        "cuda",
        culprit=("blocks.1.attention.rotary", "einsum"),
        mended=planted(late, peaked),
    )
    yield Case(
        "steps_by_matmul",
        "P47",
        "The angles of a step's embedding by a matmul: 998 and 999 become 1000.",
        planted(partial(faults.Denoiser, by_matmul=True)),
        denoise,
        noisy_samples,
        "bf16",
        "cuda",
        culprit=("time", "mm", "matmul"),
        mended=planted(partial(faults.Denoiser, by_matmul=False)),
    )
    yield Case(
        "running_sum",
        "own cumulative sum",
        "A sum over tokens, kept in bfloat16, swallows what is added late.",
        planted(Transformer, put("blocks.1.attention", lambda: faults.RunningMean(64, one_by_one=True))),
        classify,
        samples(4, 256, 16),
        "bf16",
        "cuda",
        culprit=("blocks.1.attention",),
        mended=planted(Transformer, put("blocks.1.attention", lambda: faults.RunningMean(64, one_by_one=False))),
    )


FAULTY = {case.name: case for group in (wiring, losses, norms, ranges, roundings) for case in group()}
