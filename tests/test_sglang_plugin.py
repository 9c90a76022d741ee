"""The plugin inside SGLang: inert unless asked for, and it picks the rows of our requests out of whatever batch."""

import json
import os
import subprocess
import sys
import threading
import time
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from extract import plugin
from extract.plugin import install, states, writer
from extract.plugin.states import Capture
from extract.plugin.writer import Writer
from extract.spool import Spool

H = 4


class Mode(Enum):
    EXTEND, DECODE = 1, 2

    def is_extend(self):
        return self is Mode.EXTEND


class Model(nn.Module):
    """A language model as SGLang has it: `nested` puts it into a wrapper, as Kimi-K2.5."""

    def __init__(self, plus=1):
        super().__init__()
        self.model, self.logits_processor = nn.Linear(1, 1), nn.Identity()
        self.plus = plus

    def set_eagle3_layers_to_capture(self, ids):
        self.model.layers_to_capture = [layer + self.plus for layer in ids]


@pytest.fixture
def spooled(tmp_path, monkeypatch):
    with Spool(tmp_path, budget_bytes=1 << 20) as made:
        made.tell(layers=[1, 3, 6], layer_ids=[0, 2, 5], prefix="hs-", groups=1)
        monkeypatch.setenv(plugin.VARIABLE, str(made.told))
        yield made


def batch_of(*requests, mode=Mode.EXTEND):
    """(rid, chunk start, rows) each."""
    rids, starts, lengths = zip(*requests, strict=True)
    return SimpleNamespace(rids=list(rids), extend_prefix_lens_cpu=list(starts), extend_seq_lens_cpu=list(lengths),
                           forward_mode=mode)  # fmt: skip


def forward(capture, batch, *, rows=None, packed=False, aux=3):
    """A forward pass whose row r has the states 100 r, 100 r + 1, ... and the id r."""
    rows = rows or sum(batch.extend_seq_lens_cpu)
    every = torch.arange(rows)[:, None] * 100.0 + torch.arange((aux + 1) * H)
    pieces = list(every.split(H, dim=1))
    captured = torch.cat(pieces[:-1], dim=1) if packed else pieces[:-1]
    ids = torch.arange(rows)
    capture(nn.Identity(), (ids, pieces[-1], None, batch), {"aux_hidden_states": captured})
    ids.fill_(-1)  # as SGLang does in its next forward pass
    pieces[-1].fill_(torch.nan)


def parts(folder, count, within_s=5.0):
    deadline = time.monotonic() + within_s
    while len(files := sorted((folder / "parts").glob("*.safetensors"))) < count:
        assert time.monotonic() < deadline, files
        time.sleep(0.005)
    return {file.name.removesuffix(".safetensors"): load_file(file) for file in files}


def test_without_the_variable_nothing_of_sglang_is_even_imported(tmp_path):
    with Spool(tmp_path, budget_bytes=1) as made:
        code = "import sys, eagle3_capture; eagle3_capture.register(); print({'torch', 'sglang'} & set(sys.modules))"
        env = {name: value for name, value in os.environ.items() if name != plugin.VARIABLE}
        done = subprocess.run([sys.executable, "-c", code], env=env | {"PYTHONPATH": str(made.site)},
                              capture_output=True, text=True, check=True)  # fmt: skip
        assert done.stdout == "set()\n"
        found = "import importlib.metadata as m; print(*(e.value for e in m.entry_points(group='sglang.srt.plugins')))"
        done = subprocess.run([sys.executable, "-c", found], env=env | {"PYTHONPATH": str(made.site)},
                              capture_output=True, text=True, check=True)  # fmt: skip
        assert done.stdout == "eagle3_capture:register\n"


def test_the_server_sees_the_plugin_and_never_our_repository(spooled):
    assert sorted(file.name for file in spooled.site.iterdir()) == ["eagle3_capture", "eagle3_capture-1.dist-info"]
    for file in (spooled.site / "eagle3_capture").iterdir():
        assert not any(word in file.read_text() for word in ("import extract", "from extract", "import numpy"))


@pytest.mark.parametrize("nested", [False, True])
def test_a_model_is_told_its_layers_and_hooked_where_its_rows_pass(spooled, nested):
    inner = Model()
    model = nn.Module() if nested else inner
    if nested:
        model.language_model = inner
    install.after_load(None, SimpleNamespace(model=model))
    (ready,) = spooled.ready()
    assert ready == {"pid": os.getpid(), "rank": 0, "world": 1, "writes": True, "layers": [1, 3, 6], "dtype": "float32"}
    assert len(inner.logits_processor._forward_pre_hooks) == 1


