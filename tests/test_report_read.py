"""Which results are found and read, which are left out and why, and --where."""

import builtins
import json
import os
from pathlib import Path

import pytest

from made_up import H100, put, result
from precision_lab.errors import InputError
from precision_lab.report import sources as module
from precision_lab.report.read import read


def folders_of(found):
    return [os.path.basename(run.folder) for run in found.runs]


def reasons(found):
    return {os.path.basename(folder): reason for folder, reason in found.skipped}


def test_results_at_any_depth_are_read_once_and_in_the_order_of_their_paths(tmp_path):
    put(tmp_path / "sweeps" / "a" / "2", seed=2)
    put(tmp_path / "sweeps" / "a" / "1", seed=1)
    put(tmp_path / "runs" / "2026-01-01" / "3", seed=3)
    (tmp_path / "linked").symlink_to(tmp_path / "sweeps")
    (tmp_path / "sweeps" / "round").symlink_to(tmp_path)  # a circle
    found = read([tmp_path, tmp_path / "sweeps" / "a", tmp_path / "runs"])
    assert sorted(folders_of(found)) == ["1", "2", "3"]
    assert sorted(run.seed for run in found.runs) == [1, 2, 3]
    assert found.skipped == []
    assert folders_of(read([tmp_path / "sweeps" / "a" / "2"])) == ["2"]  # a run folder itself


def test_a_link_to_itself_hides_nothing(tmp_path):
    put(tmp_path / "a")
    (tmp_path / "loop").symlink_to("loop")
    found = read([tmp_path])
    assert (folders_of(found), found.skipped) == (["a"], [])


