"""A starting server's log tells in which phase it is, and each phase has its own deadline."""

import re

from extract.engines.sglang_server import PHASES
from extract.phases import Phases

ENDS = (("one", re.compile(rb"one ends")), ("two", re.compile(rb"two ends")), ("three", re.compile(rb"$^")))
LONG = {"one": 60.0, "two": 60.0, "three": 60.0}


def test_phases_follow_the_log_and_a_later_milestone_ends_the_earlier_ones(tmp_path):
    log = tmp_path / "log"
    log.write_text("")
    phases = Phases(log, ENDS, LONG)
    assert phases.overdue() is None and phases.name == "one" and phases.told() == "one for 0 s of at most 60 s"
    with log.open("a") as file:
        file.write("something\none e")
        file.flush()
        assert phases.overdue() is None and phases.name == "one", "half a line says nothing yet"
        file.write("nds\n")
        file.flush()
        assert phases.overdue() is None and phases.name == "two"
        file.write("two ends\none ends\n")
        file.flush()
        assert phases.overdue() is None and phases.name == "three"
    skipped = Phases(log, ENDS, LONG)
    assert skipped.overdue() is None and skipped.name == "three"


def test_the_phase_that_takes_too_long_is_named(tmp_path):
    log = tmp_path / "log"
    log.write_text("one ends\n")
    assert Phases(log, ENDS, LONG | {"two": 1e-9}).overdue() == "its phase two took more than 1e-09 s"


def test_sglang_s_own_words_end_its_phases(tmp_path):
    words = {
        "distributed": ("Init torch distributed begin.", "Init parallel begin."),
        "weights": ("Init torch distributed ends. elapsed=0.2 s", "Init parallel ends. elapsed=0.01 s"),
        "kv_cache": ("Load weight end. elapsed=0.02 s, type=LlamaForCausalLM, avail mem=19.97 GB",),
        "graphs": ("Memory pool end. avail mem=19.97 GB",),
        "ready": ("max_total_num_tokens=2048, chunked_prefill_size=4096, max_prefill_tokens=16384",),
    }
    timeouts = {name: 60.0 for name, _ in PHASES}
    for name, lines in words.items():
        for line in lines:
            (tmp_path / "log").write_text(f"[2026-12-01 12:29:29 TP0] {line}\n")
            phases = Phases(tmp_path / "log", PHASES, timeouts)
            phases.overdue()
            assert phases.name == name, line
