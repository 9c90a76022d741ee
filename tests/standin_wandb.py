"""A stand-in for the W&B server: takes runs and their rows over HTTP, with faults on request."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VIEWER = {"id": "u", "entity": "team", "username": "someone", "flags": "{}", "teams": {"edges": []}}


@dataclass
class Received:
    """What the server was sent. `busy`: so many uploads of rows get a 429; `dead`, from GET /die on: all get a 503."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)
    busy: int = 0
    dead: bool = False
    url: str = ""


@contextmanager
def standin_wandb() -> Iterator[Received]:
    """A server on this machine, until the block ends."""
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            received.dead = received.dead or self.path == "/die"
            self.answer({})

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer({})

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            if received.dead:
                self.answer({}, 503)
            elif self.path.endswith("/file_stream"):
                self.take_rows(json.loads(data))
            elif self.path.endswith("/graphql"):
                body = json.loads(data)
                self.answer({"data": self.asked(body["query"], body.get("variables") or {})})
            else:
                self.answer({})

        def take_rows(self, body: dict[str, Any]) -> None:
            if received.busy:
                received.busy -= 1
                self.answer({}, 429)
                return
            history = body.get("files", {}).get("wandb-history.jsonl", {"content": []})["content"]
            received.rows += [json.loads(line) for line in history]
            if "exitcode" in body:
                received.exit_codes.append(body["exitcode"])
            self.answer({"exitcode": None, "limits": {}})

        def asked(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
            if "upsertBucket" in query:
                received.runs.append(variables)
                project = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": "team"}}
                bucket = {"id": "b", "name": variables["name"], "displayName": variables["displayName"],
                          "project": project, "historyLineCount": 0, "config": "{}"}  # fmt: skip
                return {"upsertBucket": {"bucket": bucket, "inserted": True}}
            if "createRunFiles" in query:
                files = [{"name": name, "uploadUrl": f"{received.url}/upload"} for name in variables["files"]]
                return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
            return {"viewer": VIEWER, "serverInfo": {"features": []}}

        def answer(self, content: dict[str, Any], code: int = 200) -> None:
            data = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
