"""Training in another device's arithmetic on this CPU: as the native one where there is one, and gone afterwards."""

import itertools
import json
import math
import statistics
import time
from dataclasses import replace

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from own_code.training import CPU, policy_of, train, trainer_of
from precision_lab import hardware, precision
from precision_lab.arm_schema import Target
from precision_lab.assemble import build, resolve
from precision_lab.config import ADDED, as_values, compose, load_precision, of_values
from precision_lab.emulation.kernels import AutocastKernels, emulated, installed
from precision_lab.emulation.rounding import WideArithmetic
from precision_lab.errors import InputError
from precision_lab.identity import _digest, arm_label, counted, counted_arm, run_signature, title
from precision_lab.models import CNN, GPT
from precision_lab.precision import LabelError, release
from precision_lab.probe.ops import op_map
from precision_lab.run import run
from precision_lab.sweep.survey import survey
from precision_lab.task import Classification, LanguageModel
from precision_lab.torture import compared
from precision_lab.tracking import of_folder
from precision_lab.tracking.words import mirror_of_run
from test_resume import attempt, killed

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Gate(nn.Module):
    """A linear, and a softmax that is called by its name."""

    def __init__(self, inside=None):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.softmax = inside or nn.Softmax(dim=-1)

    def forward(self, x):
        return self.softmax(self.linear(x))


def images():
    draw = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, 64, 64, generator=draw), torch.randint(0, 10, (8,), generator=draw)


def tokens():
    draw = torch.Generator().manual_seed(1)
    return torch.randint(0, 64, (4, 33), generator=draw)


NETWORKS = {
    "cnn": (lambda: CNN(10, 3, [16, 32]), Classification(), images),
    "gpt": (lambda: GPT(64, 32, 2, 2, 32, 0.0), LanguageModel(), tokens),
    "resnet18": (lambda: resnet18(num_classes=10), Classification(), images),
}


def gradient(model, task, batch, arm, **changes):
    """All gradients of one step as one vector, unscaled by a fixed loss scale of 1024 where there is one."""
    policy = policy_of(arm, **changes)
    scale = 1024.0 if arm == "fp16" else 1.0
    model.zero_grad()
    with policy.arithmetic():
        with policy.autocast():
            loss, _ = task(model, batch)
        (loss * scale).backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters()]) / scale


def sqnr(exact, other):
    return float(10 * torch.log10(exact.square().sum() / (exact - other).square().sum()))


# --- against what is native here ------------------------------------------------------------------------------


# Native float16 convolutions take 10 s here, and minutes on a CPU without units for them.
SLOW = pytest.param("resnet18", "fp16", marks=pytest.mark.slow)
QUICK = [(network, arm) for network in NETWORKS for arm in LOW if (network, arm) != ("resnet18", "fp16")]


@pytest.mark.parametrize(("network", "arm"), [*QUICK, SLOW])
def test_emulating_a_cpu_has_the_error_of_a_cpu(network, arm):
    build, task, batch = NETWORKS[network]
    torch.manual_seed(0)
    model = build()
    exact = gradient(model, task, batch(), "fp32")
    native = sqnr(exact, gradient(model, task, batch(), arm))
    emulation = sqnr(exact, gradient(model, task, batch(), arm, emulate=Target.cpu))
    assert math.isfinite(native)
    assert emulation == pytest.approx(native, abs=1.0)


@pytest.mark.parametrize("arm", LOW)
@pytest.mark.parametrize("target", Target)
def test_the_label_is_proved_in_the_arithmetic_that_is_emulated(arm, target):
    proof = policy_of(arm, emulate=target).prove()
    name = str(LOW[arm]).removeprefix("torch.")
    bits = {"bf16": 7, "fp16": 10}[arm]
    assert proof == {"linear_dtype": name, "linear_bits": bits, "conv_dtype": name, "conv_bits": bits}


def test_an_emulation_that_does_not_round_is_no_proof(monkeypatch):
    one = policy_of("bf16", emulate=Target.cuda)
    monkeypatch.setattr(precision, "WideArithmetic", lambda: WideArithmetic(lambda exact, dtype: exact))
    with pytest.raises(LabelError, match="should run a linear in bfloat16 .* but float32 with 7 bits was measured"):
        one.prove()


def test_weights_in_bfloat16_are_multiplied_as_the_target_does_and_have_no_policy():
    one = policy_of("bf16_pure", emulate=Target.cuda)
    assert one.prove()["linear_bits"] == 7
    with one.autocast(), installed(AutocastKernels("cpu", {})):
        pass  # nothing stands in the way


