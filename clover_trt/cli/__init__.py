"""Command line: parse, call one function, print."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from clover_trt import __version__
from clover_trt.cli import build, run, serve
from clover_trt.cli.shared import fail, out
from clover_trt.errors import CloverError

app = typer.Typer(
    help="Build and run engines for Clover block-diffusion language models.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(build.app)
app.add_typer(run.app)
app.add_typer(serve.app)
_debug = False


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    global _debug
    _debug = debug
    if version:
        out.print(__version__)
        raise typer.Exit


def main() -> NoReturn:
    """Entry point: a user's mistake is one or two lines on stderr and exit code 2."""
    try:
        app()
    except CloverError as error:
        if _debug:
            raise
        fail(str(error))
    except ModuleNotFoundError as error:
        if _debug or error.name is None or error.name.startswith("clover_trt"):
            raise
        serving = ("fastapi", "grpc", "openai", "tritonclient", "uvicorn", "httpx")
        extra = "bench" if error.name == "matplotlib" else "serve" if error.name.split(".")[0] in serving else "build"
        fail(f"this command needs the package {error.name!r}; install it with: pip install 'clover-trt[{extra}]'")
    sys.exit(0)
