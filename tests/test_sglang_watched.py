"""The plugin that only looks on, inside a real SGLang: it sees the layers that a drafter would be given."""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
from composed import config
from test_sglang import PYTHON, SERVER
from tiny import tiny_verifier

from eagle3.served_sglang import SglangJudges
from eagle3.serving.started import started
from extract.engines.sglang_server import server_environment
from extract.launcher import ServerDied
from extract.spool import Spool
from extract.verifier import resolve_verifier

SPY = """
import os
def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    def after(result, runner, *_args, **_kwargs):
        import eagle3_capture.install as ours
        ours.after_load(result, runner)
        runner.model.set_eagle3_layers_to_capture([int(told) for told in os.environ["SPY"].split("-")])
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.load_model", after, HookType.AFTER)
"""
"""SGLang does not draft on a CPU; this plugin tells its model what a drafter's config.json would."""


@pytest.mark.engine
@pytest.mark.parametrize(("ids", "layers"), [("0-1-3", [1, 2, 4]), ("1-2-4", [2, 3, 5])])
def test_a_real_sglang_s_layers_are_seen_by_the_plugin(tmp_path, ids, layers):
    assert PYTHON.exists(), f"{PYTHON} is missing: `make sglang-env` makes it"
    spec = resolve_verifier(str(tiny_verifier(tmp_path / "v")), name="tiny", cache_dir=tmp_path, chat_template=None,
                            trust_remote_code=False)  # fmt: skip
    server = config(*SERVER, f"server.capture.spool={tmp_path}", script="evaluate").server
    info = tmp_path / "spy" / "spy-1.dist-info"
    info.mkdir(parents=True)
    (info.parent / "spy.py").write_text(SPY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spy\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nspy = spy:register\n")
    line = SglangJudges(server, spec, tmp_path, 3, "float32", {}).line(with_drafter=False)
    with Spool(tmp_path, budget_bytes=0) as spool:
        spool.tell(layers=[1, 2, 4], layer_ids=None, prefix="", groups=1)
        env = server_environment(server, {}, spool)
        env |= {"SGLANG_PLUGINS": "spy", "SPY": ids, "PYTHONPATH": f"{env['PYTHONPATH']}:{info.parent}"}
        trained = layers == [1, 2, 4]
        words = rf"trained on layers \[1, 2, 4\], and this SGLang gives it {re.escape(str(layers))}"
        ended = nullcontext() if trained else pytest.raises(ServerDied, match=words)
        with ended, started(replace(line, env=env), server, tmp_path / "log"):
            assert [(said["layers"], said["writes"]) for said in spool.ready()] == [(layers, False)]
        assert len(spool.ready()) == trained
