"""Generation without a KV cache: the single-stage way, kept as the thing to compare with.

Each new token is bought by running the whole text so far through the model again. The tokens are
the same; only the work differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pdlab.attention import AttentionBackend, ExactAttention, FusedAttention, Window, narrower
from pdlab.costmodel import StepCost, dense_step_cost
from pdlab.engine.admission import check_token_ids, check_vocabulary
from pdlab.engine.request import Sample, new_request
from pdlab.engine.runner import EXACT_ROW_TILE
from pdlab.models import Model
from pdlab.sampling import Compiler, Sampler, SamplingParams


@dataclass
class NaiveOutput:
    """Tokens, and for each of them the time it took and the work it cost."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    token_s: list[float] = field(default_factory=list)
    """Wall time of each token, in seconds, measured."""
    costs: list[StepCost] = field(default_factory=list)
    """Counted FLOPs and bytes of each token's pass."""


class NaiveGenerator:
    """Runs a model without any cache.

    Args:
        exact: bit-identical to `Engine` in exact mode.
        window: what every layer looks back on, at most.
    """

    def __init__(self, model: Model, *, exact: bool = False, window: Window | None = None):
        if exact and model.decoder.dtype is not torch.float32:
            raise ValueError(f"exact=True needs a model in fp32, not {model.decoder.dtype}")
        self.model = model
        self._attention: AttentionBackend = ExactAttention() if exact else FusedAttention()
        self._windows = [narrower(window, w) for w in model.config.windows]
        self._row_tile = EXACT_ROW_TILE if exact else None
        self._sampler = Sampler(top_k_recorded=0)
        self._compiler = Compiler(model.tokenizer, model.config.vocab_size)

    def logits(self, token_ids: list[int], *, last_only: bool = False) -> Tensor:
        """Next-token logits at every position, float32 [len(token_ids) or 1, vocab_size]."""
        decoder = self.model.decoder
        ids = torch.tensor(token_ids, dtype=torch.long, device=decoder.device)
        positions = torch.arange(len(token_ids), device=decoder.device)
        hidden = decoder(ids, positions, self._attend, row_tile=self._row_tile)
        return decoder.logits(hidden[-1:] if last_only else hidden, row_tile=self._row_tile)

    def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams | None = None,
        *,
        seed: int = 0,
        track: Callable[[range], Iterable[int]] = iter,
    ) -> NaiveOutput:
        """Generate by recomputing everything for every token.

        Args:
            seed: for sampling, where `params` brings none.
            track: given the range of tokens to make; may show progress as it is walked through.

        Raises:
            ValueError: the prompt is empty, too long, or has unknown token ids.
        """
        params = params or SamplingParams()
        for name, only in {"n": 1, "prompt_logprobs": None}.items():
            if getattr(params, name) != only:
                raise ValueError(f"{name}={getattr(params, name)} needs an Engine")
        limit = self.model.config.max_model_len
        if not 0 < len(prompt_ids) <= limit:
            raise ValueError(f"prompt has {len(prompt_ids)} tokens, it must have 1 to {limit}")
        check_vocabulary(self.model, prompt_ids)
        check_token_ids(self.model, params)
        sample = self._new_sample(prompt_ids, params, seed)
        sequence, output = sample.sequence, NaiveOutput()
        for _ in track(range(params.max_tokens)):
            start = time.perf_counter()
            logits = self.logits(sequence.token_ids, last_only=True)
            [drawn] = self._sampler.sample(logits, [sequence])
            if isinstance(drawn, ValueError):
                raise drawn
            output.token_s.append(time.perf_counter() - start)
            output.costs.append(self._cost(sequence.num_tokens))
            sequence.token_ids.append(drawn.token_id)
            sample.take(drawn, time.perf_counter())
            if sample.ending(limit):
                break
        sample.close()
        output.token_ids, output.text = sequence.output_ids, sample.text
        return output

    def _new_sample(self, prompt_ids: list[int], params: SamplingParams, seed: int) -> Sample:
        request = new_request(
            "naive",
            "",
            prompt_ids,
            params,
            seed=seed if params.seed is None else params.seed,
            uses_prefix_cache=False,
            now_s=time.perf_counter(),
            model=self.model,
            constraint=self._compiler.constraint(params),
            bad_words=self._compiler.bad_words(params),
        )
        return request.samples[0]

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attention.dense(q, k, v, self._windows[layer])

    def _cost(self, num_tokens: int) -> StepCost:
        return dense_step_cost(
            self.model.config,
            num_tokens,
            num_sampled=1,
            weight_element_bytes=self.model.decoder.dtype.itemsize,
            causal=True,
        )
