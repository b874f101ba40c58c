"""The precision policy: one arm turned into backend flags, an autocast context, a scaler, a prepared model.

Knows torch's switches; refuses to know loops, files and models by name. An arm does exactly
what its name says: `prove` measures what really executes, and a difference is an error.

An arm that keeps operations in float32, or is emulated, has autocast kernels of its own. Kernels are process-wide:
`apply_backends` and `autocast` put the arm's in place and take those of another policy away; they go with the policy,
or by `release`.
"""

import difflib
import fnmatch
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from precision_lab.arm_schema import Float32Mode, PrecisionConfig
from precision_lab.emulation.kernels import AutocastKernels, emulated, in_float32
from precision_lab.emulation.rounding import WideArithmetic
from precision_lab.errors import InputError
from precision_lab.nested import map_tensors

# Explicit significand bits kept by each format: 1 + 2^-k survives a product for k up to this.
SIGNIFICAND_BITS = {"float32": 23, "tf32": 10, "bfloat16": 7, "float16": 10}


class LabelError(InputError):
    """The precision that executes is not the one the arm names."""


class Policy:
    """One arm on one device. Everything that differs between precisions happens in here."""

    def __init__(self, precision: PrecisionConfig, device: torch.device):
        self.config, self.device = precision, device
        self.param_dtype = getattr(torch, precision.param_dtype.name)
        self.autocast_dtype = precision.autocast_dtype and getattr(torch, precision.autocast_dtype.name)
        self._kept: list[str] = []
        self._ran: set[str] = set()
        self._kernels = _kernels_of(precision, device)
        weakref.finalize(self, _take_away, self._kernels).atexit = False

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype matmuls and convolutions are meant to run in."""
        return self.autocast_dtype or self.param_dtype

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """The context around forward and loss: explicitly off, not absent, where the arm has none.

        Device and dtype are always named: torch's defaults differ by device (bfloat16 on cpu, float16 on cuda).
        """
        _put_in_place(self._kernels)
        enabled = self.autocast_dtype is not None
        try:
            with torch.autocast(self.device.type, dtype=self.autocast_dtype, enabled=enabled):
                yield
        finally:
            if self._kernels:
                self._kernels.memory.clear()

    def arithmetic(self) -> AbstractContextManager:
        """The context around forward, backward and update: the units of a device that is emulated."""
        return WideArithmetic() if self.config.emulate else nullcontext()

    def grad_scaler(self) -> torch.amp.GradScaler:
        """Enabled for float16 autocast with scaling alone; a disabled one is a true no-op."""
        return torch.amp.GradScaler(
            self.device.type,
            init_scale=self.config.init_scale,
            growth_interval=self.config.growth_interval,
            enabled=self.config.grad_scaling,
        )

    def apply_backends(self) -> dict[str, Any]:
        """Set every process-wide switch and return those of float32 as they now read."""
        _put_in_place(self._kernels)
        set_float32(self.config.float32_matmul, self.config.float32_conv)
        return backend_flags()

    def prepare(self, model: nn.Module) -> nn.Module:
        """Give the model the arm's parameter dtype and float32 modules. Once, before the optimizer exists."""
        if self.param_dtype is not torch.float32:
            model.to(self.param_dtype)
            model.register_forward_pre_hook(cast_inputs_to_parameters, with_kwargs=True)
        self._kept = keep_in_float32(model, self.config.fp32_modules, self.device.type, self._ran)
        wrong = [
            name for name, p in model.named_parameters() if p.is_floating_point() and p.dtype is not self.param_dtype
        ]
        if wrong:
            raise InputError(
                f"precision={self.config.name} holds parameters in {self.config.param_dtype.name}, but the model's "
                f"{wrong[0]} is {model.get_parameter(wrong[0]).dtype}; build the model in float32."
            )
        return model

    def check_float32(self) -> None:
        """After a step: InputError if a module meant to run in float32 was never called as a module, or an operation
        never under autocast."""
        inside_another = {name for name in self._kept for outer in self._kept if name.startswith(f"{outer}.")}
        idle = [name for name in self._kept if name not in self._ran and name not in inside_another]
        if idle:
            raise InputError(
                f"precision.fp32_modules: {idle[0]} is never called as a module (its parent uses its weights "
                "itself, or not at all), so it cannot be kept in float32; name its parent."
            )
        if idle := [name for name in self.config.fp32_ops if name not in self._kernels.called]:
            raise InputError(
                f"precision.fp32_ops: {idle[0]} is never called under autocast by this model and task"
                f"{_nearest(idle[0], self._kernels.called)}. Names are those that the model calls, not what these are "
                "made of: linear, not addmm; what a module of precision.fp32_modules calls does not count."
            )

    @contextmanager
    def reference(self, model: nn.Module) -> Iterator[None]:
        """Within: the same weights computed in IEEE float32, autocast off. Restored after."""
        try:
            set_float32(Float32Mode.ieee, Float32Mode.ieee)
            if self.param_dtype is not torch.float32:
                model.float()  # exact, and so is the way back
            with torch.autocast(self.device.type, enabled=False):
                yield
        finally:
            if self.param_dtype is not torch.float32:
                model.to(self.param_dtype)
            self.apply_backends()

    def prove(self) -> dict[str, Any]:
        """Measure what a linear and a convolution really execute here; LabelError if not what the arm says.

        Feeds 1 + 2^-k, k = 1..32, through an identity and counts which k survive: 23 is IEEE float32,
        10 tf32 or float16, 7 bfloat16. Draws no random numbers.
        """
        # large enough on a GPU for its libraries to choose tensor cores; small where float16 is emulated
        size = 32 if self.device.type == "cpu" else 512
        diagonal = torch.ones(size)
        diagonal[:32] += 2.0 ** -torch.arange(1.0, 33.0)
        values = torch.diag(diagonal).to(self.device, self.param_dtype)  # [size, size]
        identity = torch.eye(size, device=self.device, dtype=self.param_dtype)
        with torch.no_grad(), self.arithmetic(), self.autocast():
            linear = nn.functional.linear(values, identity)
            conv = nn.functional.conv2d(values.T[None, :, None, :], identity[:, :, None, None])[0, :, 0, :]
        proof = {
            "linear_dtype": str(linear.dtype).removeprefix("torch."),
            "linear_bits": _surviving_bits(linear),
            "conv_dtype": str(conv.dtype).removeprefix("torch."),
            "conv_bits": _surviving_bits(conv),
        }
        if self._kernels:
            self._kernels.called.clear()
        modes = {"linear": self.config.float32_matmul, "conv": self.config.float32_conv}
        for (kind, mode), operation in zip(modes.items(), ("linear", "conv2d"), strict=True):
            kept = operation in self.config.fp32_ops
            expected = "float32" if kept else str(self.compute_dtype).removeprefix("torch.")
            rounded = expected == "float32" and mode is Float32Mode.tf32
            allowed = {SIGNIFICAND_BITS["tf32" if rounded else expected]}
            if rounded and kind == "conv":
                allowed.add(SIGNIFICAND_BITS["float32"])  # cuDNN may choose an algorithm without tensor cores
            if proof[f"{kind}_dtype"] != expected or proof[f"{kind}_bits"] not in allowed:
                raise LabelError(
                    f"precision={self.config.name} should run a {kind} in {expected} with {max(allowed)} "
                    f"significand bits, but {proof[f'{kind}_dtype']} with {proof[f'{kind}_bits']} bits was measured."
                )
        return proof


