"""The `pdlab` command: what can be asked for. What it does stands in the other modules here.

They are imported only when their command runs, so that `pdlab --help` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdlab.cli.errors import one_line_errors

app = typer.Typer(
    help="A workbench for learning how LLM inference works, on a real engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

bench_app = typer.Typer(help="Measure things side by side, in one run.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

DeviceOption = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]


@app.command()
def lab(
    port: Annotated[int, typer.Option(help="First port to try.", min=1, max=65535)] = 8888,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
) -> None:
    """Fetch and check the model, then open JupyterLab on the first lesson."""
    with one_line_errors():
        from pdlab.cli.lab_server import open_lab

        open_lab(port, browser=browser)


@app.command()
def run(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64,
    model: Annotated[
        str, typer.Option(help="A name, a GGUF file, a model directory or a hub id.")
    ] = "smollm2-135m",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it stands: no chat template.")
    ] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Bit-identical whatever the batch (float32, slower).")
    ] = False,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="The same tokens each time.")] = None,
    chunk_size: Annotated[
        int | None, typer.Option(help="Most prompt tokens of one prefill step.")
    ] = None,
    device: DeviceOption = "cpu",
    save: Annotated[
        Path | None, typer.Option(help="Write the trace here, say run.json.gz.")
    ] = None,
) -> None:
    """Walk one prompt through prefill and decode, with the cost of each stage."""
    with one_line_errors():
        from pdlab.cli.walk import Walk, run_prompt

        run_prompt(
            Walk(
                prompt=prompt,
                model=model,
                raw=raw,
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                exact=exact,
                chunk_size=chunk_size,
                device=device,
                save=save,
            )
        )


@app.command()
def chat(
    model: Annotated[
        str, typer.Option(help="A name, a GGUF file, a model directory or a hub id.")
    ] = "smollm2-135m",
    system: Annotated[
        str | None, typer.Option(help="What the model is told before all else.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token.")] = 0.2,
    top_p: Annotated[
        float, typer.Option(help="Only the most probable tokens, up to this probability.")
    ] = 0.9,
    seed: Annotated[int | None, typer.Option(help="The same answers each time.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
    device: DeviceOption = "cpu",
    save: Annotated[
        Path | None, typer.Option(help="Write the trace here, say chat.json.gz.")
    ] = None,
) -> None:
    """Talk with a model; every turn says what the prefix cache spared it."""
    with one_line_errors():
        from pdlab.cli.chat import Chat
        from pdlab.cli.chat import chat as talk

        talk(
            Chat(
                model=model,
                system=system,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                max_tokens=max_tokens,
                device=device,
                save=save,
            )
        )


@app.command()
def models() -> None:
    """List the models that have a name."""
    with one_line_errors():
        from pdlab.cli.model_list import list_models

        list_models()


@app.command()
def doctor() -> None:
    """Check what this machine has, and say how to get what is missing."""
    with one_line_errors():
        from pdlab.cli.checkup import examine

        raise typer.Exit(0 if examine() else 1)


@app.command()
def calibrate(
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again.")] = False,
    device: DeviceOption = "cpu",
    dtype: Annotated[str, typer.Option(help="fp32, fp16 or bf16.")] = "fp32",
) -> None:
    """Measure this machine's ceilings: FLOP/s and bytes a second."""
    with one_line_errors():
        from pdlab.cli.ceilings import show_ceilings

        show_ceilings(device, dtype, refresh=refresh)


@app.command()
def replay(
    trace: Annotated[str, typer.Argument(help="A trace file, or the name of a shipped trace.")],
    cache_only: Annotated[
        bool, typer.Option("--cache-only", help="KV memory only: no model is run.")
    ] = False,
    blocks: Annotated[str, typer.Option(help="Blocks of KV memory, or infinite.")] = "infinite",
    block_size: Annotated[
        int | None, typer.Option(help="Tokens a block; by default the trace's, or 16.", min=1)
    ] = None,
    model: Annotated[
        str, typer.Option(help="Whose K and V to count in bytes: the name of a shape.")
    ] = "smollm2-135m",
    kv_format: Annotated[str, typer.Option(help="The format of K and V to count.")] = "bf16",
    requests: Annotated[int | None, typer.Option(help="Only the first so many.", min=1)] = None,
    step_ms: Annotated[float, typer.Option(help="Simulated time of a step.")] = 50,
    baselines: Annotated[bool, typer.Option(help="Contiguous KV memory beside paged.")] = True,
) -> None:
    """Replay the requests of a trace: what they do to KV memory."""
    with one_line_errors():
        if not cache_only:
            raise ValueError("replay needs --cache-only: replaying with a model is not there yet")
        from pdlab.cli.replay import Replay, replay_cache_only

        replay_cache_only(
            Replay(
                trace=trace,
                blocks=blocks,
                block_size=block_size,
                model=model,
                kv_format=kv_format,
                num_requests=requests,
                step_ms=step_ms,
                baselines=baselines,
            )
        )


@bench_app.command()
def sampling(
    batch: Annotated[int, typer.Option(help="Sequences that decode together.")] = 32,
    context: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    repeats: Annotated[int, typer.Option(help="Rounds of all mixes; each has 6 steps.")] = 3,
    model: Annotated[
        str, typer.Option(help="A name, a GGUF file, a model directory or a hub id.")
    ] = "smollm2-135m",
    device: DeviceOption = "cpu",
    constraint_backend: Annotated[str, typer.Option(help="llguidance or pdlab.")] = "llguidance",
    save: Annotated[
        Path | None, typer.Option(help="Write the measurement here, say sampling.json.")
    ] = None,
) -> None:
    """What sampling costs beside the decode step that it is part of."""
    with one_line_errors():
        from pdlab.cli.bench import SamplingBench, bench_sampling

        bench_sampling(
            SamplingBench(
                batch=batch,
                context_len=context,
                repeats=repeats,
                model=model,
                device=device,
                constraint_backend=constraint_backend,
                save=save,
            )
        )
