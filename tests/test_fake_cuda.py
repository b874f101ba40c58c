"""The CUDA policy by a second, independent implementation: torch's own dispatcher on fake CUDA tensors.

A fake tensor has a device and no data, so that torch's own CUDA autocast picks every dtype of a forward without a GPU.
A backward needs a device (2.14.1). Maps are compared as `op_rows.differences` says, by the dtypes that operations give.
"""

import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from precision_lab.assemble import build_workload
from precision_lab.config import compose
from precision_lab.emulation import kernels as kernels_module
from precision_lab.emulation.kernels import AutocastKernels, emulated, installed
from precision_lab.emulation.lists import Cast
from precision_lab.emulation.rounding import WideArithmetic
from precision_lab.models import torchvision_model
from precision_lab.probe.op_rows import OpRow, differences, outputs_of
from precision_lab.probe.ops import OpRecorder

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(),
    reason="this torch is built without CUDA: a matmul of fake CUDA tensors aborts it",
)
IMAGES = "dataset=synthetic_images dataset.samples=10 dataset.channels=3 dataset.num_classes=10 dataset.image_size=64"
OF_CONF = {
    "mlp": f"model=mlp {IMAGES}",
    "cnn": f"model=cnn {IMAGES}",
    "gpt": "model=gpt model.dropout=0.1 model.context=16 dataset=synthetic_tokens dataset.samples=10 "
    "dataset.vocab_size=50",
    **{name: f"model={name} {IMAGES}" for name in ("resnet18", "resnet50", "vit_b_16")},
}
FAMILIES = [
    "vit_b_16", "swin_v2_t", "convnext_tiny", "regnet_y_400mf", "shufflenet_v2_x0_5", "mobilenet_v3_small",
    "efficientnet_b0", "densenet121", "squeezenet1_0", "googlenet",
]  # fmt: skip
LOW = pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@contextmanager
def cuda_autocast(low: torch.dtype):
    """What `torch.autocast("cuda", low)` does, which without a GPU only warns."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", low)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def on_fake_cuda(model: nn.Module, batch: list[Tensor], step, low: torch.dtype) -> list[OpRow]:
    """The forward's operations; the model is of no use afterwards, its parameters are fake."""

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

    with FakeTensorMode():
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(fake(parameter), parameter.requires_grad)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fake(buffer)
        recorder = OpRecorder(model)
        inputs = [fake(one) for one in batch]
        with recorder.naming(), recorder, cuda_autocast(low):
            step(model, *inputs)
    return recorder.rows()


def on_cpu(model: nn.Module, batch: list[Tensor], step, low: torch.dtype) -> list[OpRow]:
    """The forward's operations under the emulated policy."""
    recorder = OpRecorder(model)
    kernels = AutocastKernels("cpu", emulated("cuda", []), "cuda")
    with installed(kernels), WideArithmetic(), recorder.naming(), recorder, torch.autocast("cpu", dtype=low):
        step(model, *batch)
    return recorder.rows()


def classify(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    output = model(images)
    return F.cross_entropy((output if isinstance(output, Tensor) else output[0]).float(), labels)


def predict_next(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def both_maps(model: nn.Module, low: torch.dtype, tokens: bool = False) -> tuple[list[OpRow], list[OpRow]]:
    batch = [torch.randint(0, 50, (2, 17))] if tokens else [torch.randn(2, 3, 64, 64), torch.randint(0, 10, (2,))]
    step = predict_next if tokens else classify
    return on_cpu(model, batch, step, low), on_fake_cuda(model, batch, step, low)


def assert_equal(emulated_map: list[OpRow], fake_map: list[OpRow], low: torch.dtype) -> None:
    assert differences(emulated_map, fake_map) == []
    modules = {module for module, _, _ in outputs_of(emulated_map)}
    assert len(modules) > 4
    assert any(gives == {str(low).removeprefix("torch.")} for gives in outputs_of(fake_map).values())


@LOW
@pytest.mark.parametrize("name", OF_CONF)
def test_a_model_of_conf_has_the_map_of_fake_cuda(name, low):
    model = build_workload(compose(OF_CONF[name].split())).model
    assert_equal(*both_maps(model, low, tokens=name == "gpt"), low)


@LOW
@pytest.mark.parametrize("name", FAMILIES)
def test_a_torchvision_family_has_the_map_of_fake_cuda(name, low):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # googlenet's initialisation is going to change
        model = torchvision_model(name, num_classes=10, channels=3, image_size=64)
    assert_equal(*both_maps(model, low), low)


class Sensitive(nn.Module):
    """Operations of all kinds of treatment, each in the open."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 8, 8)
        self.norm, self.act, self.linear = nn.GroupNorm(2, 8), nn.PReLU(), nn.Bilinear(8, 8, 10)
        self.layer_norm, self.head = nn.LayerNorm(10), nn.Linear(10, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.act(self.norm(self.stem(images)))
        x = F.interpolate(x, scale_factor=2).mean((2, 3)).softmax(-1)
        y = torch.addcmul(x, x, self.stem.bias)
        z = (
            torch.einsum("bi,bi->bi", x, y).exp().log1p().cumsum(1)
            + x.norm(dim=1, keepdim=True)
            + y.pow(2).sum(1, True)
        )
        return self.head(F.softplus(self.layer_norm(self.linear(x, z.to(x.dtype)))).rsqrt())


@LOW
def test_operations_of_every_kind_have_the_dtypes_of_fake_cuda(low):
    emulated_map, fake_map = both_maps(Sensitive(), low)
    assert_equal(emulated_map, fake_map, low)
    assert {"native_group_norm", "_softmax", "exp", "cumsum"} <= {row.op for row in fake_map}


def test_a_wrong_list_would_be_seen(monkeypatch):
    own = kernels_module.policy_of
    monkeypatch.setattr(kernels_module, "policy_of", lambda target: own(target) | {"softmax.int": Cast.lower})
    emulated_map, fake_map = both_maps(Sensitive(), torch.bfloat16)
    first = differences(emulated_map, fake_map)[0]
    assert (first.op, first.first, first.second) == ("_softmax", ("bfloat16",), ("float32",))
