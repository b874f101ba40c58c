"""The op map as a user gets it: of a target, of two, of what is here; stored, mirrored, and refused in a sentence."""

import json
import statistics
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from precision_lab import op_maps, precision
from precision_lab.assemble import assemble, make_trainer, resolve, training_batches
from precision_lab.config import compose
from precision_lab.emulation import kernels
from precision_lab.emulation.lists import Cast
from precision_lab.errors import InputError
from precision_lab.op_maps import inspect_ops, predicted, real
from precision_lab.probe.op_rows import totals
from precision_lab.settings import InspectOpsConfig

MLP = ["model=mlp", "model.hidden=[8]", "trainer.batch_size=4", "device=cpu", "precision=bf16"]


class Scores(nn.Module):
    """A matmul and a softmax of it, then what must stay: a model of one line."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(images.flatten(1)).softmax(-1)


class Wrong(nn.Module):
    """Two matrices that do not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.mm(self.inner(images.flatten(1)), torch.eye(5)))


def own(name):
    return ["model=custom", f"model._target_={__name__}.{name}", "device=cpu", "trainer.batch_size=4"]


def settings(**given):
    return InspectOpsConfig(**{"target": None, "by": "operation", "diff": None, **given})


@pytest.fixture
def inspected(tmp_path, capsys):
    """What the command prints, and the maps that it stores."""

    def run(*words, width=200, **given):
        asked = compose([*words, f"paths.outputs={tmp_path}"])
        inspect_ops(asked, settings(**given), width, list(words))
        stored = {path.name: json.loads(path.read_text()) for path in tmp_path.rglob("ops_*.json")}
        return capsys.readouterr().out, stored

    yield run
    assert kernels._installed is None


# --- must show: the policy of a device that is not here -----------------------------------------------------------


@pytest.mark.parametrize(("target", "softmax"), [("cuda", "float32"), ("mps", "float32"), ("cpu", "bfloat16")])
def test_a_softmax_of_a_matmul_is_shown_as_the_target_has_it(inspected, target, softmax):
    text, _ = inspected(*own("Scores"), "precision=bf16", target=target)
    rows = [line.split() for line in text.splitlines()]
    (matmul,) = [row for row in rows if row[:2] == ["forward", "addmm"]]
    (found,) = [row for row in rows if row[:2] == ["forward", "_softmax"]]
    assert matmul[3:6] == ["bfloat16", "->", "bfloat16"]
    assert found[5] == softmax
    assert f"bf16 on {target}, one training step, predicted by the autocast lists of torch" in text


def test_two_targets_are_shown_where_they_differ_and_nowhere_else(inspected):
    text, stored = inspected(*own("Scores"), "precision=fp16", diff=["cpu", "cuda"])
    rows = [line.split() for line in text.splitlines()]
    assert rows[2:6] == [
        ["modules", "phase", "op", "cpu", "cuda"],
        ["(model)", "forward", "_softmax", "float16", "float32"],
        ["(model)", "backward", "_softmax_backward_data", "float16", "float32"],
        [],
    ]
    assert [row[0] for row in rows[6:10]] == ["cpu:", "cpu:", "cuda:", "cuda:"]
    assert set(stored) == {"ops_cpu.json", "ops_cuda.json"}
    text, _ = inspected(*MLP, diff=["cpu", "cuda"])
    assert "all operations give the same dtypes on cpu and cuda" in text
    assert "addmm" not in text


def test_float32_has_one_map_on_all_targets():
    asked = compose([*MLP, "precision=fp32"])
    first, *others = (predicted(asked, target).rows for target in ("cpu", "cuda", "mps"))
    assert others == [first, first]
    assert set(totals(first).flops_in) == {"float32"}


def test_weights_batch_and_map_of_two_calls_are_equal():
    asked = compose(MLP)
    assert predicted(asked, "cuda") == predicted(asked, "cuda")


