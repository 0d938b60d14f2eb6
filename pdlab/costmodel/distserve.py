"""DistServe's formulas of step times, and the files that hold their constants.

DistServe (Zhong et al. 2024, OSDI) fitted the prefill and decode times of A100 80 GB for its
simulator, `simdistserve` (Apache-2.0): those of its own engine and those of vLLM, by model and
tensor parallelism, in milliseconds. The extra millisecond that the simulator itself adds to each
prefill is no part of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pdlab.costmodel.step_times import StepShape

Terms = tuple[float, float, float]


@dataclass(frozen=True)
class DistServeStepTimes:
    """DistServe's formulas for steps of one phase, and a composition of them for both.

    A prefill of prompts with n tokens takes a + b sum(n) + c sum(n^2); a decode of a batch takes
    a + b sum(context) + c batch, with other constants in a large batch. A chunk behind `start`
    tokens has end^2 - start^2 for n^2, so chunks of a prompt add up.

    DistServe never mixes the phases. For a mixed step we take the larger of the two constants a,
    that of a small batch for decodes, and add what the prompts and the decodes take beyond theirs:
    one pass over the weights serves both. So it takes no less than either alone. That is pdlab's
    assumption, and was not measured.

    More work never takes less, but for one more decode where a batch becomes large: there the two
    fits do not meet.
    """

    basis: str
    prefill_s: Terms
    decode_s: Terms
    large_decode_s: Terms
    large_batch: int
    """Decodes from which on `large_decode_s` holds."""

    @classmethod
    def of_milliseconds(
        cls,
        basis: str,
        prefill: Sequence[float],
        decode: Sequence[float],
        large_decode: Sequence[float],
        large_batch: int,
    ) -> DistServeStepTimes:
        """From what is published."""
        a, b, c = map(_in_seconds, (prefill, decode, large_decode))
        return cls(basis, a, b, c, int(large_batch))

    def step_s(self, shape: StepShape) -> float:
        """Seconds of a step of this shape."""
        _, tokens, pairs, decodes, context, _ = shape
        if not tokens:
            return self._decode_s(decodes, context)
        a, b, c = self.prefill_s
        # of a chunk, pairs = (end^2 + end)/2 - (start^2 + start)/2
        seconds = b * tokens + c * (2 * pairs - tokens)
        if not decodes:
            return a + seconds
        empty_s = self.decode_s[0]
        more_s = max(0.0, self._decode_s(decodes, context) - empty_s)
        return max(a, empty_s) + seconds + more_s

    def _decode_s(self, decodes: int, context: int) -> float:
        a, b, c = self.decode_s if decodes < self.large_batch else self.large_decode_s
        return a + b * context + c * decodes


def load_distserve_profile(path: Path | str) -> dict[tuple[str, int], DistServeStepTimes]:
    """The fits of a file `profiler-a100-80g.*.json`, by model and tensor-parallel devices.

    Raises:
        ValueError: it is no such file.
        OSError: it cannot be read.
    """
    path = Path(path)
    try:
        profiles = json.loads(path.read_text(encoding="utf-8"))
        return {
            (model, int(devices)): DistServeStepTimes.of_milliseconds(
                f"published: fit of DistServe, {path.stem}, {model}, tensor parallelism {devices}",
                fit["prefill"],
                fit["decoding_smallbs"],
                fit["decoding_largebs"],
                fit["decoding_large_small_bs_threshold"],
            )
            for model, fits in profiles.items()
            for devices, fit in fits.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: no profile of DistServe's simulator: {error!r}") from error


def _in_seconds(milliseconds: Sequence[float]) -> Terms:
    a, b, c = (float(value) / 1e3 for value in milliseconds)
    return a, b, c
