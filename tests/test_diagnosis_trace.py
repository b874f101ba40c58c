"""A diagnosis leaves nothing behind: not in the model, not in torch, not in the losses that come after it."""

import copy
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from precision_lab.config import load_precision
from precision_lab.diagnosis.examine import examine
from zoo.case import adamw, classify, samples
from zoo.faults import OwnLinear, SquashedTwice

BATCH = samples(8, 3, 8, 8)


class Net(nn.Module):
    """Batch norm, dropout, a tied weight, a frozen layer, a hook, and a forward of an instance."""

    def __init__(self, last: nn.Module):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.frozen = nn.Dropout(0.3), nn.Linear(8, 8).requires_grad_(False)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.still = nn.BatchNorm1d(8)
        self.last = last
        self.one.register_forward_hook(lambda module, args, output: output * 1.0)
        self.two.forward = partial(_without_bias, self.two)

    def forward(self, x):
        x = self.drop(F.relu(self.norm(self.conv(x)))).mean((2, 3))
        return self.last(self.still(self.frozen(self.two(self.one(x)))))


def _without_bias(layer, x):
    return F.linear(x, layer.weight)


class Raises(nn.Linear):
    def forward(self, x):
        if x.dtype is not torch.float32:
            raise TypeError("float32 only")
        return super().forward(x)


def _case(last, precision, target="cuda", task=classify):
    return SimpleNamespace(last=last, task=task, precision=precision, target=target)


CASES = {
    "healthy": _case(lambda: nn.Linear(8, 10), "bf16"),
    "healthy, cpu": _case(lambda: nn.Linear(8, 10), "fp16", "cpu"),
    "overflow": _case(lambda: nn.Sequential(SquashedTwice(8, 1e8), nn.Linear(8, 10)), "fp16"),
    "raises": _case(lambda: Raises(8, 10), "fp16"),
    "raises in backward": _case(lambda: OwnLinear(8, 10), "bf16"),
    "pure": _case(lambda: nn.Linear(8, 10), "bf16_pure"),
    "no gradient": _case(lambda: nn.Linear(8, 10), "bf16", task=lambda m, b: (classify(m, b)[0].detach(), {})),
    "raises in float32": _case(
        lambda: nn.Linear(8, 10), "bf16", task=lambda m, b: (F.cross_entropy(m(b[0]), b[1][:3]), {})
    ),
}


def model_of(name):
    model = Net(CASES[name].last())
    model.train()
    model.still.eval()
    model.last.train(False)
    return model


def native():
    """What CPU autocast, torch's own, does with some operations."""
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(4, 8, generator=draw), torch.randn(8, 8, generator=draw)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = [F.linear(x, w), torch.softmax(x @ w, -1), torch.cat([x, (x @ w)]), torch.logsumexp(x @ w, 1)]
    return [(t.dtype, t.clone()) for t in made]


HOOKS = [name for name in vars(nn.Module()) if name.endswith(("hooks", "hooks_with_kwargs", "hooks_always_called"))]
GLOBAL_HOOKS = [name for name in vars(torch_module) if name.startswith("_global_") and name.endswith("hooks")]


