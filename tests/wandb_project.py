"""A server on loopback that answers for one W&B project as W&B's does, from recorded runs."""

import contextlib
import http.server
import json
import re
import threading
from datetime import datetime, timedelta

from precision_lab.tracking import inspector


def node(run_id, **changes):
    """A run as the API sends it in full; config and summaryMetrics are texts of JSON."""
    made = {
        "id": f"UnVu{run_id}", "projectId": "1", "tags": [], "name": run_id, "displayName": run_id, "sweepName": None,
        "state": "finished", "group": "g", "jobType": "train", "commit": None, "readOnly": True,
        "createdAt": "2026-11-01T00:00:00", "heartbeatAt": "2026-11-01T00:00:00", "description": "", "notes": "",
        "historyLineCount": 3, "user": {"name": "me", "username": "me"}, "historyKeys": None, "systemMetrics": "{}",
        "config": "{}", "summaryMetrics": "{}",
    }  # fmt: skip
    return made | changes


def in_full(run_id, config, summary, **changes):
    """With config and summary as W&B stores them: a config's value lies below its key."""
    stored = {key: {"value": value, "desc": None} for key, value in config.items()}
    return node(run_id, config=json.dumps(stored), summaryMetrics=json.dumps(summary), **changes)


def recorded(wandb_folder):
    """The same runs as the API sends them, from W&B's files."""
    nodes, files = [], inspector.files_in(wandb_folder)
    for start in range(0, len(files), 50):
        for answer in inspector._inspected(files[start : start + 50]):
            made = (datetime(2026, 11, 1) + timedelta(seconds=len(nodes))).isoformat()
            state = {"running": "crashed"}.get(answer["state"], answer["state"])
            job_type = answer["config"].get("job_type")
            times = {"createdAt": made, "heartbeatAt": made, "state": state, "jobType": job_type}
            nodes.append(in_full(answer["run_id"], answer["config"], answer["summary"], **times))
    return nodes


class Server(http.server.ThreadingHTTPServer):
    """`asked` are the requests for runs: (light or full, variables). `fault` changes the answers to them."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, nodes, fault=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.nodes, self.fault, self.asked = nodes, fault, []

    @property
    def environment(self):
        """What makes W&B ask this server."""
        url = f"http://127.0.0.1:{self.server_address[1]}"
        return {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0123456789" * 4}


@contextlib.contextmanager
def serving(nodes, fault=None):
    with Server(nodes, fault) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/graphql", self.path
        if "query Runs(" not in asked["query"]:
            assert "viewer" in asked["query"], asked["query"]  # the login
            return self.send({"data": {"viewer": {"id": "1", "entity": "me", "username": "me", "flags": "{}"}}})
        full = "summaryMetrics" in asked["query"]
        self.server.asked.append(("full" if full else "light", asked["variables"]))
        answer = page(self.server.nodes, asked["variables"], full)
        return self.server.fault(self, answer) if self.server.fault else self.send({"data": answer})

    def send(self, values, status=200):
        text = values if isinstance(values, bytes) else json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


HEAVY = ("config", "summaryMetrics", "systemMetrics", "historyKeys")


def page(nodes, variables, full):
    if (variables["entity"], variables["project"]) != ("team", "project"):
        return {"project": None}
    assert variables["order"] == "+created_at"
    fitting = [one for one in nodes if fits(one, json.loads(variables["filters"]))]
    start, size = int(variables["cursor"] or 0), variables["perPage"]
    sent = fitting[start : start + size]
    light = [{key: value for key, value in one.items() if full or key not in HEAVY} for one in sent]
    edges = [{"node": one, "cursor": str(start + n)} for n, one in enumerate(light, 1)]
    ends = {"endCursor": str(start + len(sent)), "hasNextPage": start + size < len(fitting)}
    runs = {"edges": edges, "pageInfo": ends}
    return {"project": {"internalId": "1", "runCount": len(fitting), "readOnly": True, "runs": runs}}


def fits(one, filters):
    """What of MongoDB's filters is asked here: {"$and": [{key: {"$in": [...]}}]}, or one such without the $and."""
    if "$and" in filters:
        return all(fits(one, condition) for condition in filters["$and"])
    config = {key: stored["value"] for key, stored in json.loads(one["config"]).items()}
    for key, wanted in filters.items():
        value = one[_camel(key)] if not key.startswith("config.") else _within(config, key.split(".")[1:])
        parts = value if isinstance(value, list) else [value]
        if not any(_same(part, want) for part in parts for want in wanted["$in"]):
            return False
    return True


def _camel(key):
    return re.sub("_(.)", lambda found: found[1].upper(), key)


def _within(values, keys):
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _same(value, wanted):
    """As MongoDB compares: 0 is neither false nor the text."""
    return value == wanted and isinstance(value, bool) is isinstance(wanted, bool)
