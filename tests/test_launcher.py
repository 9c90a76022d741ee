"""A server ends with whoever started it, and whatever goes wrong with it is told with its own last words."""

import json
import logging
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripts import FORKS

from extract import launcher
from extract.launcher import ServerDied, ServerHung, child_environment, free_port, launch, tail

STUB = Path(__file__).with_name("stub_server.py")


def python(code: str, *words: str) -> list[str]:
    return [sys.executable, "-c", code, *words]


def start(command, folder, *, healthy=lambda: True, timeout_s=60.0, grace_s=10.0, env=None):
    return launch(command, env or {}, folder / "server.log", healthy=healthy, timeout_s=timeout_s, grace_s=grace_s)


def stub(folder: Path, port: int, faults: str = "", **options):
    """The stub, listening on `port`."""
    command = [sys.executable, str(STUB), "--port", str(port), "--served-model-name", "stub"]
    log_file = folder / "server.log"
    return start(command, folder, healthy=lambda: "session" in log_file.read_text(), env={"STUB": faults}, **options)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def gone(pid: int, within_s: float = 10.0) -> bool:
    """Whether a process, of whomever, ends in time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], within_s)[0])
    finally:
        os.close(handle)


def written(file: Path, within_s: float = 10.0) -> str:
    """The content of a small file, as soon as there is some."""
    deadline = time.monotonic() + within_s
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline, f"{file} is not written"
        time.sleep(0.01)
    return file.read_text()


def test_one_that_dies_at_its_start_is_told_at_once_with_exit_code_and_log(tmp_path):
    began = time.monotonic()
    with pytest.raises(ServerDied) as caught:
        start(python("import sys; print('no such quantisation', file=sys.stderr); sys.exit(3)"), tmp_path,
              healthy=lambda: False)  # fmt: skip
    assert time.monotonic() - began < 3
    assert "exit code 3;" in str(caught.value) and "no such quantisation" in str(caught.value)
    assert str(tmp_path / "server.log") in str(caught.value)


def test_a_command_that_cannot_be_run_is_told_with_its_reason(tmp_path):
    with pytest.raises(ServerDied, match=r"No such file or directory: ./nowhere/python"):
        start(["/nowhere/python"], tmp_path, healthy=lambda: False)


def test_one_that_never_gets_ready_is_stopped_at_the_deadline(tmp_path):
    command = python("import os, time; print(os.getpid()); time.sleep(1000)")
    with pytest.raises(ServerHung, match=r"not ready within 1 s, and is stopped; the last lines of .*:\n\d+"):
        start(command, tmp_path, healthy=lambda: False, timeout_s=1)
    assert gone(int((tmp_path / "server.log").read_text().split()[0]), within_s=0)


def test_one_whose_health_question_fails_is_stopped_too(tmp_path):
    def stranger():
        raise ValueError(f"a stranger, {written(tmp_path / 'server.log')}")

    with pytest.raises(ValueError, match="a stranger") as caught:
        start(python("import os, time; print(os.getpid()); time.sleep(1000)"), tmp_path, healthy=stranger)
    assert gone(int(str(caught.value).split()[-1]), within_s=0)


def test_while_it_starts_a_line_says_for_how_long_and_what_it_does(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(launcher, "TELL_EVERY_S", 0.1)
    caplog.set_level(logging.INFO)
    asked = []

    def at_the_fifth_time():
        asked.append(written(tmp_path / "server.log"))
        return len(asked) == 5

    start(python("import time; print('loading weights'); time.sleep(1000)"), tmp_path, healthy=at_the_fifth_time).stop()
    told = [message for message in caplog.messages if message.startswith("the server has been starting for")]
    assert told and all(line.endswith("of at most 60 s: loading weights") for line in told)
    assert caplog.messages[-1].startswith("the server is ready after")


LIFE = """
import os, signal, sys, time
def end(*_):
    print("orderly end")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("up")