def test_float32_evaluation_is_plain_float32():
    torch.manual_seed(0)
    model, x = Gate(), torch.randn(4, 8)
    plain = model(x)
    one = policy_of("bf16", emulate=Target.cuda)
    with one.arithmetic(), one.autocast():
        assert not torch.equal(model(x), plain)
        with one.reference(model):
            assert torch.equal(model(x), plain)


STEPS = {
    "gpt": (["model=gpt", "model.width=256", "dataset=synthetic_tokens", "trainer.batch_size=8"], 1.6),
    "resnet18": (["model=resnet18", "dataset=synthetic_images", "dataset.image_size=64", "trainer.batch_size=16"], 2.0),
}


@pytest.mark.slow  # it times steps, for half a minute each
@pytest.mark.parametrize("network", STEPS)
def test_a_step_takes_little_more_than_in_float32(network):
    words, most = STEPS[network]
    arms = {"fp32": [], "bf16": ["precision.emulate=cuda"], "fp16": ["precision.emulate=cuda"]}
    trainers, batches = {}, {}
    for arm, more in arms.items():
        _, trainers[arm], stream = build(resolve(compose([*words, f"precision={arm}", *more, "device=cpu"])))
        batches[arm] = itertools.repeat(next(stream))

    def seconds(arm):
        trainers[arm].policy.apply_backends()
        began = time.perf_counter()
        trainers[arm].step(batches[arm])
        return time.perf_counter() - began

    rounds = [{arm: seconds(arm) for arm in (arms if n % 2 else reversed(arms))} for n in range(22)][2:]
    for arm in ("bf16", "fp16"):
        assert statistics.median(one[arm] / one["fp32"] for one in rounds) < most, arm


# --- kernels of several policies --------------------------------------------------------------------------------


def losses_of(arm, **changes):
    torch.manual_seed(0)
    trainer = trainer_of(arm, Gate(), regression, precision=changes, log_every=1)
    x = torch.randn(4, 8)
    return [one["train/loss"] for one in train(trainer, [(x, x)] * 6, 6)[1]]


def regression(model, batch):
    x, y = batch
    return (model(x).float() - y).square().mean(), {}


def test_native_losses_are_the_same_bits_before_and_after_an_emulation():
    native = losses_of("bf16")
    assert losses_of("bf16", emulate=Target.cuda) != native
    assert losses_of("bf16") == native


def test_policies_that_live_side_by_side_each_get_their_own():
    torch.manual_seed(0)
    model, x = Gate(), torch.randn(4, 8)
    policies = {
        torch.bfloat16: policy_of("bf16"),
        torch.float32: policy_of("bf16", emulate=Target.cuda),  # its softmax
        torch.float16: policy_of("fp16", emulate=Target.cpu),
    }
    for _ in range(2):
        for dtype, one in policies.items():
            with one.autocast():
                assert model(x).dtype is dtype
    policies[torch.float32].apply_backends()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).dtype is torch.float32
        release()
        assert model(x).dtype is torch.bfloat16


def test_kernels_go_with_their_policy():
    one = policy_of("bf16", emulate=Target.cuda)
    one.apply_backends()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Gate()(torch.randn(2, 8)).dtype is torch.float32
    del one
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Gate()(torch.randn(2, 8)).dtype is torch.bfloat16


def test_two_owners_of_the_kernels_are_an_error_and_not_a_silent_mixture():
    with installed(AutocastKernels("cpu", emulated("mps", []), "mps")):
        with pytest.raises(RuntimeError, match="installed already"):
            policy_of("bf16", emulate=Target.cuda).apply_backends()
        with policy_of("bf16").autocast():  # those of another owner stay
            assert Gate()(torch.randn(2, 8)).dtype is torch.float32


def test_weights_are_cast_anew_in_each_region():
    torch.manual_seed(0)
    one, model, x = policy_of("bf16", emulate=Target.cuda), nn.Linear(4, 4), torch.randn(2, 4)
    with one.autocast():
        before = model(x)
    with torch.no_grad():
        model.weight.add_(1.0)
    with one.autocast():
        assert not torch.equal(model(x), before)


# --- operations kept in float32 -------------------------------------------------------------------------------


@pytest.mark.parametrize("emulate", [None, Target.cpu])
def test_softmax_stays_in_float32_where_a_cpu_would_lower_it(emulate):
    kept, plain = (policy_of("bf16", fp32_ops=ops, emulate=emulate) for ops in (["softmax"], []))
    model, x = Gate(), torch.randn(4, 8)

    def rows(one):
        def forward():
            with one.arithmetic(), one.autocast():
                return model(x).float().sum()

        return {row.op: row for row in op_map(model, forward)}

    assert rows(plain)["_softmax"].outputs == ("bfloat16",)
    assert rows(kept)["_softmax"].inputs == rows(kept)["_softmax"].outputs == ("float32",)
    with kept.autocast():
        assert model.linear(x).dtype is torch.bfloat16
        assert model(x).dtype is torch.float32
    kept.check_float32()