def test_what_lies_below_a_run_and_in_wandb_s_folders_is_no_run(tmp_path):
    put(tmp_path / "job", status="diverged")
    put(tmp_path / "job" / "attempts" / "1", status="failed")
    put(tmp_path / "wandb" / "offline-run-20260101_000000-abc" / "files")
    put(tmp_path / "attempts" / "wandb", seed=5)  # names that a user may choose
    assert sorted(folders_of(read([tmp_path]))) == ["job", "wandb"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "result.json is empty"),
        (" \n", "result.json is empty"),
        ('{"schema": 1, "arm": ', "result.json is damaged: no JSON"),
        ("\xff\xfe".encode("latin-1"), "result.json is damaged: no JSON"),
        ("[" * 100_000, "result.json is damaged: no JSON"),
        ("[]", "result.json is damaged: no object"),
        ("{}", "result.json is damaged, or of an older version: schema is missing or of a wrong type"),
        (json.dumps(result() | {"schema": 2}), "written by a newer version (schema 2; this one reads up to 1)"),
        ('{"schema": 7, "arms": {}}', "written by a newer version (schema 7; this one reads up to 1)"),
        (json.dumps(result(step_ms_p50=float("nan"))), "result.json is damaged: no JSON"),
        (json.dumps(result()).replace("32000.0", "1e999"), "result.json is damaged: it holds values of a wrong type"),
        (json.dumps(result(samples_per_s=10**400)), "result.json is damaged: it holds values of a wrong type"),
        (json.dumps(result(samples_per_s=1e300)), "result.json is damaged: it holds values of a wrong type"),
    ],
)  # fmt: skip
def test_a_result_that_is_no_use_is_named_and_the_others_are_read(tmp_path, text, reason):
    put(tmp_path / "good")
    bad = put(tmp_path / "bad")
    (bad / "result.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    found = read([tmp_path])
    assert folders_of(found) == ["good"]
    assert reasons(found) == {"bad": reason}


@pytest.mark.parametrize("key", [key for key in result() if key not in ("note", "reason", "step", "applied_steps")])
@pytest.mark.parametrize("value", [None, [], {"a": {}}, True])
def test_a_value_of_a_wrong_type_is_named_and_never_fatal(tmp_path, key, value):
    put(tmp_path / "bad", result() | {key: value})
    found = read([tmp_path])
    assert (len(found.runs), len(found.skipped)) in ((0, 1), (1, 0))
    nothing_lost = (key == "memory" and value is None) or (key == "overrides" and value == [])
    any_dict = ("summary", "hashes", "support", "versions", "git", "fingerprint")
    if not nothing_lost and not (key in any_dict and isinstance(value, dict)):
        assert "bad" in reasons(found)


@pytest.mark.parametrize(
    "curve",
    [
        *({name: [1.0, 2.0] for name in ("step", "train_s", "val_loss_fp32") if name != lost}
          for lost in ("step", "train_s", "val_loss_fp32")),
        {"step": [100, 200], "train_s": [1.0], "val_loss_fp32": [2.0, 1.0]},
        {"step": [100, None], "train_s": [1.0, 2.0], "val_loss_fp32": [2.0, 1.0]},
        {"step": [100, 200], "train_s": [1.0, "2"], "val_loss_fp32": [2.0, 1.0]},
        {"step": 100, "train_s": 1.0, "val_loss_fp32": 2.0},
    ],
)  # fmt: skip
def test_a_curve_without_all_of_its_columns_is_damaged(tmp_path, curve):
    put(tmp_path / "bad", result() | {"curve": curve})
    put(tmp_path / "none", result(seed=1) | {"curve": {}})
    put(tmp_path / "diverged", result(seed=2, status="diverged") | {
        "curve": {"step": [100], "train_s": [1.0], "val_loss_fp32": [None]}
    })  # fmt: skip
    found = read([tmp_path])
    assert sorted(folders_of(found)) == ["diverged", "none"]
    assert reasons(found) == {"bad": "result.json is damaged: it holds values of a wrong type"}


@pytest.mark.parametrize("group", ["model", "dataset", "precision", "name", "trainer"])
@pytest.mark.parametrize("value", [5, [1], {"_target_": 5}])
def test_a_config_of_a_wrong_shape_is_never_fatal(tmp_path, group, value):
    made = result()
    made["config"][group] = value
    put(tmp_path / "odd", made)
    found = read([tmp_path], ["model=mlp"]) if group == "trainer" else read([tmp_path])
    assert len(found.runs) + len(found.skipped) == 1


@pytest.mark.parametrize("key", sorted(result()["config"]))
def test_a_config_without_a_key_is_never_fatal(tmp_path, key):
    made = result()
    del made["config"][key]
    put(tmp_path / "odd", made)
    found = read([tmp_path])
    assert len(found.runs) + len(found.skipped) == 1


@pytest.mark.parametrize("text", ["name=!!bool x", 'name=!!int ""', "seed=[", "seed=", "name= "])
def test_an_odd_value_fits_no_run(three, text):
    with pytest.raises(InputError, match="fits no run"):
        read([three], [text])


def test_a_running_job_a_folder_without_rights_and_a_result_that_is_a_folder_are_named(tmp_path, monkeypatch):
    put(tmp_path / "good")
    (tmp_path / "running").mkdir()
    (tmp_path / "running" / "status.json").write_text('{"status": "running"}')
    (tmp_path / "odd" / "result.json").mkdir(parents=True)
    (tmp_path / "closed").mkdir()
    put(tmp_path / "unreadable")
    scandir, opened = os.scandir, builtins.open

    def guarded(path):
        if os.fspath(path).endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    def reading(path, *args, **words):
        if "unreadable" in os.fspath(path):
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **words)

    monkeypatch.setattr(os, "scandir", guarded)  # for root no folder is closed
    monkeypatch.setattr(module, "open", reading, raising=False)
    found = read([tmp_path])
    assert folders_of(found) == ["good"]
    assert reasons(found) == {
        "closed": "cannot be opened (Permission denied)",
        "odd": "result.json is not a file",
        "running": "no result yet: still running, or killed",
        "unreadable": "result.json cannot be read (Permission denied)",
    }


@pytest.mark.parametrize("value", [[], {}, 5])
def test_an_arm_of_a_wrong_shape_is_named(tmp_path, value):
    made = result()
    made["config"]["precision"]["autocast_dtype"] = value
    put(tmp_path / "bad", made)
    assert reasons(read([tmp_path])) == {"bad": "result.json is damaged: it holds values of a wrong type"}


