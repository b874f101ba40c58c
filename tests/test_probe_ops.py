"""The op map: dtypes that autocast really picks, names in both phases, and no trace left."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from precision_lab.probe.ops import OpRow, by_operation, op_map, render, to_json


def loss_of(model: nn.Module, *, bf16: bool, features: int = 4) -> Tensor:
    """Cross-entropy on three samples; the batch is the same at each call and needs no gradient."""
    x = torch.linspace(-1, 1, 3 * features).reshape(3, features)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        return F.cross_entropy(model(x), torch.tensor([0, 1, 2]))


def mapped(model: nn.Module, *, bf16: bool) -> list[OpRow]:
    return op_map(model, lambda: loss_of(model, bf16=bf16))


def find(rows: list[OpRow], **wanted: object) -> list[OpRow]:
    return [row for row in rows if all(getattr(row, k) == v for k, v in wanted.items())]


def test_bf16_on_cpu_lowers_linear_and_softmax_but_not_the_cross_entropy() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    rows = mapped(model, bf16=True)
    low, full = ("bfloat16",), ("float32",)
    assert find(rows, op="addmm") == [OpRow("0", "forward", "addmm", low, low, 1, False)]
    assert find(rows, op="_softmax") == [OpRow("1", "forward", "_softmax", low, low, 1, False)]
    assert find(rows, op="_log_softmax") == [OpRow("", "forward", "_log_softmax", full, full, 1, False)]
    # Two backward matmuls would need a gradient of the batch: there is none, so only the weight's.
    assert find(rows, op="mm") == [OpRow("0", "backward", "mm", low, low, 1, False)]
    casts = find(rows, is_cast=True)
    # Weight, bias and batch down, the logits up for the loss; backward mirrors all but the batch.
    assert Counter((r.module, r.phase, r.inputs, r.outputs) for r in casts for _ in range(r.count)) == {
        ("0", "forward", full, low): 3,
        ("", "forward", low, full): 1,
        ("", "backward", full, low): 1,
        ("0", "backward", low, full): 2,
    }


def test_fp32_has_no_cast_and_nothing_but_float32() -> None:
    rows = mapped(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), bf16=False)
    assert len(find(rows, phase="forward")) >= 4
    assert len(find(rows, phase="backward")) >= 4
    assert not find(rows, is_cast=True)
    assert {dtype for row in rows for dtype in row.inputs + row.outputs} == {"float32"}


def test_views_allocations_and_integer_operations_are_left_out() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    model = nn.ParameterList([weight])

    def forward() -> Tensor:
        torch.empty_like(weight)
        torch.arange(3) + 1
        return weight.t()[1:].unsqueeze(0).expand(4, 2, 2).exp().sum()

    assert [row.op for row in op_map(model, forward) if row.phase == "forward"] == ["exp", "sum"]


def test_a_copy_into_another_dtype_is_a_cast_and_an_integer_source_is_none() -> None:
    weight = nn.Parameter(torch.ones(3))

    def forward() -> Tensor:
        low = torch.zeros(3, dtype=torch.bfloat16).copy_(weight)
        return (low.float() * torch.arange(3).float()).sum()

    rows = op_map(nn.ParameterList([weight]), forward)
    assert find(rows, op="copy_", phase="forward")[0].is_cast
    assert [(r.inputs, r.is_cast) for r in find(rows, op="_to_copy", phase="forward")] == [
        (("bfloat16",), True),
        ((), False),
    ]


class Towers(nn.Module):
    """Two branches on the batch: neither has an input that needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
        self.right = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) * self.right(x).sigmoid()


def test_backward_rows_carry_the_module_of_their_forward() -> None:
    # torch's ModuleTracker would still be inside `right` while `left` runs its backward.
    backward = find(mapped(Towers(), bf16=False), phase="backward")
    modules = {row.op: row.module for row in backward if row.op.endswith("_backward")}
    assert modules["tanh_backward"] == "left.1"
    assert modules["sigmoid_backward"] == ""
    assert [(row.module, row.count) for row in find(backward, op="mm")] == [
        ("right", 1),
        ("left.0", 1),
    ]


def test_a_checkpointed_forward_that_is_repeated_counts_as_backward() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    rows = mapped(Checkpointed(), bf16=False)
    assert [(r.module, r.phase) for r in find(rows, op="addmm")] == [
        ("block.0", "forward"),
        ("block.0", "backward"),
    ]


