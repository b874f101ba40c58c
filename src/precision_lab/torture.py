"""Runs that are ended again and again at random moments, and whether they come out as one that was left alone.

A case is one command of train.py. It runs once undisturbed; then it is started, killed and started again until it
completes. Nothing is made up: the processes are real, and what is compared is what they leave behind.
"""

import json
import math
import random
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from precision_lab import checkpoint
from precision_lab.config import ROOT
from precision_lab.folders import read_json
from precision_lab.hashing import content_hash

MODELS = {
    "cnn": ["model=cnn", "model.widths=[8,16]", "dataset=digits", "trainer.batch_size=16"],
    "gpt": [
        *("model=gpt", "model.layers=1", "model.heads=2", "model.width=32", "model.context=16", "model.dropout=0.1"),
        *("dataset=synthetic_tokens", "dataset.samples=512", "trainer.batch_size=8"),
    ],
}
ARMS = {  # a loss scale that overflows at once, and every few steps again
    "fp32": ["precision=fp32"],
    "bf16": ["precision=bf16"],
    "fp16": ["precision=fp16", "precision.init_scale=1e9", "precision.growth_interval=5"],
}
# No interval divides another: checkpoints fall into the middle of a window, and beside evaluations.
EVERY = 7
INTERVALS = ["trainer.log_every=3", "trainer.eval_every=10", f"trainer.checkpoint_every={EVERY}"]
INTERVALS += ["trainer.accumulation=2"]
FIXED = ["device=cpu", "device.threads=1", "wandb.mode=disabled", "probe.memory=false"]
LAST_END = 0.85  # share of the steps after which no attempt is ended any more
MOMENT_S = 0.1  # within which a random moment after a step lies
STOP_S = 10.0  # within which a run that is told to stop has saved its state, after the step
PATIENCE_S = 300.0  # for an attempt
OF_THE_MACHINE = re.compile(r"((final|best)/)?(perf|mem|energy)[/_]")  # metrics that no two runs share
EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


@dataclass
class Case:
    """One command of train.py, and how often it is to be killed."""

    name: str
    words: list[str]
    kills: int
    stops: list[signal.Signals]


@dataclass
class Outcome:
    """What became of a case: how its attempts were ended, and in what it differs from the undisturbed run."""

    name: str
    kills: int = 0
    inside: int = 0  # of them, in the middle of writing a checkpoint
    stops: list[str] = field(default_factory=list)
    skipped: int = 0  # steps
    seconds: float = 0.0
    differences: list[str] = field(default_factory=list)


def cases(kills: int, steps: int) -> list[Case]:
    """Every model in every arm, with `kills` among them; every second one is told to stop as well."""
    made = []
    for model, words in MODELS.items():
        for arm, arm_words in ARMS.items():
            name = f"{model} {arm}"
            more = [f"trainer.steps={steps}", *(["trainer.workers=1"] if name == "gpt bf16" else [])]
            made.append(Case(name, [*words, *arm_words, *INTERVALS, *FIXED, *more], 0, []))
    for number, case in enumerate(made):
        case.kills = kills // len(made) + (number < kills % len(made))
        case.stops = [[signal.SIGTERM], [signal.SIGINT], []][number % 3]
    return made


def torture(case: Case, folder: Path, steps: int, seed: int) -> Outcome:
    """Run the case undisturbed and disturbed, below `folder`, and compare."""
    draw = random.Random(f"{seed}:{case.name}")
    outcome, began = Outcome(case.name), time.monotonic()
    alone = folder / "alone"
    if (code := _end_of(_start(case, alone))) != 0:
        outcome.differences.append(f"the undisturbed run ended with {code}, see {alone}")
        return outcome
    round_ = 0
    while outcome.kills < case.kills and not outcome.differences:
        round_ += 1
        stops = case.stops if round_ == 1 else []
        disturbed = folder / f"disturbed-{round_}"
        ended = _disturb(case, disturbed, steps, draw, stops, outcome)
        outcome.differences += compared(_run_in(alone), _run_in(disturbed))
        went_on = (_run_in(disturbed) / "train.log").read_text().count("goes on after step")
        if went_on != ended:
            outcome.differences.append(f"it went on from a checkpoint {went_on} times, and was ended {ended} times")
    outcome.skipped = _run_in(alone, "result.json")["summary"]["final/amp_skipped_steps"]
    outcome.seconds = time.monotonic() - began
    return outcome


# --- ending attempts -------------------------------------------------------------------------------------------


def _disturb(
    case: Case, folder: Path, steps: int, draw: random.Random, stops: list[signal.Signals], outcome: Outcome
) -> int:
    """Start the case until it completes; return how many of its attempts were ended."""
    ways = [signal.SIGKILL] * (case.kills - outcome.kills) + stops
    draw.shuffle(ways)
    # from the first checkpoint on: before it the same command begins another run
    moments = sorted(draw.randrange(EVERY, int(steps * LAST_END)) for _ in ways)
    ended = 0
    for number, (way, step) in enumerate(zip(ways, moments, strict=True)):
        process = _start(case, folder)
        inside = way is signal.SIGKILL and number % 2 == 0
        if not _ready_to_be_ended(process, folder, step, inside, draw.uniform(0, MOMENT_S)):
            break
        process.send_signal(way)
        sent = time.time()
        code = _end_of(process)
        ended += 1
        if way is signal.SIGKILL:
            outcome.kills += 1
            outcome.inside += _half_written(folder, process)
        else:
            _check_stop(way, code, sent, folder, outcome)
    else:
        process = _start(case, folder)
    if (code := _end_of(process)) != 0:
        outcome.differences.append(f"the last attempt ended with {code}, see {folder}")
    return ended


