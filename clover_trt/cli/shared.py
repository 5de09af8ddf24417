"""What the verbs share: consoles, options, progress, errors."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from clover_trt.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Number = TypeVar("Number", int, float)
out, err = Console(), Console(stderr=True)

EngineOption = Annotated[Path, typer.Option("--engine", help="Engine package folder.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
TensorMapOption = Annotated[
    Path | None, typer.Option("--tensor-map", help="JSON file that names Clover's added GDN tensors in the checkpoint.")
]


def fail(message: str) -> NoReturn:
    """End with a user's mistake: one or two lines on stderr, exit code 2."""
    err.print(Text.assemble(("error: ", "red"), message), soft_wrap=True)
    sys.exit(2)


@contextmanager
def progress_lines(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A spinner with the running stage; finished stages stay as lines when the output is not a terminal."""
    if quiet:
        yield lambda _: None
        return
    with err.status("starting") as status:

        def show(stage: str) -> None:
            status.update(stage)
            if not err.is_terminal:
                err.print(stage)

        yield show


@contextmanager
def log_file(path: Path | None) -> Iterator[Callable[[str], None]]:
    """A function that appends lines to a file, or drops them."""
    if path is None:
        yield lambda _: None
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path}: cannot be written ({error.strerror})") from None
    with file:
        yield lambda line: print(line, file=file)


def numbers(option: str, text: str, kind: type[Number]) -> list[Number]:
    """Positive numbers separated by commas.

    Raises:
        RequestError: something else.
    """
    try:
        found = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise RequestError(f"{option}: expected numbers separated by commas, found {text!r}") from None
    if any(not number > 0 for number in found):
        raise RequestError(f"{option}: expected numbers above 0, found {text!r}")
    return found