def test_odd_characters_of_names_and_folders_are_made_fit_to_be_written(tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    made = result("fp16") | {"arm": "fp16\ud800\n[x]"}
    made["config"]["name"] = "a\x1b[31m\u2028b"
    put(Path(folder), made)
    (run,) = read([tmp_path]).runs
    assert (run.arm, run.name) == ("fp16\\ud800 [x]", "a [31m b")
    assert run.folder.endswith("/\\udcff")


def test_a_run_without_a_name_is_called_by_its_model_and_data(tmp_path):
    made = result()
    made["config"]["name"] = None
    put(tmp_path / "0", made)
    assert read([tmp_path]).runs[0].name == "mlp on digits"


def test_nothing_but_results_is_opened(tmp_path, monkeypatch):
    put(tmp_path / "a")
    (tmp_path / "a" / "metrics.jsonl").write_text('{"train/step": ')  # cut short, and of no concern
    names = []
    opened = builtins.open
    monkeypatch.setattr(
        module, "open", lambda path, *rest: names.append(os.path.basename(path)) or opened(path, *rest), raising=False
    )
    monkeypatch.setattr("pathlib.Path.read_text", None)
    assert len(read([tmp_path]).runs) == 1
    assert names == ["result.json"]


@pytest.fixture
def three(tmp_path):
    put(tmp_path / "0", seed=0)
    put(tmp_path / "1", arm="bf16", seed=1, machine=H100)
    made = result(seed=2, status="diverged")
    made["config"]["model"] = {"_target_": "precision_lab.models.CNN", "widths": [16, 32]}
    made["config"]["optimizer"]["lr"] = 0.5
    put(tmp_path / "2", made)
    return tmp_path


@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        (["seed=0"], ["0"]),
        (["seed=0,2"], ["0", "2"]),
        (["precision=bf16"], ["1"]),
        (["arm=fp32"], ["0", "2"]),
        (["model=cnn"], ["2"]),
        (["model.widths=[16,32]"], ["2"]),
        (["model.widths=[16, 32]"], ["2"]),
        (["optimizer.lr=0.5"], ["2"]),
        (["optimizer.lr=5e-1"], ["2"]),
        (["status=diverged"], ["2"]),
        (["device=cuda"], ["1"]),
        (["hardware=Made-up Xeon"], ["0", "2"]),
        (["fingerprint.threads=8"], ["1"]),
        (["versions.torch=2.14.1", "seed=1"], ["1"]),
        (["device.compile=false", "trainer.epochs=null"], ["0", "1", "2"]),
        (["arm=fp32", "seed=0,1"], ["0"]),
    ],
)
def test_where_chooses_by_short_name_or_by_any_key(three, where, chosen):
    assert folders_of(read([three], where)) == chosen


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("seed", "--where seed is not a condition; write key=value, such as seed=0,1 or model=cnn."),
        ("=5", "--where =5 is not a condition; write key=value, such as seed=0,1 or model=cnn."),
        ("seed=7", "--where seed=7 fits no run; there is seed=0, 1, 2."),
        ("trainer.stepz=5", "--where trainer.stepz=5: no run has the key trainer.stepz; did you mean trainer.steps?"),
        ("zzz=5", "--where zzz=5: no run has the key zzz; short names are arm, precision, model, dataset, seed, "
                  "status, name, device, hardware, host."),
    ],
)  # fmt: skip
def test_a_condition_that_cannot_fit_is_refused(three, where, sentence):
    with pytest.raises(InputError) as refused:
        read([three], [where])
    assert str(refused.value) == sentence


@pytest.mark.parametrize("name", ["missing", "n" * 300])
def test_a_folder_that_is_none_is_refused(tmp_path, name):
    with pytest.raises(InputError, match="not a folder; name one that holds runs"):
        read([tmp_path / name])


def test_conditions_that_fit_no_run_together_are_refused(three):
    with pytest.raises(InputError, match=r"No run fits all of seed=0 and model=cnn\."):
        read([three], ["seed=0", "model=cnn"])
