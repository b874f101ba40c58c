"""scripts/publish.py: the saved view, panel by panel, and what a login, a server or the lack of them makes of it."""

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from precision_lab.config import ROOT
from precision_lab.recorder import METRICS
from precision_lab.report.to_wandb import TABLE
from precision_lab.tracking import view
from wandb_project import Handler, Server

BASE = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
KEY = {"WANDB_API_KEY": "0123456789" * 4}
STRUCTURE = """\
view: Precision
  runs: job type train, benchmark, compare; state not crashed
  columns: config:precision, config:device_name, summary:status, summary:final/val_loss_fp32; the newest first
  section: Comparison
    table: Arms: mean, sd, n and intervals, from scripts/compare.py --wandb
      arms
    pictures: Its charts
      charts/1_speed_ratio, charts/1_memory_by_kind, charts/1_validation_loss_difference
  section: Loss by precision
    line: Validation loss in float32
      val/loss_fp32 over train/step, by precision: mean, stddev
    line: Validation loss in the arm's precision
      val/loss over train/step, by precision: mean, stddev
    line: Training loss
      train/loss over train/step, by precision: mean, stddev
  section: Speed by precision and hardware
    bar: Step time in ms (median)
      final/perf_step_ms_p50, by precision_on_device: mean, minmax
    bar: Samples per second
      final/perf_samples_per_s, by precision_on_device: mean, minmax
    bar: Share of the step that waits for data
      final/perf_data_wait_share, by precision_on_device: mean, minmax
    bar: Speed ratio to the reference arm, timed in alternation
      benchmark/speed_ratio_tf32, benchmark/speed_ratio_bf16, benchmark/speed_ratio_fp16, by device_name: mean, minmax
  section: Memory by precision and hardware
    bar: Peak allocated in GiB
      final/mem_peak_allocated_gib, by precision_on_device: mean, minmax
    bar: Saved activations in MiB
      final/mem_saved_activations_mib, by precision_on_device: mean, minmax
  section: Scaler health
    line: Loss scale
      amp/loss_scale over train/step, by precision: mean, minmax, log scale
    line: Skipped steps
      amp/skipped_steps over train/step, by precision: max, minmax
    line: Steps that were not finite
      amp/nonfinite_steps over train/step, by precision: max, minmax
    line: Gradient norm, before clipping
      train/grad_norm over train/step, by precision: mean, minmax, log scale
"""


def publish(*words, home, timeout=60, **environment):
    """(exit code, stdout, stderr); no login of whoever runs the tests is seen."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "publish.py"), *words],
        env=BASE | {"PYTHONPATH": str(ROOT / "src"), "HOME": str(home), "NETRC": str(home / "netrc")} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return done.returncode, done.stdout, done.stderr


# --- the structure ---------------------------------------------------------------------------------


def test_without_a_login_it_prints_the_structure(tmp_path):
    code, out, err = publish(home=tmp_path)
    said = "\nnot saved: there is no W&B login here. Run `wandb login`, or set WANDB_API_KEY.\n"
    assert (code, out, err) == (0, STRUCTURE + said, "")


def test_every_metric_of_the_view_is_one_that_runs_record():
    panels = [panel for section in view.SECTIONS for panel in section.panels]
    for panel in panels:
        if panel.kind == "line":
            assert set(panel.metrics) <= set(METRICS), panel
        elif panel.kind == "bar":
            names = [name.removeprefix("final/").replace("_", "/", 1) for name in panel.metrics]
            assert set(names) <= set(METRICS) or panel.metrics == view.RATIOS, panel
    assert view.STEP in METRICS
    assert [panel.metrics for panel in panels if panel.kind == "table"] == [(TABLE,)]


def test_charts_of_the_view_are_those_that_a_comparison_hands_over(of_fleet):
    from precision_lab.report.charts import charts_of
    from precision_lab.report.drawing import arm_key

    _, comparisons = of_fleet
    looks = {row.arm: arm_key(n, row.arm) for n, row in enumerate(comparisons[0].rows)}
    drawn, _ = charts_of(comparisons[0], looks)
    (pictures,) = [panel for section in view.SECTIONS for panel in section.panels if panel.kind == "pictures"]
    assert set(pictures.metrics) <= {f"charts/1_{chart.name}" for chart in drawn}


def spec_of(group=None):
    """What W&B would be sent, as plain values."""
    model = view.workspace("team", "project", group)._to_model()
    return json.loads(model.spec.model_dump_json(by_alias=True, exclude_none=True))


def panels_of(spec):
    """(section, kind, metrics, key grouped by, aggregation, band, log scale) of each panel."""
    found = []
    for section in spec["section"]["panelBankConfig"]["sections"]:
        for panel in section["panels"]:
            config = panel["config"]
            grouped = [config.get(key) for key in ("groupBy", "groupAgg", "groupArea", "yLogScale")]
            found.append((section["name"], panel["viewType"], config.get("metrics"), *grouped))
    return found


def test_what_is_sent_is_what_is_printed():
    drawn = {"line": "Run History Line Plot", "bar": "Bar Chart", "table": "Weave", "pictures": "Media Browser"}
    expected = []
    for section in view.SECTIONS:
        for panel in section.panels:
            grouped = [panel.by and f"{panel.by}.value", panel.shown, panel.band]
            metrics = {
                "line": list(panel.metrics),
                "bar": [f"summary_metrics.{name}" for name in panel.metrics],
            }.get(panel.kind)
            log = panel.log if panel.kind == "line" else None
            expected.append((section.name, drawn[panel.kind], metrics, *grouped, log))
    spec = spec_of()
    assert panels_of(spec) == expected
    text = json.dumps(spec)
    assert '"val": "arms"' in text  # what the table's query picks
    assert "charts/1_speed_ratio" in text
    (runset,) = spec["section"]["runSets"]
    filters = json.dumps(runset["filters"])
    assert all(f'"{name}"' in filters for name in ("jobType", "train", "benchmark", "compare", "state", "crashed"))
    assert "demo-1405e615" not in text
    assert "demo-1405e615" in json.dumps(spec_of("demo-1405e615")["section"]["runSets"])


# --- with a login -------------------------------------------------------------------------------------


class Views(Handler):
    """Takes views: `server.saved` are the variables of each, under a name that it had or gets."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault, variables = self.server.fault, asked.get("variables")
        if "viewer" in asked["query"]:
            return self.send({"data": {"viewer": {"id": "1", "entity": "me", "username": "me", "flags": "{}"}}})
        if fault:
            return fault(self)
        if "UpsertView2" in asked["query"]:
            self.server.saved.append(variables)
            kept = {"id": variables.get("id") or "Vmlldzox", "name": variables["name"]}
            return self.send({"data": {"upsertView": {"view": kept, "inserted": True}}})
        assert "allViews" in asked["query"], asked["query"]
        known = [one for one in self.server.saved if one["name"] == variables["viewName"]]
        nodes = [{"id": "Vmlldzox", "displayName": one["displayName"], "spec": one["spec"]} for one in known[-1:]]
        return self.send({"data": {"project": {"allViews": {"edges": [{"node": node} for node in nodes]}}}})


