"""Command line: parse, call one function, print."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from clover_trt import __version__
from clover_trt.errors import CloverError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from clover_trt.engine.capacity import Capacity
    from clover_trt.runtime.generate import Generator
    from clover_trt.runtime.request import PassEvent, Result
    from clover_trt.runtime.sequence import Sequence

app = typer.Typer(
    help="Build and run engines for Clover block-diffusion language models.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
out, err = Console(), Console(stderr=True)
_debug = False

EngineOption = Annotated[Path, typer.Option("--engine", help="Engine package folder.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
TensorMapOption = Annotated[
    Path | None, typer.Option("--tensor-map", help="JSON file that names Clover's added GDN tensors in the checkpoint.")
]


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
        _fail(str(error))
    except ModuleNotFoundError as error:
        if _debug or error.name is None or error.name.startswith("clover_trt"):
            raise
        _fail(f"this command needs the package {error.name!r}; install it with: pip install 'clover-trt[build]'")
    sys.exit(0)


def _fail(message: str) -> NoReturn:
    err.print(Text.assemble(("error: ", "red"), message), soft_wrap=True)
    sys.exit(2)


@contextmanager
def _progress(quiet: bool = False) -> Iterator[Callable[[str], None]]:
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


@app.command(epilog="Example: clover-trt build --gpu cpu --checkpoint clover-tiny --out build/engines/tiny")
def build(
    checkpoint: Annotated[
        str | None, typer.Option(help="Checkpoint folder, or clover-tiny for the model that ships with us.")
    ] = None,
    target: Annotated[Path | None, typer.Option("--out", help="Folder of the engine package to write.")] = None,
    gpu: Annotated[str, typer.Option(help="Target: a name that 'clover-trt profiles' lists, or a YAML file.")] = "cpu",
    precision: Annotated[str | None, typer.Option(help="One that the profile offers; its first when not given.")] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="Longest prompt and response together.")] = None,
    compute_capability: Annotated[str | None, typer.Option(help="Instead of the profile's, as 12.0.")] = None,
    operations: Annotated[
        str | None, typer.Option(help="plugins, or functions: the operations in TensorRT's own operators.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Finish this build bundle on a machine that can.")] = None,
    gate: Annotated[
        bool, typer.Option("--gate/--no-gate", help="Compare the layers with the reference before the package is finished.")
    ] = True,
    log: Annotated[Path | None, typer.Option(help="Write TensorRT's messages to this file.")] = None,
    tensor_map: TensorMapOption = None,
    json_out: JsonOption = False,
) -> None:
    """Build an engine package from a checkpoint, or finish a build bundle."""
    from clover_trt.checkpoint.reader import Checkpoint
    from clover_trt.engine import build as engine
    from clover_trt.engine.inspect import describe_engine
    from clover_trt.parity.verify import layer_gate

    if resume is None and (checkpoint is None or target is None):
        raise RequestError("expected --checkpoint and --out, or --resume BUNDLE")
    with _progress(json_out) as progress, _log_file(log) as write_log:
        if resume is not None:
            if checkpoint is not None or target is not None:
                raise RequestError(
                    "--resume takes neither --checkpoint nor --out: the bundle has its settings, and stays where it is"
                )
            target, finished = resume, True
            engine.resume(resume, progress=progress, log=write_log)
        else:
            assert checkpoint is not None
            assert target is not None
            source = Checkpoint(checkpoint, tensor_map)
            if source.neutral and not json_out:
                err.print("note: a plain Qwen3.5-MoE checkpoint: logits are exact, but it has no tensors to denoise blocks with")
            finished = engine.build(
                source,
                target,
                gpu=gpu,
                precision=precision,
                max_seq_len=max_seq_len,
                compute_capability=compute_capability,
                operations=operations,
                progress=progress,
                log=write_log,
                gate=layer_gate(source) if gate else None,
            )
    if json_out:
        print(json.dumps({"engine": str(target), "finished": finished, **describe_engine(target)}))
    elif finished:
        out.print(f"built {target}")
    else:
        out.print(f"wrote the build bundle {target}: everything but the plan, which needs TensorRT and the GPU it is for")
        out.print(f"finish it there with: clover-trt build --resume {target}", soft_wrap=True)


@contextmanager
def _log_file(path: Path | None) -> Iterator[Callable[[str], None]]:
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


@app.command(epilog="Example: clover-trt plan --gpu h200 --context 131072 --slots 4")
def plan(
    gpu: Annotated[str, typer.Option(help="A name that 'clover-trt profiles' lists, or a YAML file.")],
    context: Annotated[int, typer.Option(min=1, help="Longest prompt and response together.")] = 131_072,
    slots: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 1,
    precision: Annotated[str | None, typer.Option(help="One that the profile offers; its first when not given.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Geometry to plan for; Clover-35B-A3B when not given.")] = None,
    json_out: JsonOption = False,
) -> None:
    """Say without building what an engine needs, whether it fits, and how fast a pass can be at best."""
    from clover_trt.checkpoint.reader import checkpoint_folder
    from clover_trt.checkpoint.synthetic import CLOVER_35B
    from clover_trt.config import ModelConfig
    from clover_trt.engine.capacity import capacity
    from clover_trt.engine.profiles import check_precision, read_profile

    profile = read_profile(gpu)
    model = CLOVER_35B if checkpoint is None else ModelConfig.from_folder(checkpoint_folder(checkpoint))
    chosen = check_precision(profile, precision)
    found = capacity(model, profile, chosen, context, slots)
    if json_out:
        totals = {"total_bytes": found.total_bytes, "fits": found.fits, "gpu": profile.name, "precision": chosen}
        print(json.dumps({**totals, "context": context, **asdict(found)}))
    else:
        _print_capacity(found, f"{profile.description}, {chosen}, {slots} x {context:,} tokens")
    if not found.fits:
        _fail(f"{slots} slots of {context:,} tokens do not fit: {found.most_slots} do")


def _print_capacity(found: Capacity, title: str) -> None:
    table = Table("part", "GB", title=title)
    for part, size in found.parts.items():
        table.add_row(part, f"{size / 1e9:.3f}")
    table.add_section()
    table.add_row("all", f"{found.total_bytes / 1e9:.1f} of {found.memory_bytes / 1e9:g}")
    table.add_row("a slot", f"{found.slot_bytes / 1e9:.2f}")
    table.add_row("slots that fit", str(found.most_slots))
    out.print(table)
    rates = list(found.floors[0].tokens_per_second)
    floors = Table("distinct experts", "GB moved", "floor, ms", "bound by", *(f"tokens/s at TPF {tpf:g}" for tpf in rates))
    for floor in found.floors:
        floors.add_row(
            str(floor.distinct_experts),
            f"{floor.bytes_moved / 1e9:.1f}",
            f"{floor.milliseconds:.2f}",
            floor.bound_by,
            *(f"{floor.tokens_per_second[tpf]:,.0f}" for tpf in rates),
        )
    out.print(floors)
    out.print("one row, empty prefix; a floor, not a measurement: bytes over bandwidth, operations over the peak rate")
    if found.stated_tokens_per_second:
        out.print(f"stated by the model's vendor, bfloat16: {found.stated_tokens_per_second:g} tokens/s")


@app.command(epilog="Example: clover-trt quantize --checkpoint clover-tiny --out out/tiny-fp8")
def quantize(
    checkpoint: Annotated[str, typer.Option(help="Checkpoint folder in bfloat16, or clover-tiny.")],
    target: Annotated[Path, typer.Option("--out", help="Checkpoint folder to write.")],
    tensor_map: TensorMapOption = None,
    json_out: JsonOption = False,
) -> None:
    """Write an FP8 copy of a checkpoint and say what the rounding costs; interrupted work goes on when called again."""
    from clover_trt.checkpoint.quantize import REPORT, quantize_checkpoint, summary
    from clover_trt.checkpoint.reader import Checkpoint

    with _progress(json_out) as progress:
        report = quantize_checkpoint(Checkpoint(checkpoint, tensor_map), target, progress)
    parts = summary(report)
    if json_out:
        print(json.dumps({"checkpoint": str(target), "summary": parts}))
        return
    table = Table("part", "matrices", "relative error, mean", "largest", "worst channel", "where")
    for part, row in parts.items():
        errors = (f"{row[field]:.2%}" for field in ("relative_error_mean", "relative_error_max", "worst_channel_error"))
        table.add_row(part, f"{row['matrices']:,}", *errors, row["worst_channel"])
    out.print(table)
    out.print(f"wrote {target}; every matrix: {target / REPORT}", soft_wrap=True)


@app.command(epilog="Example: clover-trt profiles")
def profiles(json_out: JsonOption = False) -> None:
    """List the GPU profiles that engines can be built for."""
    from clover_trt.engine.profiles import profile_names, profiles_folder, read_profile

    found = [read_profile(name) for name in profile_names()]
    if json_out:
        print(json.dumps([profile.model_dump(mode="json") for profile in found]))
        return
    table = Table("profile", "target", "backend", "compute capability", "memory", "bandwidth", "precisions")
    for each in found:
        table.add_row(
            each.name,
            each.description,
            each.backend,
            each.compute_capability or "-",
            f"{each.memory_gb:g} GB" if each.memory_gb else "-",
            f"{each.bandwidth_gb_s:,g} GB/s" if each.bandwidth_gb_s else "-",
            ", ".join(each.precisions),
        )
    out.print(table)
    out.print(f"files: {profiles_folder()}; your own: --gpu FILE.yaml", soft_wrap=True)


@app.command(epilog='Example: clover-trt generate --engine build/engines/tiny --prompt "What is 12 + 13?" --show-passes')
def generate(
    engine: EngineOption,
    stdin: Annotated[str | None, typer.Argument(metavar="[-]", help="- reads the prompt from standard input.")] = None,
    prompt: Annotated[str | None, typer.Option(help="User message; with --raw, the prompt itself.")] = None,
    chat: Annotated[Path | None, typer.Option(help="JSON file: a list of messages, or {messages, tools}.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the chat template to the prompt.")] = False,
    max_new_tokens: Annotated[int | None, typer.Option(help="Hard limit of the response.")] = None,
    threshold: Annotated[float | None, typer.Option(help="Confidence above which a position is filled, in (0, 1].")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per noisy block.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed when sampling.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sample at this temperature; greedy when not given.")] = None,
    expert_subset_mass: Annotated[
        float | None, typer.Option(help="Share of the routing mass kept in a block, in (0, 1].")
    ] = None,
    enable_thinking: Annotated[
        bool | None, typer.Option("--enable-thinking/--no-enable-thinking", help="Thinking mode of the template.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    fused: Annotated[bool, typer.Option("--fused/--no-fused", help="Commit a block in the first pass over the next one.")] = True,
    show_passes: Annotated[bool, typer.Option("--show-passes", help="Show the block filling in, pass by pass.")] = False,
    json_out: JsonOption = False,
) -> None:
    """Generate an answer."""
    from clover_trt.runtime.generate import Generator

    generator = Generator(str(engine), threads=threads, fused=fused)
    overrides: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "threshold": threshold,
        "block_size": block_size,
        "seed": seed,
        "temperature": temperature,
        "do_sample": True if temperature is not None else None,
        "expert_subset_mass": expert_subset_mass,
    }
    sequence = _request(generator, stdin, prompt, chat, raw, enable_thinking, overrides)
    if json_out:
        result = generator.run_one(sequence)
        print(json.dumps(asdict(result)))
    elif show_passes:
        result = _show_passes(generator, sequence)
        out.print(_figures(result))
    else:
        result = generator.run_one(
            sequence, lambda event: out.print(event.text, end="", markup=False, highlight=False, soft_wrap=True)
        )
        out.print()
        out.print(_figures(result))
    if result.error:
        _fail(result.error)


def _request(
    generator: Generator,
    stdin: str | None,
    prompt: str | None,
    chat: Path | None,
    raw: bool,
    enable_thinking: bool | None,
    overrides: dict[str, Any],
) -> Sequence:
    """The one request that the options describe."""
    if stdin not in (None, "-"):
        raise RequestError(
            f"unexpected argument {stdin!r}: give the prompt with --prompt TEXT, --chat FILE or - for standard input"
        )
    if sum(x is not None for x in (stdin, prompt, chat)) != 1:
        raise RequestError("expected exactly one of --prompt TEXT, --chat FILE.json and - (standard input)")
    if chat is not None:
        messages, tools = _read_chat(chat)
        return generator.chat(messages, tools=tools, enable_thinking=enable_thinking, **overrides)
    text = prompt if prompt is not None else sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
    if raw or generator.codec.template is None:
        return generator.sequence(text, **overrides)
    if not text:
        raise RequestError("the prompt is empty: expected at least one token")
    return generator.chat([{"role": "user", "content": text}], enable_thinking=enable_thinking, **overrides)


def _read_chat(path: Path) -> tuple[list[dict[str, Any]], list[Any] | None]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: not a readable JSON file ({error})") from None
    if isinstance(data, dict):
        tools = data.get("tools")
        if tools is not None and not isinstance(tools, list):
            raise RequestError(f"{path}: tools: expected a list, found {type(tools).__name__}")
        data = data.get("messages")
    else:
        tools = None
    if not isinstance(data, list):
        raise RequestError(f"{path}: expected a list of messages, or an object with 'messages'")
    return data, tools


def _figures(result: Result) -> Text:
    return Text(
        f"{len(result.token_ids)} tokens in {result.forwards} forwards: "
        f"TPF {result.tpf:.2f} ({result.tpf_denoise:.2f} per denoise pass), "
        f"{result.tokens_per_second:.0f} tokens/s, first block after {result.seconds_to_first_block:.3f} s, "
        f"finish: {result.finish_reason}",
        style="dim",
    )


def _show_passes(generator: Generator, sequence: Sequence) -> Result:
    """Draw the answer so far with the current block; a filled token is the greener the surer the model was."""
    done, confidence = Text(), {}
    mask = sequence.mask

    def draw(event: PassEvent) -> Text:
        confidence.update({fill.position: fill.confidence for fill in event.filled})
        view = Text()
        for i, token in enumerate(sequence.response + sequence.block):
            if token == mask:
                view.append("·", style="dim")
            else:
                sure = confidence.get(i, 1.0)
                piece = generator.codec.tokenizer.decode([token], skip_special_tokens=False)
                view.append(piece, style=f"rgb({int(255 * (1 - sure) * 2) if sure > 0.5 else 255},{int(200 * sure) + 40},80)")
        surest = f", {len(event.filled)} filled" if event.block else ", prompt committed"
        return Text.assemble((f"pass {event.forward}{surest}\n", "dim"), view)

    if not out.is_terminal:
        return generator.run_one(sequence, lambda event: out.print(draw(event)))
    with Live(done, console=out, refresh_per_second=30) as live:
        return generator.run_one(sequence, lambda event: live.update(draw(event), refresh=True))


@app.command(epilog="Example: clover-trt inspect build/engines/tiny")
def inspect(
    folder: Annotated[str, typer.Argument(help="Checkpoint folder, engine package, or clover-tiny.")],
    tensor_map: TensorMapOption = None,
    json_out: JsonOption = False,
) -> None:
    """Say what a checkpoint or an engine package is: geometry, parameters, bytes by part, provenance."""
    from clover_trt.engine.inspect import describe_engine
    from clover_trt.engine.package import is_package

    if is_package(Path(folder)):
        facts = describe_engine(Path(folder))
    else:
        from clover_trt.checkpoint.inspect import describe_checkpoint

        facts = describe_checkpoint(folder, tensor_map)
    if json_out:
        print(json.dumps(facts))
        return
    for title, section in facts.items():
        table = Table(title=title, title_justify="left", show_header=False)
        for key, value in (section if isinstance(section, dict) else {title: section}).items():
            number = isinstance(value, int) and not isinstance(value, bool)
            table.add_row(key, f"{value:,}" if number else escape(str(value)))
        out.print(table)


@app.command(epilog="Example: clover-trt logits --engine build/engines/tiny --ids 1,2,3 --out logits.npy")
def logits(
    ids: Annotated[str, typer.Option(help="Token ids, separated by commas.")],
    target: Annotated[Path, typer.Option("--out", help="File to write: [ids, vocabulary] float32.")],
    checkpoint: Annotated[str | None, typer.Option(help="Run the reference model of this checkpoint.")] = None,
    engine: Annotated[Path | None, typer.Option(help="Run this engine package.")] = None,
    tensor_map: TensorMapOption = None,
) -> None:
    """Write the logits of every position of a committed text as a NumPy file."""
    import numpy as np

    from clover_trt.runtime.scoring import commit_logits

    if (checkpoint is None) == (engine is None):
        raise RequestError("expected exactly one of --checkpoint and --engine")
    try:
        tokens = [int(part) for part in ids.split(",")]
    except ValueError:
        raise RequestError(f"--ids: expected whole numbers separated by commas, found {ids!r}") from None
    with _progress() as progress:
        progress("loading")
        if engine is not None:
            from clover_trt.engine.package import open_package
            from clover_trt.runtime.ort_session import OrtSession

            values = commit_logits(OrtSession(open_package(engine)), tokens)
        else:
            from clover_trt.checkpoint.reader import Checkpoint
            from clover_trt.model.load import load_model
            from clover_trt.parity.torch_session import TorchSession

            assert checkpoint is not None
            model = load_model(Checkpoint(checkpoint, tensor_map))
            limit = min(model.config.max_position_embeddings, max(512, len(tokens)))
            values = commit_logits(TorchSession(model, max_len=limit), tokens)
    try:
        with target.open("wb") as file:
            np.save(file, values)
    except OSError as error:
        raise RequestError(f"{target}: cannot be written ({error.strerror})") from None
    out.print(f"wrote {target}: {list(values.shape)} float32")


@app.command(epilog="Example: clover-trt verify --engine build/engines/tiny --checkpoint clover-tiny")
def verify(
    engine: EngineOption,
    checkpoint: Annotated[str, typer.Option(help="The checkpoint the engine was built from.")],
    tensor_map: TensorMapOption = None,
    json_out: JsonOption = False,
) -> None:
    """Compare an engine with the reference model: every layer, then decoded tokens; exit code 1 on a difference."""
    from clover_trt.checkpoint.reader import Checkpoint
    from clover_trt.engine.package import open_package
    from clover_trt.parity.verify import verify as run

    package = open_package(engine)
    with _progress(json_out) as progress:
        checks = run(package, Checkpoint(checkpoint, tensor_map), progress)
    if json_out:
        print(
            json.dumps({"passed": all(c.passed for c in checks), "checks": [{**asdict(c), "passed": c.passed} for c in checks]})
        )
    else:
        table = Table("compared", "error", "limit", "result")
        for check in checks:
            verdict = "[green]ok[/green]" if check.passed else "[red]DIFFERS[/red]"
            table.add_row(check.name, f"{check.error:.2g}", f"{check.limit:g}", verdict)
        out.print(table)
    if not all(check.passed for check in checks):
        raise typer.Exit(1)


@app.command(epilog="Example: clover-trt doctor")
def doctor(json_out: JsonOption = False) -> None:
    """Say what this machine can build and run, and the next step for what it can't."""
    from clover_trt.engine.doctor import examine

    findings = examine()
    if json_out:
        print(json.dumps([asdict(finding) for finding in findings]))
        return
    table = Table("part", "found", "next step")
    for finding in findings:
        table.add_row(
            finding.part, f"[{'green' if finding.present else 'yellow'}]{escape(finding.found)}", escape(finding.next_step)
        )
    out.print(table)


if __name__ == "__main__":
    main()
