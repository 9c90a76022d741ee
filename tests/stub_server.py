"""Stands in for vLLM's server: the same endpoints from the standard library, and faults on request.

`installed(folder)` makes a package `vllm` of it, so that `python -m vllm.entrypoints.openai.api_server` starts it.
The variable STUB lists faults, separated by commas; see `Stub`. The answer to a prompt is its last id + 1, + 2, ...
"""

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

VOCAB = 100
ACCEPTED = (2, 0, 3, 1)
"""Of the drafts of each verification in turn, starting anew with every request."""


def installed(folder: Path) -> Path:
    """`folder`, in which Python finds a package vllm that is this stub."""
    package = folder / "vllm"
    for name in ("vllm", "vllm/entrypoints", "vllm/entrypoints/openai"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
    (package / "entrypoints" / "openai" / "api_server.py").symlink_to(Path(__file__).resolve())
    return folder


class Stub(BaseHTTPRequestHandler):
    """dies: at its start. dies_at=N, fails_at=N, hangs_at=N: at the Nth completion (a SIGKILL, a 500, no answer).
    never_healthy: 503. wrong_model: another name. health_blocks: after its first answer. ignores_ids: gives no ids.
    miscounts: metrics without the totals. detaches=FILE: a process in a session of its own holds the port, too.
    stubborn: does not heed SIGTERM.
    """

    name, drafts = "", 0
    faults: dict[str, str]
    lock = threading.Lock()
    completions = healths = 0
    totals: dict[str, int]

    def do_GET(self) -> None:
        if self.path == "/health":
            Stub.healths += 1
            if "health_blocks" in self.faults and self.healths > 1:
                threading.Event().wait()
            self.say(503 if "never_healthy" in self.faults else 200, "")
        elif self.path == "/version":
            self.say(200, {"version": "0.0.stub"})
        elif self.path == "/v1/models":
            self.say(200, {"data": [{"id": "somebody" if "wrong_model" in self.faults else self.name}]})
        elif self.path == "/metrics":
            lines = [f"vllm:spec_decode_num_{key} {float(value)}" for key, value in self.totals.items()]
            self.say(200, "\n".join(["# HELP some text", "vllm:num_requests_running 0.0", *lines]))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            Stub.completions += 1
            sys.stdout.write(f"completion {self.completions}\n")
            at = str(self.completions)
        if self.faults.get("dies_at") == at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.faults.get("hangs_at") == at:
            threading.Event().wait()
        if self.faults.get("fails_at") == at:
            return self.say(500, {"error": {"message": "out of luck"}})
        if asked["model"] != self.name or asked["max_tokens"] < 1:
            return self.say(400, {"error": {"message": f"refused: {asked['model']}, {asked['max_tokens']}"}})
        self.say(200, self.answer(asked))

    def answer(self, asked: dict) -> dict:
        prompt, stops = asked["prompt"], asked["stop_token_ids"]
        ids = [(prompt[-1] + 1 + place) % VOCAB for place in range(asked["max_tokens"])]
        end = next((place for place, token in enumerate(ids) if token in stops), None)
        ids = ids if end is None else ids[: end + 1]
        choice = {"token_ids": ids, "prompt_token_ids": prompt, "finish_reason": "length" if end is None else "stop"}
        if "ignores_ids" in self.faults:
            choice |= {"token_ids": None, "prompt_token_ids": None}
        metrics = {"speculative_decoding": self.speculate(len(ids))} if self.drafts else None
        return {"choices": [choice], "metrics": metrics}

    def speculate(self, length: int) -> dict:
        accepted = []
        while 1 + sum(accepted) + len(accepted) < length:
            accepted.append(ACCEPTED[len(accepted) % len(ACCEPTED)])
        with self.lock:
            counts = {"drafts": len(accepted), "draft_tokens": 3 * len(accepted), "accepted_tokens": sum(accepted)}
            for key, count in counts.items():
                self.totals[f'{key}_total{{engine="0"}}'] += count
            for place in range(self.drafts):
                key = f'accepted_tokens_per_pos_total{{engine="0",position="{place}"}}'
                self.totals[key] += sum(a > place for a in accepted)
        steps = {"per_step_accepted": accepted, "per_step_drafted": [3] * len(accepted)} if accepted else {}
        return {"num_spec_steps": len(accepted), **steps}

    def say(self, status: int, body: dict | str) -> None:
        content = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def detached(listening: socket.socket, file: Path) -> None:
    """A process that init or another reaper adopts, in a session of its own, with the server's port open."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            listening.set_inheritable(True)
            file.write_text(str(os.getpid()))
            time.sleep(1000)
        os._exit(0)
    os.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--served-model-name")
    parser.add_argument("--port", type=int)
    parser.add_argument("--speculative-config", type=json.loads)
    told, _ = parser.parse_known_args()
    words = [word.partition("=") for word in os.environ.get("STUB", "").split(",")]
    Stub.faults = {key: value for key, _, value in words}
    if "dies" in Stub.faults:
        sys.stderr.write("RuntimeError: no such quantisation\n")
        sys.exit(3)
    if "stubborn" in Stub.faults:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Stub.name = told.served_model_name
    Stub.drafts = told.speculative_config["num_speculative_tokens"] if told.speculative_config else 0
    per_position = [f'accepted_tokens_per_pos_total{{engine="0",position="{place}"}}' for place in range(Stub.drafts)]
    names = ["drafts", "draft_tokens", "accepted_tokens"] if "miscounts" not in Stub.faults else ["accepted_tokens"]
    Stub.totals = dict.fromkeys([f'{name}_total{{engine="0"}}' for name in names] + per_position, 0)
    server = ThreadingHTTPServer(("127.0.0.1", told.port), Stub)
    if "detaches" in Stub.faults:
        detached(server.socket, Path(Stub.faults["detaches"]))
    sys.stdout.write(f"the stub listens on {told.port}, in session {os.getsid(0)}\n")
    server.serve_forever()


if __name__ == "__main__":
    main()
