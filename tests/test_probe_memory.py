"""Saved activations against bytes counted by hand; the CPU peak against known allocations."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from precision_lab.probe.memory import SavedActivations, cpu_step_peak, saved_activations


def measure(model: nn.Module, x: Tensor, *, bf16: bool) -> SavedActivations:
    y = torch.zeros(len(x), dtype=torch.int64)

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return F.cross_entropy(model(x), y)

    return saved_activations(model, forward, exclude=(x, y))


def strided_cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 64), (64, 128)):
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def test_two_layer_mlp_by_hand() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(5, 4)
    # The ReLU's output (5 x 8) serves the ReLU and the second linear; log-softmax (5 x 3) serves
    # itself and the loss, which adds its total weight (a scalar). Batch and weights are not counted.
    full = 5 * 8 * 4 + 5 * 3 * 4 + 4
    assert measure(model, x, bf16=False) == SavedActivations(full, 0, {"float32": full})
    # A bf16 copy of the batch, the ReLU's output in bf16, the loss as before. Only the second
    # weight's copy is kept: the batch needs no gradient.
    low, loss = 5 * 4 * 2 + 5 * 8 * 2, 5 * 3 * 4 + 4
    assert measure(model, x, bf16=True) == SavedActivations(low + loss, 8 * 3 * 2, {"bfloat16": low, "float32": loss})


def test_strided_cnn_halves_under_bf16() -> None:
    model, x = strided_cnn(), torch.randn(4, 3, 32, 32)
    full, low = measure(model, x, bf16=False), measure(model, x, bf16=True)
    assert full.weight_casts_bytes == 0
    # All three: a convolution keeps its weight even where, as at the first, the input needs no gradient.
    assert low.weight_casts_bytes == 2 * (3 * 64 * 9 + 64 * 128 * 9 + 128 * 10)
    # Above one half: the low-precision copy of the batch is kept beside the batch.
    assert 0.49 <= low.activations_bytes / full.activations_bytes <= 0.55


def test_mlp_at_a_small_batch_grows_once_weight_casts_are_counted() -> None:
    model = nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(256, 256), nn.ReLU())])
    x = torch.randn(64, 256)
    full, low = measure(model, x, bf16=False), measure(model, x, bf16=True)
    assert low.activations_bytes < full.activations_bytes
    assert low.activations_bytes + low.weight_casts_bytes > full.activations_bytes


def test_max_pool_keeps_int64_indices() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 3))
    saved = measure(model, torch.randn(2, 3, 8, 8), bf16=True)
    assert saved.by_dtype["int64"] == 2 * 4 * 4 * 4 * 8
    assert sum(saved.by_dtype.values()) == saved.activations_bytes


def test_a_cast_of_a_view_of_a_weight_is_a_weight_cast_also_when_copied_again() -> None:
    weight, x = nn.Parameter(torch.randn(6, 4)), torch.randn(6, 5, requires_grad=True)

    def forward() -> Tensor:
        half = weight.t()[:2].to(torch.bfloat16)  # 2 x 4 slice of the transpose: 2 x 6
        again = half.contiguous(memory_format=torch.contiguous_format).clone()
        return (again @ x.to(torch.bfloat16)).sum()

    saved = saved_activations(nn.ParameterList([weight]), forward, exclude=[x])
    assert saved == SavedActivations(6 * 5 * 2, 2 * 6 * 2, {"bfloat16": 6 * 5 * 2})


def test_a_small_view_holds_its_whole_storage_once() -> None:
    weight = nn.Parameter(torch.ones(10))

    def forward() -> Tensor:
        big = torch.ones(1000, dtype=torch.float64)
        return (weight * big[:10]).sum() + (weight * big[10:20]).sum()

    saved = saved_activations(nn.ParameterList([weight]), forward)
    assert saved == SavedActivations(8000, 0, {"float64": 8000})


def test_a_graph_that_forward_drops_is_not_counted_though_its_memory_is_reused() -> None:
    weight = nn.Parameter(torch.ones(10_000))

    def forward() -> Tensor:
        for _ in range(3):  # each result is dropped, and its memory handed to the next
            (weight * torch.rand(10_000)).sum()
        return (weight * torch.rand(10_000)).sum()

    saved = saved_activations(nn.ParameterList([weight]), forward)
    assert saved.activations_bytes == 40_000


def test_saved_activations_leaves_no_trace_and_drops_the_graph() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    grad = model[2].weight.grad = torch.ones(3, 4)
    x, rng = torch.randn(5, 4), torch.get_rng_state()
    first = measure(model, x, bf16=True)
    assert torch.equal(torch.get_rng_state(), rng)
    assert model[2].weight.grad is grad
    assert model[0].num_batches_tracked == 0
    assert torch.equal(model[0].running_mean, torch.zeros(4))
    assert measure(model, x, bf16=True) == first


def test_peak_of_known_allocations_to_the_byte() -> None:
    held = torch.empty(100)

    def step() -> None:
        a = torch.empty(1000)
        b = a + 1
        del a
        c = torch.empty(3000)
        del b, c
        torch.empty(10)

    # 4000 + 4000, then 4000 + 12000; `held` and a view of it are one storage.
    assert cpu_step_peak(step, [held, held[1:]]).nbytes == 400 + 16_000


def test_peak_of_a_training_step_that_starts_without_gradients() -> None:
    n = 1000
    weight, x = nn.Parameter(torch.ones(n)), torch.ones(n)
    optimizer = torch.optim.SGD([weight], lr=0.1, foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        loss = (weight * x).sum()
        loss.backward()
        optimizer.step()

    # Weight and batch; then the gradient beside the loss and the backward's seed, 4 bytes each.
    # The product is gone by then, and plain SGD needs no temporary.
    expected = 4 * (n + n + n + 1 + 1)
    for _ in range(2):
        weight.grad = None
        assert cpu_step_peak(step, [weight, x]).nbytes == expected


def test_a_free_of_memory_that_an_earlier_profile_saw_does_not_lower_the_peak() -> None:
    n = 1 << 25  # 64 MiB, never touched: mapped and unmapped as a whole, so addresses do come back
    kept: list[Tensor] = []
    cpu_step_peak(lambda: kept.append(torch.empty(n // 2 + 1)), [])
    address = kept.pop().data_ptr()
    kept.append(torch.empty(n // 2))
    if kept[0].data_ptr() != address:
        pytest.skip("the system's allocator did not hand the address out again")

    def step() -> None:
        kept.clear()
        torch.empty(100)

    assert cpu_step_peak(step, [torch.empty(50)]).nbytes == 200 + 400


def test_kineto_prints_nothing() -> None:
    # In a fresh process: the level is read when the profiler first starts.
    code = (
        "import torch; from precision_lab.probe.memory import cpu_step_peak as peak; "
        "print(peak(lambda: torch.empty(10), []).nbytes)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "KINETO_LOG_LEVEL"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("40\n", "")
