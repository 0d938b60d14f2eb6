"""What lossy knobs of the KV cache cost: perplexity, KL, agreement and errors, beside the bytes.

Every configuration reads the same text (teacher forcing, `pdlab.engine.forced`), in segments that
each start from nothing, and is compared with a reference token by token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
import torch.nn.functional as F
from torch import Tensor

from pdlab.engine import Engine, EngineConfig, SamplingParams
from pdlab.engine.admission import Prompt
from pdlab.engine.forced import ForcedRun
from pdlab.kvcache import PagedKVCache
from pdlab.models import Model, ModelConfig
from pdlab.workbench.kv_errors import Errors, KVErrors
from pdlab.workbench.lesson import progress


@dataclass(frozen=True)
class KVCost:
    """One configuration on one text, measured."""

    label: str
    config: EngineConfig
    bytes_per_token: float
    """Bytes of a slot over all layers, K and V, with its share of scales, off the tensors."""
    perplexity: float
    kl: float
    """Mean KL(reference || this) of the next-token distributions, in nats."""
    agreement: float
    """Share of positions with the reference's most probable token."""
    num_tokens: int
    """Tokens that were predicted: all but the first of each segment."""
    k_error: Errors
    """Relative L2 error, [num_layers, num_kv_heads]; see `KVErrors`."""
    v_error: Errors
    attended_error: Errors
    """[num_layers, num_heads]."""
    peak_blocks: int
    """Most blocks that a segment held at once."""
    segment_nll: list[float] = field(default_factory=list)
    """Mean negative log-likelihood of each segment's tokens, in nats."""
    chunk_nll: list[float] = field(default_factory=list)
    """The same for the first chunk of all segments, the second, and so on: by position."""
    open_bytes: int = 0
    """Bytes beside the blocks for each block that still fills; see `open_block_bytes`."""


def open_block_bytes(config: ModelConfig, kv_format: str, block_size: int) -> int:
    """Bytes that a block takes while it fills, in full precision beside the blocks.

    Block-wise formats need them, once for each sequence that grows; for others they are 0.

    Raises:
        ValueError: the format does not fit the model.
    """
    return PagedKVCache(config, 1, block_size, kv_format, max_open_blocks=1).open_bytes


def kv_costs(
    model: Model,
    configs: dict[str, EngineConfig],
    token_ids: list[int],
    *,
    segment_len: int = 1024,
    chunk_size: int = 256,
    reference: str = "fp32",
    after_segment: Callable[[list[KVCost]], None] = lambda costs: None,
) -> list[KVCost]:
    """Measure each configuration on the text, in the order of `configs`.

    Shows a progress bar; an interrupt ends it and leaves nothing behind.

    Args:
        reference: label of the configuration that the others are compared with.
        after_segment: given what is known so far, as often as a segment is done.

    Raises:
        ValueError: there is no such reference, no text, or a configuration does not fit.
    """
    if reference not in configs:
        raise ValueError(f"reference={reference!r} is not one of {', '.join(map(repr, configs))}")
    if segment_len < 2 or len(token_ids) < 2:
        raise ValueError(
            f"token_ids has {len(token_ids)} tokens and segment_len={segment_len}: a token is "
            "predicted from those before it, so both must be at least 2"
        )
    segments = [token_ids[i : i + segment_len] for i in range(0, len(token_ids), segment_len)]
    segments = [segment for segment in segments if len(segment) > 1]
    longest = len(segments[0])
    meters = {n: _Meter(model, n, c, longest, chunk_size) for n, c in configs.items()}
    order = sorted(meters, key=lambda label: label != reference)
    right: list[Tensor] = []
    for segment, label in progress([(s, n) for s in segments for n in order], "KV costs"):
        if label == reference:
            right = []
        meters[label].read(segment, right)
        if label == order[-1]:
            after_segment([meter.cost() for meter in meters.values()])
    return [meter.cost() for meter in meters.values()]


