"""Stands in for SGLang's server, its plugin and its model: the same endpoints and files, and faults on request.

`installed(folder)` makes a package `sglang` of it, so that `python -m sglang.launch_server` starts it. The variable
FAKE lists faults, separated by commas; see `Fake`. Number w of the states of token t is ids[t] + w / 100, and every
next token is equally likely. An answer is the prompt's last id + 1, + 2, ...
"""

import argparse
import json
import math
import os
import signal
import socket
import struct
import sys
import threading
import time
from array import array
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

VERSION, VOCAB, HIDDEN, MAX_INPUT, CHUNK = "0.5.23", 100, 4, 200, 16


def installed(folder: Path) -> Path:
    """`folder`, in which Python finds a package sglang that is this fake."""
    (folder / "sglang").mkdir(parents=True)
    (folder / "sglang" / "__init__.py").touch()
    (folder / "sglang" / "launch_server.py").symlink_to(Path(__file__).resolve())
    info = folder / f"sglang-{VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {VERSION}\n")
    return folder


def part(states: array, ids: list[int], width: int) -> bytes:
    """A safetensors file of float32 states and int32 ids."""
    rows, tokens = states.tobytes(), array("i", ids).tobytes()
    header = json.dumps({
        "states": {"dtype": "F32", "shape": [len(ids), width], "data_offsets": [0, len(rows)]},
        "input_ids": {"dtype": "I32", "shape": [len(ids)], "data_offsets": [len(rows), len(rows) + len(tokens)]},
    }).encode()  # fmt: skip
    return struct.pack("<Q", len(header)) + header + rows + tokens


