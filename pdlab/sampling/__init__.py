"""From logits to a token: parameters, the chain of processors, constraints, and the draw.

This room knows logits and tokens; it does not know engines, blocks or time.
"""

from pdlab.sampling.chain import CHAIN, Processed, run_chain
from pdlab.sampling.constraints import CONSTRAINT_BACKENDS, Compiler
from pdlab.sampling.matcher import Drawer, Matcher
from pdlab.sampling.params import SamplingParams
from pdlab.sampling.processors import LogitsProcessor
from pdlab.sampling.sampler import (
    Logprob,
    Sampled,
    Sampler,
    TokenLogprobs,
    draw,
    logprobs_of,
    mix,
    uniform,
)
from pdlab.sampling.tally import Tally
from pdlab.sampling.verify import NO_DRAFT, Draft, Verdict, verify

__all__ = [
    "CHAIN",
    "CONSTRAINT_BACKENDS",
    "NO_DRAFT",
    "Compiler",
    "Draft",
    "Drawer",
    "LogitsProcessor",
    "Logprob",
    "Matcher",
    "Processed",
    "Sampled",
    "Sampler",
    "SamplingParams",
    "Tally",
    "TokenLogprobs",
    "Verdict",
    "draw",
    "logprobs_of",
    "mix",
    "run_chain",
    "uniform",
    "verify",
]
