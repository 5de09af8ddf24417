"""Compare what the assembler says of each kernel with resources.csv: no spills, no static shared memory (what a launch asks for
is capped by tests/simt), and no more registers than the table has.

    python plugins/tests/check_resources.py BUILD_FOLDER [--write]

`--write` puts the figures of this build into the table where they are higher: it has the most that any compiler has taken
(nvcc 13.0 and 13.5 so far). A later one may take up to 16 registers more.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

TABLE = Path(__file__).parent.parent / "resources.csv"
SLACK = 16
Row = tuple[str, str]


def short_name(mangled: str) -> str:
    """`moe_down<e4m3>` from a mangled name."""
    name = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
    name = name.removeprefix("void ").replace("(anonymous namespace)", "").replace("clover::", "").replace("::", "")
    return name.split("(", 1)[0]


def read_reports(folder: Path) -> dict[Row, tuple[int, int]]:
    """Registers, and bytes spilled or of static shared memory, by kernel and architecture."""
    found: dict[Row, tuple[int, int]] = {}
    for report in sorted(folder.rglob("*.report")):
        entry, spilled = None, 0
        for line in report.read_text().splitlines():
            if match := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
                entry = (short_name(match[1]), match[2])
            elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
                spilled = int(match[1]) + int(match[2])
            elif entry and (match := re.search(r"Used (\d+) registers", line)):
                static = re.search(r"(\d+) bytes smem", line)
                found[entry] = (int(match[1]), spilled + (int(static[1]) if static else 0))
                entry = None
    return found


def main() -> int:
    """Print a line for each kernel; 1 when one is off."""
    folder, write = Path(sys.argv[1]), "--write" in sys.argv
    found = read_reports(folder)
    if not found:
        print(f"{folder}: no reports of the assembler; build first")
        return 1
    with TABLE.open() as file:
        table = {(row["kernel"], row["architecture"]): int(row["registers"]) for row in csv.DictReader(file)}
    if write:
        table.update({key: max(registers, table.get(key, 0)) for key, (registers, _) in found.items()})
        with TABLE.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["kernel", "architecture", "registers", "spilled_bytes"])
            writer.writerows((*key, table[key], 0) for key in sorted(table))
    wrong = 0
    for key, (registers, spilled) in sorted(found.items()):
        limit = table.get(key)
        verdict = "ok"
        if spilled:
            verdict = f"{spilled} BYTES spilled or of static shared memory"
        elif limit is None:
            verdict = "NOT IN THE TABLE"
        elif registers > limit + SLACK:
            verdict = f"TOO MANY, the table has {limit}"
        wrong += verdict != "ok"
        print(f"{key[0]:28} {key[1]:8} {registers:4} registers  {verdict}")
    built = {architecture for _, architecture in found}
    for key in sorted(key for key in table if key[1] in built and key not in found):
        print(f"{key[0]:28} {key[1]:8} in the table, not in the build")
        wrong += 1
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