def test_a_draft_model_is_left_alone(spooled):
    install.after_load(None, SimpleNamespace(model=Model(), is_draft_worker=True))
    assert spooled.ready() == []


def test_the_fallback_finds_the_model_where_sglang_calls_it(spooled):
    def register_forward_hooks(model):
        return install.fallback({})

    hook = register_forward_hooks(Model())
    assert len(spooled.ready()) == 1 and hook(None, None, None) is None


def test_a_model_that_captures_nothing_or_other_layers_ends_the_server(spooled):
    with pytest.raises(RuntimeError, match=r"captures layers \[0, 2, 5\] and not \[1, 3, 6\]"):
        install.install(Model(plus=0))
    silent = nn.Module()
    silent.logits_processor = nn.Identity()
    with pytest.raises(RuntimeError, match="has no EAGLE-3 support"):
        install.install(silent)
    with pytest.raises(RuntimeError, match="has no logits_processor"):
        install.install(nn.Module())
    assert spooled.ready() == []


@pytest.mark.parametrize(
    ("groups", "writers"), [(1, [0]), (2, [0, 4]), (8, list(range(8)))], ids=["tp", "dp attention", "one rank a group"]
)
def test_every_rank_captures_and_one_of_each_group_writes(tmp_path, monkeypatch, groups, writers):
    written = []
    for rank in range(8):
        with Spool(tmp_path, budget_bytes=1 << 20) as made:
            made.tell(layers=[1, 3, 6], layer_ids=[0, 2, 5], prefix="hs-", groups=groups)
            monkeypatch.setenv(plugin.VARIABLE, str(made.told))
            monkeypatch.setattr(install, "_rank", lambda rank=rank: (rank, 8))
            model = Model()
            install.install(model)
            assert model.model.layers_to_capture == [1, 3, 6]
            (ready,) = made.ready()
            written += [rank] * ready["writes"]
            assert bool(model.logits_processor._forward_pre_hooks) == ready["writes"]
    assert written == writers


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_a_batch_go_to_their_requests_and_padding_to_nobody(spooled, packed):
    capture = Capture(Writer(spooled.folder, budget_bytes=1 << 20), prefix="hs-", num_layers=3)
    forward(capture, batch_of(("hs-1", 0, 2), ("other", 0, 3), ("hs-2", 16, 1)), rows=9, packed=packed)
    found = parts(spooled.folder, 2)
    assert found.keys() == {"hs-1.0", "hs-2.16"}
    for name, rows in (("hs-1.0", [0, 1]), ("hs-2.16", [5])):
        assert found[name]["input_ids"].tolist() == rows and found[name]["input_ids"].dtype == torch.int32
        wanted = torch.tensor(rows)[:, None] * 100.0 + torch.arange(4 * H)
        assert found[name]["states"].equal(wanted)


def test_decoding_and_dummy_passes_leave_nothing(spooled):
    capture = Capture(Writer(spooled.folder, budget_bytes=1 << 20), prefix="hs-", num_layers=3)
    forward(capture, batch_of(("hs-1", 0, 1), mode=Mode.DECODE))
    forward(capture, batch_of(("HEALTH_CHECK", 0, 4)))
    for empty in ({"rids": None}, {"extend_seq_lens_cpu": None}):
        batch = SimpleNamespace(**{**vars(batch_of(("hs-1", 0, 1))), **empty})
        capture(nn.Identity(), (torch.zeros(1), torch.zeros(1, H), None, batch), {})
    forward(capture, batch_of(("hs-9", 0, 1)))
    assert parts(spooled.folder, 1).keys() == {"hs-9.0"} and spooled.failure(0) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [({"aux": 2}, "8 numbers a token were captured, not 3 x 4"), ({"rows": 3}, "3 rows of states for 5 tokens")],
)
def test_what_does_not_fit_together_is_told_to_the_client(spooled, options, words):
    capture = Capture(Writer(spooled.folder, budget_bytes=1 << 20), prefix="hs-", num_layers=3)
    forward(capture, batch_of(("hs-1", 0, 5)), **options)
    assert spooled.failure(0) == words
    later = time.monotonic()
    assert spooled.failure(later) is None and spooled.failure(0) == words
    with pytest.raises(Exception, match=words):
        spooled.take("hs-1", [0] * 5, width=16, began=0, check=lambda: None)


def test_no_states_at_all_are_told_to_the_client(spooled):
    capture = Capture(Writer(spooled.folder, budget_bytes=1 << 20), prefix="hs-", num_layers=3)
    capture(nn.Identity(), (torch.zeros(1), torch.zeros(1, H), None, batch_of(("hs-1", 0, 1))), {})
    assert spooled.failure(0) == "the model hands no captured states to its logits processor"


