"""What a model takes on several devices: memory of each, and seconds of a step.

Every rank computes its shard under the roofline of `predict`, beside the others. What they tell
each other comes on top, after the operations it belongs to and hidden by none:

    a collective   rounds x latency + bytes / bandwidth, of the rank that sends most
    a send         from stage to stage: the sender goes on meanwhile

What one rank sends goes over a link of its own, one after the other; what several send to one does
not wait for each other.

With p stages a step is cut into m micro-batches, which follow each other through the stages. If all
take the same slot, the step takes m + p - 1 slots, and of these each stage spends p - 1 without
work: the bubble (Huang et al. 2019, "GPipe", section 2.3). A micro-batch reads all weights of its
stage again, so decode, which waits for weights, gains nothing by more of them.

A step ends before the next one begins, as in our engine. A server that has as many batches in
flight as stages fills the bubble with other requests: more tokens a second, none of them sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdlab.costmodel.checks import check_at_least
from pdlab.costmodel.collectives import LOGIT_BYTES, Collective, exchanged, is_one_shot
from pdlab.costmodel.cost import Chunk, step_cost
from pdlab.costmodel.hardware import Hardware, Provenance
from pdlab.costmodel.parallel_memory import (
    ElementBytes,
    RankMemory,
    check_fits,
    rank_memory,
    stage_config,
)
from pdlab.costmodel.predict import predict
from pdlab.link import Bookings, Link
from pdlab.models.config import ModelConfig
from pdlab.models.shard_plan import ShardPlan, cut

MicroBatch = tuple[Sequence[Chunk], int]
"""Chunks of sequences, and how many rows of them are sampled from."""


@dataclass(frozen=True)
class PredictedStep:
    """Seconds of one step on a grid of ranks."""

    time_s: float
    """From the first stage's start to the last one's end."""
    compute_s: float
    """Of the stage with the most work, all micro-batches together."""
    collective_s: float
    """Of the same stage."""
    bubble_share: float
    """Part of the time in which a stage has nothing to do, mean of all stages."""

    @property
    def waiting_s(self) -> float:
        """What is left: bubbles, and hidden states on their way."""
        return self.time_s - self.compute_s - self.collective_s


@dataclass(frozen=True)
class ParallelPrediction:
    """What a model should take on a grid of devices."""

    tensor_parallel: int
    pipeline_parallel: int
    prefill: PredictedStep
    decode: PredictedStep
    batch: int
    ranks: list[RankMemory]
    hardware: str
    link: str
    basis: Provenance
    """Whether the device's ceilings were measured or published."""
    provenance: Provenance = "predicted"

    @property
    def ttft_s(self) -> float:
        """Of one prompt with no other beside it: its prefill."""
        return self.prefill.time_s

    @property
    def tpot_s(self) -> float:
        """A decode step of the whole batch."""
        return self.decode.time_s

    @property
    def tokens_s(self) -> float:
        """Tokens a second, of the whole batch."""
        return self.batch / self.decode.time_s


def bubble_share(num_stages: int, num_micro_batches: int) -> float:
    """(p - 1) / (m + p - 1): GPipe's bubble, where all stages take equally long."""
    check_at_least(1, num_stages=num_stages, num_micro_batches=num_micro_batches)
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def predict_step(
    plan: ShardPlan,
    micro_batches: Sequence[MicroBatch],
    hardware: Hardware,
    link: Link,
    dtype: str,
    sizes: ElementBytes,
) -> PredictedStep:
    """Seconds of a step that is computed in these pieces, each stage one after the other."""
    compute_s, collective_s = [], []
    for shard in plan.shards[:: plan.tensor_parallel]:  # a stage's first rank has the most
        config = stage_config(plan, shard)
        computed, exchange = [], []
        for chunks, num_sampled in micro_batches:
            sampled = num_sampled if shard.has_head else 0
            cost = step_cost(
                config,
                chunks,
                num_sampled=sampled,
                weight_element_bytes=sizes.weights,
                kv_element_bytes=sizes.kv,
            )
            computed.append(predict(cost, hardware, dtype).time_s)
            rows = sum(length for _, length in chunks)
            told = exchanged(plan, shard, 0, rows, sampled, sizes.hidden)
            exchange.append(sum(_collective_s(plan, each, sampled, link) for each in told))
        compute_s.append(computed)
        collective_s.append(exchange)
    busy_s = [
        [a + b for a, b in zip(*stage, strict=True)]
        for stage in zip(compute_s, collective_s, strict=True)
    ]
    sent = [
        sum(length for _, length in chunks) * plan.config.hidden_size * sizes.hidden
        for chunks, _ in micro_batches
    ]
    time_s = pipeline_ends_s(busy_s, sent, link)[-1][-1]
    most = max(range(len(busy_s)), key=lambda stage: sum(busy_s[stage]))
    return PredictedStep(
        time_s=time_s,
        compute_s=sum(compute_s[most]),
        collective_s=sum(collective_s[most]),
        bubble_share=1 - sum(map(sum, busy_s)) / (len(busy_s) * time_s),
    )


