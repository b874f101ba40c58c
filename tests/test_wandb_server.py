"""`wandb.mode=online` against servers on loopback that fail in their ways: the run ends, its losses are the same."""

import contextlib
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

RUN = ["experiment=smoke", "precision=fp32", "device=cpu", "device.threads=1", "probe.memory=false"]


class Server(http.server.ThreadingHTTPServer):
    """Answers every request with one status, or lets a run begin and then never answers."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, status: int):
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = status
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.status != 200:
            self.answer({})
        elif b"UpsertBucket" in body:
            name = json.loads(body)["variables"]["name"]
            project = {"id": "UA", "name": "precision-lab", "entity": {"id": "RQ", "name": "me"}}
            bucket = {"id": "Qg", "name": name, "displayName": name, "config": "{}", "historyLineCount": 0}
            self.answer({"data": {"upsertBucket": {"bucket": bucket | {"project": project}, "inserted": True}}})
        else:
            time.sleep(120)

    do_GET = do_POST

    def answer(self, values):
        text = json.dumps(values).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


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


def train(outputs, mode: str, port: int) -> tuple[float, str, dict, dict]:
    """Seconds, terminal output, result and status of a run."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    server = {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_API_KEY": "0123456789" * 4, "WANDB_MODE": mode}
    command = [sys.executable, str(ROOT / "train.py"), *RUN, f"paths.outputs={outputs}"]
    start = time.monotonic()
    environment = inherited | server | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    seconds = time.monotonic() - start
    (folder,) = outputs.glob("runs/*/*")
    result, status = (json.loads((folder / f"{name}.json").read_text()) for name in ("result", "status"))
    return seconds, done.stdout + done.stderr, result, status


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
