"""A saved view of a W&B project: what stands in it is said here, as plain values; W&B's library writes and saves it.

Metrics are named as W&B has them: `val/loss_fp32` over the steps, `final/perf_step_ms_p50` at a run's end. No torch;
wandb and wandb_workspaces are imported when a view is saved.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from precision_lab.errors import InputError
from precision_lab.tracking import server

NAME = "Precision"
STEP = "train/step"
# Fragments of killed runs are not shown: mirror.py makes whole runs of them, which take their place.
JOB_TYPES, HIDDEN_STATE = ("train", "benchmark", "compare"), "crashed"
MOST_RUNS = 100  # that W&B draws in one grouped chart
COLUMNS = ("config:precision", "config:device_name", "summary:status", "summary:final/val_loss_fp32")


@dataclass(frozen=True)
class Panel:
    """`kind` is line (over the steps), bar (at the end), table or pictures.

    `by` is the config key that runs are grouped by; of a group the `shown` is drawn, with a band of what `band` says.
    """

    kind: str
    title: str
    metrics: tuple[str, ...]
    by: str | None = None
    shown: str | None = None
    band: str | None = None
    log: bool = False


@dataclass(frozen=True)
class Section:
    """Panels under one heading."""

    name: str
    panels: tuple[Panel, ...]


RATIOS = ("benchmark/speed_ratio_tf32", "benchmark/speed_ratio_bf16", "benchmark/speed_ratio_fp16")


def _lines(title: str, metric: str, shown: str = "mean", band: str = "stddev", log: bool = False) -> Panel:
    return Panel("line", title, (metric,), "precision", shown, band, log)


def _bars(title: str, metric: str) -> Panel:
    return Panel("bar", title, (f"final/{metric.replace('/', '_')}",), "precision_on_device", "mean", "minmax")


SECTIONS = (
    Section(
        "Comparison",
        (
            Panel("table", "Arms: mean, sd, n and intervals, from scripts/compare.py --wandb", ("arms",)),
            Panel(
                "pictures",
                "Its charts",
                ("charts/1_speed_ratio", "charts/1_memory_by_kind", "charts/1_validation_loss_difference"),
            ),
        ),
    ),
    Section(
        "Loss by precision",
        (
            _lines("Validation loss in float32", "val/loss_fp32"),
            _lines("Validation loss in the arm's precision", "val/loss"),
            _lines("Training loss", "train/loss"),
        ),
    ),
    Section(
        "Speed by precision and hardware",
        (
            _bars("Step time in ms (median)", "perf/step_ms_p50"),
            _bars("Samples per second", "perf/samples_per_s"),
            _bars("Share of the step that waits for data", "perf/data_wait_share"),
            Panel(
                "bar", "Speed ratio to the reference arm, timed in alternation", RATIOS, "device_name", "mean", "minmax"
            ),
        ),
    ),
    Section(
        "Memory by precision and hardware",
        (
            _bars("Peak allocated in GiB", "mem/peak_allocated_gib"),
            _bars("Saved activations in MiB", "mem/saved_activations_mib"),
        ),
    ),
    Section(
        "Scaler health",
        (
            _lines("Loss scale", "amp/loss_scale", "mean", "minmax", log=True),
            _lines("Skipped steps", "amp/skipped_steps", "max", "minmax"),
            _lines("Steps that were not finite", "amp/nonfinite_steps", "max", "minmax"),
            _lines("Gradient norm, before clipping", "train/grad_norm", "mean", "minmax", log=True),
        ),
    ),
)


def structure(group: str | None) -> Iterator[str]:
    """The view in words, a line each, indented by depth."""
    yield f"view: {NAME}" + (f", {group}" if group else "")
    yield f"  runs: job type {', '.join(JOB_TYPES)}; state not {HIDDEN_STATE}" + (f"; group {group}" if group else "")
    yield f"  columns: {', '.join(COLUMNS)}; the newest first"
    for section in SECTIONS:
        yield f"  section: {section.name}"
        for panel in section.panels:
            yield f"    {panel.kind}: {panel.title}"
            what = f"      {', '.join(panel.metrics)}"
            if panel.by:
                over = f" over {STEP}" if panel.kind == "line" else ""
                what += f"{over}, by {panel.by}: {panel.shown}, {panel.band}" + ", log scale" * panel.log
            yield what


def workspace(entity: str, project: str, group: str | None) -> Any:
    """W&B's own object of it."""
    import wandb_workspaces.expr as expr
    import wandb_workspaces.workspaces as ws

    filters = [expr.Metric("JobType").isin(list(JOB_TYPES)), expr.Metric("State") != HIDDEN_STATE]
    filters += [expr.Metric("Group") == group] if group else []
    newest = expr.Ordering(expr.Metric("CreatedTimestamp"), ascending=False)
    return ws.Workspace(
        entity=entity,
        project=project,
        name=f"{NAME}, {group}" if group else NAME,
        sections=[
            ws.Section(name=section.name, panels=[_panel(panel) for panel in section.panels], is_open=True)
            for section in SECTIONS
        ],
        settings=ws.WorkspaceSettings(x_axis=STEP, max_runs=MOST_RUNS),
        runset_settings=ws.RunsetSettings(filters=expr.And(*filters), order=[newest], pinned_columns=list(COLUMNS)),
        auto_generate_panels=False,
    )


def _panel(panel: Panel) -> Any:
    import wandb_workspaces.reports.v2 as wr

    if panel.kind == "table":
        return wr.WeavePanelSummaryTable(table_name=panel.metrics[0])
    if panel.kind == "pictures":
        return wr.MediaBrowser(title=panel.title, media_keys=list(panel.metrics))
    both = {
        "title": panel.title,
        "groupby": wr.Config(panel.by),
        "groupby_aggfunc": panel.shown,
        "groupby_rangefunc": panel.band,
        "max_runs_to_show": MOST_RUNS,
    }
    if panel.kind == "line":
        return wr.LinePlot(x=STEP, y=list(panel.metrics), log_y=panel.log, **both)
    return wr.BarPlot(metrics=[wr.SummaryMetric(name) for name in panel.metrics], **both)


def save(entity: str | None, project: str, group: str | None, over: str | None = None) -> str | None:
    """Save the view, in the place of the one at the address `over` if that is given; return its address.

    None, with nothing done, where there is no login. InputError where the server does not take it.
    """
    wandb = server.loaded()
    try:
        try:
            api = wandb.Api()
        except wandb.errors.UsageError:
            return None
        owner = entity or api.default_entity
        made = workspace(owner, project, group)
        return (made if over is None else _in_place_of(over, made)).save().url
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"The view cannot be saved: {server.why(entity or '?', project, error)}") from error
    finally:
        server.close(wandb)


def _in_place_of(address: str, made: Any) -> Any:
    """The view saved before under that address, with all that `made` has."""
    import wandb_workspaces.workspaces as ws

    place = f"{made.entity}/{made.project}"
    try:
        known = ws.Workspace.from_url(address)
    except ValueError as error:  # no address, or one of nothing
        raise InputError(f"--view {address} is no saved view of {place}; name the address that was printed.") from error
    if f"{known.entity}/{known.project}" != place:
        raise InputError(f"--view {address} is no view of the project {place}.")
    for name in ("name", "sections", "settings", "runset_settings"):
        setattr(known, name, getattr(made, name))
    return known