class Fake(BaseHTTPRequestHandler):
    """Faults at its start: dies, hangs_in_weights, not_ready, radix_cache, version. At the Nth request of the whole
    life, the two probes counted: dies_at, hangs_at, fails_at, late_at (rows come after the answer). For every prompt
    with the id N in it: dies_of, fails_of, fewer_of, nan_of, half_of, others_of, cached_of, full_of. fails_from=N: the
    Nth and all later ones. fails_every=N: every Nth. breaks_off: answers are too short. cuts_at=N: the connection is
    closed without an answer. slow=S: seconds for each token. silent: no figures of speculation. one_each: hangs up on
    whoever wants to keep the connection. on=N: all this only where CUDA_VISIBLE_DEVICES is N. drafts: all this only in
    a server with a drafter.

    With --speculative-algorithm every verification but the last accepts one draft, and the plugin that looks on finds
    one layer more than each id of the drafter's config.json; captures=N: N more; unwatched: it is not there.
    played=FILE: answers and histograms, by the ids of their prompts, of a server without and of one with a drafter;
    lies=hist, lies=count, lies=length, lies=proposed: its counts contradict each other, its answer, or its flags.
    """

    protocol_version = "HTTP/1.1"
    faults: dict[str, str]
    told: dict | None
    name, flags = "", argparse.Namespace()
    lock = threading.Lock()
    requests = 0
    vocab, hidden = VOCAB, HIDDEN

    def do_GET(self) -> None:
        if self.path == "/health":
            self.say(503 if "hangs_in_weights" in self.faults else 200, {})
        elif self.path == "/v1/models":
            self.say(200, {"data": [{"id": self.name}]})
        elif self.path == "/server_info":
            off = "radix_cache" not in self.faults
            self.say(200, {
                "version": self.faults.get("version", VERSION), "page_size": 1, "max_req_input_len": MAX_INPUT + 1,
                "disable_radix_cache": off, "disable_cuda_graph": True, "pp_size": 1, **self.speculation(),
                "model_path": self.faults.get("model_path", self.flags.model_path),
            })  # fmt: skip

    def speculation(self) -> dict:
        told = {key: value for key, value in vars(self.flags).items() if key.startswith("speculative_")}
        numbers = {key: None if value is None else int(value) for key, value in told.items() if "num" in key}
        if "steps" in self.faults:
            numbers["speculative_num_steps"] = int(self.faults["steps"])
        topk = told["speculative_eagle_topk"]
        return told | numbers | {"speculative_eagle_topk": topk and int(topk)}

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "one_each" in self.faults and self.headers["Connection"] != "close":
            self.close_connection = True
            return None
        if self.path == "/abort_request":
            return self.say(200, {})
        with self.lock:
            Fake.requests += 1
            number = self.requests
        ids = asked["input_ids"]
        if self.is_due("dies", number, ids):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.is_due("hangs", number, ids):
            threading.Event().wait()
        every = int(self.faults.get("fails_every", 0))
        if self.is_due("cuts", number, ids):
            return self.connection.shutdown(socket.SHUT_RDWR)
        if (
            self.is_due("fails", number, ids)
            or (every and number % every == 0)
            or number >= int(self.faults.get("fails_from", 1 << 30))
        ):
            return self.say(500, {"error": {"message": "out of luck"}})
        if not 0 < len(ids) <= MAX_INPUT or max(ids) >= self.vocab:
            return self.say(400, {"error": {"message": f"refused: {ids[:8]}"}})
        if asked.get("stream"):
            return self.stream(asked)
        captures = self.told is not None and asked["rid"].startswith(self.told["prefix"])
        if not captures or asked["sampling_params"]["max_new_tokens"]:
            if captures:  # the plugin looks at the rid alone
                self.hand_over(asked["rid"], ids, number)
            return self.say(200, self.answer(asked))
        late = self.is_due("late", number, ids)
        if not late:
            self.hand_over(asked["rid"], ids, number)
        even = [-math.log(self.vocab), 0, None]
        self.say(200, {"output_ids": [], "meta_info": {"input_top_logprobs": [None, *[[even]] * (len(ids) - 1)]}})
        if late:
            time.sleep(0.2)
            self.hand_over(asked["rid"], ids, number)

    def is_due(self, fault: str, number: int, ids: list[int]) -> bool:
        return self.faults.get(f"{fault}_at") == str(number) or int(self.faults.get(f"{fault}_of", -1)) in ids

    def hand_over(self, rid: str, ids: list[int], number: int) -> None:
        """Writes the parts, as the plugin does."""
        width, folder = (len(self.told["layers"]) + 1) * self.hidden, Path(self.told["folder"])
        if self.is_due("full", number, ids):
            (folder / "FAILED.1.unused").write_text("OSError: [Errno 28] No space left on device")
            return (folder / "FAILED.1.unused").rename(folder / "FAILED.1")
        told = [(token + 1) % self.vocab for token in ids] if self.is_due("others", number, ids) else ids
        if self.is_due("fewer", number, ids):
            told = told[:-1]
        for start in range(CHUNK if self.is_due("cached", number, ids) else 0, len(told), CHUNK):
            tokens = told[start : start + CHUNK]
            states = array("f", [token + place / 100 for token in tokens for place in range(width)])
            if self.is_due("nan", number, ids):
                states[-1] = math.nan
            content = part(states, tokens, width)
            if self.is_due("half", number, ids):
                content = content[: len(content) // 2]
            file = folder / "parts" / f"{rid}.{start}.safetensors"
            file.with_suffix(".tmp").write_bytes(content)
            file.with_suffix(".tmp").rename(file)

    def answer(self, asked: dict) -> dict:
        sampling = asked["sampling_params"]
        if "played" in self.faults:
            return self.play(asked["input_ids"], sampling)
        ids = [(asked["input_ids"][-1] + 1 + place) % self.vocab for place in range(sampling["max_new_tokens"])]
        stops = [] if sampling.get("ignore_eos") else sampling["stop_token_ids"]
        end = next((place for place, token in enumerate(ids) if token in stops), None)
        ids = ids if end is None else ids[: end + 1]
        ids = ids[:-1] if "breaks_off" in self.faults else ids
        time.sleep(float(self.faults.get("slow", 0)) * len(ids) * (not asked.get("stream")))
        reason = "length" if end in (None, sampling["max_new_tokens"] - 1) else "stop"  # the limit counts first
        meta = {"finish_reason": {"type": reason}, **self.counted(len(ids))}
        return {"output_ids": ids, "meta_info": meta}

    def play(self, prompt: list[int], sampling: dict) -> dict:
        drafts = self.flags.speculative_algorithm is not None
        told = json.loads(Path(self.faults["played"]).read_text())["drafted" if drafts else "alone"][str(prompt)]
        ids, histogram, lies = told["ids"], told["histogram"], self.faults.get("lies")
        meta = {"finish_reason": {"type": "stop" if ids[-1] in sampling["stop_token_ids"] else "length"},
                "completion_tokens": len(ids)}  # fmt: skip
        if drafts and sum(histogram) and "silent" not in self.faults:
            if lies == "length":  # verifications too many, and all sums with them
                histogram = [histogram[0] + 5, *histogram[1:]]
            verified, accepted = sum(histogram), sum(length * count for length, count in enumerate(histogram))
            proposed = verified * int(self.flags.speculative_num_steps) + (lies == "proposed")
            meta |= {"spec_verify_ct": verified, "spec_num_correct_drafts": accepted + (lies == "count"),
                     "spec_num_proposed_drafts": proposed, "spec_correct_drafts_histogram":
                     [*histogram[:-1], histogram[-1] + 1] if lies == "hist" else histogram}  # fmt: skip
        return {"output_ids": ids, "meta_info": meta}

    def counted(self, tokens: int) -> dict:
        verified = tokens // 2
        drafts = self.flags.speculative_algorithm is not None and verified and "silent" not in self.faults
        told = {"spec_verify_ct": verified, "spec_num_correct_drafts": tokens - 1 - verified} if drafts else {}
        return {"completion_tokens": tokens, **told}

    def stream(self, asked: dict) -> None:
        """One piece a token, each with all ids from the beginning."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        ids = self.answer(asked)["output_ids"]
        for count in range(1, len(ids) + 1):
            time.sleep(float(self.faults.get("slow", 0)))
            piece = {"output_ids": ids[:count], "meta_info": {"finish_reason": None, **self.counted(count)}}
            self.wfile.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def say(self, status: int, body: dict) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def say(line: str) -> None:
    sys.stdout.write(f"[2026-01-01 00:00:00] {line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("model-path", "served-model-name", "host", "port", "dtype", "random-seed", "tp-size",
                 "attention-backend", "speculative-algorithm", "speculative-draft-model-path", "speculative-num-steps",
                 "speculative-eagle-topk", "speculative-num-draft-tokens"):  # fmt: skip
        parser.add_argument(f"--{flag}")
    for flag in ("skip-tokenizer-init", "disable-radix-cache", "disable-cuda-graph"):
        parser.add_argument(f"--{flag}", action="store_true")
    told = parser.parse_args()
    model = Path(told.model_path) / "config.json"
    if model.exists():
        Fake.vocab, Fake.hidden = (json.loads(model.read_text())[key] for key in ("vocab_size", "hidden_size"))
    Fake.faults = {key: value for key, _, value in (w.partition("=") for w in os.environ.get("FAKE", "").split(","))}
    if "on" in Fake.faults and Fake.faults["on"] != os.environ.get("CUDA_VISIBLE_DEVICES"):
        Fake.faults = {}
    if "drafts" in Fake.faults and told.speculative_algorithm is None:
        Fake.faults = {key: value for key, value in Fake.faults.items() if key == "played"}
    Fake.name, Fake.flags = told.served_model_name, told
    say("Init torch distributed begin.")
    say("Init torch distributed ends. elapsed=0.01 s")
    say("Load weight begin.")
    if "dies" in Fake.faults:
        sys.stderr.write("RuntimeError: out of memory\n")
        sys.exit(3)
    if "hangs_in_weights" in Fake.faults:
        threading.Event().wait()
    say("Load weight end.")
    file = os.environ.get("EAGLE3_CAPTURE")
    Fake.told = json.loads(Path(file).read_text()) if file else None
    if Fake.told is not None and not Fake.faults.keys() & {"not_ready", "unwatched"}:
        captures = Fake.told["layer_ids"] is not None
        if not captures:
            draft = json.loads((Path(told.speculative_draft_model_path) / "config.json").read_text())
            ids, more = draft["eagle_config"]["eagle_aux_hidden_state_layer_ids"], int(Fake.faults.get("captures", 1))
            if (layers := [layer + more for layer in ids]) != Fake.told["layers"]:
                sys.exit(f"RuntimeError: trained on layers {Fake.told['layers']}, and this SGLang gives it {layers}")
        ready = {"pid": os.getpid(), "rank": 0, "world": 1, "writes": captures, "layers": Fake.told["layers"]}
        (Path(Fake.told["folder"]) / f"READY.{os.getpid()}.json").write_text(json.dumps(ready))
    say("Memory pool end.")
    say("max_total_num_tokens=1000")
    server = ThreadingHTTPServer(("127.0.0.1", int(told.port)), Fake)
    say("The server is fired up and ready to roll!")
    server.serve_forever()


if __name__ == "__main__":
    main()
