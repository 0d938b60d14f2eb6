"""`pdlab run`: one prompt through tokenizer, prefill, first token and decode, in a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from pdlab.cli.errors import INTERRUPTED
from pdlab.cli.speculation import drafts_line, parse_speculation
from pdlab.cli.stages import ElementBytes, Stage, decode_stages, num_put_out, prefill_stages
from pdlab.cli.text import counted, seconds, si
from pdlab.costmodel import Hardware, StepCost, calibrate, mbu, mfu, predict
from pdlab.engine import Engine, EngineConfig, RequestOutput, SamplingParams
from pdlab.engine.recorder import cost_of
from pdlab.kvcache import blocks_for
from pdlab.models import Model, Tokenizer, load
from pdlab.trace import StepRecord

CONTROL_CHARACTERS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")})
"""Dropped from the model's text, which must not command the terminal."""
HOW_TO_READ = (
    "Times are measured, FLOPs and the least bytes to move counted from shapes. Predicted: from "
    "these and from the ceilings that this machine was measured to have (pdlab calibrate), as if "
    "it reached them."
)


@dataclass(frozen=True)
class Walk:
    """What `pdlab run` was asked for."""

    prompt: str
    model: str = "smollm2-135m"
    raw: bool = False
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int | None = None
    exact: bool = False
    chunk_size: int | None = None
    weights: str = "auto"
    device: str = "cpu"
    speculate: str | None = None
    save: Path | None = None


@dataclass
class Steps:
    """The engine's records of the one request, by phase."""

    prefill: list[StepRecord] = field(default_factory=list)
    decode: list[StepRecord] = field(default_factory=list)

    def add(self, record: StepRecord) -> None:
        (self.decode if record.phase == "decode" else self.prefill).append(record)


def run_prompt(walk: Walk) -> None:
    """Generate, and print the text as it comes between the tables of what it took.

    Raises:
        ValueError: a parameter is out of range; nothing was loaded yet if that could be told.
    """
    params = SamplingParams(
        temperature=walk.temperature, max_tokens=walk.max_tokens, seed=walk.seed
    )
    config = EngineConfig(
        exact=walk.exact,
        chunk_size=walk.chunk_size,
        speculation=parse_speculation(walk.speculate),
    )
    check_save(walk.save)
    console = Console(highlight=False)
    model = load(walk.model, weights=walk.weights, device=walk.device)
    tokenized, prompt_ids = _tokenize(model, walk)
    config = replace(config, num_blocks=_blocks_needed(model, config, prompt_ids, walk.max_tokens))
    with Engine(model, config) as engine:
        _print_header(console, engine, walk, len(prompt_ids))
        steps, output = _generate(console, engine, tokenized, prompt_ids, params)
        if steps.decode:
            _print_stages(console, decode_stages(steps.decode))
        _print_summary(console, model, steps, output, speculates=config.speculation is not None)
        if walk.save:
            engine.trace.save(walk.save)
            console.print(f"trace: {walk.save}", soft_wrap=True)
    if output.finish_reason == "abort":
        raise typer.Exit(INTERRUPTED)


def check_save(save: Path | None, name: str = "save") -> None:
    """Raise a ValueError, before the work is done, where its result could not be written."""
    if save and not save.parent.is_dir():
        raise ValueError(f"{name}={str(save)!r}: there is no directory {save.parent}")
    if save and save.is_dir():
        raise ValueError(f"{name}={str(save)!r} is a directory")


def _tokenize(model: Model, walk: Walk) -> tuple[Stage, list[int]]:
    if model.tokenizer is None:
        raise ValueError(f"model={walk.model!r} has no tokenizer, so it cannot read a prompt")
    if not walk.prompt:
        raise ValueError("prompt is empty: it needs at least 1 character")
    _prompt_ids(model.tokenizer, walk)  # the first call compiles the template: not what we time
    start = time.perf_counter()
    prompt_ids = _prompt_ids(model.tokenizer, walk)
    return Stage("tokenize", len(prompt_ids), time.perf_counter() - start), prompt_ids


def _prompt_ids(tokenizer: Tokenizer, walk: Walk) -> list[int]:
    if walk.raw or tokenizer.chat_template is None:
        return tokenizer.encode(walk.prompt)
    return tokenizer.apply_chat_template([{"role": "user", "content": walk.prompt}])


def _blocks_needed(
    model: Model, config: EngineConfig, prompt_ids: list[int], max_tokens: int
) -> int:
    """Blocks for this request alone; a prompt that is too long is left for the engine to refuse."""
    most = min(len(prompt_ids) + max_tokens, model.config.max_model_len)
    return blocks_for(most, config.block_size)


