"""The `pdlab` command: what can be asked for. What it does stands in the other modules here.

They are imported only when their command runs, so that `pdlab --help` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdlab.cli.bench_overlap import overlap
from pdlab.cli.bench_parallel import parallel
from pdlab.cli.bench_speculation import speculation
from pdlab.cli.bench_weights import weights
from pdlab.cli.errors import one_line_errors

app = typer.Typer(
    help="A workbench for learning how LLM inference works, on a real engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

bench_app = typer.Typer()
bench_app.command()(weights)
bench_app.command()(speculation)
bench_app.command()(overlap)
bench_app.command()(parallel)
app.add_typer(bench_app, name="bench")

DeviceOption = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
WeightsOption = Annotated[
    str,
    typer.Option(help="Format: auto (the plain dtype), file (a GGUF's own), int8, int4:gptq, ..."),
]

SpeculateOption = Annotated[
    str | None,
    typer.Option(
        help="Guess tokens ahead: prompt_lookup:5, self:int4:4, early_exit:10:3, model:NAME:4; "
        "auto in place of the last number finds out how many pay."
    ),
]


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
    weights: WeightsOption = "auto",
    device: DeviceOption = "cpu",
    speculate: SpeculateOption = None,
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
                weights=weights,
                device=device,
                speculate=speculate,
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
    weights: WeightsOption = "auto",
    device: DeviceOption = "cpu",
    speculate: SpeculateOption = None,
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
                weights=weights,
                device=device,
                speculate=speculate,
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
    context: typer.Context,
    trace: Annotated[
        str, typer.Argument(help="A trace file, or the name of a shipped trace or of a workload.")
    ],
    cache_only: Annotated[
        bool, typer.Option("--cache-only", help="KV memory only: no model is run.")
    ] = False,
    requests: Annotated[int | None, typer.Option(help="Only the first so many.", min=1)] = None,
    rate: Annotated[float | None, typer.Option(help="Arrival rate, times the trace's.")] = None,
    prompt_scale: Annotated[
        float | None, typer.Option(help="Prompt lengths, times the trace's.")
    ] = None,
    output_scale: Annotated[
        float | None, typer.Option(help="Output lengths, times the trace's.")
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(help="Closed loop: so many clients, each waits for its answer.", min=1),
    ] = None,
    think_s: Annotated[float, typer.Option(help="What a client thinks between two.")] = 0,
    batching: Annotated[
        str, typer.Option(help="static, prefill_first, decode_first or mixed.")
    ] = "mixed",
    policy: Annotated[
        str, typer.Option(help="fcfs, sjf, priority, deadline or longest_prefix.")
    ] = "fcfs",
    max_num_seqs: Annotated[
        int | None,
        typer.Option(help="Sequences that run at once: 32; with --hardware 256.", min=1),
    ] = None,
    max_overtakes: Annotated[
        int | None,
        typer.Option(
            help="Later requests that may be admitted before one that waits: 1000.", min=0
        ),
    ] = None,
    budget: Annotated[int, typer.Option(help="Most tokens of a step.", min=1)] = 2048,
    chunk_size: Annotated[
        int | None, typer.Option(help="Most prompt tokens of one sequence a step.", min=1)
    ] = None,
    blocks: Annotated[
        str | None,
        typer.Option(
            help="Blocks of KV memory: 512; for --cache-only, or by default there, infinite."
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(help="Tokens a block: 16; with --cache-only the trace's.", min=1),
    ] = None,
    model: Annotated[
        str, typer.Option(help="The model; for --cache-only the name of a shape.")
    ] = "smollm2-135m",
    weights: WeightsOption = "auto",
    device: DeviceOption = "cpu",
    speculate: SpeculateOption = None,
    ttft_slo_ms: Annotated[float, typer.Option(help="Latest first token that is good.")] = 2000,
    tpot_slo_ms: Annotated[float, typer.Option(help="Slowest pace after it that is good.")] = 250,
    seed: Annotated[int, typer.Option(help="Of the prompts, and of a workload.", min=0)] = 0,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="In simulated time: steps take what they took here.")
    ] = False,
    hardware: Annotated[
        str | None,
        typer.Option(help="--simulate: published times of this machine, say a100-opt-13b."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the trace of the run here, say run.json.gz.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write all metrics and every request here, as JSON.")
    ] = None,
    prometheus: Annotated[
        Path | None, typer.Option(help="Write the metrics here, as Prometheus text.")
    ] = None,
    kv_format: Annotated[
        str, typer.Option(help="--cache-only: the format of K and V to count.")
    ] = "bf16",
    step_ms: Annotated[float, typer.Option(help="--cache-only: simulated time of a step.")] = 50,
    baselines: Annotated[
        bool, typer.Option(help="--cache-only: contiguous KV memory beside paged.")
    ] = True,
) -> None:
    """Replay the requests of a trace on the engine, or see what they do to KV memory alone."""
    with one_line_errors():
        from pdlab.cli.replay import ServingReplay, check_together, replay_serving

        check_together(_given(context), {p.name: p.opts[0] for p in context.command.params})
        if cache_only:
            from pdlab.cli.cache_replay import CacheOnly, replay_cache_only

            replay_cache_only(
                CacheOnly(
                    trace=trace,
                    blocks=blocks or "infinite",
                    block_size=block_size,
                    model=model,
                    kv_format=kv_format,
                    num_requests=requests,
                    step_ms=step_ms,
                    baselines=baselines,
                )
            )
            return
        replay_serving(
            ServingReplay(
                trace=trace,
                num_requests=requests,
                rate=rate,
                prompt_scale=prompt_scale,
                output_scale=output_scale,
                clients=clients,
                think_s=think_s,
                batching=batching,
                policy=policy,
                max_num_seqs=max_num_seqs,
                max_overtakes=max_overtakes,
                budget=budget,
                chunk_size=chunk_size,
                blocks=blocks,
                block_size=block_size,
                model=model,
                weights=weights,
                device=device,
                speculate=speculate,
                ttft_slo_ms=ttft_slo_ms,
                tpot_slo_ms=tpot_slo_ms,
                seed=seed,
                simulate=simulate,
                hardware=hardware,
                save=save,
                json=json,
                prometheus=prometheus,
            )
        )


def _given(context: typer.Context) -> set[str]:
    """Names of the parameters that stand on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