def _check_stop(way: signal.Signals, code: int, sent: float, folder: Path, outcome: Outcome) -> None:
    """`sent`: when, by the wall clock. What ends later is the interpreter, which takes torch apart."""
    told = _run_in(folder, "status.json")
    saved, ended = told.get("updated", math.inf) - sent, time.time() - sent
    outcome.stops.append(f"{way.name}: saved after {saved:.1f} s, exit code {code} after {ended:.1f} s")
    if (code, told.get("status")) != (EXIT_CODES[way], "interrupted") or saved > STOP_S:
        outcome.differences.append(f"{outcome.stops[-1]}, status {told.get('status')}")


def _start(case: Case, folder: Path) -> subprocess.Popen:
    folder.mkdir(parents=True, exist_ok=True)
    words = [*case.words, f"paths.outputs={folder}"]
    with (folder / "said.txt").open("a") as said:
        return subprocess.Popen([sys.executable, str(ROOT / "train.py"), *words], stdout=said, stderr=subprocess.STDOUT)


def _end_of(process: subprocess.Popen) -> int:
    try:
        return process.wait(PATIENCE_S)
    finally:
        process.kill()  # one that does not end


def _ready_to_be_ended(process: subprocess.Popen, folder: Path, step: int, inside: bool, seconds: float) -> bool:
    """Wait until the attempt has recorded a step of its own and has come to `step`; and then for the moment.

    False if it came to its end before.
    """
    if not _until(process, lambda: _has_begun(process, folder)):
        return False
    metrics = _run_in(folder, None) / "metrics.jsonl"
    before = metrics.stat().st_size if metrics.is_file() else 0
    if not _until(process, lambda: _has_recorded(metrics, before, step)):
        return False
    if inside:
        return _until(process, lambda: _half_written(folder, process), every_s=0.0002)
    return not _until(process, lambda: False, seconds)


def _until(process: subprocess.Popen, true: Any, timeout_s: float = PATIENCE_S, every_s: float = 0.001) -> bool:
    """Whether it came true while the process ran."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and process.poll() is None:
        if true():
            return True
        time.sleep(every_s)
    return False


def _has_begun(process: subprocess.Popen, folder: Path) -> bool:
    """Whether the attempt has taken up what there was, and trains."""
    runs = list(folder.glob("runs/*/*"))
    told = read_json(runs[0] / "status.json") if runs else {}
    return told.get("pid") == process.pid and "total_steps" in told


def _has_recorded(metrics: Path, before: int, step: int) -> bool:
    with suppress(OSError):
        text = metrics.read_bytes()
        lines = text.split(b"\n")
        return len(text) > before and text.endswith(b"\n") and json.loads(lines[-2])["train/step"] >= step
    return False


def _half_written(folder: Path, process: subprocess.Popen) -> bool:
    """Whether the process has a checkpoint that is not whole."""
    return any(folder.glob(f"runs/*/*/checkpoints/.step_*.{process.pid}"))


def _run_in(folder: Path, file: str | None = None) -> Any:
    """The only run below a folder, or what one of its JSON files holds."""
    (run,) = folder.glob("runs/*/*")
    return read_json(run / file) if file else run


# --- comparing -------------------------------------------------------------------------------------------------


def compared(alone: Path, disturbed: Path) -> list[str]:
    """In what a run that was ended and went on differs from the undisturbed one: names and both values."""
    found = [f"left behind: {path}" for path in disturbed.rglob(".*")]
    for name, of in (("checkpoint", _of_checkpoint), ("metrics.jsonl", _of_metrics), ("result.json", _of_result)):
        found += differences(of(alone), of(disturbed), name)
    return found


def _of_checkpoint(run: Path) -> dict[str, Any]:
    """All that the last checkpoint holds, but for times and where it was gone on with."""
    state = checkpoint.read(checkpoint.written_in(run)[0])
    kept = state["findings"]
    curve = [(step, loss) for step, _, loss in kept["curve"]]
    # a run that is stopped puts its spike score so far there, which its end overwrites
    final = {name: value for name, value in _timeless(kept["final"]).items() if name != "train/spike_score"}
    found = {"final": final, "best": _timeless(kept["best"]), "curve": curve}
    return {key: state[key] for key in ("about", "trainer", "batches", "generators")} | {"findings": found}


def _of_metrics(run: Path) -> list[dict[str, Any]]:
    return [_timeless(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _of_result(run: Path) -> dict[str, Any]:
    result = read_json(run / "result.json")
    keys = ("status", "step", "applied_steps", "hashes", "nonfinite")
    return {key: result[key] for key in keys} | {"summary": _timeless(result["summary"])}


def _timeless(values: dict[str, Any]) -> dict[str, Any]:
    """Without what is of the machine."""
    return {key: value for key, value in values.items() if not OF_THE_MACHINE.match(key)}


def differences(left: Any, right: Any, where: str) -> Iterator[str]:
    """Where two nested values are not the same bit for bit; a NaN is the same as itself."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in {**left, **right}:
            yield from differences(left.get(key), right.get(key), f"{where} {key}")
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        for number, pair in enumerate(zip(left, right, strict=True)):
            yield from differences(*pair, f"{where}[{number}]")
    elif _bits(left) != _bits(right):
        yield f"{where}: {_shown(left)} and {_shown(right)}"


def _bits(value: Any) -> Any:
    if isinstance(value, Tensor):
        return content_hash(value)
    return (type(value).__name__, struct.pack("<d", value) if isinstance(value, float) else value)


def _shown(value: Any) -> str:
    text = f"a tensor of {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) < 80 else f"{text[:80]}..."