def test_an_operation_inside_attention_that_is_no_operation_of_the_model_s_is_kept_too():
    """A function mode does not see what torch's own multi-head attention calls."""
    model, x = nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)
    one = policy_of("bf16", fp32_ops=["softmax"])
    with one.autocast():
        _, weights = model(x, x, x)
    assert weights.dtype is torch.float32
    one.check_float32()


def test_what_cuda_refuses_can_be_kept_in_float32():
    probability, target = torch.tensor([0.25, 0.5]), torch.tensor([0.0, 1.0])
    refusing, kept = (policy_of("fp16", emulate=Target.cuda, fp32_ops=ops) for ops in ([], ["binary_cross_entropy"]))
    with refusing.autocast(), pytest.raises(RuntimeError, match="binary_cross_entropy is not allowed under autocast"):
        nn.functional.binary_cross_entropy(probability.half(), target.half())
    with kept.autocast():
        loss = nn.functional.binary_cross_entropy(probability.half(), target.half())
    assert loss.dtype is torch.float32
    assert loss == nn.functional.binary_cross_entropy(probability, target)


def test_a_linear_that_is_kept_is_proved_to_be_float32():
    proof = policy_of("bf16", fp32_ops=["linear"]).prove()
    assert (proof["linear_dtype"], proof["linear_bits"]) == ("float32", 23)
    assert (proof["conv_dtype"], proof["conv_bits"]) == ("bfloat16", 7)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("linaer", "near are linear, "),
        ("cross_entropy", "near are "),
        ("softmax.int", "near are softmax"),
        ("add_", "near are add"),
        ("xyzzy", "that returns a new tensor."),
    ],
)
def test_an_operation_that_does_not_exist(name, told):
    with pytest.raises(InputError) as caught:
        policy_of("bf16", fp32_ops=["softmax", name])
    assert str(caught.value).startswith(f"precision.fp32_ops: '{name}' is no operation of torch's that returns a new")
    assert told in str(caught.value)


def test_an_operation_that_is_never_called():
    torch.manual_seed(0)
    trainer = trainer_of("bf16", Gate(), regression, precision={"fp32_ops": ["addmm"], "emulate": Target.cuda})
    x = torch.randn(4, 8)
    with pytest.raises(InputError, match=r"^precision\.fp32_ops: addmm is never called under autocast .*: linear, not"):
        train(trainer, [(x, x)], 1)


def test_the_proof_s_own_calls_do_not_count():
    one = policy_of("bf16", fp32_ops=["conv2d"])
    one.prove()
    with pytest.raises(InputError, match="conv2d is never called under autocast"):
        one.check_float32()


def test_what_a_module_in_float32_calls_does_not_count():
    model = Gate()
    one = policy_of("bf16", fp32_ops=["softmax"], fp32_modules=["softmax"])
    one.prepare(model)
    with one.autocast():
        model(torch.randn(2, 8))
    with pytest.raises(InputError, match="softmax is never called under autocast"):
        one.check_float32()


# --- what is refused ------------------------------------------------------------------------------------------


def test_emulation_needs_no_support_of_this_machine(monkeypatch):
    without = {"float32": "native", "tf32": "no", "bfloat16": "no", "float16": "emulated"}
    arms = {arm: load_precision(arm) for arm in LOW}
    with pytest.raises(InputError, match="precision=bf16 needs bfloat16"):
        hardware.check_support(arms["bf16"], CPU, without)
    for one in arms.values():
        assert hardware.check_support(replace(one, emulate=Target.cuda), CPU, without) == []
    with pytest.raises(InputError, match="needs tf32"):
        hardware.check_support(
            replace(arms["bf16"], emulate=Target.cuda, float32_matmul=load_precision("tf32").float32_matmul),
            CPU,
            without,
        )


def test_a_device_chosen_by_itself_may_be_no_cpu(monkeypatch):
    monkeypatch.setattr(hardware, "select_device", lambda wanted: torch.device("mps"))
    with pytest.raises(InputError, match=r"^precision.emulate needs the CPU, and device=auto is mps here; set device"):
        resolve(compose(["precision=bf16", "precision.emulate=cuda"]))


# --- runs -------------------------------------------------------------------------------------------------------

TINY = ["model=mlp", "model.hidden=[16]", "dataset=digits", "trainer.steps=30", "trainer.batch_size=32"]
TINY += ["trainer.log_every=10", "meter.warmup_steps=2", "device.threads=1", "device=cpu"]


