"""What travels between two workers, and how long the receiver waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pdlab.bench.disaggregation import warm_up
from pdlab.disagg.cluster import Cluster
from pdlab.disagg.hosts.spec import local_specs
from pdlab.disagg.router import RouterConfig
from pdlab.disagg.serving import ClusterRun
from pdlab.disagg.simulated.break_even import exposed_s
from pdlab.engine import EngineConfig
from pdlab.link import LINKS, Link
from pdlab.models import Model
from pdlab.models.catalog import SHAPES
from pdlab.models.config import ModelConfig
from pdlab.workbench.disagg_experiments.chats import DOCUMENT_TOKENS
from pdlab.workbench.disagg_experiments.processes import ENGINE, Processes, Runs
from pdlab.workload import TraceRequest


class Shape(NamedTuple):
    """A model's K and V, as far as a link is concerned."""

    name: str
    config: ModelConfig
    element_bytes: float

    @property
    def bytes_per_token(self) -> float:
        return self.config.kv_bytes_per_token(self.element_bytes)


LLAMA2_7B = ModelConfig(
    family="llama",
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=11_008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    max_model_len=4096,
)
"""Touvron et al. 2023: the last of its size in which each head has its own K and V."""


def shapes(model: Model) -> list[Shape]:
    """The model at hand, and three that are served in earnest."""
    return [
        Shape(f"{model.name}, fp32", model.config, 4),
        Shape("Llama-2-7B, bf16 (no GQA)", LLAMA2_7B, 2),
        Shape("Qwen3-8B, bf16", SHAPES["qwen3-8b"], 2),
        Shape("Qwen3-8B, int8 without scales", SHAPES["qwen3-8b"], 1),
    ]


class Exposed(NamedTuple):
    """A prompt's K and V on a link; predicted."""

    link: Link
    whole_s: float
    """All of it after the prompt's last step."""
    layered_s: float
    """What is left to wait for, layer by layer."""


def exposed(
    prefill_s: float, num_layers: int, num_bytes: float, names: Sequence[str] = tuple(LINKS)
) -> list[Exposed]:
    """What the receiver waits for, on each of the links."""
    found = []
    for name in names:
        link, size = LINKS[name], round(num_bytes)
        left_s = exposed_s(prefill_s, num_layers, size, link)
        found.append(Exposed(link, link.transfer_s(size), left_s))
    return found


ROOMS = 36
"""Blocks of the decode worker behind the slow link: room for two prompts of `ROOM_PROMPT`."""
ROOM_PROMPT, ROOM_TOKENS = 240, 16


class SlowPair(Processes):
    """1P1D with a slow link between, simulated, and little memory at the receiver."""

    def __init__(self, model: Model, link: Link, config: EngineConfig = ENGINE):
        self.link = link
        specs = local_specs(
            1,
            1,
            model=model.name,
            config=replace(config, max_num_batched_tokens=DOCUMENT_TOKENS),
            decode_config=replace(config, num_blocks=ROOMS),
            link=link,
        )
        super().__init__(model, {"pair": specs})
        warm_up(self.by("push"))

    def by(self, transfer: str) -> Cluster:
        """`push`: the whole prompt, once it is computed; `stream`: layer by layer."""
        return self.cluster("pair", RouterConfig(transfer=transfer))

    def send(self, num_tokens: int = DOCUMENT_TOKENS) -> Runs:
        """One prompt's K and V, as a whole and layer by layer."""
        request = [TraceRequest(0.0, num_tokens, 4)]
        return {way: self.serve(self.by(way), request) for way in ("push", "stream")}

    def crowd(self, num_prompts: int = 4) -> Runs:
        """More prompts than the receiver has room for, all at once, in both ways."""
        requests = [TraceRequest(0.0, ROOM_PROMPT, ROOM_TOKENS) for _ in range(num_prompts)]
        return {way: self.serve(self.by(way), requests) for way in ("push", "stream")}


def waited_s(run: ClusterRun, place: int = 0) -> float:
    """From the end of a prompt's last step to when the receiver could go on."""
    moved = run.transfers[place]
    steps = [s for s in run.workers[moved.source].steps if moved.request_id in s.prompts]
    return max(0.0, moved.ready_s - max(step.end_s for step in steps))


class Room(NamedTuple):
    """Where a request of a crowd waited."""

    queue_s: float
    """Until its prompt was begun."""
    ttft_s: float
    first_gap_s: float
    """From the first token, which the prompt's worker draws, to the second."""

    @classmethod
    def of(cls, run: ClusterRun) -> list[Room]:
        """Of all requests, by their first tokens."""
        metrics = sorted((r.metrics for r in run.requests), key=lambda m: m.ttft_s or 0.0)
        return [cls(m.queue_s or 0.0, m.ttft_s or 0.0, m.itl_s[0]) for m in metrics]