@bench_app.callback(invoke_without_command=True)
def bench_speed_or_gpu(
    context: typer.Context,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="BACKEND WEIGHTS [KV], say 'cpu int8'; may be given several times."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PYTHON[,MODEL], see README; may be given several times."),
    ] = None,
    transformers: Annotated[bool, typer.Option(help="Measure transformers too.")] = True,
    rounds: Annotated[int, typer.Option(help="Of all modes and peers in turn.")] = 5,
    tokens: Annotated[int, typer.Option(help="Generated of each prompt.")] = 48,
    threads: Annotated[int | None, typer.Option(help="For each; all cores by default.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="About a minute: a prompt of 128 tokens, twice.")
    ] = False,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="The CUDA GPU instead: kernels, prefill, decode.")
    ] = False,
    minutes: Annotated[float, typer.Option(help="--gpu: stop measuring after these.")] = 7.5,
    save: Annotated[Path | None, typer.Option(help="Write the measurement here, as JSON.")] = None,
    chart: Annotated[
        Path | None, typer.Option(help="Write a chart here: .html, or JSON for plotly.")
    ] = None,
) -> None:
    """How fast pdlab is, beside its peers and the machine's own floor; or one of the commands."""
    if context.invoked_subcommand:
        return
    with one_line_errors():
        if gpu:
            from pdlab.cli.bench_gpu import bench_gpu

            bench_gpu(minutes=minutes, save=save)
            return
        from pdlab.bench.entries import MODES
        from pdlab.cli.bench_speed import AskedSpeed, bench_speed

        bench_speed(
            AskedSpeed(
                modes=mode or MODES,
                peers=peer or (),
                rounds=rounds,
                num_tokens=tokens,
                threads=threads,
                transformers=transformers,
                quick=quick,
                save=save,
                chart=chart,
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


@bench_app.command()
def scheduling(
    requests: Annotated[int, typer.Option(help="Of each workload, each turn.")] = 24,
    repeats: Annotated[int, typer.Option(help="Turns, each with requests of its own.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the first turn; the next has the next.")] = 0,
    rate: Annotated[float, typer.Option(help="Of arrivals: a multiple of each workload's.")] = 1.0,
    ttft_slo_ms: Annotated[
        float | None,
        typer.Option(help="Latest first token that is good; by default simulation sets it."),
    ] = None,
    tpot_slo_ms: Annotated[
        float | None,
        typer.Option(help="Slowest pace after it that is good; given with the other or not."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="agreement, simulator, overhead or published; may be given twice."),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(help="short chat, long documents or mixed; may be given twice."),
    ] = None,
    published: Annotated[
        Path | None,
        typer.Option(help="A folder with distserve_sim and splitwise_sim, to compare with."),
    ] = None,
    model: Annotated[
        str, typer.Option(help="A name, a GGUF file, a model directory or a hub id.")
    ] = "smollm2-135m",
    device: DeviceOption = "cpu",
    save: Annotated[
        Path | None,
        typer.Option(help="Write it here; what is there stays, and turns of other seeds join."),
    ] = None,
) -> None:
    """The simulator beside the engine, and what scheduling and simulating take.

    By default some 8 minutes for smollm2-135m on two idle cores, nearly all of it the agreement:
    the engine serves 48 requests of each of three workloads, in two turns.
    """
    with one_line_errors():
        from pdlab.cli.bench_scheduling import AskedScheduling, bench_scheduling

        bench_scheduling(
            AskedScheduling(
                model=model,
                device=device,
                num_requests=requests,
                repeats=repeats,
                seed=seed,
                rate=rate,
                ttft_slo_ms=ttft_slo_ms,
                tpot_slo_ms=tpot_slo_ms,
                sections=only or (),
                workloads=workload or (),
                published=published,
                save=save,
            )
        )


@bench_app.command()
def disaggregation(
    repeats: Annotated[int, typer.Option(help="Times that each plan serves each workload.")] = 3,
    link: Annotated[
        str, typer.Option(help="Simulated, for what layer by layer hides: 1GbE, 10GbE, ...")
    ] = "1GbE",
    only: Annotated[
        list[str] | None,
        typer.Option(help="plans, overlap or agreement; may be given twice."),
    ] = None,
    model: Annotated[
        str, typer.Option(help="A name, a GGUF file, a model directory or a hub id.")
    ] = "smollm2-135m",
    save: Annotated[
        Path | None, typer.Option(help="Write the measurement here, say disaggregation.json.")
    ] = None,
) -> None:
    """What the same cores do as one engine, as two, and as one for prompts and one for outputs.

    By default some 13 minutes for smollm2-135m on two idle cores, of which the plans and the
    agreement of the simulated cluster with the real one take 6 each.
    """
    with one_line_errors():
        from pdlab.cli.bench_disaggregation import bench_disaggregation

        bench_disaggregation(model, sections=only or (), repeats=repeats, link=link, save=save)
