"""scripts/replay.py: the step at which a run went wrong, taken again and looked at; and what it refuses."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
import torch
import yaml

from precision_lab import checkpoint
from precision_lab.batches import TrainBatches
from precision_lab.config import ROOT, compose
from precision_lab.errors import InputError
from precision_lab.folders import read_json
from precision_lab.replay import lines, replay
from precision_lab.run_folder import config_of, nonfinite_step
from precision_lab.seeds import derive

OWN_CODE = Path(__file__).parent / "own_code"
STEP, BATCH, SAMPLES = 137, 4, 800
PLANTED = ["model=custom", "model._target_=planted.Planted", "dataset=custom", "dataset._target_=planted.data"]
PLANTED += ["task=language_model", "trainer.steps=160", f"trainer.batch_size={BATCH}", "trainer.log_every=20"]
PLANTED += ["precision.init_scale=64", "probe.memory=false", "device=cpu", "device.threads=1", "meter.warmup_steps=2"]


def batch_of_step(step: int) -> list[int]:
    """By the rule alone: the training samples of a step's batch, for seed 0."""
    batches = TrainBatches(range(SAMPLES), BATCH, derive(0, "order"), lambda batch: batch)
    next(islice(batches, step - 1, None))
    return batches.indices


@dataclass
class Done:
    code: int
    out: str
    err: str


def typed(script: str, *words: str) -> Done:
    path = os.pathsep.join([str(ROOT / "src"), str(OWN_CODE)])
    environment = os.environ | {"PYTHONPATH": path, "WANDB_MODE": "disabled"}
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *words], env=environment, capture_output=True, text=True, timeout=200
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """(the run with one bad batch as a person starts it, its folder)"""
    outputs = tmp_path_factory.mktemp("outputs")
    words = [*PLANTED, f"+dataset.planted={batch_of_step(STEP)[2]}", f"paths.outputs={outputs}"]
    done = typed("train.py", *words, "precision=fp16", "trainer.checkpoint_every=50")
    (folder,) = outputs.glob("runs/*/*")
    return done, folder, words


def test_the_run_itself_names_the_step_and_the_command_that_shows_more(planted):
    done, folder, _ = planted
    assert done.code == 0, done.out + done.err
    assert read_json(folder / "result.json")["nonfinite"] == {
        "first_loss": STEP,
        "first_step": STEP,
        "last_streak_from": None,
    }
    said = f"The loss of step {STEP} is the first that was not finite. See where: python scripts/replay.py run={folder}"
    assert said in done.out


def test_the_checkpoint_before_the_trouble_is_kept_beside_the_last_two(planted):
    _, folder, _ = planted
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["step_00000100.pt", "step_00000150.pt", "step_00000160.pt"]


def test_one_command_names_the_step_the_samples_and_the_module(planted):
    _, folder, _ = planted
    done = typed("scripts/replay.py", f"run={folder}")
    assert (done.code, done.err) == (3, "")
    indices = ", ".join(map(str, batch_of_step(STEP)))
    assert f"\nstep {STEP}\n" in done.out
    assert f"training samples {indices}\n" in done.out
    first = re.search(r"First non-finite: (.*)\n", done.out).group(1)
    assert first == (
        "the output of amplifier.mix (Linear): 16 inf of 512 values in float16; the largest of its inputs is 3e+04."
    )
    assert "from the checkpoint after step 100; at every log point on the way (1) the loss equals" in done.out
    assert "update     skipped" in done.out
    assert all(len(line) < 200 for line in done.out.splitlines())


def test_from_the_start_it_is_the_same_step_bit_for_bit(planted, monkeypatch, tmp_path):
    """Also where no checkpoint was written: seeds make the start anew."""
    _, folder, _ = planted
    monkeypatch.syspath_prepend(OWN_CODE)
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.yaml", "result.json", "environment.json", "metrics.jsonl"):
        (bare / name).write_bytes((folder / name).read_bytes())
    looks = [replay(place, config_of(place), STEP - 1, STEP - 1) for place in (folder, bare)]
    assert [one.began for one in looks] == [100, 0]
    assert [one.compared for one in looks] == [1, 6]
    assert [one.differs_from for one in looks] == [None, None]
    assert looks[0].look == looks[1].look
    assert not looks[0].look.nonfinite
    assert "All of it is finite." in lines(looks[0], "title")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda state: state["trainer"].pop("guarded"), r"lacks trainer\.guarded, or holds another kind"),
        (
            lambda state: state["trainer"]["optimizer"].update(param_groups=[]),
            "cannot be loaded: ValueError: loaded state dict has",
        ),
        (lambda state: state["generators"].update(python=[3]), "cannot be loaded: ValueError: "),
    ],
)
def test_a_checkpoint_of_which_a_part_is_wrong_is_passed_over_with_all_of_it(
    planted, monkeypatch, tmp_path, change, why
):
    _, folder, _ = planted
    monkeypatch.syspath_prepend(OWN_CODE)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    for path in (other / "checkpoints").iterdir():
        state = checkpoint.read(path)
        change(state)
        torch.save(state, path)
    done, whole = replay(other, config_of(other), STEP, STEP), replay(folder, config_of(folder), STEP, STEP)
    assert (done.began, done.differs_from) == (0, None)
    assert any(re.search(f"no checkpoint can be used: .*{why}", note) for note in done.notes)
    assert repr(done.look) == repr(whole.look)  # whose losses are NaN


