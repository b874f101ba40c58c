"""Models: shapes, sizes, causality, what they keep for backward, and the sentences they refuse with."""

import math
import warnings

import pytest
import torch
from torch import nn

from precision_lab.errors import InputError
from precision_lab.models import CNN, GPT, MLP, torchvision_model


def parameter_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def small_gpt(**changed) -> GPT:
    arguments = dict(vocab_size=11, context=8, layers=2, heads=2, width=16, dropout=0.0) | changed
    torch.manual_seed(0)
    return GPT(**arguments)


def test_mlp_shape_and_parameters():
    model = MLP(num_classes=10, channels=3, image_size=4, hidden=[7, 5])
    assert model(torch.randn(2, 3, 4, 4)).shape == (2, 10)
    assert parameter_count(model) == (48 * 7 + 7) + (7 * 5 + 5) + (5 * 10 + 10)


def test_mlp_without_hidden_layers_is_linear():
    model = MLP(num_classes=10, channels=1, image_size=2, hidden=[])
    x, y = torch.randn(2, 1, 1, 2, 2)
    zero = torch.zeros_like(x)
    torch.testing.assert_close(model(x + y) + model(zero), model(x) + model(y))


@pytest.mark.parametrize("image_size", [8, 9, 33])
def test_cnn_takes_any_size(image_size):
    model = CNN(num_classes=10, channels=1, widths=[4, 6, 8])
    assert model(torch.randn(2, 1, image_size, image_size)).shape == (2, 10)


def test_cnn_parameters_and_resolution():
    model = CNN(num_classes=10, channels=3, widths=[4, 6])
    convolutions, norms, head = 9 * (3 * 4 + 4 * 6), 2 * (4 + 6), 6 * 10 + 10
    assert parameter_count(model) == convolutions + norms + head
    assert model.blocks(torch.randn(2, 3, 8, 8)).shape == (2, 6, 4, 4)


def test_cnn_keeps_no_indices_for_backward():
    model = CNN(num_classes=10, channels=3, widths=[4, 6, 8])
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.dtype) or t, lambda t: t):
        model(torch.randn(2, 3, 16, 16)).sum().backward()
    assert torch.float32 in saved
    assert torch.int64 not in saved
    assert not any(isinstance(m, nn.MaxPool2d) for m in model.modules())


def test_cnn_saves_half_the_bytes_under_bf16():
    def saved_bytes(enabled: bool) -> int:
        torch.manual_seed(0)
        model = CNN(num_classes=10, channels=3, widths=[8, 16])
        parameters = {p.data_ptr() for p in model.parameters()}
        sizes = {}

        def note(t):
            if t.data_ptr() not in parameters and t.dim() == 4 and t.shape[0] == 64:
                sizes[t.data_ptr()] = t.untyped_storage().nbytes()
            return t

        images = torch.randn(64, 3, 16, 16)
        autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), autocast:
            logits = model(images)  # kept alive, so that no address is used twice
        assert logits.requires_grad
        return sum(sizes.values())

    assert saved_bytes(True) / saved_bytes(False) == pytest.approx(0.5, abs=0.02)


def test_cnn_refuses_no_blocks():
    with pytest.raises(InputError, match=r"^model.widths is empty: a CNN needs at least one block"):
        CNN(num_classes=10, channels=3, widths=[])


def test_gpt_shape_and_parameters():
    model = small_gpt()
    assert model(torch.randint(11, (3, 5))).shape == (3, 5, 11)
    width = 16
    block = 4 * width + (3 + 1) * width * (width + 1) + 8 * width * width + 5 * width
    assert parameter_count(model) == (11 + 8) * width + 2 * block + 2 * width
    assert model.head.weight is model.token_embedding.weight


def test_gpt_is_causal():
    model = small_gpt()
    tokens = torch.randint(11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:5], after[:5])
    assert (before[5:] != after[5:]).any(dim=1).all()  # the change reaches every later position


def test_gpt_initialisation():
    model = small_gpt(vocab_size=64, layers=8, width=64)
    residual_std = 0.02 / math.sqrt(16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.abs().max() == 0, name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            expected = residual_std if ".out." in name else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.15), name


def test_gpt_drops_out_only_in_training():
    model = small_gpt(dropout=0.5)
    tokens = torch.randint(11, (2, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_gpt_refusals():
    with pytest.raises(InputError, match=r"^model.width=16 is not a multiple of model.heads=3\.$"):
        small_gpt(heads=3)
    with pytest.raises(InputError, match=r"have 9 tokens, but model.context=8: set dataset.context"):
        small_gpt()(torch.zeros(1, 9, dtype=torch.int64))


def test_torchvision_model_trains():
    model = torchvision_model("resnet18", num_classes=7, channels=3, image_size=32)
    assert model.training
    assert all(not t.is_meta for t in model.state_dict().values())
    assert all(n == 0 for k, n in model.state_dict().items() if k.endswith("num_batches_tracked"))
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 7)


def test_torchvision_vit_gets_the_image_size():
    model = torchvision_model("vit_b_16", 10, 3, image_size=32)
    assert model.encoder.pos_embedding.shape[1] == (32 // 16) ** 2 + 1


def test_torchvision_auxiliary_outputs_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = torchvision_model("googlenet", 10, 3, 64)
    output = model(torch.randn(2, 3, 64, 64))
    assert output.logits.shape == output.aux_logits1.shape == output.aux_logits2.shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "channels", "image_size", "text"),
    [
        ("resnet19", 3, 64, r"^model.name=resnet19 is not one of torchvision's \d\d classification "
         r"models; near matches: resnet\d+, .*\.$"),
        ("qqqqqq", 3, 64, r"models; none is near\.$"),
        ("fcn_resnet50", 3, 64, r"is not a classification model .* torchvision.models.segmentation"),
        ("ssd300_vgg16", 3, 64, r"is not a classification model .* torchvision.models.detection"),
        ("r3d_18", 3, 64, r"is not a classification model .* torchvision.models.video"),
        ("resnet18", 1, 64, r"^torchvision's resnet18 takes 3-channel images, not 1: "
         r"set dataset.channels=3\.$"),
        ("alexnet", 3, 32, r"^torchvision's alexnet cannot be used with image_size=32"),
        ("maxvit_t", 3, 64, r"^torchvision's maxvit_t cannot be used with image_size=64"),
    ],
)  # fmt: skip
def test_torchvision_refusals(name, channels, image_size, text):
    with pytest.raises(InputError, match=text):
        torchvision_model(name, 10, channels, image_size)


def test_torchvision_refuses_unknown_arguments():
    with pytest.raises(InputError, match=r"unexpected keyword argument 'depth'"):
        torchvision_model("resnet18", 10, 3, 64, depth=3)