class _Meter:
    """Adds up what one configuration does to the segments."""

    def __init__(
        self, model: Model, label: str, config: EngineConfig, longest: int, chunk_size: int
    ):
        self.label, self.config = label, config
        self.run = ForcedRun(model, config, longest=longest, chunk_size=chunk_size)
        self.errors = KVErrors(model.config)
        self.kl, self.same = 0.0, 0
        self.nll: list[list[float]] = []
        """Of each segment's chunks: the sum over their tokens."""
        self.counts: list[list[int]] = []

    def read(self, segment: list[int], right: list[Tensor]) -> None:
        """Run one segment.

        Args:
            right: the reference's log-probabilities, chunk by chunk; filled if it is empty, for
                then this is the reference.
        """
        fills, start = not right, 1
        self.nll.append([])
        self.counts.append([])
        for i, logits in enumerate(self.run.logits(segment, [self.errors])):
            targets = torch.tensor(segment[start : start + len(logits)], device=logits.device)
            start += len(logits)
            ours = logits[: len(targets)].log_softmax(dim=-1)
            if fills:
                right.append(ours)
            self._compare(ours, right[i], targets)
        self.errors.end_text(self.run.read_kv)

    def _compare(self, ours: Tensor, right: Tensor, targets: Tensor) -> None:
        """Log-probabilities [num_rows, vocab_size] and the tokens that really come next."""
        self.nll[-1].append(-float(ours.gather(1, targets[:, None]).double().sum()))
        self.counts[-1].append(len(targets))
        self.same += int((ours.argmax(-1) == right.argmax(-1)).sum())
        if ours is not right:
            kl = F.kl_div(ours, right, reduction="none", log_target=True).sum(-1)
            self.kl += float(kl.double().sum())

    def cost(self) -> KVCost:
        count = sum(map(sum, self.counts))
        by_chunk = zip_longest(*self.nll, fillvalue=0.0), zip_longest(*self.counts, fillvalue=0)
        cache = self.run.memory.cache
        return KVCost(
            label=self.label,
            config=self.config,
            bytes_per_token=cache.bytes_per_token,
            perplexity=math.exp(sum(map(sum, self.nll)) / count),
            kl=self.kl / count,
            agreement=self.same / count,
            num_tokens=count,
            k_error=self.errors.relative("k"),
            v_error=self.errors.relative("v"),
            attended_error=self.errors.relative("attended"),
            peak_blocks=self.run.peak_blocks,
            segment_nll=[sum(n) / sum(c) for n, c in zip(self.nll, self.counts, strict=True)],
            chunk_nll=[sum(n) / sum(c) for n, c in zip(*by_chunk, strict=True) if sum(c)],
            open_bytes=open_block_bytes(
                cache.config, f"{cache.k_format}/{cache.v_format}", cache.block_size
            ),
        )


@dataclass(frozen=True)
class Greedy:
    """Greedy continuations of some prompts under one configuration."""

    texts: list[str]
    token_ids: list[list[int]]
    first_difference: list[int | None]
    """For each prompt, index of the first token that differs from the reference's; None: none."""


def greedy_agreement(
    model: Model,
    configs: dict[str, EngineConfig],
    prompts: list[Prompt],
    max_tokens: int,
    *,
    reference: str = "fp32",
) -> dict[str, Greedy]:
    """Continue each prompt greedily under each configuration, and find where the texts part.

    Raises:
        ValueError: there is no such reference, or a prompt or configuration does not fit.
    """
    if reference not in configs:
        raise ValueError(f"reference={reference!r} is not one of {', '.join(map(repr, configs))}")
    params = SamplingParams(max_tokens=max_tokens)
    outputs = {}
    for label, config in progress(list(configs.items()), "greedy"):
        with Engine(model, config) as engine:
            outputs[label] = engine.generate(prompts, params)
    for output in (output for several in outputs.values() for output in several):
        if output.error:
            raise output.error
    right = [output.token_ids for output in outputs[reference]]
    return {
        label: Greedy(
            texts=[o.text for o in several],
            token_ids=[o.token_ids for o in several],
            first_difference=[
                first_difference(o.token_ids, r) for o, r in zip(several, right, strict=True)
            ],
        )
        for label, several in outputs.items()
    }


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """Index of the first token that differs, or at which one list ends; None if they are equal."""
    if ours == theirs:
        return None
    pairs: Iterable[tuple[int, int]] = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
