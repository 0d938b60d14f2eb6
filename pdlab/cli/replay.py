"""`pdlab replay`: a workload on the engine, or simulated, and what became of its requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from os.path import isfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from pdlab.cli.replay_traffic import ServingReplay, Traffic
from pdlab.cli.serving_view import LiveView, print_summary
from pdlab.cli.speculation import parse_speculation
from pdlab.cli.text import counted, seconds
from pdlab.cli.walk import check_save
from pdlab.costmodel import StepTimes
from pdlab.costmodel.published import PUBLISHED, PublishedMachine, published
from pdlab.engine import Engine, EngineConfig
from pdlab.engine.policies import Deadline
from pdlab.models import Model, load
from pdlab.requirements import require_choice
from pdlab.workload.export import to_json, to_prometheus
from pdlab.workload.replay import ReplayInterrupted, replay
from pdlab.workload.report import summarize
from pdlab.workload.serving import SLO, ServingRun
from pdlab.workload.simulation import simulate
from pdlab.workload.step_calibration import measured_step_times
from pdlab.workload.traces import TraceRequest

SERVER_SEQS = 256
"""Sequences at once of a server with a GPU of its own: what vLLM's engine has had by default."""
CACHE_ONLY = ("kv_format", "step_ms", "baselines")
"""Options of `--cache-only` alone."""
BOTH = ("trace", "cache_only", "blocks", "block_size", "model", "requests")
"""Options of either; all others are those of a replay with a model."""


def check_together(given: Collection[str], options: Mapping[str, str]) -> None:
    """Refuse options that make no sense together.

    Args:
        given: names of the parameters that were given.
        options: how each is written.

    Raises:
        ValueError: names both.
    """
    if "cache_only" in given:
        for name in sorted(set(given) - {*CACHE_ONLY, *BOTH}):
            raise ValueError(f"{options[name]} needs a model to run; --cache-only runs none")
    else:
        for name in sorted(set(given) & {*CACHE_ONLY}):
            raise ValueError(f"{options[name]} is for --cache-only, which was not given")
    if "think_s" in given and "clients" not in given:
        raise ValueError("--think-s needs --clients: in an open loop nobody waits for an answer")
    if "hardware" in given and "simulate" not in given:
        raise ValueError(
            "--hardware needs --simulate: only simulated time can be another machine's"
        )
    for name in sorted({"model", "weights", "device"} & set(given)):
        if "hardware" in given:
            raise ValueError(
                f"{options[name]} and --hardware: the published times are of one model"
            )
    if "speculate" in given and "simulate" in given:
        raise ValueError("--speculate and --simulate: which drafts stand is not simulated")
    if "save" in given and "simulate" in given:
        raise ValueError("--save and --simulate: a simulation has no trace; --json has its metrics")
    if "rate" in given and "clients" in given:
        raise ValueError("--rate and --clients: in a closed loop the clients set the rate")


def replay_serving(asked: ServingReplay) -> None:
    """Serve the workload, show how it goes, and print what came of it.

    Raises:
        ValueError: no such workload, or a parameter out of range; nothing was loaded yet if that
            could be told.
    """
    _check_files(asked)
    slo, machine = asked.slo, _machine(asked)
    config = _config(asked, {} if machine is None else machine.engine)
    traffic = Traffic.of(asked)
    traffic.arrivals(asked)  # refuses what is out of range before a model is loaded
    console = Console(highlight=False)
    model = None if machine else load(asked.model, weights=asked.weights, device=asked.device)
    limit = config.max_model_len or (model.config.max_model_len if model else 0)
    traffic = traffic.cut(min(limit, config.num_blocks * config.block_size))
    for line in _introduction(asked, traffic, config):
        console.print(line, soft_wrap=True)
    if model is None or asked.simulate:
        times = machine.step_times if machine else _step_times(console, model, config)
        run = simulate(traffic.arrivals(asked), config, times, max_model_len=limit)
    else:
        try:
            run = _measure(console, asked, model, config, traffic)
        except ReplayInterrupted as interrupt:
            _finish(console, asked, interrupt.run, slo, interrupted=True)
            raise
    _finish(console, asked, run, slo)


def _check_files(asked: ServingReplay) -> None:
    """Raise a ValueError where a result could not be written, or would overwrite another."""
    taken: dict[Path, str] = {}
    if isfile(asked.trace):
        taken[Path(asked.trace).resolve()] = "the trace that is replayed"
    for name in ("save", "json", "prometheus"):
        path: Path | None = getattr(asked, name)
        check_save(path, name)
        if path is not None:
            other = taken.setdefault(path.resolve(), f"--{name}")
            if other != f"--{name}":
                raise ValueError(f"{name}={str(path)!r} is also {other}: each needs its own file")


def _machine(asked: ServingReplay) -> PublishedMachine | None:
    if asked.hardware is None:
        return None
    require_choice("hardware", asked.hardware, tuple(PUBLISHED))
    return published(asked.hardware)


def _step_times(console: Console, model: Model | None, config: EngineConfig) -> StepTimes:
    assert model is not None
    with console.status("measuring how long steps take on this machine (a minute, once) ..."):
        return measured_step_times(model, config)


