"""The op map: dtypes that autocast really picks, names in both phases, and no trace left."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from precision_lab.probe.op_rows import Difference, OpRow, as_record, by_operation, differences, totals
from precision_lab.probe.op_tables import agreement, lines, render, render_differences, summary
from precision_lab.probe.ops import op_map


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
    # 3 x 4 outputs of 4 products and sums each; read: bias 4, batch 12, weight 16; written: 12; 2 bytes each
    assert find(rows, op="addmm") == [OpRow("0", "forward", "addmm", low, low, 1, False, 2 * 3 * 4 * 4, 2 * 44)]
    assert find(rows, op="_softmax") == [OpRow("1", "forward", "_softmax", low, low, 1, False, None, 2 * 24)]
    assert find(rows, op="_log_softmax") == [OpRow("", "forward", "_log_softmax", full, full, 1, False, None, 4 * 24)]
    # Two backward matmuls would need a gradient of the batch: there is none, so only the weight's.
    assert find(rows, op="mm") == [OpRow("0", "backward", "mm", low, low, 1, False, 2 * 4 * 3 * 4, 2 * 40)]
    casts = find(rows, is_cast=True)
    # Weight, bias and batch down, the logits up for the loss; backward mirrors all but the batch.
    assert Counter((r.module, r.phase, r.inputs, r.outputs) for r in casts for _ in range(r.calls)) == {
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
    assert [(row.module, row.calls) for row in find(backward, op="mm")] == [
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
        assert (merged.module, merged.calls) == ("", 2 * single.calls)
    assert sum(row.calls for row in by_operation(two)) == sum(row.calls for row in two)


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


LOW, FULL = ("bfloat16",), ("float32",)


def some_rows() -> list[OpRow]:
    long = "encoder.layers.encoder_layer_11.self_attention.out_proj"
    attention = "_scaled_dot_product_flash_attention_for_cpu_backward"
    return [
        OpRow(long, "forward", "addmm", LOW, LOW, 2, flops=3_000_000, nbytes=600),
        OpRow(long, "backward", attention, LOW + FULL, LOW + FULL, 1, flops=6_000_000, nbytes=200),
        OpRow("head[0]", "forward", "addmm", FULL, FULL, 1, flops=1_000_000, nbytes=100),
        OpRow("head[0]", "forward", "mkldnn_rnn_layer", FULL, FULL, 3),
        OpRow("", "forward", "_to_copy", FULL, LOW, 12, True, nbytes=100),
    ]


def test_the_table_fits_80_columns_and_ends_with_the_share_of_low_precision() -> None:
    text = render(some_rows(), by_module=True, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "head[0]" in text
    assert "(model)" in text
    assert "…" not in text
    merged = render(some_rows(), by_module=False, width=200)
    assert "module" not in merged
    assert "_scaled_dot_product_flash_attention_for_cpu_backward" in merged
    assert merged.splitlines()[-3:] == [
        "90.0% of the arithmetic runs in bfloat16: 9 MFLOP in bfloat16, 1 MFLOP in float32. Counted are matmuls, "
        "convolutions and attention, forward and backward.",
        "Not counted, since torch has no formula: calls, 3 of mkldnn_rnn_layer.",
        "12 casts read and write 0.0977 KiB, 10.0% of the 0.977 KiB that all operations of forward and backward read "
        "and write.",
    ]
    casts = merged[merged.index("cast ") :]
    assert re.search(r"12  float32 -> bfloat16  0.0977 KiB  10.0%", casts)
    assert "addmm" not in casts
    assert render([], by_module=True, width=80).splitlines() == [
        "no operations",
        "",
        "no casts",
        "",
        "No operation whose FLOPs torch has a formula for.",
    ]


def test_an_arm_of_one_dtype_is_told_as_such() -> None:
    rows = [row for row in some_rows() if row.module == "head[0]" and row.flops]
    assert summary(rows)[0].startswith("All of the arithmetic, 1 MFLOP, runs in float32. Counted are")


def test_the_share_is_by_flops_and_not_by_calls() -> None:
    found = totals(some_rows())
    assert (found.low_share, found.flops, found.uncounted) == (0.9, 10_000_000, {"mkldnn_rnn_layer": 3})
    assert (found.cast_bytes, found.all_bytes, found.cast_share) == (100, 1000, 0.1)
    assert totals([]).low_share is None


def test_flops_are_those_that_torch_counts() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(2, 6, 3, groups=2), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x).flatten(2).mT[:, None].contiguous()  # [3, 1 head, 4, 6]
            return self.head(F.scaled_dot_product_attention(x, x, x)).mean((1, 2))

    model, x = Net(), torch.randn(3, 2, 4, 4)

    def forward() -> Tensor:
        return F.cross_entropy(model(x), torch.tensor([0, 1, 2]))

    rows = op_map(model, forward)
    attention = [row for row in rows if "attention" in row.op]
    assert sorted(row.phase for row in attention) == ["backward", "forward"]
    # scores and their product with the values: 2 x 2 x 3 x 4 x 4 x 6; backward has five such products (torch's formula)
    products = 2 * 3 * 4 * 4 * 6
    assert {row.phase: row.flops for row in attention} == {"forward": 2 * products, "backward": 5 * products}
    assert {row.part_of for row in attention} == {"attention"}
    with FlopCounterMode(display=False) as counter:  # it does not know the CPU's kernel for attention
        forward().backward()
    assert totals(row for row in rows if row not in attention).flops == counter.get_total_flops()


def test_an_expanded_tensor_counts_with_the_bytes_that_are_there() -> None:
    weight = nn.Parameter(torch.ones(4))
    rows = op_map(nn.ParameterList([weight]), lambda: weight.expand(1000, 4).exp().sum())
    assert [row.nbytes for row in rows if row.op == "exp"] == [16 + 16_000]


def test_maps_differ_where_an_operation_gives_another_dtype() -> None:
    first = [
        OpRow("a", "forward", "_softmax", LOW, LOW, 1),
        OpRow("a", "forward", "native_batch_norm", LOW, LOW + FULL, 1),
        OpRow("a", "forward", "_to_copy", FULL, LOW, 1, True),
        OpRow("a", "forward", "relu", LOW, LOW, 1),
        OpRow("", "forward", "bernoulli_", LOW, LOW, 1, part_of="dropout", given=LOW),
        OpRow("m", "forward", "_flash_attention", LOW, LOW + FULL, 1, part_of="attention", given=LOW),
        OpRow("r", "forward", "addmm", LOW, LOW, 1, part_of="rnn"),
    ]
    second = [
        OpRow("a", "forward", "cudnn_batch_norm", LOW, LOW + FULL, 3),
        OpRow("a", "forward", "_softmax", FULL, FULL, 1),
        OpRow("b", "forward", "relu", LOW, LOW, 1),
        OpRow("", "forward", "native_dropout", FULL, FULL, 1, part_of="dropout", given=FULL),
        OpRow("m", "forward", "bmm", FULL, FULL, 2, part_of="attention", given=LOW),
        OpRow("m", "backward", "bmm", FULL, FULL, 4, part_of="attention", given=LOW),
        OpRow("r", "forward", "_cudnn_rnn", LOW, LOW, 1, part_of="rnn"),
    ]
    found = differences(first, second)
    assert found == [
        Difference("a", "forward", "_softmax", LOW, FULL),
        Difference("a", "forward", "relu", LOW, ()),
        Difference("", "forward", "dropout", LOW, FULL),
        Difference("b", "forward", "relu", (), LOW),
    ]
    assert differences(first, first) == []
    told = agreement("cuda", found, 6)
    assert told == (
        "Predicted and real map of cuda, the real one by torch's own kernels, differ in 4 of 6 operations: _softmax in "
        "a, forward: predicted bfloat16, real float32; relu in a, forward: predicted bfloat16, real none; dropout in "
        "(model), forward: predicted bfloat16, real float32; relu in b, forward: predicted none, real bfloat16."
    )
    assert agreement("cuda", [], 6).endswith("agree in all 6 operations of its modules.")


def test_a_dropout_that_one_device_does_not_run_is_no_difference() -> None:
    run = [OpRow("a", "forward", "native_dropout", LOW, LOW, 1, part_of="dropout", given=LOW)]
    assert differences(run, []) == differences([], run) == []


def test_equal_differences_of_many_modules_are_one_row() -> None:
    found = [Difference(f"blocks.{i}", "forward", "_softmax", LOW, FULL) for i in range(3)]
    (row,) = render_differences(found, ("cpu", "cuda"), by_module=False, width=80).splitlines()[1:]
    assert row.split("  ")[0] == "blocks.0 and 2 more"
    assert row.split()[-3:] == ["_softmax", "bfloat16", "float32"]
    split = render_differences(found, ("cpu", "cuda"), by_module=True, width=80).splitlines()[1:]
    assert [line.split()[0] for line in split] == ["blocks.0", "blocks.1", "blocks.2"]


class Attentive(nn.Module):
    """A multi-head attention with dropout, whose C++ parts no function mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]  # [3, 1, 4]
        return self.dropout(self.attention(x, x, x, need_weights=False)[0])[:, 0]


