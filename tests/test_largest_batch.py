"""The largest batch: the search by itself, then real steps in real processes."""

import io
import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from precision_lab import inspection, largest_batch
from precision_lab.assemble import assemble, make_trainer, resolve
from precision_lab.batches import batch_of
from precision_lab.config import compose
from precision_lab.datasets import TensorSamples
from precision_lab.errors import InputError
from precision_lab.largest_batch import Largest, find_largest, look, search
from precision_lab.settings import LargestBatchConfig
from precision_lab.sizes import GIB, MIB
from precision_lab.trainer import Trainer
from typed_scripts import module, run

BUDGET = 10_000_000
MLP = ["model=mlp", "model.hidden=[64]", "device=cpu", "device.threads=1"]


@pytest.mark.parametrize(
    "cost",
    [
        lambda size: 1000 + 50 * size,
        lambda size: 9_000_000 + 3 * size,  # nearly all of it is there at any size
        lambda size: max(8_000_000, 40 * size),  # flat as long as the peak sits in the optimizer step
        lambda size: size**2,
        lambda size: int(1000 * size**0.5),  # bends the other way
        lambda size: 50 * size if 50 * size <= BUDGET else None,  # beyond it memory runs out
        lambda size: 1_000_000 * size,
    ],
    ids=["straight", "mostly fixed", "flat at first", "bent up", "bent down", "runs out", "ten samples"],
)
def test_the_search_ends_within_two_percent_after_few_tries(cost):
    tried = []
    low, high = search(lambda size: tried.append(size) or cost(size), BUDGET)
    assert {low, high} <= set(tried)
    assert cost(low) <= BUDGET
    assert cost(high) is None or cost(high) > BUDGET
    assert high - low <= max(1, 0.02 * low)
    assert len(tried) == len(set(tried)) <= high.bit_length() + 8


def test_the_search_goes_little_beyond_a_budget_that_it_can_foresee():
    tried = []
    search(lambda size: tried.append(size) or 1000 + 50 * size, BUDGET)
    assert 50 * max(tried) < 1.02 * BUDGET


def test_without_a_budget_running_out_of_memory_is_what_limits():
    low, high = search(lambda size: size if size < 5000 else None, None)
    assert low < 5000 <= high <= 1.02 * low


@pytest.mark.parametrize(("budget", "found"), [(9, (0, 1)), (10, (1, 2)), (20, (2, 3))])
def test_the_smallest_batches(budget, found):
    assert search(lambda size: 10 * size, budget) == found


def test_a_batch_may_be_larger_than_the_dataset_and_begins_again_with_its_first_sample():
    samples = TensorSamples(torch.arange(6.0).reshape(3, 2), torch.arange(3))
    values, labels = batch_of(samples, 7, lambda batch: batch)
    assert labels.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert values.shape == (7, 2)


# --- the table -------------------------------------------------------------------------------------------


def shown(monkeypatch, **memory):
    """The lines of the table, of made-up answers."""
    asked = {arm: compose([f"precision={arm}", *MLP]) for arm in memory}
    answers = iter(Largest(100, 101, None, one, 1000) for one in memory.values())
    monkeypatch.setattr(largest_batch, "_largest_of", lambda *_: next(answers))
    monkeypatch.setattr(largest_batch, "survey", lambda arms: [SimpleNamespace(refused=None, device="cpu")] * len(arms))
    out = io.StringIO()
    find_largest(asked, LargestBatchConfig("fp32", "fp32", 0.1), Console(file=out, width=100))
    return [re.split(r"  +", line.strip()) for line in out.getvalue().splitlines()[-1 - len(memory) :]]