def test_counts_double_with_two_layers_and_add_up_over_modules() -> None:
    one = mapped(nn.Sequential(nn.Linear(4, 4)), bf16=True)
    two = mapped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bf16=True)
    assert [row.module for row in find(two, op="addmm")] == ["0", "1"]
    for op in ("addmm", "sum"):
        (single,), (merged,) = find(by_operation(one), op=op), find(by_operation(two), op=op)
        assert (merged.module, merged.count) == ("", 2 * single.count)
    assert sum(row.count for row in by_operation(two)) == sum(row.count for row in two)


def trained_losses(*, inspect: bool) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        if inspect:  # before zero_grad: the last step's gradients must survive as well
            before = [p.grad for p in model.parameters()]
            values = [None if g is None else g.clone() for g in before]
            mapped(model, bf16=True)
            assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))
            assert all(g is v or torch.equal(g, v) for g, v in zip(before, values, strict=True))
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model, bf16=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [*model.parameters(), *model.buffers()]


def test_training_is_bit_equal_with_and_without_it() -> None:
    plain_losses, plain_state = trained_losses(inspect=False)
    losses, state = trained_losses(inspect=True)
    assert losses == plain_losses
    assert all(torch.equal(a, b) for a, b in zip(state, plain_state, strict=True))
    assert len(set(losses)) == 4  # it did train


def test_a_forward_that_raises_leaves_no_trace_either() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
    weight, mean = model[0].weight, model[0].running_mean
    grad = weight.grad = torch.ones(4)
    rng = torch.get_rng_state()

    def forward() -> Tensor:
        model(torch.ones(3, 4))
        model.eval()
        model[0].running_mean = torch.full((4,), 7.0)
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        op_map(model, forward)
    assert all(module.training for module in model.modules())
    assert weight.grad is grad
    assert torch.equal(grad, torch.ones(4))
    assert model[0].running_mean is mean
    assert torch.equal(mean, torch.zeros(4))
    assert model[0].num_batches_tracked == 0
    assert torch.equal(torch.get_rng_state(), rng)
    assert not torch.nn.modules.module._global_forward_hooks


def test_an_expanded_buffer_is_left_alone() -> None:
    model = nn.Linear(4, 3)
    model.register_buffer("mask", torch.ones(1, 3).expand(5, 3))
    mask = model.mask
    assert len(op_map(model, lambda: (model(torch.ones(5, 4)) * model.mask).sum())) > 0
    assert model.mask is mask


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=r"scalar loss, not shape \(2, 3\)"):
        op_map(model, lambda: model(torch.ones(2, 4)))


def test_the_table_fits_80_columns_and_ends_with_the_matmul_share() -> None:
    low, full = ("bfloat16",), ("float32",)
    long = "encoder.layers.encoder_layer_11.self_attention.out_proj"
    attention = "_scaled_dot_product_flash_attention_for_cpu_backward"
    rows = [
        OpRow(long, "forward", "addmm", low, low, 2, False),
        OpRow(long, "backward", attention, low + full, low + full, 1, False),
        OpRow("head[0]", "forward", "addmm", full, full, 1, False),
        OpRow("", "forward", "_to_copy", full, low, 12, True),
    ]
    text = render(rows, by_module=True, width=80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "head[0]" in text
    assert "(model)" in text
    assert "…" not in text
    assert "2 of 4 (50.0%) in bfloat16" in " ".join(lines[-2:])
    merged = render(rows, by_module=False, width=140)
    assert "module" not in merged
    assert attention in merged
    assert merged.splitlines()[-1] == (
        "Matmul, convolution, attention and RNN calls: 2 of 4 (50.0%) in bfloat16, "
        "1 of 4 (25.0%) in bfloat16 and float32, 1 of 4 (25.0%) in float32"
    )
    casts = merged[merged.index("cast ") :]
    assert "12  float32 -> bfloat16" in casts
    assert "addmm" not in casts
    assert render([], by_module=True, width=80).splitlines() == [
        "no operations",
        "",
        "no casts",
        "",
        "No matmul, convolution, attention or RNN calls.",
    ]


def test_json_round_trip() -> None:
    rows = mapped(nn.Linear(4, 3), bf16=True)
    read = [
        OpRow(**{**row, "inputs": tuple(row["inputs"]), "outputs": tuple(row["outputs"])})
        for row in json.loads(to_json(rows))
    ]
    assert read == rows
