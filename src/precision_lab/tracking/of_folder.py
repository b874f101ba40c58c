"""The W&B run of one folder of ours, filled while the folder is, or later from what lies in it. No torch.

`wandb.json` in the folder says under which id W&B has it, whether it has all of it, and which earlier W&B runs of the
folder it takes the place of. Every attempt has an id of its own: two under one leave two fragments.
"""

import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from precision_lab.config import Extra, WandbConfig, WandbMode
from precision_lab.folders import ATTEMPTS, LEDGER, read_json
from precision_lab.recorder import CannotWrite, write_whole
from precision_lab.sizes import MIB
from precision_lab.tracking.mirror import Mirror, run_id

RECORD = "result_json"  # the summary's key for the text of result.json or benchmark.json: all that a comparison needs
UPLOAD_S = 600  # that a checkpoint may take
ALERTED = {"diverged", "failed", "out_of_memory"}


@dataclass(frozen=True)
class Ledger:
    """What W&B has of a folder. `lines` are those of metrics.jsonl, `status` the run's when it was closed."""

    id: str | None = None
    mode: str | None = None
    whole: bool = False
    lines: int = 0
    status: str | None = None
    url: str | None = None
    replaces: list[str] = field(default_factory=list)  # ids


def ledger_of(folder: Path) -> Ledger:
    """What wandb.json says; nothing where there is none, or a damaged one."""
    told, empty = read_json(folder / LEDGER), asdict(Ledger())
    with suppress(TypeError):
        made = Ledger(**{key: told[key] for key in empty if key in told})
        ids = [made.id, *made.replaces]
        texts = all(isinstance(one, str | None) for one in [*ids, made.status])
        if texts and isinstance(made.lines, int) and isinstance(made.replaces, list):
            return made
    return Ledger()


def memory_rows(result: dict[str, Any]) -> list[list[Any]]:
    """(phase, kind, MiB) of what a run's peak was made of, as far as its result tells."""
    memory = result.get("memory")
    return [[memory["phase"], kind, nbytes / MIB] for kind, nbytes in memory["by_kind"].items()] if memory else []


class FolderMirror:
    """Writes it. No failure stops anything: `state` is the mode of W&B, or `degraded`."""

    record, held = "result.json", "the run folder"  # the file that tells all of the folder, and what it is in words

    def __init__(self, folder: Path, outputs: Path, asked: WandbConfig, slack: float = 1, **words: Any):
        """`words` are name, job_type, group, tags and config, and W&B's settings; its files go to `outputs`/wandb.

        The ledger has the id before W&B has: whenever it ends, what W&B began is known.
        """
        self.folder, self.outputs, self.asked = folder, outputs, asked
        earlier = ledger_of(folder)
        replaces = [*earlier.replaces, *([earlier.id] if earlier.id else [])]
        place = folder.relative_to(outputs).as_posix() if folder.is_relative_to(outputs) else folder.name
        config = words.pop("config") | {"folder": place, "replaces": replaces, "job_type": words.get("job_type")}
        upload_s = UPLOAD_S if Extra.checkpoint in asked.extras else 0
        complete = f"{self.held} is complete, and scripts/mirror.py makes up for it"
        own = None if asked.mode is WandbMode.disabled else run_id(words["name"])
        self.ledger = Ledger(own, asked.mode.name, replaces=replaces)
        if own or replaces:  # what W&B had of the folder is not what it holds any more
            self._keep()
        self.mirror = Mirror(asked, outputs, slack, upload_s, complete, id=own, config=config, **words)
        if self.mirror.id:
            self.ledger = replace(self.ledger, id=self.mirror.id, url=self.mirror.url)
            self._keep()

    @property
    def state(self) -> str:
        """The mode, or `degraded`."""
        return self.mirror.state

    def log(self, line: dict[str, Any]) -> None:
        """Take one log point as metrics.jsonl has it."""
        self.mirror.log(line)
        self.ledger = replace(self.ledger, lines=self.ledger.lines + 1)

    def figures(self, told: dict[str, Any]) -> dict[str, Any]:
        """What of the record runs are filtered and sorted by."""
        return told.get("summary", {})

    def shortened(self, told: dict[str, Any]) -> dict[str, Any]:
        """The record as W&B takes it."""
        return told

    def finish(self, status: str, reason: str | None, late: bool = False) -> None:
        """Hand over the folder's record and what else was asked for, and close. Nobody is alerted of what is `late`."""
        summary: dict[str, Any] = {}
        told = read_json(self.folder / self.record)
        if told:
            summary = {**self.figures(told), RECORD: json.dumps(self.shortened(told), separators=(",", ":"))}
        self._hand_over_extras(told)
        if status in ALERTED and Extra.alert in self.asked.extras and not late:
            self.mirror.alert(f"{self.folder.name}: {status}", reason or status)
        self.mirror.finish(status, reason, summary)
        if self.mirror.id and self.state != "degraded":
            self.ledger = replace(self.ledger, whole=True, status=status)
            self._keep()
            self._set_aside_what_is_replaced()

    def abandon(self, status: str, reason: str | None) -> None:
        """Close what nothing came of: the folder's own run is as it was, and W&B does not have it whole."""
        self.mirror.finish(status, reason, {})

    def _hand_over_extras(self, told: dict[str, Any]) -> None:
        extras, name = self.asked.extras, self.mirror.id
        if Extra.memory in extras and (rows := memory_rows(told)):
            self.mirror.table("memory_at_peak", ["phase", "kind", "mib"], rows)
        op_map = read_json(self.folder / "probe" / "op_map.json")
        if Extra.op_map in extras and _is_table(op_map.get("columns"), op_map.get("rows")):
            self.mirror.table("op_map", op_map["columns"], op_map["rows"])
        if Extra.config in extras and (path := self.folder / "config.yaml").is_file():
            self.mirror.artifact(f"config-{name}", "config", path)
        if Extra.checkpoint in extras and (last := sorted(self.folder.glob("checkpoints/step_*.pt"))):
            self.mirror.artifact(f"checkpoint-{name}", "checkpoint", last[-1])

    def _keep(self) -> None:
        with suppress(CannotWrite):  # a full disk is for the run to tell
            write_whole(self.folder / LEDGER, json.dumps(asdict(self.ledger), indent=2) + "\n")

    def _set_aside_what_is_replaced(self) -> None:
        """W&B's files of earlier runs of the folder go to its `attempts/wandb`, so that nothing is uploaded twice."""
        kept = self.folder / ATTEMPTS / "wandb"
        ends = tuple(f"-{one}" for one in self.ledger.replaces)
        with suppress(OSError):
            for path in list((self.outputs / "wandb").iterdir()) if ends else []:
                if path.name.endswith(ends) and path.is_dir() and not path.is_symlink():
                    kept.mkdir(parents=True, exist_ok=True)
                    shutil.move(path, kept / path.name)


def _is_table(columns: Any, rows: Any) -> bool:
    return (
        isinstance(columns, list)
        and isinstance(rows, list)
        and all(isinstance(row, list) and len(row) == len(columns) for row in rows)
    )