def done(outputs, *words):
    asked = compose([*TINY, f"paths.outputs={outputs}", *words])
    assert run(asked) == 0
    (folder,) = outputs.glob("runs/*/*")
    return asked, folder, json.loads((folder / "result.json").read_text())


def test_float16_trains_as_on_a_gpu_with_the_scaler_and_says_so_everywhere(tmp_path, capsys):
    _, _, exact = done(tmp_path / "fp32", "precision=fp32")
    native = done(tmp_path / "native", "precision=bf16")[2]["hashes"]["losses"]
    capsys.readouterr()
    asked, folder, result = done(tmp_path / "emulated", "precision=fp16", "precision.emulate=cuda")
    assert (result["arm"], result["status"]) == ("fp16[emulate=cuda]", "completed")
    assert result["summary"]["final/amp_loss_scale"] == 65536
    loss, reference = (one["summary"]["final/val_loss_fp32"] for one in (result, exact))
    assert loss != reference
    assert loss == pytest.approx(reference, rel=5e-3)
    assert result["hashes"]["initial_weights"] == exact["hashes"]["initial_weights"]
    assert "_fp16-emulated_s0_cpu_" in folder.name
    assert title(asked).startswith("fp16[emulate=cuda]: mlp on digits")
    said = capsys.readouterr().out
    assert "emulated on this CPU: the autocast policy of cuda and float16 as the units of cuda round it" in said
    assert "The time and memory of this run say nothing about cuda." in said
    assert "has no units of its own here" not in said
    assert json.loads((folder / "environment.json").read_text())["label_proof"]["linear_bits"] == 10
    again = done(tmp_path / "again", "precision=bf16")[2]["hashes"]["losses"]
    assert again == native


def test_an_emulated_run_that_was_killed_goes_on_to_the_same_bits(tmp_path):
    words = ["precision.emulate=cuda"]
    whole = attempt(tmp_path / "whole", *words)
    first = killed(tmp_path / "outputs", *words)
    second = attempt(tmp_path / "outputs", *words)
    assert (second.code, second.result["resumed_at"], second.folder) == (0, [6], first.folder)
    assert compared(whole.folder, second.folder) == []
    assert second.result["arm"] == "fp16[init_scale=10000000.0,growth_interval=2,emulate=cuda]"


def test_a_sweep_takes_emulated_arms_for_supported(tmp_path):
    jobs = [compose([*TINY, f"precision={arm}", "precision.emulate=cuda", f"paths.outputs={tmp_path}"]) for arm in LOW]
    answers = survey(jobs, try_input=True)
    assert [(answer.refused, answer.wrong, answer.device) for answer in answers] == [("", "", "cpu")] * 2
    assert [arm_label(answer.precision) for answer in answers] == ["bf16[emulate=cuda]", "fp16[emulate=cuda]"]


def test_wandb_can_tell_emulated_runs_from_others(monkeypatch, tmp_path):
    given = []

    class Mirror:
        state, id, url = "offline", None, None

        def __init__(self, asked, outputs, slack, upload_s, complete, **init):
            given.append(init)

    monkeypatch.setattr(of_folder, "Mirror", Mirror)
    machine = {"device": "cpu", "model": "Xeon"}
    environment = {"fingerprint": machine, "versions": {"torch": "2"}, "git": {"sha": None}, "host": "here"}
    for words in ([], ["precision.emulate=mps"]):
        asked = compose([*TINY, "precision=fp16", f"paths.outputs={tmp_path}", *words])
        mirror_of_run(asked, environment, [], tmp_path / "runs" / "day" / "one")
    native, emulation = given
    assert (native["tags"], native["config"]["emulate"]) == (["fp16", "cpu"], None)
    assert (emulation["tags"], emulation["config"]["emulate"]) == (["fp16", "cpu", "emulated"], "mps")
    assert emulation["config"]["precision"] == "fp16[emulate=mps]"
    assert "_fp16-emulated_" in emulation["name"]
    assert (emulation["config"]["host"], emulation["config"]["folder"]) == ("here", "runs/day/one")


# --- what was stored before there was emulation --------------------------------------------------------------


def test_a_config_without_the_fields_is_read_and_is_the_same_arm():
    asked = compose([*TINY, "precision=bf16"])
    values = as_values(asked)
    for group, added in ADDED.items():
        for key in added:
            del values[group][key]
    assert of_values(values, "config.yaml") == asked
    assert counted_arm(values["precision"]) == counted_arm(as_values(asked.precision)) == values["precision"]
    assert run_signature(asked) == _digest([counted(values), values["precision"], asked.seed])  # as it was made then
    assert run_signature(asked) != run_signature(replace(asked, precision=replace(asked.precision, emulate=Target.cpu)))
    assert "emulate" in counted_arm(as_values(replace(asked.precision, emulate=Target.cuda)))
