"""`wandb.mode=online` against servers on loopback that fail in their ways: the run ends, its losses are the same."""

import contextlib
import gzip
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from precision_lab.config import ROOT
from wandb_project import Handler as Answering

RUN = ["experiment=smoke", "precision=fp32", "device=cpu", "device.threads=1", "probe.memory=false"]


class Server(http.server.ThreadingHTTPServer):
    """Answers every request with one status; while `silent`, lets a run begin and then never answers.

    `history` is what it was told of runs, by id: the lines of their history, by place.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, status: int, silent: bool = True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.silent = status, silent
        self.history: dict[str, dict[int, dict]] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(Answering):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.server.status != 200:
            self.answer({})
        elif b"UpsertBucket" in body:
            name = json.loads(body)["variables"]["name"]
            project = {"id": "UA", "name": "precision-lab", "entity": {"id": "RQ", "name": "me"}}
            bucket = {"id": "Qg", "name": name, "displayName": name, "config": "{}", "historyLineCount": 0}
            self.answer({"data": {"upsertBucket": {"bucket": bucket | {"project": project}, "inserted": True}}})
        elif self.server.silent:
            time.sleep(120)
        elif b"CreateRunFiles" in body:
            address = f"http://127.0.0.1:{self.server.server_address[1]}/upload"
            files = [{"name": name, "uploadUrl": address} for name in json.loads(body)["variables"]["files"]]
            self.answer({"data": {"createRunFiles": {"runID": "Qg", "uploadHeaders": [], "files": files}}})
        else:
            if self.path.endswith("/file_stream"):
                self.take(json.loads(body).get("files") or {})
            self.answer({})

    def take(self, files):
        history = self.server.history.setdefault(self.path.split("/")[-2], {})
        part = files.get("wandb-history.jsonl", {"offset": 0, "content": []})
        history |= {part["offset"] + n: json.loads(line) for n, line in enumerate(part["content"])}

    do_PUT = do_POST
    do_GET = do_POST

    def answer(self, values):
        self.send(values, self.server.status)


@contextlib.contextmanager
def port_of(kind: str):
    """A port of loopback that behaves so."""
    if kind.isdigit():
        with Server(int(kind)) as server:
            yield server.server_address[1]
            server.shutdown()
        return
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if kind == "accepts and never answers":
            listening.listen(50)
        yield listening.getsockname()[1]  # bound and not listening: it refuses


def do(*words: str, mode: str, port: int) -> str:
    """What a script of ours prints with a server there."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    server = {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_API_KEY": "0123456789" * 4, "WANDB_MODE": mode}
    environment = inherited | server | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True, cwd=ROOT)
    return done.stdout + done.stderr


def train(outputs, mode: str, port: int) -> tuple[float, str, dict, dict]:
    """Seconds, terminal output, result and status of a run."""
    start = time.monotonic()
    said = do("train.py", *RUN, f"paths.outputs={outputs}", mode=mode, port=port)
    seconds = time.monotonic() - start
    (folder,) = outputs.glob("runs/*/*")
    result, status = (json.loads((folder / f"{name}.json").read_text()) for name in ("result", "status"))
    return seconds, said, result, status


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    return train(tmp_path_factory.mktemp("offline"), "offline", 9)


# 200 lets the run begin, and is silent from then on
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["refuses", "accepts and never answers", "401", "500", "200"])
def test_a_failing_server_costs_at_most_half_a_minute_and_no_loss_a_bit(tmp_path, offline, kind):
    with port_of(kind) as port:
        seconds, said, result, status = train(tmp_path, "online", port)
    assert (result["status"], status["wandb"]) == ("completed", "degraded")
    assert result["hashes"] == offline[2]["hashes"]
    assert seconds - offline[0] < 30
    assert said.count("W&B stopped") == 1
    assert "Traceback" not in said


@pytest.mark.slow
def test_what_a_silent_server_missed_is_made_whole_when_it_answers_again(tmp_path):
    with Server(200) as server:
        port = server.server_address[1]
        _, said, result, status = train(tmp_path, "online", port)
        assert (result["status"], status["wandb"]) == ("completed", "degraded")
        assert server.history == {}
        (folder,) = tmp_path.glob("runs/*/*")
        begun = json.loads((folder / "wandb.json").read_text())
        assert (begun["whole"], begun["mode"]) == (False, "online")
        server.silent = False
        assert "1 mirrored" in do("scripts/mirror.py", str(tmp_path), mode="online", port=port)
        whole = json.loads((folder / "wandb.json").read_text())
        (history,) = server.history.values()
        assert "1 whole before" in do("scripts/mirror.py", str(tmp_path), mode="online", port=port)
        server.shutdown()
    assert list(server.history) == [whole["id"]]
    assert (whole["whole"], whole["replaces"]) == (True, [begun["id"]])
    assert whole["url"].endswith(f"/me/precision-lab/runs/{whole['id']}")
    local = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [history[place] for place in sorted(history)]
    assert [line["_timestamp"] for line in lines] == [line["perf/unix_s"] for line in local]
    assert [{key: line[key] for key in line if key[0] != "_"} for line in lines] == local
