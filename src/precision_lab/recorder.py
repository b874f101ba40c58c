"""What a run leaves behind: metrics.jsonl, status.json, environment.json, result.json. No torch.

Local files are the truth. Every file but metrics.jsonl is written whole and renamed into place, so
that a reader never sees half of one; metrics.jsonl gets one whole line a log point, and a resumed run cuts it back
to where its checkpoint was made.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import platform
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from precision_lab.errors import InputError
from precision_lab.redaction import redact

SCHEMA_VERSION = 1
STATUSES = ("running", "completed", "diverged", "out_of_memory", "failed", "interrupted")


@dataclass(frozen=True)
class Metric:
    """What a recorded number is in, and whether less or more of it is better (None: neither)."""

    unit: str
    better: str | None  # "lower" | "higher" | None


# Every metric there is. The unit stands in the name where it has one; GiB = 2^30 bytes, MiB = 2^20.
METRICS = {
    "train/loss": Metric("nats", "lower"),
    "train/step": Metric("steps attempted", None),
    "train/lr": Metric("1", None),
    "train/spike_score": Metric("share of steps whose loss lies 7 sd above the mean of those before", "lower"),
    "train/grad_norm": Metric("1, before clipping, after unscaling", None),
    "val/loss": Metric("nats, in the arm's precision", "lower"),
    "val/loss_fp32": Metric("nats, same weights in IEEE float32", "lower"),
    "val/accuracy": Metric("share", "higher"),
    "perf/step_ms_p50": Metric("ms", "lower"),
    "perf/step_ms_p95": Metric("ms", "lower"),
    "perf/elapsed_s": Metric("s by the wall clock that the run has taken, the time between attempts left out", None),
    "perf/unix_s": Metric("s since 1970, at the log point", None),
    "perf/measured_steps": Metric("steps that the step times are of", None),
    "perf/samples_per_s": Metric("samples/s", "higher"),
    "perf/data_wait_share": Metric("share of the step time the host waited for data", "lower"),
    "mem/peak_allocated_gib": Metric("GiB", "lower"),
    "mem/peak_reserved_gib": Metric("GiB", "lower"),
    "mem/saved_activations_mib": Metric("MiB kept for backward", "lower"),
    "mem/saved_weight_casts_mib": Metric("MiB of low-precision parameter copies kept for backward", "lower"),
    "amp/loss_scale": Metric("1", None),
    "amp/skipped_steps": Metric("steps", "lower"),
    "amp/nonfinite_steps": Metric("steps", "lower"),
    "range/activation_headroom_fp16": Metric("largest activation / 65504, in float32", "lower"),
    "range/gradient_headroom_fp16": Metric("largest gradient times the loss scale / 65504, in float32", "lower"),
    "range/gradient_flushed_fp16": Metric("share of the scaled gradients that float16 makes zero", "lower"),
    "range/nonfinite_values": Metric("activations and gradients that are not finite in float32", "lower"),
    "range/lost_updates": Metric("share of the weights with a gradient that the step left unchanged", "lower"),
    "range/lost_updates_bf16": Metric("share of the updates that weights held in bfloat16 would lose", "lower"),
    "energy/joules_per_sample": Metric("J", "lower"),
}


def metrics_of(task: Any) -> dict[str, Metric]:
    """`val/<name>` for what a task says it measures: `metrics = {"mae": ("dollars", "lower")}`."""
    try:
        stated = {f"val/{name}": Metric(unit, better) for name, (unit, better) in getattr(task, "metrics", {}).items()}
        if all(metric.better in ("lower", "higher", None) for metric in stated.values()):
            return stated
    except (TypeError, ValueError, AttributeError):  # not a mapping of names to pairs
        pass
    raise InputError('task: metrics must be like {"mae": ("dollars", "lower")}, with lower, higher or None.')


class CannotWrite(Exception):
    """A file of a run's folder cannot be written: the text is a sentence for the reader."""

    def __init__(self, path: Path, error: OSError):
        self.strerror = error.strerror or str(error)
        super().__init__(f"{path} cannot be written ({self.strerror}).")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """An OSError from what is done to `path` becomes CannotWrite."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(path, error) from error


class Recorder:
    """Writes one run folder. Raises CannotWrite where that is not possible, and leaves what was written as it was."""

    def __init__(self, folder: Path, secrets: list[str]):
        """`folder` must exist; `secrets` are the texts never to be written.

        `metrics` may be given what a task measures, with its unit and better direction.
        """
        self.folder = folder
        self.metrics = dict(METRICS)
        self._secrets = secrets
        self._started = time.time()
        self._elapsed_before = 0.0  # by earlier attempts

    def config(self, values: dict[str, Any]) -> None:
        self._write("config.yaml", yaml.safe_dump(self._clean(values), sort_keys=False, allow_unicode=True))

    def environment(self, values: dict[str, Any]) -> None:
        self._write_json("environment.json", values)

    def status(self, status: str, **details: Any) -> None:
        if status not in STATUSES:
            raise ValueError(f"{status} is not a run status")
        owner = {"host": platform.node(), "pid": os.getpid(), "started": self._started}
        self._write_json("status.json", {"status": status, **owner, "updated": time.time(), **details})

    def log(self, step: int, values: Mapping[str, float | None]) -> dict[str, float | None]:
        """Append one line and return its values. One not finite is null there, and named under `nonfinite`."""
        self.learn(values)
        self._check_names(values)
        clocks = {"perf/elapsed_s": round(self.elapsed_s(), 3), "perf/unix_s": round(time.time(), 3)}
        line = {"train/step": step, **clocks, **values}
        append(self.folder / "metrics.jsonl", (json.dumps(finite(line), allow_nan=False) + "\n").encode())
        return line

    def learn(self, names: Iterable[str]) -> None:
        """Know the metrics of validation among these, stated or not: a task measures what it likes."""
        for name in names:
            if name.startswith("val/"):
                self.metrics.setdefault(name, Metric("not stated", None))

    def elapsed_s(self) -> float:
        """Seconds that the run has taken, all its attempts together."""
        return self._elapsed_before + time.time() - self._started

    def position(self) -> dict[str, Any]:
        """Where metrics.jsonl stands, safe on the disk, for a checkpoint: what `resume` takes, and a hash of it."""
        path = self.folder / "metrics.jsonl"
        with writing(path), path.open("ab") as file:
            os.fsync(file.fileno())
            size = file.tell()
            return {"metrics_bytes": size, "metrics_hash": hash_of(path, size), "elapsed_s": self.elapsed_s()}

    def resume(self, position: dict[str, Any]) -> None:
        """Go on from a checkpoint's `position`: cut off what was recorded after it."""
        path = self.folder / "metrics.jsonl"
        with writing(path):
            os.truncate(path, position["metrics_bytes"])
        self._elapsed_before = position["elapsed_s"]

    def logged(self) -> Iterator[dict[str, Any]]:
        """What each call of `log` returned, also in earlier attempts, as metrics.jsonl holds it."""
        for text in (self.folder / "metrics.jsonl").read_text().splitlines():
            yield restored(json.loads(text))

    def best(self, before: Mapping[str, float | None], values: Mapping[str, float]) -> dict[str, float | None]:
        """The best finite values of validation up to now."""
        best = dict(before)
        for name, value in values.items():
            better = self.metrics[name].better
            if name.startswith("val/") and better and math.isfinite(value):
                best[name] = (min if better == "lower" else max)(value, best.get(name, value))
        return best

    def result(self, final: Mapping[str, float | None], best: Mapping[str, float | None], **parts: Any) -> None:
        """Write result.json: all that a comparison table needs.

        `final` and `best` are keyed by metric name; `val/loss` becomes the summary key `final/val_loss`.
        """
        self._write_json("result.json", {"schema": SCHEMA_VERSION, **parts, "summary": self.summary(final, best)})

    def summary(self, final: Mapping[str, float | None], best: Mapping[str, float | None]) -> dict[str, Any]:
        """The flat summary: `final/...` and `best/...`."""
        flat: dict[str, float | None] = {}
        for prefix, values in (("final", final), ("best", best)):
            self._check_names(values)
            flat |= {f"{prefix}/{name.replace('/', '_')}": value for name, value in values.items()}
        return finite(flat)

    def _check_names(self, values: Mapping[str, Any]) -> None:
        unknown = sorted(set(values) - set(self.metrics))
        if unknown:
            raise KeyError(f"{unknown[0]} is not declared in recorder.METRICS")

    def _write_json(self, name: str, values: dict[str, Any]) -> None:
        self._write(name, json.dumps(storable(self._clean(values)), indent=2, allow_nan=False) + "\n")

    def _write(self, name: str, text: str) -> None:
        write_whole(self.folder / name, text)

    def _clean(self, values: Any) -> Any:
        return redact(values, self._secrets)