# --- real and predicted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "model", ["model=cnn model.widths=[4,8]", "model=gpt model.layers=1 model.dropout=0.1 dataset=synthetic_tokens"]
)
def test_the_cpus_prediction_is_what_its_own_kernels_do(inspected, model, precision):
    text, stored = inspected(
        *model.split(), f"precision={precision}", "device=cpu", "trainer.batch_size=2", target="cpu"
    )
    record = stored["ops_cpu.json"]
    assert (record["kind"], record["differences_to_real"]) == ("predicted", [])
    compared = record["compared_with_real"]
    assert compared > 15
    assert text.splitlines()[-2] == (
        "Predicted and real map of cpu, the real one by torch's own kernels, agree in all "
        f"{compared} operations of its modules."
    )


def test_a_prediction_that_is_wrong_is_told_with_its_first_differences(inspected, monkeypatch):
    own_policy = kernels.policy_of
    monkeypatch.setattr(kernels, "policy_of", lambda target: own_policy(target) | {"softmax.int": Cast.fp32})
    text, stored = inspected(*own("Scores"), "precision=bf16", target="cpu", width=400)
    assert text.splitlines()[-2] == (
        "Predicted and real map of cpu, the real one by torch's own kernels, differ in 2 of 9 operations: _softmax in "
        "(model), forward: predicted float32, real bfloat16; _softmax_backward_data in (model), backward: predicted "
        "float32, real bfloat16."
    )
    assert [one["op"] for one in stored["ops_cpu.json"]["differences_to_real"]] == [
        "_softmax",
        "_softmax_backward_data",
    ]


def test_a_target_that_is_not_here_is_not_compared(inspected):
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    text, stored = inspected(*MLP, target="cuda")
    assert "real" not in text
    assert (stored["ops_cuda.json"]["differences_to_real"], stored["ops_cuda.json"]["compared_with_real"]) == (None, 0)


def test_without_a_target_the_device_that_is_here_is_shown(inspected):
    text, stored = inspected(*MLP)
    assert "bf16 on cpu, one training step, as it ran here with torch" in text
    assert stored["ops_cpu.json"]["kind"] == "real"


def test_modules_and_operations_kept_in_float32_are_shown_as_such():
    asked = compose([*MLP, "precision.fp32_modules=[head]"])
    assert {row.outputs for row in predicted(asked, "cuda").rows if row.op == "addmm"} == {("bfloat16",), ("float32",)}
    asked = compose([*own("Scores"), "precision=bf16", "precision.fp32_ops=[softmax]"])
    for rows in (predicted(asked, "cpu").rows, real(asked, asked.device.type).rows):
        assert {row.outputs for row in rows if row.op == "_softmax"} == {("float32",)}


def test_attention_with_dropout_is_one_operation_on_cuda_and_several_on_the_cpu():
    words = "model=gpt model.layers=1 model.dropout=0.1 dataset=synthetic_tokens precision=bf16 trainer.batch_size=2"
    cpu, cuda = (
        [row for row in predicted(compose(words.split()), target).rows if row.part_of == "attention"]
        for target in ("cpu", "cuda")
    )
    assert {row.inputs for row in cpu if row.op == "bmm"} == {("float32",)}
    assert [(row.phase, row.op, row.dtypes) for row in cuda] == [
        ("forward", "scaled_dot_product_attention", "bfloat16 -> bfloat16"),
        ("backward", "scaled_dot_product_attention_backward", "bfloat16 -> bfloat16"),
    ]
    assert sum(row.flops for row in cuda) == sum(row.flops or 0 for row in cpu)


# --- stored and mirrored ------------------------------------------------------------------------------------------


def test_a_map_is_stored_with_what_it_is_of_and_without_secrets(inspected, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "hunter2hunter2")
    text, stored = inspected(*MLP, "name=looked", "tags=[hunter2hunter2]", target="cuda")
    (path,) = tmp_path.glob("sweeps/looked/inspections/*/probe/ops_cuda.json")
    assert text.splitlines()[-1] == f"written: {path}"
    record = stored["ops_cuda.json"]
    assert (record["schema"], record["target"], record["kind"], record["arm"]) == (1, "cuda", "predicted", "bf16")
    assert (record["model"], record["dataset"], record["torch"]) == ("mlp", "digits", torch.__version__)
    assert record["totals"]["low_precision_share_of_flops"] == 1
    assert {"module", "phase", "op", "inputs", "outputs", "calls", "flops", "nbytes"} <= set(record["rows"][0])
    assert "hunter2" not in path.read_text()