def pipeline_ends_s(
    slots_s: Sequence[Sequence[float]], sent_bytes: Sequence[int], link: Link
) -> list[list[float]]:
    """When each stage is done with each micro-batch: [stages, micro-batches].

    A stage begins a micro-batch when it is done with the one before and has the hidden states.

    Args:
        slots_s: [stages, micro-batches], what each takes.
        sent_bytes: hidden states of each micro-batch, which go from stage to stage.
    """
    arrived_s = [0.0] * len(sent_bytes)
    ends_s = []
    for slots in slots_s:
        done_s = [0.0]
        for slot_s, there_s in zip(slots, arrived_s, strict=True):
            done_s.append(max(done_s[-1], there_s) + slot_s)
        ends_s.append(done_s[1:])
        wire = Bookings(link)
        arrived_s = [wire.book(n, at_s) for n, at_s in zip(sent_bytes, done_s[1:], strict=True)]
    return ends_s


def predict_parallel(
    config: ModelConfig,
    hardware: Hardware,
    link: Link,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    *,
    prompt_tokens: int,
    batch: int = 1,
    context_tokens: int | None = None,
    micro_batches: int | None = None,
    dtype: str = "bf16",
    weight_element_bytes: float | None = None,
    kv_element_bytes: float | None = None,
) -> ParallelPrediction:
    """TTFT of a prompt, TPOT of a batch, and memory of each device.

    Args:
        link: between any two devices.
        prompt_tokens: of one prompt, computed alone and in one step.
        batch: sequences that decode together.
        context_tokens: of each of them; None for the prompt's.
        micro_batches: most pieces of a step; None for as many as there are stages.
        weight_element_bytes, kv_element_bytes: default to the size of `dtype`.

    Raises:
        ValueError: the model cannot be cut so, the prompt is longer than it takes, a device has too
            little memory or no peak for `dtype`, or a count is out of range.
    """
    context = prompt_tokens if context_tokens is None else context_tokens
    pieces = pipeline_parallel if micro_batches is None else micro_batches
    check_at_least(
        1, prompt_tokens=prompt_tokens, batch=batch, context_tokens=context, micro_batches=pieces
    )
    longest = max(prompt_tokens, context + 1)
    if longest > config.max_model_len:
        raise ValueError(
            f"prompt_tokens={prompt_tokens}, context_tokens={context}: {longest} tokens are more "
            f"than the model's max_model_len={config.max_model_len}"
        )
    plan = ShardPlan(config, tensor_parallel, pipeline_parallel)
    sizes = ElementBytes.of(dtype, weight_element_bytes, kv_element_bytes)
    memory = memory_at(plan, sizes, prompt_tokens, batch, context, pieces)
    check_fits(memory, hardware)
    return ParallelPrediction(
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        prefill=predict_step(
            plan, prompt_pieces(prompt_tokens, pieces), hardware, link, dtype, sizes
        ),
        decode=predict_step(
            plan, decode_pieces(batch, context, pieces), hardware, link, dtype, sizes
        ),
        batch=batch,
        ranks=memory,
        hardware=hardware.name,
        link=link.name,
        basis=hardware.provenance,
    )


def memory_at(
    plan: ShardPlan,
    sizes: ElementBytes,
    prompt_tokens: int,
    batch: int,
    context_tokens: int,
    micro_batches: int,
) -> list[RankMemory]:
    """What each rank holds while a batch decodes and a prompt is computed before it joins in."""
    [[chunk], _], *_ = prompt_pieces(prompt_tokens, micro_batches)
    return rank_memory(
        plan,
        sizes,
        kv_tokens=batch * (context_tokens + 1),
        rows=max(chunk.num_tokens, -(-batch // micro_batches)),
        num_sampled=-(-batch // micro_batches),
    )


def prompt_pieces(num_tokens: int, most: int) -> list[MicroBatch]:
    """A prompt in at most so many micro-batches; the last samples the first token."""
    parts = cut(num_tokens, min(most, num_tokens))
    return [([Chunk(p.start, len(p))], int(p.stop == num_tokens)) for p in parts]


def decode_pieces(batch: int, context: int, most: int) -> list[MicroBatch]:
    """A batch of decodes in at most so many micro-batches."""
    return [([Chunk(context, 1)] * len(p), len(p)) for p in cut(batch, min(most, batch))]


def _collective_s(plan: ShardPlan, each: Collective, num_sampled: int, link: Link) -> float:
    """Seconds of a collective for a stage's first rank; a send is the pipeline's matter."""
    if each.kind == "send":
        return 0.0
    if each.kind == "gather":  # the first rank waits for the others, of which the second has most
        most = cut(plan.config.vocab_size, plan.tensor_parallel)[1]
        return link.transfer_s(num_sampled * len(most) * LOGIT_BYTES)
    rounds = 1 if is_one_shot(plan.tensor_parallel, each.num_bytes) else 2
    return rounds * link.latency_s + each.wire_bytes / link.bandwidth_bytes_s