time.sleep(1000)
"""


def test_at_the_end_of_the_block_it_is_asked_to_end_before_it_is_killed(tmp_path):
    log_file = tmp_path / "server.log"
    with start(python(LIFE), tmp_path, healthy=lambda: written(log_file) == "up\n"):
        pass
    assert log_file.read_text() == "up\norderly end\n"


def test_one_that_does_not_heed_that_is_killed_after_the_grace(tmp_path):
    port = free_port()
    server = stub(tmp_path, port, "stubborn", grace_s=0.3)
    began = time.monotonic()
    server.stop()
    assert 0.3 < time.monotonic() - began < 5 and not listens(port)
    server.stop()


def test_what_cannot_be_killed_at_once_is_left_to_the_warden_which_finishes_the_job(tmp_path, monkeypatch, caplog):
    """A process in the kernel's hands does not die of SIGKILL until it is let go; here the warden is held instead."""
    monkeypatch.setattr(launcher, "KILL_WITHIN_S", 0.2)
    orphan, scratch = tmp_path / "orphan", tmp_path / "scratch"
    scratch.mkdir()
    port = free_port()
    command = [sys.executable, str(STUB), "--port", str(port), "--served-model-name", "stub"]
    log_file = tmp_path / "server.log"
    server = launch(command, {"STUB": f"stubborn,detaches={orphan}"}, log_file, timeout_s=60, grace_s=0.1,
                    healthy=lambda: "session" in log_file.read_text(), scratch=scratch)  # fmt: skip
    pids = [int(written(orphan)), int(log_file.read_text().split()[-1])]
    os.kill(server._warden.pid, signal.SIGSTOP)
    server.stop()
    assert "cannot even be killed yet" in caplog.text
    assert listens(port) and not any(gone(pid, within_s=0) for pid in pids), "nobody else can end them now"
    os.kill(server._warden.pid, signal.SIGCONT)
    assert all(gone(pid) for pid in pids) and not listens(port)
    assert server.death(within_s=10) is not None and not scratch.exists()


def test_a_death_between_requests_is_told_with_signal_and_log(tmp_path):
    log_file = tmp_path / "server.log"
    code = "import os, time; print(os.getpid()); time.sleep(1000)"
    with start(python(code), tmp_path, healthy=lambda: bool(written(log_file))) as server:
        assert server.death() is None
        os.kill(int(log_file.read_text()), signal.SIGKILL)
        died = server.death(within_s=5)
    assert isinstance(died, ServerDied) and "exit code 137 (SIGKILL)" in str(died)


def test_what_a_dead_server_leaves_is_killed(tmp_path):
    port, orphan = free_port(), tmp_path / "orphan"
    with stub(tmp_path, port, f"detaches={orphan}") as server:
        left = int(written(orphan))
        os.kill(int((tmp_path / "server.log").read_text().split()[-1]), signal.SIGKILL)
        assert server.death(within_s=5) is not None
        assert gone(left, within_s=0) and not listens(port)


def test_kill_9_of_the_warden_ends_the_server(tmp_path):
    log_file = tmp_path / "server.log"
    code = "import os, time; print(os.getpid(), os.getppid()); time.sleep(1000)"
    with start(python(code), tmp_path, healthy=lambda: bool(written(log_file))) as server:
        pid, warden = map(int, log_file.read_text().split())
        os.kill(warden, signal.SIGKILL)
        assert gone(pid) and "SIGKILL" in str(server.death(within_s=5))


