"""The zoo itself, measured straight from the definitions: each fault is there, and what is said to heal it does."""

import dataclasses
import importlib.util
import sys

import pytest
import torch

import direct
import zoo
from precision_lab.config import ROOT

FOUND_DB, RESTORED_DB = 10.0, 7.0
SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2)))
LARGE = ("regnet", "resnet18", "efficientnet", "mobilenet", "shufflenet")
# Faults of which a gradient that exists tells nothing; each has a test of its own.
WIRING = ("rewrapped_loss", "half_prelu", "bf16_layer_with_scaler", "lost_updates")
NUMERIC = [name for name in zoo.FAULTY if name not in WIRING]
BY_MODULE = [name for name in NUMERIC if zoo.FAULTY[name].cure == "override" and name != "underflow_without_scaler"]


def built(name: str, seed: int = 0):
    case = zoo.FAULTY[name]
    return case, case.build(seed), case.batch(seed)


def finding(case, model, batch, **kept) -> str:
    """What is wrong with a step by the definition of a finding, empty if nothing is."""
    reference = direct.plain(case, model, batch)
    try:
        done = direct.arm(case, model, batch, **kept)
    except RuntimeError as error:
        return f"raised: {error}"
    if lost := direct.new_nonfinite(reference, done):
        return f"not finite: {lost[0]}"
    excess = direct.excess(case, model, batch, **kept)
    return f"excess {excess:.1f} dB" if excess > FOUND_DB else ""


def healthy(case, model, batch, **kept) -> bool:
    reference, done = direct.plain(case, model, batch), direct.arm(case, model, batch, **kept)
    return not direct.new_nonfinite(reference, done) and direct.excess(case, model, batch, **kept) < RESTORED_DB


def test_the_zoo_holds_what_it_promises():
    asked = {"P01", "P02", "P03", "P19", "P26", "P27", "P37", "P38", "P40", "P42", "P47", "P51", "P53"}
    assert asked <= {case.source for case in zoo.FAULTY.values()}
    assert len(zoo.FAULTY) >= 16
    assert len(zoo.HEALTHY) >= 2 * 10  # makers, under two precisions each


@pytest.mark.parametrize("name", zoo.FAULTY)
def test_a_culprit_is_a_name_in_a_net_of_some_size(name):
    case, model, _ = built(name)
    modules = dict(model.named_modules())
    assert 18 <= len(modules) <= 45
    for culprit in case.culprit:
        setting = culprit in ("precision.grad_scaling", "precision.param_dtype")
        parameter = culprit in dict(model.named_parameters())
        assert culprit in modules or parameter or setting or hasattr(torch.ops.aten, culprit), culprit
    assert case.cure == "override" or case.mended is not None


@pytest.mark.parametrize("name", zoo.FAULTY)
def test_a_seed_says_all_and_the_global_generator_is_left_alone(name):
    case = zoo.FAULTY[name]
    before = torch.get_rng_state()
    once, again, other = case.build(0).state_dict(), case.build(0).state_dict(), case.build(1).state_dict()
    case.batch(0)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, again[key]) for key, value in once.items())
    assert not all(torch.equal(value, other[key]) for key, value in once.items())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NUMERIC)
def test_the_fault_is_there(name, seed):
    case, model, batch = built(name, seed)
    assert direct.plain(case, model, batch).finite()
    assert finding(case, model, batch) != ""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", BY_MODULE)
def test_the_culprit_in_float32_heals(name, seed):
    case, model, batch = built(name, seed)
    assert healthy(case, model, batch, modules=[case.culprit[0]])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [name for name in zoo.FAULTY if zoo.FAULTY[name].mended])
def test_the_net_written_properly_is_healthy(name, seed):
    case, _, batch = built(name, seed)
    assert healthy(case, case.mended(seed), batch)