def test_a_full_budget_makes_the_forward_wait_until_somebody_reads(spooled, monkeypatch):
    monkeypatch.setattr(writer, "QUEUED", 1)
    capture = Capture(Writer(spooled.folder, budget_bytes=700), prefix="hs-", num_layers=3)
    passes = []

    def run():
        for number in range(6):
            forward(capture, batch_of((f"hs-{number}", 0, 4)))
            passes.append(number)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    parts(spooled.folder, 1)
    thread.join(0.2)
    assert thread.is_alive() and len(passes) < 6, "it went on although nobody read"
    for number in range(6):
        (rows,) = spooled.take(f"hs-{number}", [0, 1, 2, 3], width=16, began=0, check=lambda: None)
        assert rows[3].tolist() == [300.0 + place for place in range(16)]
    thread.join(5)
    assert not thread.is_alive() and not list(spooled.parts.iterdir())


def test_full_memory_is_told_and_leaves_no_torn_part(spooled, monkeypatch):
    capture = Capture(Writer(spooled.folder, budget_bytes=1 << 20), prefix="hs-", num_layers=3)
    fits = Path.replace
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(Path, "replace", lambda self, to: fits(self, to) if "parts" not in str(self) else _raise(full))
    forward(capture, batch_of(("hs-1", 0, 4)))
    with pytest.raises(Exception, match="No space left on device"):
        spooled.take("hs-1", [0, 1, 2, 3], width=16, began=0, check=lambda: None)
    assert not list(spooled.parts.iterdir())
    monkeypatch.undo()
    forward(capture, batch_of(("hs-2", 0, 4)))
    assert parts(spooled.folder, 1).keys() == {"hs-2.0"}


def _raise(error):
    raise error


def test_late_rows_of_a_request_that_was_given_up_are_deleted(spooled):
    capture = Capture(Writer(spooled.folder, budget_bytes=1 << 20), prefix="hs-", num_layers=3)
    spooled.discard("hs-1")
    forward(capture, batch_of(("hs-1", 0, 4), ("hs-10", 0, 1)))
    assert len(parts(spooled.folder, 2)) == 2
    spooled.sweep()
    assert parts(spooled.folder, 1).keys() == {"hs-10.0"}


def test_what_was_told_is_all_that_the_plugin_knows(spooled):
    told = json.loads(spooled.told.read_text())
    assert told == {"folder": str(spooled.folder), "layers": [1, 3, 6], "layer_ids": [0, 2, 5], "prefix": "hs-",
                    "groups": 1, "budget_bytes": 1 << 20}  # fmt: skip
    assert states.NAMES[-1] == "aux_hidden_states"


@pytest.fixture
def looking(tmp_path, monkeypatch):
    """Told to change nothing: a drafter chooses the layers."""
    with Spool(tmp_path, budget_bytes=0) as made:
        made.tell(layers=[1, 3, 6], layer_ids=None, prefix="", groups=1)
        monkeypatch.setenv(plugin.VARIABLE, str(made.told))
        yield made


@pytest.mark.parametrize("nested", [False, True])
def test_beside_a_drafter_the_plugin_only_looks(looking, nested):
    inner = Model()
    model = nn.Module() if nested else inner
    if nested:
        model.language_model = inner
        model.set_eagle3_layers_to_capture = inner.set_eagle3_layers_to_capture
    install.after_load(None, SimpleNamespace(model=model))
    assert not hasattr(inner.model, "layers_to_capture") and looking.ready() == [], "nobody has chosen yet"
    model.set_eagle3_layers_to_capture([0, 2, 5])  # as SGLang does, with what the drafter's config.json says
    (ready,) = looking.ready()
    assert ready["layers"] == inner.model.layers_to_capture == [1, 3, 6] and not ready["writes"]
    assert not inner.logits_processor._forward_pre_hooks, "no states are taken"
    assert sorted(file.name for file in looking.folder.iterdir() if file.is_dir()) == ["parts", "site"]
    assert not list(looking.parts.iterdir())


def test_a_drafter_that_is_given_other_layers_ends_the_server(looking):
    model = Model(plus=0)
    install.after_load(None, SimpleNamespace(model=model))
    with pytest.raises(RuntimeError, match=r"trained on layers \[1, 3, 6\], and this SGLang gives it \[0, 2, 5\]"):
        model.set_eagle3_layers_to_capture([0, 2, 5])
    assert looking.ready() == []
    silent = nn.Module()
    silent.logits_processor = nn.Identity()
    with pytest.raises(RuntimeError, match="cannot serve a drafter"):
        install.after_load(None, SimpleNamespace(model=silent))
    install.after_load(None, SimpleNamespace(model=silent, is_draft_worker=True))
