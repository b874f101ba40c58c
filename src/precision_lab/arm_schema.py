"""What one arm is: the schema of the `precision` group, and which of its values go together. No torch."""

import math
from dataclasses import dataclass, field
from enum import Enum

from omegaconf import MISSING

from precision_lab import ranges
from precision_lab.errors import at_least, require

LARGEST_FLOAT32 = 2**128 - 2**104
WHERE_SET = {"identity": "where set"}  # null, or an empty list, is as if the field did not exist
# Devices whose autocast policy can be carried out on a CPU.
Target = Enum("Target", ["cpu", "cuda", "mps"])


class Dtype(Enum):
    """A dtype of parameters or autocast, by torch's name."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Float32Mode(Enum):
    """How float32 matmuls and convolutions multiply: IEEE float32, or inputs rounded to TF32 (10 bits)."""

    ieee = "ieee"
    tf32 = "tf32"


@dataclass
class PrecisionConfig:
    """One arm: everything that may differ between two precisions."""

    name: str = MISSING
    param_dtype: Dtype = MISSING
    autocast_dtype: Dtype | None = MISSING
    grad_scaling: bool = MISSING
    init_scale: float = MISSING
    growth_interval: int = MISSING
    min_scale: float = MISSING
    max_consecutive_skips: int = MISSING
    float32_matmul: Float32Mode = MISSING
    float32_conv: Float32Mode = MISSING
    fp32_modules: list[str] = MISSING
    fp32_ops: list[str] = field(default=MISSING, metadata=WHERE_SET)
    emulate: Target | None = field(default=MISSING, metadata=WHERE_SET)
    weight_noise: float = MISSING

    def __post_init__(self) -> None:
        low_params = self.param_dtype is not Dtype.float32
        require(
            self.param_dtype is not Dtype.float16,
            "precision.param_dtype=float16 is not supported: AdamW's eps is 0 in float16 and its gradients cannot "
            "be unscaled; use float32 parameters with precision.autocast_dtype=float16.",
        )
        require(
            self.autocast_dtype is not Dtype.float32,
            "precision.autocast_dtype=float32 does nothing; use null for no autocast, bfloat16 or float16.",
        )
        require(
            not self.grad_scaling or self.autocast_dtype is Dtype.float16,
            "precision.grad_scaling=true needs precision.autocast_dtype=float16: "
            f"{self.name} does not have float16's narrow range, so there is nothing to scale.",
        )
        require(
            not (low_params and self.autocast_dtype),
            f"precision.param_dtype={self.param_dtype.name} and precision.autocast_dtype cannot be combined: "
            "autocast needs float32 parameters.",
        )
        require(
            not self.fp32_modules or self.autocast_dtype is not None,
            "precision.fp32_modules keeps modules out of autocast, and precision.autocast_dtype is null.",
        )
        require(
            not self.fp32_ops or self.autocast_dtype is not None,
            "precision.fp32_ops keeps operations out of autocast, and precision.autocast_dtype is null.",
        )
        require(
            self.emulate is None or low_params or self.autocast_dtype is not None,
            f"precision.emulate={self.emulate and self.emulate.name} carries out another device's low precision, and "
            f"precision={self.name} has none; use bf16 or fp16.",
        )
        require(
            math.isfinite(self.init_scale) and self.init_scale >= self.min_scale > 0,
            f"precision.init_scale={self.init_scale} and precision.min_scale={self.min_scale} must be finite, "
            "above 0, and the first not below the second.",
        )
        require(
            self.init_scale <= LARGEST_FLOAT32,
            f"precision.init_scale={self.init_scale} is more than float32 holds; it must be at most {LARGEST_FLOAT32}.",
        )
        require(
            0 <= self.weight_noise <= 1,
            f"precision.weight_noise={self.weight_noise} must be from 0 to 1: a share of each weight.",
        )
        ranges.texts("precision.fp32_modules", self.fp32_modules)
        ranges.texts("precision.fp32_ops", self.fp32_ops)
        at_least("precision.growth_interval", self.growth_interval, 1)
        at_least("precision.max_consecutive_skips", self.max_consecutive_skips, 1)