_in_place: AutocastKernels | None = None  # of the policies', in this process


def _put_in_place(kernels: AutocastKernels | None) -> None:
    """Have autocast follow these kernels, torch's own if None, whatever policy was at it before."""
    global _in_place
    if kernels is _in_place:
        return
    if _in_place:
        _in_place.remove()
        _in_place = None
    if kernels:
        kernels.install()
        _in_place = kernels


def _take_away(kernels: AutocastKernels | None) -> None:
    if kernels is _in_place:
        release()


def release() -> None:
    """Give the process torch's own autocast kernels back. The policy that replaced them may be used again."""
    _put_in_place(None)


def check_operations(names: list[str]) -> None:
    """InputError for one of precision.fp32_ops that does not exist."""
    known = {full.removeprefix("aten::").partition(".")[0] for full in torch._C._dispatch_get_all_op_names()}
    for name in names:
        if name not in known or not hasattr(torch.ops.aten, name) or not in_float32([name]):
            near = _nearest(name, [one for one in known if not one.startswith("_") and not one.endswith("_")])
            raise InputError(
                f"precision.fp32_ops: {name!r} is no operation of torch's that returns a new tensor{near}."
            )


def _kernels_of(precision: PrecisionConfig, device: torch.device) -> AutocastKernels | None:
    """The kernels of an arm whose autocast is not the device's own. InputError for an operation that does not exist."""
    check_operations(precision.fp32_ops)
    if precision.autocast_dtype is None:
        return None
    if precision.emulate:
        return AutocastKernels("cpu", emulated(precision.emulate.name, precision.fp32_ops), precision.emulate.name)
    return AutocastKernels(device.type, in_float32(precision.fp32_ops)) if precision.fp32_ops else None