@contextmanager
def serving(fault=None):
    with Server([], fault) as server:
        server.RequestHandlerClass, server.saved = Views, []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_with_a_login_it_is_saved_and_may_be_saved_over(tmp_path):
    with serving() as server:
        code, out, err = publish("--entity", "team", "--project", "project", home=tmp_path, **server.environment)
        assert (code, err) == (0, "")
        assert out.startswith(STRUCTURE)
        address = out.removeprefix(STRUCTURE).removeprefix("\nsaved: ").strip()
        assert address.startswith(f"{server.environment['WANDB_BASE_URL']}/team/project?nw=")
        (first,) = server.saved
        assert (first["entityName"], first["projectName"], first["displayName"]) == ("team", "project", "Precision")
        assert panels_of(json.loads(first["spec"])) == panels_of(spec_of())
        words = ["--entity", "team", "--project", "project", "--view", address, "--group", "demo-1405e615"]
        code, out, err = publish(*words, home=tmp_path, **server.environment)
        assert (code, err) == (0, "")
        assert out.endswith(f"\nsaved: {address}\n")
        second = server.saved[1]
    assert (second["id"], second["name"]) == ("Vmlldzox", first["name"])
    assert second["displayName"] == "Precision, demo-1405e615"
    assert "demo-1405e615" in second["spec"]


def test_the_login_s_own_entity_is_the_default_and_a_dry_run_saves_nothing(tmp_path):
    with serving() as server:
        code, out, err = publish("--dry-run", home=tmp_path, **server.environment)
        assert (code, out, err) == (0, STRUCTURE, "")
        assert server.saved == []
        publish(home=tmp_path, **server.environment, WANDB_PROJECT="night")
        assert [(one["entityName"], one["projectName"]) for one in server.saved] == [("me", "night")]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda handler: handler.send({"errors": [{"message": "permission denied"}]}), "permission denied"),
        (lambda handler: handler.send({"data": None}), "The view cannot be saved: "),
        (lambda handler: handler.send(b"<html>"), "The view cannot be saved: "),
    ],
)
def test_a_server_that_refuses_is_one_sentence(tmp_path, fault, said):
    with serving(fault) as server:
        code, out, err = publish("--entity", "team", home=tmp_path, **server.environment)
    assert (code, out) == (2, STRUCTURE)
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("listens", [True, False])
def test_a_server_that_is_not_there_is_one_sentence(tmp_path, listens):
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        if listens:
            place.listen(5)  # and never answers
        url = f"http://127.0.0.1:{place.getsockname()[1]}"
        more = {"WANDB_BASE_URL": url, "WANDB_HTTP_TIMEOUT": "3"}
        code, out, err = publish("--entity", "team", home=tmp_path, **KEY, **more)
    assert (code, out) == (2, STRUCTURE)
    assert err == (
        "precision-lab: The view cannot be saved: its server does not answer. WANDB_BASE_URL says which one it is, "
        "WANDB_HTTP_TIMEOUT how long to wait.\n"
    )


def test_a_view_of_another_project_is_refused(tmp_path):
    with serving() as server:
        address = f"{server.environment['WANDB_BASE_URL']}/other/project?nw=abc"
        server.saved.append({"name": "nw-abc-v", "displayName": "x", "spec": json.dumps(spec_of())})
        words = ["--entity", "team", "--project", "project", "--view", address]
        code, _, err = publish(*words, home=tmp_path, **server.environment)
    assert (code, err) == (2, f"precision-lab: --view {address} is no view of the project team/project.\n")


@pytest.mark.parametrize("address", ["", "rubbish", "http://127.0.0.1/team/project?nw=unknown"])
def test_an_address_of_no_view_is_refused(tmp_path, address):
    with serving() as server:
        words = ["--entity", "team", "--project", "project", "--view", address]
        code, _, err = publish(*words, home=tmp_path, **server.environment)
        assert server.saved == []
    said = f"precision-lab: --view {address} is no saved view of team/project; name the address that was printed.\n"
    assert (code, err) == (2, said)


def test_a_project_that_can_be_none_is_refused(tmp_path):
    code, out, err = publish("--project", "a/b", home=tmp_path)
    assert (code, out) == (2, "")
    assert "is no name of a project" in err