def state(model):
    """By aspect, all that an examination could have changed."""
    backends = torch.backends
    return {
        "random state": torch.get_rng_state(),
        "weights": [(name, p.detach().clone()) for name, p in model.named_parameters()],
        "gradients": [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()],
        "parameters": [(id(p), p.dtype, p.requires_grad) for p in model.parameters()],
        "buffers": [(name, id(b), b.clone()) for name, b in model.named_buffers()],
        "modes": [(name, m.training) for name, m in model.named_modules()],
        "hooks": [(name, key, list(getattr(m, key))) for name, m in model.named_modules() for key in HOOKS],
        "global hooks": [(name, list(getattr(torch_module, name))) for name in GLOBAL_HOOKS],
        "forwards": [(name, m.__dict__.get("forward")) for name, m in model.named_modules()],
        "attributes": [(name, sorted(vars(m))) for name, m in model.named_modules()],
        "kernels": native(),
        "autocast": [
            *(torch.is_autocast_enabled(d) for d in ("cpu", "cuda", "mps")),
            *(torch.get_autocast_dtype(d) for d in ("cpu", "cuda", "mps")),
            *(
                torch.is_autocast_cache_enabled(),
                torch.autocast_increment_nesting(),
                torch.autocast_decrement_nesting(),
            ),
        ],
        "dispatch modes": [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()],
        "flags": [
            *(backends.fp32_precision, backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision),
            *(backends.cudnn.enabled, backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()),
            *(torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()),
        ],
    }


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@cache
def before_and_after(name):
    case = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, batch = model_of(name), BATCH(0)
        classify(model, batch)[0].backward()  # so that there are gradients, and statistics
        before = state(model)
        try:
            found = examine(model, case.task, batch, load_precision(case.precision), case.target, adamw)
        except ValueError as error:
            found = error
        return before, state(model), found


ASPECTS = list(state(Net(nn.Identity())))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("aspect", ASPECTS)
def test_an_examination_leaves_no_trace(aspect, name):
    before, after, _ = before_and_after(name)
    assert same(after[aspect], before[aspect])


def test_the_cases_are_what_they_are_called():
    found = {name: before_and_after(name)[2] for name in CASES}
    assert (found["healthy"].healthy, found["healthy, cpu"].healthy) == (True, True)
    assert found["overflow"].culprits[0] == "last.0.first"
    assert str(found["raises"].plain.raised) == "float32 only"
    assert found["raises"].culprits == ["last"]
    assert "dtype" in str(found["raises in backward"].plain.raised)
    assert found["raises in backward"].culprits == ["last"]
    assert found["pure"].patient.pure
    assert found["no gradient"].culprits == ["task"]
    assert isinstance(found["raises in float32"], ValueError)


def test_what_is_compared_would_show_a_change():
    model = model_of("healthy")
    before = state(model)
    model(BATCH(0)[0])
    after = state(model)
    assert {aspect for aspect in ASPECTS if not same(before[aspect], after[aspect])} == {"random state", "buffers"}
    model.one.register_forward_hook(lambda *_: None)
    model.one.forward = model.one.forward
    model.eval()
    changed = state(model)
    assert {aspect for aspect in ASPECTS if not same(after[aspect], changed[aspect])} == {
        "hooks", "forwards", "attributes", "modes"
    }  # fmt: skip


def losses(model, batch, looked_at: bool, arm: str, case) -> list[float]:
    """Of some steps of training in float32 or under torch's own autocast, with and without looks between them."""
    torch.manual_seed(1)
    model, made = copy.deepcopy(model), []
    optimizer = adamw(model)
    for _ in range(4):
        if looked_at:
            examine(model, classify, batch, load_precision(case.precision), case.target, adamw)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arm == "bf16"):
            loss = classify(model, batch)[0]
        loss.backward()
        optimizer.step()
        made.append(loss.item())
    return made


@pytest.mark.parametrize("name", ["healthy", "overflow", "raises in backward", "pure"])
@pytest.mark.parametrize("arm", ["fp32", "bf16"])
def test_losses_are_the_same_to_the_bit(name, arm):
    class Plain(nn.Module):  # Net without what cannot be copied
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.drop = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.3)
            self.last = CASES[name].last() if arm == "fp32" or name != "raises in backward" else nn.Linear(8, 10)

        def forward(self, x):
            return self.last(self.drop(F.relu(self.norm(self.conv(x)))).mean((2, 3)))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, batch = Plain(), BATCH(0)
        plain = losses(model, batch, False, arm, CASES[name])
        assert losses(model, batch, True, arm, CASES[name]) == plain
        assert len(set(plain)) == 4
