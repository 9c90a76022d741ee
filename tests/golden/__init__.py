"""Fixtures of an independent implementation, and the runner that holds ours to them: `python -m tests.golden`."""