@pytest.mark.parametrize("name", BY_MODULE)
def test_another_module_in_float32_does_not_heal(name):
    """Or it would mean nothing to name the right one."""
    case, model, batch = built(name)
    other = next(path for path, _ in model.named_modules() if path.endswith((".up", ".conv")))
    assert other not in case.culprit
    assert finding(case, model, batch, modules=[other]) != ""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("sigmoid_bce_cuda", "binary_cross_entropy is not allowed"),
        ("own_function", "same dtype"),
        ("mask_constant", "without overflow"),
    ],
)
def test_what_raises(name, says):
    case, model, batch = built(name)
    with pytest.raises(RuntimeError, match=says):
        direct.arm(case, model, batch)


@pytest.mark.parametrize("name", ["sigmoid_bce_cpu", "hidden_infinity", "squares_overflow"])
def test_what_no_scaler_notices(name):
    case, model, batch = built(name)
    assert direct.arm(case, model, batch).finite()


def scaler_steps(model, case, batch) -> bool:
    """Whether a scaler on the CPU takes one step of the case; raises what it raises."""
    optimizer, scaler = case.optimizer(model), torch.amp.GradScaler("cpu")
    with torch.autocast("cpu", dtype=torch.float16):
        loss, _ = case.task(model, batch)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return True


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("rewrapped_loss", AssertionError, "No inf checks were recorded"),
        ("half_prelu", ValueError, "unscale FP16 gradients"),
    ],
)
def test_what_a_scaler_refuses(name, error, says):
    case, model, batch = built(name)
    with pytest.raises(error, match=says):
        scaler_steps(model, case, batch)
    assert scaler_steps(case.mended(0), case, batch)


def test_a_scaler_on_the_cpu_takes_bfloat16_weights():
    case, model, batch = built("bf16_layer_with_scaler")
    assert scaler_steps(model, case, batch)
    wrong = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.dtype is not torch.float32}
    assert wrong == {case.culprit[0]}
    assert {p.dtype for p in case.mended(0).parameters()} == {torch.float32}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loss_scale_heals_underflow(seed):
    case, model, batch = built("underflow_without_scaler", seed)
    assert healthy(dataclasses.replace(case, precision="fp16"), model, batch)


def unchanged(case, dtype: torch.dtype) -> float:
    """Share of the weights that one update leaves as they are."""
    model, batch = case.build(0), case.batch(0)
    model.to(dtype)
    optimizer, before = case.optimizer(model), [p.detach().clone() for p in model.parameters()]
    case.task(model, (batch[0].to(dtype), batch[1]))[0].backward()
    optimizer.step()
    same = sum(int((p == old).sum()) for p, old in zip(model.parameters(), before, strict=True))
    return same / sum(p.numel() for p in model.parameters())


def test_bfloat16_weights_stay_where_float32_weights_move():
    case = zoo.FAULTY["lost_updates"]
    assert unchanged(case, torch.bfloat16) > 0.8
    assert unchanged(case, torch.float32) < 0.1


def test_a_batch_norm_keeps_the_infinity_of_a_step_that_was_skipped():
    case, model, batch = built("poisoned_batch_norm")
    done = direct.arm(case, model, batch)
    poisoned = {name for name, buffer in done.model.named_buffers() if not buffer.isfinite().all()}
    assert poisoned >= {"blocks.1.norm.running_mean", "blocks.1.norm.running_var"}
    with torch.no_grad():
        assert not case.task(done.model.eval(), batch)[0].isfinite()
        assert case.task(model.eval(), batch)[0].isfinite()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name.startswith(LARGE) else name for name in zoo.HEALTHY]
)
def test_a_healthy_net_is_healthy(name, seed):
    case = zoo.HEALTHY[name]
    assert case.culprit == ()
    assert healthy(case, case.build(seed), case.batch(seed))


def test_the_zoo_can_be_loaded_from_its_path():
    """As a script does, which does not have tests/ among the places it imports from."""
    folder = ROOT / "tests" / "zoo"
    spec = importlib.util.spec_from_file_location(
        "the_zoo", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["the_zoo"] = module
    try:
        spec.loader.exec_module(module)
        assert set(module.FAULTY) == set(zoo.FAULTY)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "the_zoo"]:
            del sys.modules[name]