def test_attention_and_dropout_are_known_forward_and_backward_and_torchs_functions_put_back() -> None:
    own = (F.scaled_dot_product_attention, F.dropout)
    rows = mapped(Attentive(), bf16=True)
    assert (F.scaled_dot_product_attention, F.dropout) == own
    parts = {(row.module, row.phase, row.part_of) for row in rows if row.part_of}
    assert parts == {
        ("attention", "forward", "attention"),
        ("attention", "backward", "attention"),
        ("dropout", "forward", "dropout"),
        ("dropout", "backward", "dropout"),
    }
    assert {row.given for row in rows if row.part_of} == {("bfloat16",)}
    assert all(row.part_of == "" for row in rows if row.op in ("addmm", "mm"))


def test_what_a_step_raises_says_at_which_operation() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.mm(self.inner(x), torch.ones(5, 5))

    own = F.dropout
    with pytest.raises(RuntimeError) as told:
        mapped(nn.Sequential(Wrong()), bf16=False)
    assert told.value.__notes__ == ["mm in 0"]
    assert F.dropout is own


def test_the_stored_map_has_its_sums_and_all_rows() -> None:
    rows = mapped(nn.Linear(4, 3), bf16=True)
    record = json.loads(json.dumps(as_record(rows)))
    read = [
        OpRow(**{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()})
        for row in record["rows"]
    ]
    assert read == rows
    assert record["schema"] == 1
    assert record["totals"]["flops_by_dtype"] == {"bfloat16": 2 * (2 * 3 * 4 * 3)}
    assert record["totals"]["low_precision_share_of_flops"] == 1
    assert record["totals"]["bytes_read_and_written"] == sum(row.nbytes for row in rows)


def test_lines_stand_by_module_forward_before_backward() -> None:
    text = lines(mapped(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), bf16=True))
    blocks = {block.splitlines()[0]: block.splitlines()[1:] for block in text.split("\n\n")[1:]}
    assert list(blocks) == ["(model)", "0", "1"]  # by first occurrence: the batch is made outside
    assert [line.split()[:3] for line in blocks["1"]] == [
        ["forward", "1", "tanh"], ["backward", "1", "tanh_backward"]
    ]  # fmt: skip