def life_with_a_server(folder: Path, port: int, how: str) -> None:
    """What a program does around its server, until it is ended from outside."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a shell ignore Ctrl-C
    with stub(folder, port, f"detaches={folder / 'orphan'}"):
        written(folder / "orphan")
        if how == "with a worker" and os.fork() == 0:
            (folder / "worker").write_text(str(os.getpid()))  # as a loader's, which inherits every open pipe
            time.sleep(1000)
        (folder / "ready").write_text("yes")
        if how != "end of the block":
            time.sleep(1000)


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("end of the block", None),
        ("kill -9", signal.SIGKILL),
        ("with a worker", signal.SIGKILL),
        ("kill", signal.SIGTERM),
        ("ctrl-c", signal.SIGINT),
    ],
)
def test_however_its_starter_ends_no_process_and_no_port_stays(tmp_path, how, number):
    port = free_port()
    program = FORKS.Process(target=life_with_a_server, args=(tmp_path, port, how))
    program.start()
    try:
        written(tmp_path / "ready", within_s=60)
        server, orphan = int((tmp_path / "server.log").read_text().split()[-1]), int(written(tmp_path / "orphan"))
        if number is not None:
            os.kill(program.pid, number)
        assert gone(server) and gone(orphan) and not listens(port)
        program.join(10)
        assert program.exitcode is not None
    finally:
        program.kill()
        if (tmp_path / "worker").exists():
            os.kill(int((tmp_path / "worker").read_text()), signal.SIGKILL)


def test_stopping_does_not_wait_for_a_worker_that_holds_the_pipe(tmp_path):
    server = start(python("import time; time.sleep(1000)"), tmp_path)
    worker = os.fork()
    if worker == 0:
        time.sleep(1000)
    began = time.monotonic()
    try:
        server.stop()
        assert time.monotonic() - began < 5
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_the_command_can_be_pasted(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    code = "import os, sys, time; print(sys.argv[1:], os.environ['GREETING']); sys.exit(len(sys.argv) - 2)"
    words = ['{"method": "eagle3"}', "two words", "it's"]
    with pytest.raises(ServerDied, match="exit code 2;"):
        start(python(code, *words), tmp_path, healthy=lambda: False, env={"GREETING": "good day"})
    line = (tmp_path / "command.txt").read_text()
    assert line.strip() in caplog.text
    again = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert again.stdout == (tmp_path / "server.log").read_text() == f"{words} good day\n"
    assert shlex.split(line)[:2] == ["env", "PYTHONUNBUFFERED=1"]


def test_nothing_of_our_interpreter_or_of_our_training_reaches_the_server(tmp_path, monkeypatch):
    ours = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1",
            "NODE_RANK": "0", "TORCHELASTIC_RUN_ID": "x", "PL_GLOBAL_SEED": "1",
            "PYTHONPATH": "/ours", "VIRTUAL_ENV": "/ours"}  # fmt: skip
    for name, value in (ours | {"CUDA_VISIBLE_DEVICES": "5", "LANG": "C"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    code = "import json, os, sys; print(json.dumps([sys.path, dict(os.environ)]))"
    with pytest.raises(ServerDied):
        start(python(code), tmp_path, healthy=lambda: False, env={"LANG": "C.UTF-8", "OWN": "1"})
    path, seen = json.loads((tmp_path / "server.log").read_text())
    assert not ours.keys() & seen.keys()
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["LANG"], seen["OWN"]) == ("5", "C.UTF-8", "1")
    assert not {"", str(tmp_path), "/ours"} & set(path), "packages of the working directory would be taken for its own"
    assert child_environment({"PYTHONPATH": "/plugin"})["PYTHONPATH"] == "/plugin", "what the user sets stays"


def test_the_end_of_a_log_is_its_last_lines_whatever_it_holds(tmp_path):
    file = tmp_path / "log"
    file.write_bytes(b"")
    assert tail(file) == "(it is empty)"
    file.write_bytes(b"first\n" * 50_000 + b"50%\r100%\r\n\xff\xfe bytes\n")
    assert tail(file).splitlines()[-3:] == ["50%", "100%", "\ufffd\ufffd bytes"]
    assert len(tail(file).splitlines()) == 30 and tail(file, 1) == "\ufffd\ufffd bytes"


def test_ports_are_given_out_by_the_system_and_not_while_they_are_used():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        assert holder.getsockname()[1] not in {free_port() for _ in range(50)}


def test_memory_that_a_server_shared_and_the_folder_that_went_with_it_are_gone_however_it_ends(tmp_path):
    code = """
import os, sys, time
from multiprocessing import shared_memory
shared = shared_memory.SharedMemory(sys.argv[1], create=True, size=4096)
print("up")
time.sleep(1000)
"""
    for number, end in enumerate((signal.SIGTERM, signal.SIGKILL)):
        name, scratch = f"eagle3-test-{os.getpid()}-{number}", tmp_path / f"scratch {number}"
        scratch.mkdir()
        log_file = tmp_path / "server.log"
        server = launch(python(code, name), {}, log_file, healthy=lambda: written(log_file) == "up\n",  # noqa: B023
                        timeout_s=30, scratch=scratch)  # fmt: skip
        assert Path("/dev/shm", name).exists() and scratch.exists()
        if end is signal.SIGKILL:
            os.kill(server._warden.pid, signal.SIGTERM)
        server.stop()
        assert not Path("/dev/shm", name).exists() and not scratch.exists()
