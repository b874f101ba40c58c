"""The run folder: values come back as they went in, files are never half written, secrets never written."""

import io
import json
import math
import os
import re
import shutil
import time
from pathlib import Path

import pytest
import yaml

from precision_lab import recorder
from precision_lab.recorder import METRICS, SCHEMA_VERSION, STATUSES, CannotWrite, Metric, Recorder, write_whole
from precision_lab.redaction import redact, secrets_in

SECRET = "wandb-0123456789abcdef"


@pytest.fixture
def rec(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    return Recorder(tmp_path, secrets_in(os.environ))


def lines(rec):
    return [json.loads(line) for line in (rec.folder / "metrics.jsonl").read_text().splitlines()]


def read(rec, name):
    return json.loads((rec.folder / name).read_text(), parse_constant=pytest.fail)  # NaN and Infinity are no JSON


# --- metrics.jsonl and result.json -----------------------------------------------------------


def test_a_logged_line_comes_back(rec):
    rec.log(50, {"train/loss": 0.1 + 0.2, "amp/skipped_steps": 3, "perf/step_ms_p50": None})
    rec.log(100, {"train/loss": 1e-300})
    first, second = lines(rec)
    assert first.pop("perf/elapsed_s") >= 0
    assert abs(first.pop("perf/unix_s") - time.time()) < 60
    assert first == {
        "train/step": 50,
        "train/loss": 0.30000000000000004,
        "amp/skipped_steps": 3,
        "perf/step_ms_p50": None,
    }
    assert (second["train/step"], second["train/loss"]) == (100, 1e-300)


@pytest.mark.parametrize(("value", "name"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_a_nonfinite_value_is_null_and_named(rec, value, name):
    rec.log(1, {"train/loss": value, "train/grad_norm": 2.5})
    text = (rec.folder / "metrics.jsonl").read_text()
    assert not re.search("NaN|Infinity", text)
    (line,) = lines(rec)
    assert line["train/loss"] is None
    assert line["train/grad_norm"] == 2.5
    assert line["nonfinite"] == {"train/loss": name}


def test_a_finite_line_names_nothing(rec):
    rec.log(1, {"train/loss": 1.0})
    assert "nonfinite" not in lines(rec)[0]


@pytest.mark.parametrize("name", ["train/los", "loss", "train_loss", "final/val_loss", "perf/step_ms"])
def test_an_undeclared_name_is_an_error_and_writes_nothing(rec, name):
    with pytest.raises(KeyError, match=name):
        rec.log(1, {"train/loss": 1.0, name: 2.0})
    assert not (rec.folder / "metrics.jsonl").exists()
    with pytest.raises(KeyError, match=name):
        rec.result({name: 2.0}, {})
    assert not (rec.folder / "result.json").exists()


def test_a_task_may_declare_its_own(rec):
    declared = Metric("dollars", "lower")
    rec.metrics |= {"val/mae": declared}
    rec.log(1, {"val/mae": 3.0, "val/bias": 2.0})
    assert (lines(rec)[0]["val/mae"], lines(rec)[0]["val/bias"]) == (3.0, 2.0)
    assert rec.metrics["val/mae"] is declared
    assert rec.metrics["val/bias"].better is None  # measured, and never declared
    assert not {"val/mae", "val/bias"} & set(METRICS)  # the table of all runs is left alone


def test_the_result_holds_all_parts_and_the_flat_summary(rec):
    final = {"val/loss": 0.5, "val/loss_fp32": math.nan, "mem/peak_allocated_gib": None}
    rec.result(final, {"val/loss": 0.25}, status="completed", seed=3, hashes={"data": "ab"})
    assert read(rec, "result.json") == {
        "schema": SCHEMA_VERSION,
        "status": "completed",
        "seed": 3,
        "hashes": {"data": "ab"},
        "summary": {
            "final/val_loss": 0.5,
            "final/val_loss_fp32": None,
            "final/mem_peak_allocated_gib": None,
            "best/val_loss": 0.25,
            "nonfinite": {"final/val_loss_fp32": "nan"},
        },
    }


def test_a_nonfinite_value_in_a_part_is_refused_or_null_but_never_written_as_nan(rec):
    """`config` may hold inf (device limits of a user's own): the file stays JSON."""
    rec.result({}, {}, config={"model": {"clip": math.inf}})
    assert read(rec, "result.json")["config"]["model"]["clip"] in (None, "inf")


@pytest.mark.parametrize("status", STATUSES)
def test_a_status_comes_back(rec, status):
    rec.status(status, reason="so", step=4)
    got = read(rec, "status.json")
    assert (got["status"], got["reason"], got["step"], got["pid"]) == (status, "so", 4, os.getpid())
    assert got["started"] <= got["updated"]


def test_the_statuses_are_these_and_no_others(rec):
    assert STATUSES == ("running", "completed", "diverged", "out_of_memory", "failed", "interrupted")
    with pytest.raises(ValueError, match="done is not a run status"):
        rec.status("done")
    assert not (rec.folder / "status.json").exists()


def test_the_config_comes_back(rec):
    values = {"seed": 0, "precision": {"name": "fp16", "fp32_modules": ["a"]}, "name": None, "lr": 1e-3, "ü": "ß"}
    rec.config(values)
    text = (rec.folder / "config.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text) == values
    assert list(yaml.safe_load(text)) == list(values)  # in the order given


# --- writing whole ---------------------------------------------------------------------------


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write_whole(path, "old")

    def crash(*_):
        raise OSError("power is gone")

    monkeypatch.setattr(recorder.os, "replace", crash)
    with pytest.raises(CannotWrite, match="power is gone"):
        write_whole(path, "new and longer")
    assert path.read_text() == "old"


def test_a_crash_while_writing_shows_no_half_file(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    monkeypatch.setattr(recorder.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(CannotWrite, match="disk full"):
        write_whole(path, "text")
    assert not path.exists()
    assert [p.name for p in tmp_path.glob("*.json")] == []  # nor under a name that a reader would take


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    write_whole(tmp_path / "a", "half of a character: \ud800")
    assert (tmp_path / "a").read_text() == "half of a character: \\ud800"

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CannotWrite, match="No space left"):
        write_whole(tmp_path / "a", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_file_is_complete_before_it_has_its_name(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        recorder.os, "replace", lambda source, target: seen.append((source.read_text(), target.exists()))
    )
    write_whole(tmp_path / "status.json", "all of it")
    assert seen == [("all of it", False)]


def test_writing_leaves_nothing_beside_the_file(tmp_path):
    write_whole(tmp_path / "status.json", "one")
    write_whole(tmp_path / "status.json", "two")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("status.json", "two")]


def test_a_full_disk_leaves_the_lines_before_as_they_were(rec, monkeypatch):
    rec.log(1, {"train/loss": 1.0})
    before = (rec.folder / "metrics.jsonl").read_bytes()

    class Full(io.FileIO):
        def write(self, data):
            return super().write(data[:10])

    monkeypatch.setattr(Path, "open", lambda path, mode, **_: Full(path, mode.replace("b", "")))
    with pytest.raises(CannotWrite, match=r"metrics\.jsonl cannot be written \(No space left on device\)\.$"):
        rec.log(2, {"train/loss": 2.0})
    monkeypatch.undo()
    assert (rec.folder / "metrics.jsonl").read_bytes() == before
    rec.log(3, {"train/loss": 3.0})
    assert [line["train/step"] for line in lines(rec)] == [1, 3]


def test_a_folder_that_was_removed_is_not_made_again(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    rec = Recorder(folder, [])
    rec.status("running")
    shutil.rmtree(folder)
    for write in (lambda: rec.log(1, {"train/loss": 1.0}), lambda: rec.status("completed"), lambda: rec.position()):
        with pytest.raises(CannotWrite, match="No such file or directory"):
            write()
    assert not folder.exists()


def test_a_resumed_run_cuts_off_what_came_after_its_checkpoint_and_goes_on_with_its_clock(rec):
    rec.log(1, {"train/loss": 1.0})
    place = rec.position()
    rec.log(2, {"train/loss": 2.0})
    again = Recorder(rec.folder, [])
    again.resume(place | {"elapsed_s": 100.0})
    again.log(2, {"train/loss": 2.5})
    assert [(line["train/step"], line["train/loss"]) for line in lines(rec)] == [(1, 1.0), (2, 2.5)]
    assert lines(rec)[0]["perf/elapsed_s"] < 100 <= lines(rec)[1]["perf/elapsed_s"]


# --- secrets ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    ["api_key", "apikey", "API_KEY", "wandb_api_key", "hf.token", "token", "client-secret", "password", "DB_PASSWD"]
    + ["access_key", "aws_secret_access_key", "credentials", "credential"],
)
def test_a_value_under_a_secret_key_is_redacted(key):
    assert redact({"model": {key: "abc"}}, []) == {"model": {key: "[redacted]"}}
    assert redact({key: None}, []) == {key: None}  # nothing to hide: say so


@pytest.mark.parametrize("key", ["tokens", "vocab_size", "tokenizer", "secretary", "keys", "monkey", "num_classes"])
def test_a_value_under_another_key_is_not(key):
    assert redact({key: "abc"}, []) == {key: "abc"}


def test_an_override_with_a_secret_key_is_redacted():
    """As environment.json has the command line."""
    command = ["train.py", "+model.api_key=a=b c", "++dataset.token='x'", "model.tokenizer=bpe", "name=token"]
    assert redact(command, []) == [
        *("train.py", "+model.api_key=[redacted]", "++dataset.token=[redacted]", "model.tokenizer=bpe", "name=token")
    ]


def test_a_known_secret_is_redacted_wherever_it_stands():
    values = {
        "url": f"https://user:{SECRET}@host/{SECRET}",
        "list": ["a", f"x{SECRET}y", {"deep": (SECRET, 3)}],
        "number": 3.5,
    }
    assert redact(values, [SECRET]) == {
        "url": "https://user:[redacted]@host/[redacted]",
        "list": ["a", "x[redacted]y", {"deep": ["[redacted]", 3]}],
        "number": 3.5,
    }


def test_which_environment_values_are_secrets():
    environment = {
        "WANDB_API_KEY": SECRET,
        "HF_TOKEN": "hf_abcdefgh",
        "AWS_SECRET_ACCESS_KEY": "aws-secret-value",
        "PASSWORD": "short",  # 5 letters would be cut out of innocent words
        "PATH": "/usr/bin:/bin",
        "TOKENIZERS_PARALLELISM": "false-false",
    }
    assert secrets_in(environment) == [SECRET, "hf_abcdefgh", "aws-secret-value"]


def test_which_config_values_are_secrets():
    values = {
        "model": {"api_key": "model-secret", "tokenizer": "not-a-secret", "layers": [{"hf.token": "deep-secret"}]},
        "dataset": {"password": "short", "token": 1234567890, "secret": None},
        "name": "free-text",
    }
    assert secrets_in({}, values) == ["model-secret", "deep-secret", "1234567890"]
    assert secrets_in({"HF_TOKEN": "hf_abcdefgh"}, values) == [
        "hf_abcdefgh",
        "model-secret",
        "deep-secret",
        "1234567890",
    ]


def test_a_secret_of_the_config_is_redacted_wherever_it_stands(tmp_path):
    values = {"model": {"api_key": "model-secret"}, "name": "by model-secret"}
    rec = Recorder(tmp_path, secrets_in({}, values))
    rec.config(values)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {
        "model": {"api_key": "[redacted]"},
        "name": "by [redacted]",
    }


def test_a_secret_that_holds_another_is_redacted_whole():
    assert redact("x hf_abcdefgh_and_more y", ["hf_abcdefgh", "hf_abcdefgh_and_more"]) == "x [redacted] y"


def test_no_secret_reaches_any_file(rec):
    rec.config({"model": {"url": f"s3://{SECRET}/x"}, "note": [SECRET]})
    rec.environment({"command": ["train.py", f"+model.key={SECRET}"]})
    rec.status("failed", reason=f"401 for {SECRET}")
    rec.result({}, {}, reason=f"401 for {SECRET}", config={"api_key": "other-secret"})
    rec.log(1, {"train/loss": 1.0})
    names = {path.name for path in rec.folder.iterdir()}
    assert names == {"config.yaml", "environment.json", "status.json", "result.json", "metrics.jsonl"}
    for path in rec.folder.iterdir():
        assert SECRET not in path.read_text(), path.name
        assert "other-secret" not in path.read_text(), path.name
    assert read(rec, "status.json")["reason"] == "401 for [redacted]"


# --- the table of metrics ---------------------------------------------------------------------


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_well_declared(name):
    assert re.fullmatch(r"[a-z0-9_]+/[a-z0-9_]+", name)
    assert METRICS[name].unit.strip()
    assert METRICS[name].better in ("lower", "higher", None)


def test_the_units_in_the_names_are_the_units():
    for suffix, unit in {"_ms": "ms", "_gib": "GiB", "_mib": "MiB", "_per_s": "samples/s"}.items():
        named = [name for name in METRICS if re.search(f"{suffix}(_p\\d+)?$", name)]
        assert named
        for name in named:
            assert METRICS[name].unit.startswith(unit), name


def test_the_contract_s_metrics_are_all_there():
    contract = """train/loss train/step train/lr train/grad_norm val/loss val/loss_fp32 val/accuracy
        perf/step_ms_p50 perf/step_ms_p95 perf/samples_per_s perf/data_wait_share
        mem/peak_allocated_gib mem/peak_reserved_gib mem/saved_activations_mib
        amp/loss_scale amp/skipped_steps amp/nonfinite_steps energy/joules_per_sample"""
    assert set(contract.split()) <= set(METRICS)
    directions = {name: METRICS[name].better for name in ("val/loss", "val/accuracy", "perf/samples_per_s", "train/lr")}
    assert directions == {
        "val/loss": "lower",
        "val/accuracy": "higher",
        "perf/samples_per_s": "higher",
        "train/lr": None,
    }


def test_all_that_stands_below_a_secret_key_is_a_secret():
    values = {"note": [{"token": ["first-secret", 987654321012]}, {"password": 1234512345}], "seed": 123456789}
    assert secrets_in({}, values) == ["first-secret", "987654321012", "1234512345"]


@pytest.mark.parametrize(
    ("word", "secrets"),
    [
        ("+model.hf_token=c2VjcmV0c2VjcmV0Cg==", ["c2VjcmV0c2VjcmV0Cg=="]),
        ("+model.api_key=first-key,second-key", ["first-key,second-key", "first-key", "second-key"]),
        ("+model.auth={token:91919191.12345678901234567,n:3}", ["91919191.12345678901234567"]),
        ("trainer.steps=12345678", []),
    ],
)
def test_what_an_override_gives_to_a_secret_key_is_a_secret_as_it_was_typed(word, secrets):
    assert secrets_in({}, words=[word]) == secrets


def test_a_secret_of_a_whole_dict_is_not_shown_however_short():
    assert redact("+model.cfg={api_key:abc,'token': x1, n: 3}", []) == (
        "+model.cfg={api_key:[redacted],'token': [redacted], n: 3}"
    )
    assert redact("loss {token: 3}", []) == "loss {token: 3}"  # what a job prints is no override


def test_a_known_secret_in_small_letters_is_one_too():
    assert redact("dictsecret33_digits", ["DICTSECRET33"]) == "[redacted]_digits"