def peak_at(nbytes):
    return {"peak_bytes": nbytes, "phase": "backward", "by_kind": {"saved_activations": nbytes * 3 // 4, "batch": 1}}


@pytest.mark.parametrize(
    ("peaks", "header", "told"),
    [
        ((139 * GIB, 300 * MIB), "peak GiB", ["139", "0.293"]),
        ((1010 * MIB, 2 * MIB), "peak GiB", ["0.9863", "0.001953"]),
        ((999 * MIB, 2 * MIB), "peak MiB", ["999", "2"]),
    ],
)
def test_all_peaks_stand_in_one_unit_and_without_an_exponent(monkeypatch, peaks, header, told):
    head, *rows = shown(monkeypatch, **dict(zip(("fp32", "bf16"), map(peak_at, peaks), strict=True)))
    assert head[3] == header
    assert [row[3] for row in rows] == told
    assert rows[0][4:6] == ["backward", "saved activations 75%"]


def test_an_arm_whose_peak_by_kind_ran_out_of_memory_has_its_largest_batch_all_the_same(monkeypatch):
    _, fp32, bf16 = shown(monkeypatch, fp32=None, bf16=peak_at(MIB))
    assert fp32 == ["fp32", "100", "1.00", "-", "-", "-", "101"]
    assert bf16 == ["bf16", "100", "1.00", "1", "backward", "saved activations 75%", "101"]
    assert shown(monkeypatch, fp32=None)[1][3] == "-"


# --- in a process of its own -----------------------------------------------------------------------------


def peak_of(precision: str, size: int) -> int:
    """Of the second step, measured here."""
    ready = assemble(resolve(compose([f"precision={precision}", *MLP])))
    trainer, batch = make_trainer(ready), batch_of(ready.workload.data.train, size, ready.place)
    trainer.step(itertools.repeat(batch))
    return inspection.step_peak(trainer, batch)


def test_the_largest_batch_fits_when_measured_anew_and_the_one_called_too_large_does_not():
    done = run("largest_batch.py", *MLP, "arms=[bf16[fp32_modules=head],fp32]", "budget_gib=0.004", columns=96)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 96
    rows = re.findall(r"^(\w\S*) +([\d,]+) +([\d.]+) +([\d.]+) +(\w+) +(\D+) (\d+)% +([\d,]+)$", done.stdout, re.M)
    assert [row[0] for row in rows] == ["bf16[fp32_modules=head]", "fp32"]
    batches = [int(row[1].replace(",", "")) for row in rows]
    too_large = [int(row[7].replace(",", "")) for row in rows]
    assert [row[2] for row in rows] == [f"{batches[0] / batches[1]:.2f}", "1.00"]
    fits, does_not = peak_of("fp32", batches[1]), peak_of("fp32", too_large[1])
    assert fits == pytest.approx(float(rows[1][3]) * 2**20, rel=0.001)
    assert fits <= 0.004 * 2**30 < does_not
    text = " ".join(done.stdout.split())
    assert text.startswith("Memory of one training step by the allocator of torch: 4.1 MiB.")
    assert ("The training set has 1,438 samples" in text) is (max(batches) > 1438)


def test_running_out_of_memory_in_a_trial_is_an_answer(monkeypatch):
    own, seen = Trainer.step, []

    def step(trainer, batches):
        images, _ = batch = next(batches)
        seen.append(len(images))
        if len(images) > 100:
            trainer.scaler.scale(torch.ones(1, requires_grad=True)).backward()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        own(trainer, itertools.repeat(batch))

    monkeypatch.setattr(Trainer, "step", step)
    found = Largest(**look((compose(["precision=fp16", *MLP]), 2**40)))
    assert (found.batch, found.beyond_peak) == (100, None)
    assert found.beyond in (101, 102)
    assert found.memory["batch_size"] == 100
    assert sum(found.memory["by_kind"].values()) == found.memory["peak_bytes"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["arms=[fp32,bf17]"], "precision=bf17 does not exist; did you mean bf16?"),
        (["arms=[fp32,bf16[emulate=cpu]]"], "arms: bf16[emulate=cpu] is emulated, and its time and memory say nothing"),
        (["arms=[fp32,tf32]"], "precision=tf32 needs tf32, which this cpu device does not have"),
        (["budget_gib=0"], "budget_gib=0.0 must be above 0 and finite, or null."),
        (["budget_gib=lots"], "budget_gib=lots is not valid"),
        (["budget_gib=1e6"], "budget_gib=1000000.0 is more than the "),
        (["budget_gib=1e308"], "budget_gib=1e+308 is too large; it must be at most 1048576"),
        (["trainer.batch_size=8"], "trainer.batch_size=8: the batch size is what is looked for; leave it out."),
        (["device.compile=true"], "The memory of a compiled model is not measured operation by operation"),
        (["budget_gib=0.00001"], "0.0102 MiB is too small for fp32 at a batch of 1, which takes 0.07"),
        (["model.hiden=[3]"], "model.hiden"),
        (["arms=[fp32,bf16]", "reference=zzz"], "reference=zzz is none of the arms, which are fp32, bf16."),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(words, sentence):
    script = module("largest_batch.py")
    with pytest.raises(InputError) as told:
        script.main([*MLP, *words])
    assert str(told.value).startswith(sentence)


@pytest.mark.slow
def test_a_model_that_breaks_is_told_as_what_it_is(tmp_path):
    (tmp_path / "broken.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(2, 2)\n"
        "    def forward(self, x):\n        raise ValueError('the model is broken')\n"
    )
    words = ["model=custom", "model._target_=broken.Net", "arms=fp32", "device=cpu", "budget_gib=0.01"]
    done = run("largest_batch.py", *words, PYTHONPATH=f"{tmp_path}:src")
    assert (done.returncode, "ValueError: the model is broken" in done.stderr) == (1, True)
    assert done.stderr.count("Traceback") == 1
