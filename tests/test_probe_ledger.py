"""What a step's peak is made of: against the step without the instrument, an independent count, and by hand."""

import itertools
import json

import pytest
import torch
from torch import Tensor, nn

from precision_lab import inspection
from precision_lab.assemble import assemble, make_trainer, resolve, training_batches
from precision_lab.config import compose
from precision_lab.inspection import measure_memory, peak_by_kind
from precision_lab.probe.ledger import KINDS, Ledger, StepMemory, allocator_counter, by_counter, step_memory
from precision_lab.run import run

CPU = torch.device("cpu")
MODELS = {
    "mlp": ["model=mlp"],
    "cnn": ["model=cnn", "model.widths=[16,32]", "trainer.batch_size=16"],
    "gpt": ["model=gpt", "dataset=synthetic_tokens", "model.layers=2", "model.width=64", "trainer.batch_size=8"],
}
TINY = {  # float16 may be emulated, at two hundred times the time
    "mlp": ["model=mlp", "model.hidden=[32]", "trainer.batch_size=8"],
    "cnn": ["model=cnn", "model.widths=[4,8]", "trainer.batch_size=4"],
    "gpt": [*MODELS["gpt"][:3], "model.width=16", "model.context=16", "trainer.batch_size=2"],
}


def trainer_and_batch(*words: str):
    ready = assemble(resolve(compose([*words, "device=cpu", "device.threads=1"])))
    trainer, batch = make_trainer(ready), next(training_batches(ready))
    trainer.step(itertools.repeat(batch))  # the optimizer state exists
    return trainer, batch


def saved_at_the_end_of_forward(monkeypatch) -> list[int]:
    """Bytes that the ledger calls saved activations each time that forward is over."""
    saved, watched = [], Ledger.watched

    def and_count(ledger, forward):
        def counted(*args):
            result = watched(ledger, forward)(*args)
            saved.append(ledger.by_kind(ledger.alive())["saved_activations"])
            return result

        return counted

    monkeypatch.setattr(Ledger, "watched", and_count)
    return saved


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16_pure"])
@pytest.mark.parametrize("model", MODELS)
def test_the_kinds_add_up_to_the_peak_of_a_step_without_the_instrument(monkeypatch, model, precision, accumulation):
    words = (TINY if precision == "fp16" else MODELS)[model]
    trainer, batch = trainer_and_batch(*words, f"precision={precision}", f"trainer.accumulation={accumulation}")
    plain = measure_memory(trainer, batch, compiled=False)
    saved = saved_at_the_end_of_forward(monkeypatch)
    found = peak_by_kind(trainer, batch)
    assert set(found["by_kind"]) == set(KINDS)
    assert sum(found["by_kind"].values()) == found["peak_bytes"]
    assert found["peak_bytes"] == pytest.approx(plain["mem/peak_allocated_gib"] * 2**30, rel=0.01)
    assert len(saved) == accumulation
    assert saved[0] == pytest.approx(plain["mem/saved_activations_mib"] * 2**20, rel=0.01)
    assert (found["source"], found["batch_size"]) == ("allocator events", trainer.plan.batch_size)


def sums(n: int):
    """A step on one weight of n numbers whose every byte is known."""
    weight, x = nn.Parameter(torch.ones(n)), torch.ones(n)

    def step(watched) -> None:
        loss = watched(lambda: (weight * x).sum())()
        loss.backward()
        with torch.no_grad():
            weight.sub_(weight.grad.neg())

    def tensors() -> dict[str, list[Tensor]]:
        return {"parameters": [weight], "batch": [x], "gradients": [] if weight.grad is None else [weight.grad]}

    return step, tensors, [weight]


def kinds(**nbytes: int) -> dict[str, int]:
    return dict.fromkeys(KINDS, 0) | nbytes


def test_a_step_by_hand_to_the_byte():
    # In the optimizer: weight, batch, gradient, the update, and the loss of 4 bytes.
    found = step_memory(*sums(1000), CPU)
    by_kind = kinds(parameters=4000, batch=4000, gradients=4000, temporaries=4000 + 4)
    assert found == StepMemory("allocator events", "optimizer", 16_004, by_kind)


def test_a_large_product_in_forward_is_a_temporary_and_the_phase_is_forward():
    weight, x = nn.Parameter(torch.ones(10)), torch.ones(10)

    def step(watched) -> None:
        def forward() -> Tensor:
            torch.zeros(5000).neg_()
            return (weight * x).sum()

        watched(forward)().backward()

    found = step_memory(step, lambda: {"parameters": [weight], "batch": [x]}, [weight], CPU)
    assert (found.phase, found.peak_bytes) == ("forward", 20_080)
    assert found.by_kind == kinds(parameters=40, batch=40, temporaries=20_000)


