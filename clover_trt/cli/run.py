"""Verbs that run and look: generate, inspect, logits, verify, doctor."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from clover_trt.cli.shared import EngineOption, JsonOption, TensorMapOption, fail, numbers, out, progress_lines
from clover_trt.errors import RequestError

if TYPE_CHECKING:
    from clover_trt.runtime.generate import Generator
    from clover_trt.runtime.request import PassEvent, Result
    from clover_trt.runtime.sequence import Sequence

app = typer.Typer()


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
    mode: Annotated[str | None, typer.Option(help="diffusion, self-speculative or autoregressive.")] = None,
    rule: Annotated[str | None, typer.Option(help="Unmasking rule: low_confidence, tokens_per_pass, margin or entropy.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="With --json: log-probabilities and this many alternatives.")] = None,
    max_forwards: Annotated[int | None, typer.Option(help="End the response after so many block steps.")] = None,
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
        "mode": mode,
        "rule": rule,
        "logprobs": logprobs,
        "max_forwards": max_forwards,
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
        fail(result.error)


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
    with progress_lines() as progress:
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
    checkpoint: Annotated[
        str | None, typer.Option(help="The checkpoint the engine was built from; the engine's own record when not given.")
    ] = None,
    tensor_map: TensorMapOption = None,
    json_out: JsonOption = False,
) -> None:
    """Compare an engine with the reference model; exit code 1 on a difference.

    Without a checkpoint: caches of every layer and log-probabilities with the record that the build left in the engine, on any
    engine. With one: hidden states of every layer and decoded tokens, on a CPU engine.
    """
    from clover_trt.checkpoint.reader import Checkpoint
    from clover_trt.engine.package import open_package
    from clover_trt.parity.record import compare_with_record
    from clover_trt.parity.verify import verify as run

    package = open_package(engine)
    with progress_lines(json_out) as progress:
        if checkpoint is None:
            checks = compare_with_record(package)
        else:
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


@app.command(epilog="Example: clover-trt sweep --engine build/engines/tiny --prompts prompts.jsonl --out out/sweep")
def sweep(
    engine: EngineOption,
    prompts: Annotated[Path, typer.Option(help='JSON lines: {"prompt": text, "answer": text, "enable_thinking": false}.')],
    target: Annotated[Path, typer.Option("--out", help="Folder for sweep.json and sweep.png.")],
    thresholds: Annotated[str, typer.Option(help="Thresholds, separated by commas.")] = "0.5,0.7,0.8,0.9,0.95,0.99",
    rules: Annotated[str, typer.Option(help="Unmasking rules, separated by commas.")] = "low_confidence",
    masses: Annotated[str, typer.Option(help="Expert-subset masses, separated by commas.")] = "1",
    max_new_tokens: Annotated[int, typer.Option(help="Hard limit of each response.")] = 128,
    slots: Annotated[
        int, typer.Option(min=1, help="Requests decoded together; experts are counted over all rows of a pass.")
    ] = 1,
    json_out: JsonOption = False,
) -> None:
    """Exact match against tokens per forward over thresholds, rules and masses: a table and a picture."""
    from clover_trt.bench.sweep import read_prompts, write_report
    from clover_trt.bench.sweep import sweep as run
    from clover_trt.runtime.generate import Generator

    asked = read_prompts(prompts)
    levels, shares = numbers("--thresholds", thresholds, float), numbers("--masses", masses, float)
    if not (levels and shares):
        raise RequestError("--thresholds, --masses: expected at least one number each")
    with progress_lines(json_out) as progress:
        generator = Generator(str(engine), slots=slots)
        points = run(generator, asked, rules.split(","), levels, shares, progress, max_new_tokens=max_new_tokens)
        areas = write_report(points, target)
    if json_out:
        print(json.dumps({"points": [asdict(point) for point in points], "aup": areas}))
        return
    table = Table("rule", "mass", "threshold", "exact match", "TPF", "distinct experts")
    for point in points:
        figures = (f"{point.exact_match:.1%}", f"{point.tpf:.2f}", f"{point.distinct_experts:.1f}")
        table.add_row(point.rule, f"{point.expert_subset_mass:g}", f"{point.threshold:g}", *figures)
    out.print(table)
    for name, area in areas.items():
        out.print(f"AUP of {name}: {area:.2f}", highlight=False)
    out.print(f"wrote {target / 'sweep.json'} and {target / 'sweep.png'}", soft_wrap=True)


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
