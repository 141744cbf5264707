"""The table of the sources in the package's README."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

NATIVE = Path(__file__).parents[2] / "native"


def test_every_source_is_in_the_table_of_the_readme() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", (NATIVE / "README.md").read_text(), re.MULTILINE)
    patterns = [pattern for row in rows for pattern in re.findall(r"`(.+?)`", row)]
    sources = [path.name for path in (NATIVE / "src").iterdir()]
    assert [name for name in sources if not any(fnmatch(name, pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in sources)] == []
