"""Serves a workload on one engine in simulated time; see `pdlab.workload.simulated_engine`."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from collections.abc import Sequence as Several
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

from pdlab.costmodel import StepTimes
from pdlab.engine.config import EngineConfig
from pdlab.engine.metrics import RequestMetrics
from pdlab.engine.moving import RequestState
from pdlab.engine.policies import PolicyError
from pdlab.sampling import SamplingParams
from pdlab.workload.arrivals import Arrivals, OpenLoop
from pdlab.workload.serving import ServedRequest, ServingRun, StepSpan
from pdlab.workload.simulated_engine import NO_LIMIT, Outcome, SimulatedEngine
from pdlab.workload.traces import TraceRequest


def simulate(
    arrivals: Arrivals | Several[TraceRequest],
    config: EngineConfig,
    step_times: StepTimes,
    *,
    max_model_len: int = NO_LIMIT,
    leaps: bool = True,
) -> ServingRun:
    """Serve all requests; returns when the last has finished.

    Requests that can never be served are refused, as by the engine, and the others go on.

    Args:
        config: the engine's knobs; those that decide about text, tensors or arithmetic do nothing.
        step_times: the machine and the model.
        max_model_len: of the model, where the configuration does not say.
        leaps: whether equal steps in a row are booked in one go.

    Raises:
        ValueError: a knob that cannot be simulated, a step time that is no time, no request at all.
        PolicyError: the policy has no rank for a request.
    """
    config = replace(config, max_model_len=config.max_model_len or max_model_len)
    engine = SimulatedEngine(config, step_times, leaps=leaps)
    if isinstance(arrivals, Several):
        arrivals = OpenLoop(arrivals)
    with uncollected():
        return _Simulation(arrivals, engine).run()


@contextmanager
def uncollected() -> Iterator[None]:
    """Python's garbage collector rests inside the `with` block, and is then as it was.

    A simulation makes millions of records and next to no cycles of them. As they become many the
    collector looks at all that there are, which in a notebook's kernel may take longer than the
    simulation.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Simulation:
    """The loop over one engine: see `simulate`."""

    def __init__(self, arrivals: Arrivals, engine: SimulatedEngine):
        self.arrivals = arrivals
        self.engine = engine
        self.requests: dict[str, ServedRequest] = {}
        self.steps: list[StepSpan] = []

    def run(self) -> ServingRun:
        """Serve everything."""
        engine, now_s = self.engine, 0.0
        while now_s < math.inf:
            next_s = self._let_in(now_s)
            end_s = engine.begin(now_s, until_s=next_s)
            if end_s is not None:
                self._book(engine.finish(end_s), end_s)
            now_s = next_s if end_s is None else end_s
        assert engine.pool.num_free == engine.pool.num_blocks, "blocks leaked"
        if not self.requests:
            raise ValueError("arrivals has no request left")
        return ServingRun(
            provenance="simulated",
            basis=engine.step_times.basis,
            config=engine.config.to_dict(),
            requests=list(self.requests.values()),
            steps=self.steps,
            num_blocks=engine.pool.num_blocks,
        )

    def _let_in(self, now_s: float) -> float:
        """Submit who has come; returns when the next will, infinity if nobody is known to."""
        while due := self.arrivals.take_due(now_s):  # one refused may call the next
            for request in due:
                self._submit(request, now_s)
        return math.inf if self.arrivals.next_s is None else self.arrivals.next_s

    def _submit(self, request: TraceRequest, now_s: float) -> None:
        """Let a request wait, or refuse it."""
        name, arrival_s = f"r{len(self.requests)}", request.arrival_s
        metrics = RequestMetrics(arrival_s, num_prompt_tokens=request.num_prompt_tokens)
        served = ServedRequest(name, metrics, priority=request.priority)
        self.requests[name] = served
        try:
            self.engine.resume(
                state_of(request, len(self.requests)),
                request_id=name,
                arrival_s=arrival_s,
                priority=request.priority,
                metrics=metrics,
            )
        except PolicyError:
            raise
        except ValueError as error:
            served.finish_reason, served.error = "error", str(error)
            self.arrivals.note_finished(now_s)

    def _book(self, outcome: Outcome, now_s: float) -> None:
        self.steps.append(outcome.span)
        for name in outcome.ended:
            self.requests[name].finish_reason = "length"
            self.arrivals.note_finished(now_s)


def state_of(request: TraceRequest, number: int) -> RequestState:
    """A request as an engine takes it; `number` as of `tokens_of`.

    Raises:
        ValueError: it makes no sense.
    """
    request.checked()
    return RequestState(tokens_of(request, number), _params_of(request.num_output_tokens))


@cache
def _params_of(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def tokens_of(request: TraceRequest, number: int) -> list[int]:
    """Tokens that are equal where the trace says that prefixes are, and nowhere else.

    The trace knows no text. A block's id and the place in it stand for a token; where there are no
    ids, the request's number does.

    Args:
        request: checked.
    """
    size = request.prefix_block_size
    if not size:
        return [-1 - number] * request.num_prompt_tokens
    tokens = [i * size + offset for i in request.prefix_ids for offset in range(size)]
    return tokens[: request.num_prompt_tokens]
