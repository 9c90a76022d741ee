"""The manifest: what a store says of itself, and what must agree before more is written to it."""

import json
from pathlib import Path
from typing import Any

from extract.durable import replace_file, sync
from extract.store_codec import CODECS
from extract.store_format import DTYPES, INDEX, MANIFEST

SCHEMA = 2
FORMAT_KEYS = ("last", "dtype", "codec", "capture_layers", "hidden_size")
"""Keys that decide how a shard is read; they must always agree on resume."""


def read_manifest(path: Path) -> dict:
    """The manifest of a store; ValueError if there is none, or one that this version cannot read."""
    file = path / MANIFEST
    if not file.exists():
        raise ValueError(f"{path.resolve()} is no store: it has no {MANIFEST}; make one with extract.py")
    try:
        manifest = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file}: unreadable ({error}); restore it, or extract into a new directory") from error
    manifest = _without_codec(manifest)
    check_format(manifest, file)
    if "complete" not in manifest:
        raise ValueError(f"{file}: manifest lacks complete")
    return manifest


def _without_codec(manifest: dict) -> dict:
    """A manifest of schema 1, which knew no codec, in the words of schema 2; any other as it is."""
    if manifest.get("schema") != 1 or "codec" in manifest:
        return manifest
    return {**manifest, "schema": SCHEMA, "codec": "none"}


def check_format(manifest: dict, source: Path) -> None:
    """Refuse a manifest whose shards would be misread."""
    if manifest.get("schema") != SCHEMA:
        raise ValueError(
            f"{source}: store schema {manifest.get('schema')!r}, this version reads {SCHEMA}; extract again"
        )
    missing = [key for key in (*FORMAT_KEYS, "must_match") if key not in manifest]
    if missing:
        raise ValueError(f"{source}: manifest lacks {', '.join(missing)}")
    if manifest["last"] != "post_norm":
        raise ValueError(f"{source}: last is {manifest['last']!r}, must be 'post_norm' (after the final norm)")
    if manifest["dtype"] not in DTYPES:
        raise ValueError(f"{source}: dtype {manifest['dtype']!r}, must be one of {', '.join(DTYPES)}")
    if manifest["codec"] not in CODECS:
        raise ValueError(f"{source}: codec {manifest['codec']!r}, must be one of {', '.join(CODECS)}")


def agreed_manifest(path: Path, manifest: dict) -> dict:
    """The manifest on disk if it agrees with the one asked for; the latter, written, if there is none."""
    asked = json.loads(json.dumps({"schema": SCHEMA, **manifest}))
    check_format(asked, path / MANIFEST)
    if not (path / MANIFEST).exists():
        if (path / INDEX).exists():
            raise ValueError(f"{path} has an {INDEX} but no {MANIFEST}; restore it, or choose another directory")
        asked |= {"complete": False, "counts": {}}
        replace_file(path / MANIFEST, json.dumps(asked, indent=2).encode() + b"\n")
        sync(path.parent)
        return asked
    found = read_manifest(path)
    if rows := differences(found, asked):
        raise ValueError(
            f"{path} was made with other settings (old -> new):\n" + "\n".join(rows) + "\n"
            "Go back to the old values to continue it, or choose another store directory"
        )
    return found


def differences(found: dict, asked: dict) -> list[str]:
    """What a manifest on disk says otherwise than the one asked for: a line a key, old and new."""
    asked = json.loads(json.dumps(asked))  # tuples are lists on disk
    old, new = ({key: value[key] for key in FORMAT_KEYS} | _flat(value["must_match"], "") for value in (found, asked))
    changed = [key for key in sorted(old | new) if old.get(key, "<absent>") != new.get(key, "<absent>")]
    return [f"  {key}: {old.get(key, '<absent>')!r} -> {new.get(key, '<absent>')!r}" for key in changed]


def _flat(tree: dict[str, Any], prefix: str) -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves
