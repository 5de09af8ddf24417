"""Compare the shared memory that each kernel asks for, over the table of cases (real sizes among them), with shared_memory.csv.

    python plugins/tests/check_shared_memory.py BUILD_FOLDER [--write]

The test programs of the host presets leave what they asked for in BUILD_FOLDER/*.shared.
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

TABLE = Path(__file__).parent.parent / "shared_memory.csv"


def read_reports(folder: Path) -> dict[str, int]:
    """The most bytes of each kernel."""
    found: dict[str, int] = {}
    for report in sorted(folder.glob("*.shared")):
        for line in report.read_text().splitlines():
            size, name = line.split(" ", 1)
            match = re.search(r"kernel = &?(?:clover::)?(?:\{anonymous\}::|\(anonymous namespace\)::)?([^;\]]+)", name)
            assert match is not None, name
            kernel = match[1].replace("clover::", "").replace("{anonymous}::", "").strip()
            found[kernel] = max(found.get(kernel, 0), int(size))
    return found


def main() -> int:
    """Print a line for each kernel; 1 when one is off."""
    found = read_reports(Path(sys.argv[1]))
    if "--write" in sys.argv:
        with TABLE.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["kernel", "shared_bytes"])
            writer.writerows(sorted(found.items()))
    with TABLE.open() as file:
        table = {row["kernel"]: int(row["shared_bytes"]) for row in csv.DictReader(file)}
    for kernel in sorted(found.keys() | table.keys()):
        same = found.get(kernel) == table.get(kernel)
        print(f"{kernel:28} {found.get(kernel, '-'):>8} bytes  {'ok' if same else f'the table has {table.get(kernel)}'}")
    return int(found != table)


if __name__ == "__main__":
    sys.exit(main())