def test_a_run_that_went_on_from_a_checkpoint_by_name_is_replayed_where_that_is_no_more(planted, monkeypatch, tmp_path):
    _, folder, _ = planted
    monkeypatch.syspath_prepend(OWN_CODE)
    values = yaml.safe_load((folder / "config.yaml").read_text())
    values["trainer"]["resume"] = str(folder / "checkpoints" / "step_00000050.pt")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    assert replay(tmp_path, config_of(tmp_path), 2, 2).look.indices == [batch_of_step(2)]


def test_a_model_that_raises_is_one_sentence_with_its_place(planted, monkeypatch, tmp_path):
    _, folder, _ = planted
    monkeypatch.syspath_prepend(OWN_CODE)
    values = yaml.safe_load((folder / "config.yaml").read_text())
    values["model"]["_target_"] = "own_code.mine.Raises"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(InputError, match=r"^Step 1 raised ValueError: the third gear is missing \(.*mine\.py, line "):
        replay(tmp_path, config_of(tmp_path), 2, 2)


def test_without_a_result_the_log_points_tell_where_to_look(planted, tmp_path):
    _, folder, _ = planted
    (tmp_path / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes() + b"{half")
    assert nonfinite_step(tmp_path) == (121, 140)


def test_windows_are_those_that_were_recorded_whatever_the_config_says_now(planted, monkeypatch, tmp_path):
    """A run may go on with another trainer.log_every."""
    _, folder, _ = planted
    monkeypatch.syspath_prepend(OWN_CODE)
    for name in ("environment.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    values = yaml.safe_load((folder / "config.yaml").read_text())
    values["trainer"]["log_every"] = 7
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    done = replay(tmp_path, config_of(tmp_path), 40, 40)
    assert (done.compared, done.differs_from) == (2, None)  # the step that is looked at, too


def test_a_replay_that_is_not_as_it_was_says_from_where(planted, monkeypatch, tmp_path):
    _, folder, _ = planted
    monkeypatch.syspath_prepend(OWN_CODE)
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.yaml", "result.json", "environment.json"):
        (other / name).write_bytes((folder / name).read_bytes())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[1]["train/loss"] += 1e-12
    (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = replay(other, config_of(other), 50, 50)
    assert (done.compared, done.differs_from) == (2, 40)
    assert "not as it was: the loss at step 40 is not the one that the run recorded" in "\n".join(lines(done, ""))


# --- refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "Write run=DIR, a run's folder, and step=K"),
        (["run=/no/such/folder"], "/no/such/folder is not a folder; name a run's."),
        ([f"run={'x' * 5000}"], " is not a folder; name a run's."),
        (["run=HERE", "step=0"], "step=0 is not valid; it must be a whole number from 1 on."),
        (["run=HERE", "step=two"], "step=two is not valid"),
        (["run=HERE", f"step={'9' * 5000}"], "is not valid; it must be a whole number from 1 on."),
        (["run=HERE", "stepp=2"], "Write run=DIR"),
        (["run=HERE"], "config.yaml cannot be read (No such file or directory); name a run's folder."),
    ],
)
def test_wrong_words_are_told_before_torch_is_loaded(tmp_path, words, sentence):
    done = typed("scripts/replay.py", *(word.replace("HERE", str(tmp_path)) for word in words))
    assert done.code == 2
    assert sentence in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no config of a run"),
        ("[1, 2]", "holds no config of a run"),
        ("a: [", "is damaged and cannot be read"),
        ("a: \x00", "is damaged and cannot be read"),
        ("seed: many", "holds no config that can be used here: seed=many is not valid; it must be a whole number."),
        ("no_such_key: 1", "holds no config that can be used here"),
        ("model: {token: '[redacted]'}", "has a secret left out"),
    ],
)
def test_a_damaged_config_is_named(tmp_path, text, sentence):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(InputError, match=re.escape(sentence)) as caught:
        config_of(tmp_path)
    assert str(tmp_path / "config.yaml") in str(caught.value)


def test_a_config_comes_back_as_it_was(tmp_path, planted):
    _, folder, words = planted
    stored = config_of(folder)
    asked = compose([*words, "precision=fp16", "trainer.checkpoint_every=50"])
    assert stored == asked
    yaml.safe_load((folder / "config.yaml").read_text())


def test_a_step_beyond_the_end_and_a_run_without_trouble_are_refused(planted, monkeypatch, tmp_path):
    _, folder, _ = planted
    monkeypatch.syspath_prepend(OWN_CODE)
    with pytest.raises(InputError, match=r"step=161 is beyond the end of the run, which has 160 steps\."):
        replay(folder, config_of(folder), 161, 161)
    with pytest.raises(InputError, match="has recorded no non-finite step; name one to look at: step=1 is the first"):
        nonfinite_step(tmp_path)


def test_a_gradient_that_overflows_is_found_where_it_does_so_first(planted, monkeypatch, tmp_path):
    """A loss scale too high: the loss is finite, and the first gradient at an output is not."""
    _, folder, words = planted
    monkeypatch.syspath_prepend(OWN_CODE)
    values = yaml.safe_load((folder / "config.yaml").read_text())
    values["precision"]["init_scale"] = 1e9
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    look = replay(tmp_path, config_of(tmp_path), 1, 1).look
    assert look.skipped
    assert torch.isfinite(torch.tensor(look.losses)).all()
    assert look.loss_scale == 1e9
    assert look.found[0].startswith("the gradient at the output of head (Linear): ")