def test_what_autograd_saves_is_told_from_what_it_does_not_and_a_cast_of_a_weight_from_both():
    weight, x = nn.Parameter(torch.ones(1000)), torch.ones(1000)

    def step(watched) -> None:
        def forward() -> Tensor:
            low = weight.to(torch.bfloat16)
            return (low * low.exp()).sum()

        loss = watched(forward)()
        torch.empty(100_000)  # the peak: forward's graph is whole
        loss.backward()

    found = step_memory(step, lambda: {"parameters": [weight], "batch": [x]}, [weight], CPU)
    assert found.by_kind == kinds(
        parameters=4000, batch=4000, weight_casts=2000, saved_activations=2000, temporaries=400_002
    )


def test_optimizer_state_that_the_step_makes_has_its_kind_however_nested_and_so_have_gradients():
    weight, state = nn.Parameter(torch.ones(1000)), {}

    def step(watched) -> None:
        watched(lambda: weight.square().sum())().backward()
        state["nested"] = [(torch.empty(3000),)]

    def tensors() -> dict[str, list[Tensor]]:
        made = {"optimizer_state": [state["nested"][0][0]], "gradients": [weight.grad]} if state else {}
        return {"parameters": [weight], **made}

    found = step_memory(step, tensors, [weight], CPU)
    assert found.phase == "optimizer"
    assert found.by_kind == kinds(parameters=4000, gradients=4000, optimizer_state=12_000, temporaries=0)


class Listed(torch.optim.Optimizer):
    """An optimizer of a user's: its state is a list, and it takes no flag to skip a step by."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            history = self.state[p].setdefault("history", [torch.zeros_like(p) for _ in range(3)])
            history[0].copy_(p.grad)
            p.data.sub_(p.grad, alpha=self.param_groups[0]["lr"])


def test_an_optimizer_of_the_users():
    trainer, batch = trainer_and_batch("precision=bf16", "optimizer=custom", f"optimizer._target_={__name__}.Listed")
    weights = sum(p.numel() for p in trainer.model.parameters()) * 4
    found = peak_by_kind(trainer, batch)
    assert found["by_kind"]["optimizer_state"] == 3 * weights
    assert sum(found["by_kind"].values()) == found["peak_bytes"]


# --- by a counter of the allocator's, as on CUDA ---------------------------------------------------------


def test_by_a_counter_the_highest_reading_is_the_peak_and_what_no_tensor_explains_is_scratch():
    step, tensors, parameters = sums(1000)
    readings = itertools.chain([8000, 12_000, 12_500], itertools.repeat(12_500))
    found = by_counter(step, tensors, parameters, CPU, "allocator counter", lambda: next(readings))
    # After the third operation, backward's first (the seed): weight, batch, and the loss with its seed.
    assert (found.source, found.phase, found.peak_bytes) == ("allocator counter", "forward", 12_500)
    assert found.by_kind == kinds(parameters=4000, batch=4000, temporaries=8, kernel_scratch=4492)


def test_by_a_counter_a_peak_in_backward_or_in_the_optimizer_is_found_there():
    def phase(peak_at: int) -> str:
        calls = itertools.count(1)
        found = by_counter(*sums(1000), CPU, "sampled", lambda: 99_000 if next(calls) >= peak_at else 1)
        assert sum(found.by_kind.values()) == found.peak_bytes
        return found.phase

    assert list(dict.fromkeys(map(phase, range(1, 9)))) == ["forward", "backward", "optimizer"]


@pytest.mark.parametrize(("reading", "source"), [(4096, "allocator counter"), (0, "sampled"), (None, "sampled")])
def test_a_counter_that_is_missing_or_counts_nothing_is_replaced_by_samples(monkeypatch, reading, source):
    def read() -> int:
        if reading is None:
            raise RuntimeError("no memory statistics for this device")
        return reading

    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", read)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda: None)
    name, count = allocator_counter(CPU)  # stands in for a device without a counter known to be there
    assert (name, count) == (source, read if source != "sampled" else torch.mps.current_allocated_memory)


# --- in a run ---------------------------------------------------------------------------------------------


def results(tmp_path, *words: str):
    own = ["experiment=smoke", "precision=bf16", "device=cpu", "device.threads=1", "wandb.mode=disabled", *words]
    assert run(compose([*own, f"paths.outputs={tmp_path}"])) == 0
    (path,) = tmp_path.glob("runs/*/*/result.json")
    return json.loads(path.read_text())


def test_a_run_keeps_its_memory_by_kind_and_its_losses_are_those_without(tmp_path):
    with_it, without = results(tmp_path / "a"), results(tmp_path / "b", "probe.memory=false")
    assert with_it["hashes"] == without["hashes"]
    assert without["memory"] is None
    memory = with_it["memory"]
    assert sum(memory["by_kind"].values()) == memory["peak_bytes"]
    assert memory["peak_bytes"] == pytest.approx(with_it["summary"]["final/mem_peak_allocated_gib"] * 2**30, rel=0.01)
    assert memory["phase"] in ("forward", "backward", "optimizer")


def test_a_ledger_that_fails_costs_the_run_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(inspection, "peak_by_kind", lambda trainer, batch: 1 / 0)
    made = results(tmp_path)
    assert (made["status"], made["memory"]) == ("completed", None)
    assert made["summary"]["final/mem_peak_allocated_gib"] > 0