def hash_of(path: Path, size: int) -> str:
    """Over the first `size` bytes of a file, or as many as it has: 16 hex digits of sha256."""
    with path.open("rb") as file:
        return hashlib.sha256(file.read(size)).hexdigest()[:16]


def finite(values: Mapping[str, float | None]) -> dict[str, Any]:
    """JSON has no NaN: such values become null, and `nonfinite` says which they were."""
    result: dict[str, Any] = {}
    nonfinite = {}
    for key, value in values.items():
        bad = isinstance(value, float) and not math.isfinite(value)
        result[key] = None if bad else value
        if bad:
            nonfinite[key] = str(value)
    return result | ({"nonfinite": nonfinite} if nonfinite else {})


def restored(line: Mapping[str, Any]) -> dict[str, Any]:
    """What `finite` made a line of metrics.jsonl of, NaN and infinity as such."""
    told = line.get("nonfinite")
    names = told if isinstance(told, dict) else ()
    bad = {name: value for name in names if (value := number_in(line, name)) is not None}
    return {name: value for name, value in line.items() if name != "nonfinite"} | bad


def number_in(values: Mapping[str, Any], key: str) -> float | None:
    """The number that `finite` stored under a key, NaN and infinity as such; None if there is none."""
    value, nonfinite = values.get(key), values.get("nonfinite")
    if value is None and isinstance(nonfinite, dict) and nonfinite.get(key) in ("nan", "inf", "-inf"):
        return float(nonfinite[key])
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    except OverflowError:  # a damaged file's whole number of a thousand digits
        return None


def storable(values: Any) -> Any:
    """The same values with a non-finite number, such as one that a config gives a class of the user's, as text."""
    if isinstance(values, dict):
        return {key: storable(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [storable(value) for value in values]
    return str(values) if isinstance(values, float) and not math.isfinite(values) else values


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that becomes `path` at the end: it is the old one or the new one, whatever happens in between.

    Raises CannotWrite. What a kill leaves has a name that begins with a dot.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CannotWrite(path, error) from error
        raise


def remove_half_written(folder: Path) -> None:
    """Remove what `written_whole` left in a run's folder where it was killed. Raises CannotWrite."""
    with writing(folder):
        for path in list(folder.rglob(".*")):
            if re.fullmatch(r"\..+\.\d+", path.name) and path.is_file():
                path.unlink()


def write_whole(path: Path, text: str) -> None:
    """Write a text as `written_whole` does."""
    with written_whole(path) as file:
        file.write(text.encode(errors="backslashreplace"))


def append(path: Path, line: bytes) -> None:
    """Append all of it or nothing: a full disk takes a part. Raises CannotWrite."""
    with writing(path), path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except BaseException:
            file.truncate(before)
            raise
