"""The drift report on the installed host, whole and with pieces taken out."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import host_drift
import pytest

PACKAGE = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A folder that holds the installed SGLang's source as another would lie; nothing is fetched."""

    def install(version, folder):
        for name in ("sglang", f"sglang-{importlib.metadata.version('sglang')}.dist-info"):
            (folder / name).mkdir()
        metadata = PACKAGE.parent / f"sglang-{importlib.metadata.version('sglang')}.dist-info" / "METADATA"
        text = metadata.read_text()
        if version not in (None, *host_drift.host.SUPPORTED_VERSIONS):
            text = text.replace(f"Version: {importlib.metadata.version('sglang')}", f"Version: {version}", 1)
        (folder / metadata.parent.name / "METADATA").write_text(text)
        for entry in PACKAGE.iterdir():
            if entry.name != "srt":
                (folder / "sglang" / entry.name).symlink_to(entry)
        _mirror(PACKAGE / "srt", folder / "sglang" / "srt")
        if version == "9.9.9":
            pool = folder / "sglang" / "srt" / "mem_cache" / "deepseek_v4_memory_pool.py"
            changed = pool.read_text().replace(
                "def get_ring_size(self, compress_ratio", "def ring_size(self, compress_ratio"
            )
            pool.unlink()
            pool.write_text(changed)
            model = folder / "sglang" / "srt" / "models" / "deepseek_v4.py"
            changed = model.read_text() + "\n\ndef f():\n    get_attn_backend().brand_new(1)\n"
            model.unlink()
            model.write_text(changed)

    monkeypatch.setattr(host_drift, "install", install)


def _mirror(source: Path, target: Path) -> None:
    """Folders two levels deep, files below them as links, so that single files can be changed."""
    target.mkdir()
    for entry in source.iterdir():
        if entry.name in ("mem_cache", "models"):
            _mirror(entry, target / entry.name)
        else:
            (target / entry.name).symlink_to(entry)


def test_drift(beside, capsys):
    newest, count = host_drift.host.SUPPORTED_VERSIONS[-1], len(host_drift.host.HOST_SYMBOLS)
    assert host_drift.report([newest, None, "9.9.9"]) == 1
    out = capsys.readouterr().out
    assert f"sglang {newest} (supported): {count} of {count} symbols as in the table" in out
    assert f"sglang {newest} is the newest: see above" in out
    assert f"sglang 9.9.9 (not in SUPPORTED_VERSIONS): {count - 1} of {count}" in out
    assert "get_ring_size does not exist" in out
    assert "the model also asks its backend for: brand_new" in out


def test_an_absent_version_is_named(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["host_drift.py", "0.0.0"])
    monkeypatch.setenv("CSA2_PIP_ARGS", "--no-index")
    assert host_drift.main() == 2
    assert "pip cannot install sglang==0.0.0" in capsys.readouterr().err
