"""Prompt files of the benchmarks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clover_trt.errors import RequestError


def read_objects(path: Path, expected: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSON-lines file, each with where it is, for messages; empty lines count for nothing.

    Args:
        path: the file.
        expected: what a line has to be.

    Raises:
        RequestError: the file can't be read, a line is no object, or there is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: cannot be read ({error})") from None
    numbered = [(f"{path}, line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise RequestError(f"{path}: holds no prompts")
    for where, line in numbered:
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise RequestError(f"{where}: expected {expected}; {error}") from None
        if not isinstance(data, dict):
            raise RequestError(f"{where}: expected {expected}, found {type(data).__name__}")
        yield where, data
