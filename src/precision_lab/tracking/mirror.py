"""One W&B run as it is written: the same numbers, never able to stop or slow training. No torch.

Imports wandb only when it is not disabled. Any failure is one warning; from then on the mirror is `degraded` and
silent. The local files are complete without it.
"""

import contextlib
import hashlib
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from precision_lab.config import WandbConfig, WandbMode
from precision_lab.tracking.patience import Worker

log = logging.getLogger("precision_lab")

# Seconds that W&B is told to keep to, and those after which it is left behind because it did not.
INIT_TIMEOUT, FINISH_TIMEOUT = 8, 8
PATIENCE = {"init": 12, "log": 5, "file": 60, "finish": 12, "teardown": 3}
# A call costs some 14 ms where W&B's process slept before, 1 ms where it did not (0.31, two cores): log points are
# handed over together, so often at most and so many at once.
SEND_EVERY_S, SEND_AT = 10, 100
TAG = 64  # characters, of which W&B refuses more, and a run with them


class Mirror:
    """One W&B run. `state` is its mode, or `degraded` once anything failed; `id` is None until it has begun."""

    def __init__(
        self,
        asked: WandbConfig,
        folder: Path,
        slack: float = 1,
        upload_s: float = 0,
        complete: str = "what was written is complete",
        settings: Mapping[str, Any] | None = None,
        **init: Any,
    ):
        """W&B's files go to `folder`/wandb, shared by all runs of a project, so that one viewer sees them all.

        `slack` times as long as usual is waited for a server, where no training has to go on, and at the end
        `upload_s` more for files. `complete` says in a warning what is there without W&B. `settings` are more of W&B's.
        An `id` among the rest is the run's, unless a sweep's server gives another.
        """
        self._settings = settings or {}
        self._complete = complete
        self.state = asked.mode.name
        self.id: str | None = None
        self.url: str | None = None
        self._finish_timeout = FINISH_TIMEOUT * slack + upload_s
        self._patience = {what: seconds * slack for what, seconds in PATIENCE.items()}
        self._patience["finish"] += upload_s
        self._wandb: Any = None  # the module, once it is imported
        self._run: Any = None
        self._worker: Worker | None = None
        self._unsent: list[dict[str, Any]] = []
        self._send_next = 0.0
        if asked.mode is WandbMode.disabled:
            return
        self._worker = Worker()
        self._try("init", lambda: self._start(asked, folder, init))

    def _start(self, asked: WandbConfig, folder: Path, init: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if os.environ.get("WANDB_MODE") == "":  # unset, to us: W&B refuses it
            del os.environ["WANDB_MODE"]
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else even offline looks up a host
        os.environ.setdefault("WANDB_SILENT", "true")  # the setting below comes too late for the login's line
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=asked.project,
            dir=str(folder),
            id=init.pop("id", None) or run_id(init["name"]),
            mode=asked.mode.name,
            reinit="finish_previous",
            settings=wandb.Settings(
                init_timeout=INIT_TIMEOUT,
                login_timeout=1,  # a prompt nobody answers
                finish_timeout=self._finish_timeout,
                finish_timeout_raises=True,
                console="off",
                silent=True,
                x_disable_meta=True,  # it holds the command line, secrets too; environment.json has it redacted
                **self._settings,
            ),
            **init | {"tags": _tags(init)},
        )
        self.id, self.url = self._run.id, self._run.url  # an agent's run has the id that its server gave
        # Our own step: W&B's restarts at 0 on a resume. Not synced: a table's row would repeat the last point's.
        self._run.define_metric("*", step_metric="train/step", step_sync=False)
        self._run.define_metric("perf/unix_s", hidden=True)

    def log(self, line: Mapping[str, Any]) -> None:
        """Take one log point as metrics.jsonl has it; W&B gets it now or with later ones, under its own time."""
        if self._worker is None:
            return
        due = time.monotonic() >= self._send_next
        self._unsent.append({"_timestamp": line.get("perf/unix_s", time.time()), **line})
        if due or len(self._unsent) >= SEND_AT:
            self._try("log", self._send)
            self._send_next = time.monotonic() + SEND_EVERY_S

    def _send(self) -> None:
        while self._unsent:
            self._run.log(self._unsent.pop(0))

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Hand over one table, a row a list of plain values."""
        self._show("log", name, lambda: self._wandb.Table(columns=columns, data=rows, allow_mixed_types=True))

    def picture(self, name: str, path: Path, caption: str | None = None) -> None:
        """Hand over an image, which W&B copies."""
        self._show("file", name, lambda: self._wandb.Image(str(path), caption=caption))

    def page(self, name: str, html: str) -> None:
        """Hand over a page, to be looked at beside the charts."""
        self._show("file", name, lambda: self._wandb.Html(html, inject=False))

    def _show(self, what: str, name: str, made: Callable[[], Any]) -> None:
        def hand_over() -> None:
            self._send()  # log points come before what was found after them
            self._run.log({name: made()})

        self._try(what, hand_over)

    def artifact(self, name: str, kind: str, path: Path, stays: bool = True) -> None:
        """Hand over a file. One that `stays` is read where it is when it is uploaded, of another W&B makes a copy."""

        def hand_over() -> None:
            artifact = self._wandb.Artifact(name, type=kind)
            artifact.add_file(str(path), policy="immutable" if stays else "mutable")
            self._run.log_artifact(artifact)

        self._try("file", hand_over)

    def alert(self, title: str, text: str) -> None:
        """Tell those who asked W&B to be told."""
        self._try("log", lambda: self._run.alert(title, text, level=self._wandb.AlertLevel.WARN))

    def finish(self, status: str, reason: str | None, summary: Mapping[str, Any]) -> None:
        """Hand over the summary and close; W&B shows a run that is not completed as failed, `status` tells why."""

        def close() -> None:
            self._send()
            self._run.summary.update({**summary, "status": status, "reason": reason or ""})
            self._run.finish(exit_code=0 if status == "completed" else 1)
            self._wandb.teardown()

        self._try("finish", close)
        self._leave()

    def _try(self, what: str, action: Callable[[], None]) -> None:
        if self._worker is None:
            return
        try:
            self._worker.do(action, self._patience[what])
        except (Exception, SystemExit) as error:
            self._degrade(what, error)

    def _degrade(self, what: str, error: BaseException) -> None:
        self.state = "degraded"
        self._leave()
        another = Worker()  # the first one may hang
        with contextlib.suppress(Exception, SystemExit):  # else W&B waits for its server when the process ends
            another.do(lambda: self._wandb.teardown(), self._patience["teardown"])
        another.end()
        text = str(error).strip().split("\n")[0].replace("<no message>", "refused by the server")
        if isinstance(error, TimeoutError):
            text = f"no answer to {what} in {self._patience[what]:g} s"
        log.warning("W&B stopped (%s: %s); nothing else does, %s.", type(error).__name__, text, self._complete)

    def _leave(self) -> None:
        if self._worker:
            self._worker.end()
        self._worker = None


def _tags(init: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(tag[:TAG] for tag in init.get("tags") or [] if tag))


def run_id(name: str) -> str:
    """Readable, and of its own for every attempt on every machine: two attempts under one id leave two fragments."""
    here = hashlib.sha256(f"{platform.node()} {os.getpid()}".encode()).hexdigest()[:4]
    return f"{name[:100]}-{time.time_ns() // 1_000_000:x}{here}"
