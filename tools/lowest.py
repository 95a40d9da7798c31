"""Print the lowest versions that pyproject.toml allows, as pip requirements: `numpy==1.26`, one a line.

python tools/lowest.py > lowest.txt && python -m pip install -r lowest.txt
"""

from __future__ import annotations

import sys
from pathlib import Path

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


def lowest(requirement: str) -> str:
    """The requirement pinned to its lower bound; raises ValueError where it has none."""
    parsed = Requirement(requirement)
    bounds = [one.version for one in parsed.specifier if one.operator in (">=", "==", "~=")]
    if len(bounds) != 1:
        raise ValueError(f"{requirement!r} needs exactly one lower bound, it has {len(bounds)}")
    return f"{parsed.name}=={bounds[0]}"


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        print(lowest(requirement))
    return 0


if __name__ == "__main__":
    sys.exit(main())
