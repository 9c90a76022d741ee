"""The journal survives kills, full disks and strange text, and nothing finished is lost."""

import errno
import json
import multiprocessing
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extract.journal import FIELDS, Journal


def record(name, turn=0, **changes):
    made = dict.fromkeys(FIELDS) | {"id": name, "turn": turn, "prompt_ids": [1, 2], "response_ids": [3]}
    return made | changes


def test_records_come_back_verbatim_and_in_order(tmp_path):
    records = [record("b", 1), record("a"), record("b", 0, response_ids=list(range(300)))]
    with Journal(tmp_path / "new" / "r.jsonl") as journal:
        journal.append(records[:2])
        journal.append(records[2:])
        assert journal.get("a", 0) == records[1] and ("b", 2) not in journal
    with Journal(tmp_path / "new" / "r.jsonl") as journal:
        assert list(journal.records()) == records and len(journal) == 3
        assert journal.get("b", 0) == records[2]
        journal.append([record("c")])
        assert journal.get("c", 0) == record("c")


@pytest.mark.parametrize("name", ["\u2028", "\u2029\x85\x0b\x0c\x1c", "two\nlines\r", "\ud800", "\U0001f600"])
def test_line_separators_inside_text_do_not_cut_a_record(tmp_path, name):
    with Journal(tmp_path / "r.jsonl") as journal:
        journal.append([record(name), record("next")])
    with Journal(tmp_path / "r.jsonl") as journal:
        assert journal.get(name, 0)["id"] == name and len(journal) == 2


def test_a_foreign_writers_unescaped_separators_are_read_too(tmp_path):
    line = json.dumps(record("a\u2028b"), ensure_ascii=False)
    (tmp_path / "r.jsonl").write_bytes(line.encode() + b"\n")
    with Journal(tmp_path / "r.jsonl") as journal:
        assert ("a\u2028b", 0) in journal


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(1, 400))
def test_torn_last_line_is_set_aside_told_and_redone(tmp_path, caplog, cut):
    path = tmp_path / "r.jsonl"
    for old in tmp_path.iterdir():
        old.unlink()
    with Journal(path) as journal:
        journal.append([record(f"s{i}") for i in range(4)])
    whole = path.read_bytes()
    kept = whole[:-cut]
    path.write_bytes(kept)
    caplog.clear()
    complete, torn = kept.count(b"\n"), kept.rpartition(b"\n")[2]
    with Journal(path) as journal:
        assert len(journal) == complete
        journal.append([record(f"s{i}") for i in range(complete, 4)])
    assert path.read_bytes() == whole
    aside = tmp_path / "r.jsonl.torn"
    assert (aside.read_bytes() == torn + b"\n" and "torn" in caplog.text) if torn else not aside.exists()


def test_zeros_after_a_power_cut_are_a_torn_line(tmp_path):
    path = tmp_path / "r.jsonl"
    with Journal(path) as journal:
        journal.append([record("a")])
    with path.open("ab") as file:
        file.write(bytes(500))
    with Journal(path) as journal:
        assert len(journal) == 1
        journal.append([record("b")])
    with Journal(path) as journal:
        assert [r["id"] for r in journal.records()] == ["a", "b"]


def test_damage_inside_the_file_is_named_by_line_and_never_passed_over(tmp_path):
    path = tmp_path / "r.jsonl"
    with Journal(path) as journal:
        journal.append([record("a"), record("b"), record("c")])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"id": "b"}\n' + lines[2])
    with pytest.raises(ValueError, match=r"r.jsonl, line 2: not a record"):
        Journal(path)
    path.write_bytes(lines[0] + lines[1] + lines[0])
    with pytest.raises(ValueError, match=r"line 3: turn \('a', 0\) is there twice"):
        Journal(path)


def test_full_disk_leaves_none_of_the_batch_and_says_so(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    with Journal(path) as journal:
        journal.append([record("a")])
        before = path.read_bytes()

        class Full:
            def __init__(self, file):
                self.file = file

            def write(self, data):
                self.file.write(data[:30])
                raise OSError(errno.ENOSPC, "No space left on device")

            def __getattr__(self, name):
                return getattr(self.file, name)

        monkeypatch.setattr(journal, "_file", Full(journal._file))
        with pytest.raises(OSError, match=r"r.jsonl: \d+ bytes could not be written .*No space left.*make room"):
            journal.append([record("b"), record("c")])
        assert path.read_bytes() == before and ("b", 0) not in journal
        monkeypatch.undo()
        journal.append([record("b")])
    with Journal(path) as journal:
        assert [r["id"] for r in journal.records()] == ["a", "b"]


def test_second_writer_is_refused_also_from_another_process(tmp_path):
    with Journal(tmp_path / "r.jsonl"):
        with pytest.raises(ValueError, match="another process is writing it"):
            Journal(tmp_path / "r.jsonl")

        def second():
            try:
                Journal(tmp_path / "r.jsonl")
            except ValueError:
                os._exit(7)

        child = multiprocessing.get_context("fork").Process(target=second)
        child.start()
        child.join(30)
        assert child.exitcode == 7
    Journal(tmp_path / "r.jsonl").close()
