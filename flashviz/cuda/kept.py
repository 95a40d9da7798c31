"""Results kept in the user's cache folder, as JSON, by everything that they depend on. Deleting the folder costs only time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashviz.cuda.cpu_build import cache_folder


def place_of(part: str, key: Mapping[str, Any]) -> Path:
    """The file for what depends on ``key``, plain data."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder(part) / f"{digest[:32]}.json"


def read(part: str, key: Mapping[str, Any]) -> Any:
    """What was written under ``key``; None where nothing was, or what is there is not that."""
    try:
        kept = json.loads(place_of(part, key).read_text(encoding="utf-8"))
        return kept["result"] if kept["key"] == json.loads(json.dumps(key)) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(part: str, key: Mapping[str, Any], result: Any) -> None:
    """Keep ``result``. Readers see all of it or nothing, also when several processes write; a folder that cannot be written is no error."""
    place = place_of(part, key)
    with contextlib.suppress(OSError):
        handle, name = tempfile.mkstemp(suffix=".part", dir=place.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"key": key, "result": result}, file)
            Path(name).replace(place)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