def _generate(
    console: Console,
    engine: Engine,
    tokenized: Stage,
    prompt_ids: list[int],
    params: SamplingParams,
) -> tuple[Steps, RequestOutput]:
    """Step until the request has finished, or Ctrl-C ends it with what there is.

    The table of prefill is printed with the first token, before the text starts.
    """
    model, steps, shown = engine.model, Steps(), 0
    assert engine.kv_cache is not None
    element_bytes = ElementBytes(model.weight_element_bytes, engine.kv_cache.element_bytes)
    request_id = engine.submit(prompt_ids, params)
    try:
        for record in iter(engine.step, None):
            steps.add(record)
            part = record.sequences[0]
            if part.phase == "prefill" and part.sampled is not None:
                stages = prefill_stages(steps.prefill, model.config, element_bytes)
                _print_stages(console, [tokenized, *stages])
            _print_text(console, part.text)
            shown += len(part.text)
    except KeyboardInterrupt:
        engine.abort(request_id)
    output = engine.collect(request_id)
    _print_text(console, output.text[shown:] + "\n\n")
    return steps, output


def _print_text(console: Console, text: str) -> None:
    if text:
        console.out(text.translate(CONTROL_CHARACTERS), end="", highlight=False)


def _print_header(console: Console, engine: Engine, walk: Walk, num_prompt_tokens: int) -> None:
    machine, model = engine.trace.machine, engine.model
    device = "" if machine["device"] == "cpu" else f"{machine['device']}; "
    chat = model.tokenizer is not None and model.tokenizer.chat_template is not None
    template = "in the chat template; --raw leaves it out" if chat and not walk.raw else "as given"
    lines = {
        "machine": f"{device}{machine['processor']}, {counted(machine['cores'], 'core')}, "
        f"{counted(machine['threads'], 'thread')}, torch {machine['torch']}",
        "model": f"{model.name}, {si(model.config.num_parameters, '')} parameters, "
        f"{model.dtype_name}, {si(model.weight_bytes, 'B')} of weights",
        "prompt": f"{counted(num_prompt_tokens, 'token')}, {template}",
    }
    for name, value in lines.items():
        console.print(f"[bold]{name:8}[/]", value, soft_wrap=True)
    console.print()


def _print_stages(console: Console, stages: Sequence[Stage]) -> None:
    """Times are measured, FLOPs and bytes counted; the last two columns are their quotients."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("stage", no_wrap=True, min_width=len("first token"))
    headers = ("tokens", "time", "FLOPs", "least bytes", "KV bytes", "GFLOP/s", "GB/s")
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True, min_width=7)
    for stage in stages:
        cells = [stage.name, str(stage.num_tokens), seconds(stage.time_s)]
        if stage.cost is not None and stage.kv_bytes is not None:
            flops, num_bytes = stage.cost.total_flops, stage.cost.total_bytes
            cells += [si(flops, ""), si(num_bytes, "B"), si(stage.kv_bytes, "B")]
            cells += [f"{rate / stage.time_s / 1e9:.1f}" for rate in (flops, num_bytes)]
        table.add_row(*cells)
    console.print(table)
    console.print()


def _print_summary(
    console: Console, model: Model, steps: Steps, output: RequestOutput, speculates: bool
) -> None:
    """Latencies, and beside them what the cost model predicts from this machine's ceilings."""
    metrics, interrupted = output.metrics, output.finish_reason == "abort"
    latencies = [
        ("TTFT, time to first token", metrics.ttft_s, steps.prefill, 1),
        ("TPOT, time per output token", metrics.tpot_s, steps.decode, num_put_out(steps.decode)),
    ]
    hardware = None if interrupted else _ceilings(console, model)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column()
    for header in ("measured", "predicted", "of the ceiling") if hardware else ("measured",):
        table.add_column(header, justify="right", no_wrap=True)
    for name, measured_s, records, count in latencies:
        if measured_s is None:
            continue
        cells = [name, seconds(measured_s)]
        if hardware:
            predicted_s, used = _prediction(records, hardware, model.dtype_name)
            cells += [seconds(predicted_s / count), used]
        table.add_row(*cells)
    console.print(table)
    if hardware:
        console.print("[dim]" + HOW_TO_READ)
    if speculates:
        console.print(drafts_line(metrics) + "; counted and predicted is the model without them")
    console.print(
        f"finished: {output.finish_reason}, {counted(metrics.num_output_tokens, 'token')}"
    )


def _ceilings(console: Console, model: Model) -> Hardware:
    with console.status("measuring this machine's ceilings (a few seconds, once) ..."):
        return calibrate(str(model.device), model.dtype_name)


def _prediction(records: list[StepRecord], hardware: Hardware, dtype: str) -> tuple[float, str]:
    """Predicted seconds of all these steps, and what they used of the ceiling that binds them."""
    cost = sum((cost_of(record) for record in records), StepCost.zero())
    wall_s = sum(record.wall_s for record in records)
    predictions = [predict(cost_of(record), hardware, dtype) for record in records]
    if sum(p.compute_s for p in predictions) >= sum(p.memory_s for p in predictions):
        used = f"MFU {mfu(cost, wall_s, hardware, dtype):.0%}"
    else:
        used = f"MBU {mbu(cost, wall_s, hardware):.0%}"
    return sum(prediction.time_s for prediction in predictions), used