def test_wandb_gets_one_run_of_its_own_kind_with_the_table(monkeypatch, inspected):
    called = []

    class Mirror:
        def table(self, name, columns, rows):
            called.append((name, columns, rows))

        def finish(self, *told):
            called.append(told)

    monkeypatch.setattr(op_maps, "mirror_of", lambda *args, **kwargs: called.append((args[1], kwargs)) or Mirror())
    _, stored = inspected(*MLP, target="cuda")
    (device, told), (name, columns, rows), end = called
    assert (device, told, name, end) == ("cuda", {"job_type": "inspect"}, "op_map", ("completed", None, {}))
    assert len(rows) == len(stored["ops_cuda.json"]["rows"])
    assert all(len(row) == len(columns) for row in rows)
    first = dict(zip(columns, rows[0], strict=True))
    assert (first["target"], first["kind"], first["op"], first["inputs"]) == (
        "cuda",
        "predicted",
        "_to_copy",
        "float32",
    )


# --- refused ------------------------------------------------------------------------------------------------------


def refusal(words, **given):
    with pytest.raises(InputError) as told:
        inspect_ops(compose(words), settings(**given), 80, words)
    assert kernels._installed is None
    assert precision._in_place is None
    return str(told.value)


def test_what_cannot_be_looked_at_is_refused_in_a_sentence():
    assert refusal([*MLP, "device.compile=true"]).startswith(
        "A compiled model cannot be looked at operation by operation"
    )
    assert refusal([*MLP, "precision=auto"], target="cuda") == (
        "precision=auto is chosen by the device, and cuda is not run on; name one."
    )
    assert refusal([*MLP, "precision.emulate=mps"], target="cuda") == (
        "precision.emulate=mps and target=cuda are different devices; leave precision.emulate out."
    )


def test_a_step_that_raises_is_a_sentence_with_the_operation_and_its_module():
    assert refusal([*own("Wrong"), "precision=fp16"], target="cuda") == (
        "fp16 on cuda: the step raised RuntimeError at mm in the model itself: mat1 and mat2 shapes cannot be "
        "multiplied (4x64 and 5x5)."
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"target": "tpu"}, "target=tpu is unknown; valid are cpu, cuda and mps."),
        ({"by": "layer"}, "by=layer is unknown; valid are operation and module."),
        ({"diff": ["cpu"]}, "diff=[cpu] is not valid; it takes two different targets of cpu, cuda and mps."),
        ({"diff": ["cpu", "cpu"]}, "diff=[cpu,cpu] is not valid; it takes two different targets of cpu, cuda and mps."),
        ({"diff": ["cpu", "cuda", "tpu"]}, "diff=[cpu,cuda,tpu] is not valid; it takes two different targets of cpu"),
        ({"diff": ["cpu", "cuda"], "target": "mps"}, "diff names both of its targets; leave target out."),
    ],
)
def test_wrong_settings_are_refused(given, sentence):
    with pytest.raises(InputError) as told:
        settings(**given)
    assert str(told.value).startswith(sentence)


# --- cost ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # timed
@pytest.mark.parametrize(
    "words",
    [
        "model=gpt model.width=256 dataset=synthetic_tokens trainer.batch_size=8 precision=bf16",
        "model=resnet18 dataset=synthetic_images dataset.channels=3 dataset.image_size=64 trainer.batch_size=16 "
        "precision=fp16",
    ],
)
def test_a_map_takes_less_than_ten_steps(words, monkeypatch):
    asked = compose([*words.split(), "device=cpu"])
    ready = assemble(resolve(replace(asked, precision=op_maps._emulating(asked.precision, "cuda"))))
    trainer, batches = make_trainer(ready), training_batches(ready)
    steps = []
    for _ in range(5):
        before = time.perf_counter()
        trainer.step(batches)
        steps.append(time.perf_counter() - before)
    precision.release()
    took = []
    own_map = op_maps.op_map

    def timed(*args, **kwargs):
        before = time.perf_counter()
        rows = own_map(*args, **kwargs)
        took.append(time.perf_counter() - before)
        return rows

    monkeypatch.setattr(op_maps, "op_map", timed)
    predicted(asked, "cuda")
    assert took[0] < 10 * statistics.median(steps)