def _nearest(name: str, names: Iterable[str]) -> str:
    """`; near are a, b, c` for the names most like this one; empty if none is."""
    near = difflib.get_close_matches(name, sorted(names), n=5, cutoff=0.5)
    return f"; near {'are' if len(near) > 1 else 'is'} {', '.join(near)}" if near else ""


def _surviving_bits(product: Tensor) -> int:
    return int((product.diagonal().float() > 1).sum())


def set_float32(matmul: Float32Mode, conv: Float32Mode) -> None:
    """Set how float32 matmuls, recurrent layers and convolutions multiply, process-wide, on every backend."""
    # Only the fp32_precision attributes (torch >= 2.9): mixing them with allow_tf32 raises, even on a read.
    # A fresh torch has cuDNN convolutions and RNNs in tf32.
    torch.backends.cuda.matmul.fp32_precision = matmul.name
    torch.backends.cudnn.conv.fp32_precision = conv.name
    torch.backends.cudnn.rnn.fp32_precision = matmul.name
    for kind in ("matmul", "conv", "rnn"):
        getattr(torch.backends.mkldnn, kind).fp32_precision = "ieee"


def perturb(model: nn.Module, relative: float, seed: int) -> None:
    """Multiply each floating-point parameter by 1 + `relative` * a standard normal number, drawn on the CPU."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                # in float64: in float32 a factor this near to 1 has three values
                noise = torch.randn(p.shape, generator=draw, dtype=torch.float64)
                p.copy_(p.cpu().double() * (1 + relative * noise))


def backend_flags() -> dict[str, Any]:
    """The process-wide switches that change what a matmul or convolution computes, as they read now."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    return {
        "cuda_matmul_fp32": cuda.matmul.fp32_precision,
        "cudnn_conv_fp32": cudnn.conv.fp32_precision,
        "cudnn_rnn_fp32": cudnn.rnn.fp32_precision,
        "mkldnn_matmul_fp32": mkldnn.matmul.fp32_precision,
        "mkldnn_conv_fp32": mkldnn.conv.fp32_precision,
        "fp16_reduced_precision_reduction": cuda.matmul.allow_fp16_reduced_precision_reduction,
        "bf16_reduced_precision_reduction": cuda.matmul.allow_bf16_reduced_precision_reduction,
        "cudnn_benchmark": cudnn.benchmark,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def keep_in_float32(model: nn.Module, patterns: list[str], device_type: str, ran: set[str]) -> list[str]:
    """Run the modules whose names match a pattern outside autocast, inputs cast to float32.

    Their output stays float32: cast back, an overflow would stay an overflow. `*` in a pattern also
    crosses dots; a container that has no forward, such as a ModuleList, stands for its children.
    Returns the names of the modules kept, each of which enters `ran` when it is called. InputError
    for a pattern that matches none.
    """
    names = [name for name, _ in model.named_modules() if name]
    kept: dict[str, nn.Module] = {}
    for pattern in patterns:
        hits = fnmatch.filter(names, pattern)
        if not hits:
            near = _nearest(pattern, names) or f"; this model has {', '.join(names[:8])}{', ...' * (len(names) > 8)}"
            raise InputError(f"precision.fp32_modules: no module's name matches {pattern!r}{near}.")
        for name in hits:
            kept |= _with_forward(name, model.get_submodule(name))
    for name, module in kept.items():
        # a partial, not a closure: a deep copy of the model then gets the copied module's forward
        module.forward = partial(_forward_in_float32, module.forward, device_type, name, ran)
    return list(kept)


def _with_forward(name: str, module: nn.Module) -> dict[str, nn.Module]:
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(f"precision.fp32_modules: {name} is a TorchScript module, which keeps its own dtypes.")
    if type(module).forward is not nn.Module.forward:
        return {name: module}
    found: dict[str, nn.Module] = {}
    for child_name, child in module.named_children():
        found |= _with_forward(f"{name}.{child_name}", child)
    return found


def _forward_in_float32(
    forward: Callable, device_type: str, name: str, ran: set[str], /, *args: Any, **kwargs: Any
) -> Any:
    ran.add(name)
    with torch.autocast(device_type, enabled=False):
        return forward(*cast_floating(args, torch.float32), **cast_floating(kwargs, torch.float32))


def cast_inputs_to_parameters(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A forward pre-hook: floating-point inputs in the dtype of the module's parameters."""
    # The current dtype, not the arm's: a float32 evaluation of the same weights passes here too.
    dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
    return cast_floating(args, dtype), cast_floating(kwargs, dtype)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors inside a nested value; leave all else."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)