def _measure(
    console: Console, asked: ServingReplay, model: Model, config: EngineConfig, traffic: Traffic
) -> ServingRun:
    """On the engine; the trace is saved also after Ctrl-C."""
    view = LiveView(console, config.num_blocks, len(traffic.requests), asked.slo)
    with Engine(model, config) as engine:
        try:
            with view:
                arrivals = traffic.arrivals(asked)
                return replay(engine, arrivals, on_step=view.update, seed=asked.seed)
        finally:
            if asked.save:
                engine.trace.save(asked.save)
                console.print(f"trace: {escape(str(asked.save))}", soft_wrap=True)


def _finish(
    console: Console,
    asked: ServingReplay,
    run: ServingRun,
    slo: SLO,
    *,
    interrupted: bool = False,
) -> None:
    """Tables, and files."""
    summary = summarize(run, slo)
    print_summary(console, run, summary, interrupted=interrupted)
    if asked.json:
        text = to_json(run, summary, interrupted=interrupted)
        asked.json.write_text(text, encoding="utf-8")
    if asked.prometheus:
        model_name = asked.hardware or asked.model
        text = to_prometheus(run, summary, model_name=model_name, interrupted=interrupted)
        asked.prometheus.write_text(text, encoding="utf-8")
    for name in ("json", "prometheus"):
        if path := getattr(asked, name):
            console.print(f"{name}: {escape(str(path))}", soft_wrap=True)


# --- the engine ----------------------------------------------------------------------------------


def _config(asked: ServingReplay, knobs: Mapping[str, Any]) -> EngineConfig:
    """The engine's knobs. A deadline is the SLO that is asked of the first token.

    Args:
        knobs: of the machine that is simulated, where nothing else was asked for.
    """
    deadline = Deadline(asked.slo.ttft_s) if asked.policy == "deadline" else None
    chosen: dict[str, Any] = {
        "max_num_seqs": asked.max_num_seqs,
        "max_overtakes": asked.max_overtakes,
    }
    if asked.hardware is not None and asked.max_num_seqs is None:
        chosen["max_num_seqs"] = min(SERVER_SEQS, asked.budget)
    config = EngineConfig(
        batching=asked.batching,
        policy=deadline or asked.policy,
        max_num_batched_tokens=asked.budget,
        chunk_size=asked.chunk_size,
        record_trace=asked.save is not None,
        speculation=parse_speculation(asked.speculate),
        **{name: value for name, value in chosen.items() if value is not None},
        **knobs,
    )
    if asked.blocks is not None:
        if not (asked.blocks.isascii() and asked.blocks.isdigit() and len(asked.blocks) < 16):
            raise ValueError(
                f"blocks={asked.blocks[:60]!r} must be a number of blocks: a pool without limit is "
                "for --cache-only"
            )
        config = replace(config, num_blocks=int(asked.blocks))
    if asked.block_size is not None:
        config = replace(config, block_size=asked.block_size)
    return config


# --- what it begins with -------------------------------------------------------------------------


def _introduction(asked: ServingReplay, traffic: Traffic, config: EngineConfig) -> list[str]:
    requests = traffic.requests
    prompt = sum(r.num_prompt_tokens for r in requests) / len(requests)
    output = sum(r.num_output_tokens for r in requests) / len(requests)
    lines = [
        f"[bold]workload[/]  {escape(traffic.name)}: {len(requests):,} of "
        f"{traffic.num_available:,} requests{_scales(asked, traffic)}",
        f"          mean {prompt:,.0f} prompt and {output:,.0f} output tokens; "
        f"{_when(asked, requests)}",
    ]
    if traffic.trimmed:
        lines.append(
            "          trimmed to what a laptop serves in about two minutes: --requests, --rate, "
            "--prompt-scale and --output-scale say otherwise"
        )
    if traffic.num_cut:
        longest = max(r.num_tokens for r in requests)
        cut = counted(traffic.num_cut, "request")
        lines.append(f"          {cut} cut to {longest:,} tokens: no more fit")
    seqs = " (a server's; --max-num-seqs says otherwise)"
    server = seqs if asked.hardware is not None and asked.max_num_seqs is None else ""
    chunk = "" if config.chunk_size is None else f" (of one prompt {config.chunk_size:,})"
    lines += [
        f"[bold]engine[/]    {config.batching}, {escape(config.to_dict()['policy'])}; at most "
        f"{config.max_num_seqs:,} sequences{server} and {config.max_num_batched_tokens:,} "
        f"tokens{chunk} a step; {config.num_blocks:,} KV blocks of {config.block_size} tokens",
        f"[bold]SLO[/]       TTFT {seconds(asked.slo.ttft_s)}, TPOT {seconds(asked.slo.tpot_s)}",
        "",
    ]
    return lines


def _scales(asked: ServingReplay, traffic: Traffic) -> str:
    factors = {"prompts": traffic.prompt, "outputs": traffic.output}
    if asked.clients is None:
        factors["arrival rate"] = traffic.rate
    changed = [f"{name} × {factor:.3g}" for name, factor in factors.items() if factor != 1]
    return "".join(f", {each}" for each in changed)


def _when(asked: ServingReplay, requests: Sequence[TraceRequest]) -> str:
    if asked.clients is not None:
        think = f", thinking {seconds(asked.think_s)}" if asked.think_s else ""
        return f"closed loop of {asked.clients:,} clients{think}"
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    if not span_s:
        return "all at once"
    return f"open loop, {(len(requests) - 1) / span_s:.3g} requests/s for {span_s:,.0f} s"
