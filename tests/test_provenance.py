"""The state of the code that a run notes down."""

import subprocess

from eagle3.runlog.provenance import git_state


def test_what_a_sweep_leaves_in_git_does_not_make_the_code_differ(tmp_path):
    def git(*words):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e", *words], check=True)

    git("init", "-q")
    (tmp_path / "code.py").write_text("1\n")
    git("add", ".")
    git("commit", "-qm", "code")
    (tmp_path / "multirun").mkdir()
    (tmp_path / "multirun" / "summary.md").write_text("a sweep\n")
    assert git_state(tmp_path)["git_dirty"] is False
    (tmp_path / "code.py").write_text("2\n")
    assert git_state(tmp_path)["git_dirty"] is True
