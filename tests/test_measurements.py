"""Measured figures: what is stored says where it was measured, and nothing is made up where nothing is stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashviz import measured as named
from flashviz.measurements import FOLDER, measured


def test_nothing_stored_is_none() -> None:
    assert measured("never measured") is None


def test_where_names_the_machine_and_the_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashviz.measurements.FOLDER", tmp_path)
    data = {"gpu": "NVIDIA X1", "multiprocessors": 7, "date": "2026-01-02", "rows": [{"ms": 1.5}]}
    (tmp_path / "thing.json").write_text(json.dumps(data))
    found = measured("thing")
    assert found is not None
    assert found.where == "one X1 with 7 multiprocessors, 2026-01-02"
    assert found.rows == [{"ms": 1.5}]
    assert repr(found) == "Measured('thing', one X1 with 7 multiprocessors, 2026-01-02)"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_every_stored_file_says_where_and_has_rows(path: Path) -> None:
    found = measured(path.stem)
    assert found is not None
    assert found.rows
    assert all(word in found.where for word in ("one ", "multiprocessors", "20"))
    assert named is measured


def test_flash_decodings_rows_have_what_the_chapter_plots() -> None:
    found = measured("flash_decoding")
    if found is None:
        pytest.skip("no figures of flash decoding are stored")
    for row in found.rows:
        lengths = {len(row[key]) for key in ("splits", "blocks", "split ms", "combine ms")}
        assert len(lengths) == 1
        assert row["floor ms"] == pytest.approx(row["kv bytes"] / found.data["copy TB/s"] / 1e9, rel=1e-3)
        assert row["blocks"] == [s * row["Hkv"] * row["B"] for s in row["splits"]]
        assert min(row["split ms"]) > 0.5 * row["floor ms"]
