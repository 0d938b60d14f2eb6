"""The engine's knobs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from pdlab.attention import BACKENDS
from pdlab.engine.drafting import Speculation
from pdlab.engine.policies import Policy, as_policy
from pdlab.kvcache import parse_kv_format
from pdlab.link import Link, name_of
from pdlab.requirements import (
    LARGEST_SEED,
    require_bool,
    require_choice,
    require_int,
    require_number,
)
from pdlab.sampling import CONSTRAINT_BACKENDS


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs. Every field is a knob.

    All are lossless but a `kv_format` of less than the model's dtype, and a `window` on a model
    that was trained without one.

    Raises:
        ValueError: a field is out of range, or two do not go together.
    """

    block_size: int = 16
    """Tokens in a KV block."""
    num_blocks: int = 512
    """KV blocks in the pool; all memory for KV is taken when the engine is made."""
    kv_format: str = "auto"
    """How K and V are stored: `NAME[:SCALES[:GROUP]]`, or one such for K and one for V with `/`
    between. NAME is fp32, fp16, bf16, fp8, int8 or int4; SCALES is token, head or channel. See
    `pdlab.kvcache.KVFormat`. `auto` is the model's own dtype."""
    kv_head_groups: int = 1
    """Tensors that the KV heads are spread over, as over the ranks of tensor parallelism."""
    enable_prefix_cache: bool = True
    """Let requests find the K and V of prompts that begin alike."""
    num_swap_blocks: int = 0
    """Blocks in host memory, where preempted sequences may wait."""
    preemption: str = "auto"
    """`recompute`, `swap` (while host memory has room), or `auto`: what is predicted to be sooner
    done (`recompute` where there are no swap blocks). For that `auto` measures the machine when the
    engine is made, some seconds the first time, unless the engine is given its `hardware`."""
    watermark: float = 0.01
    """Part of the blocks that admission leaves free, so that those who run can grow."""
    window: int | None = None
    """Tokens a query looks back on, itself included; None for what the model was made with."""
    sink_tokens: int = 0
    """First tokens that stay visible behind the window."""
    heavy_tokens: int = 0
    """Older tokens that stay behind the window because they receive the most attention, in whole
    blocks."""
    exact: bool = False
    """Bit-identical results whatever the batch, block size or chunking (float32, slower)."""
    backend: str = "auto"
    """What computes: `torch`, operator by operator; `cpu`, a whole step in one compiled call (see
    `pdlab_kernels.cpu`); `triton`, kernels for NVIDIA GPUs (see `pdlab_kernels.triton`); or `auto`:
    `triton` on a GPU and `cpu` for packed weights, where it can be had, else `torch`. Of steps that
    are probed all is computed by torch."""
    cuda_graphs: bool = True
    """Whether `triton` replays steps of decodes alone from CUDA graphs, a graph for each of a few
    batch sizes, recorded when first needed."""
    attention_backend: str = "auto"
    """`reference`, `torch` or `exact`; `auto` is `exact` in exact mode and `torch` otherwise."""
    max_model_len: int | None = None
    """Longest prompt, and length at which generation stops, in tokens; None is the model's own."""
    max_num_seqs: int = 32
    """Sequences that may run at once."""
    max_num_batched_tokens: int = 2048
    """Token budget of one step: prompt chunks and decodes together."""
    chunk_size: int | None = None
    """Most prompt tokens of one sequence in one step; None leaves only the token budget. Where it
    is less than the budget, short prompts run beside the chunks of a long one."""
    batching: str = "mixed"
    """What a step may hold: `static` (nobody joins until all of a batch have finished),
    `prefill_first` or `decode_first` (one phase a step), or `mixed` (all decodes, and prompt chunks
    up to the token budget). See `pdlab.engine.scheduler.Scheduler`."""
    policy: str | Policy = "fcfs"
    """Who of those that wait is admitted next: `fcfs`, `sjf` (shortest prompt), `priority` (lowest
    number, with ageing), `deadline` (earliest TTFT deadline that can still be met) or
    `longest_prefix` (most tokens in the prefix cache); or a `pdlab.Policy` of your own."""
    max_overtakes: int = 1000
    """Later requests that may be admitted before one that waits: then the oldest is next, whatever
    the policy. A small number makes every policy first come, first served in a long queue."""
    max_phase_steps: int = 16
    """Most steps in a row that `prefill_first` and `decode_first` give to one phase while the other
    one waits."""
    speculation: Speculation | None = None
    """Who guesses tokens ahead, for the model to confirm several in a step: one of those in
    `pdlab.speculate`, such as `pdlab.PromptLookup()`. None guesses nothing."""
    overlap: bool = False
    """Compute the next step in a thread, beside what `step` still does of the last (text, chunks,
    record) and what its caller does before the next call. A request that comes meanwhile joins one
    step later; nothing else changes. Steps follow each other all the same where somebody looks in
    (a probe, counted activations), where K and V travel between engines, and in beam search."""
    tensor_parallel: int = 1
    """Ranks over which heads, MLP columns and vocabulary are cut, and with them every layer."""
    pipeline_parallel: int = 1
    """Stages over which the layers are dealt out, of `tensor_parallel` ranks each."""
    micro_batches: int | None = None
    """Pieces of a step's tokens that follow each other through the stages; None for as many as
    there are stages, or one where scales of K or V are those of blocks."""
    rank_host: str = "process"
    """Where ranks live: `process` (each in one of its own, on this machine), `thread` (of this
    process), `torchrun` (this process is rank 0 of a job, see `pdlab.parallel.torchrun`) or `ray`
    (actors)."""
    rank_threads: int | None = None
    """Threads of torch in each rank; None deals the cores out. Not for `rank_host="thread"`."""
    rank_link: Link | None = None
    """A link as slow as which all between ranks is made, simulated."""
    record_trace: bool = True
    """Keep every StepRecord in `engine.trace`."""
    top_k_recorded: int = 5
    """Most probable candidates kept with each sampled token."""
    constraint_backend: str = "llguidance"
    """What enforces json_schema, regex, choice and grammar: `llguidance`, or `pdlab`, our own,
    which knows regex and choice."""
    seed: int | None = None
    """Seeds the requests that bring no seed of their own; None draws from the system."""

    def __post_init__(self) -> None:
        for name in POSITIVE:
            require_int(name, getattr(self, name), least=1)
        for name in NOT_NEGATIVE:
            require_int(name, getattr(self, name), least=0)
        for name in ("exact", "record_trace", "enable_prefix_cache", "cuda_graphs", "overlap"):
            require_bool(name, getattr(self, name))
        for name in ("chunk_size", "max_model_len", "window", "micro_batches", "rank_threads"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), least=1)
        if self.seed is not None:
            require_int("seed", self.seed, least=0, most=LARGEST_SEED)
        require_number("watermark", self.watermark, 0, 1)
        require_choice("preemption", self.preemption, ("auto", "recompute", "swap"))
        require_choice("batching", self.batching, BATCHING_MODES)
        as_policy(self.policy)
        require_choice("constraint_backend", self.constraint_backend, CONSTRAINT_BACKENDS)
        require_choice("backend", self.backend, ("auto", "torch", "cpu", "triton"))
        require_choice("rank_host", self.rank_host, RANK_HOSTS)
        if not isinstance(self.rank_link, Link | None):
            raise ValueError(f"rank_link={self.rank_link!r:.60} must be None or a pdlab.link.Link")
        require_choice("attention_backend", self.attention_backend, ("auto", *BACKENDS))
        if not isinstance(self.speculation, Speculation | None):
            raise ValueError(
                f"speculation={self.speculation!r:.60} must be None or one of pdlab.speculate's"
            )
        self._check_together()

    def _check_together(self) -> None:
        """Refuse knobs that do not go together."""
        if self.preemption == "swap" and not self.num_swap_blocks:
            raise ValueError("preemption='swap' needs num_swap_blocks of at least 1, not 0")
        for name in ("sink_tokens", "heavy_tokens"):
            if getattr(self, name) and self.window is None:
                raise ValueError(
                    f"{name}={getattr(self, name)} needs a window: without one all stay"
                )
        if self.heavy_tokens and self.enable_prefix_cache:
            raise ValueError(
                f"heavy_tokens={self.heavy_tokens} needs enable_prefix_cache=False: which tokens "
                "stay, and so the K and V after them, depends on how a sequence came about"
            )
        if self.heavy_tokens and self.exact:
            raise ValueError(
                f"heavy_tokens={self.heavy_tokens} cannot be exact: which tokens stay depends on "
                "block size, chunks and preemption"
            )
        if self.heavy_tokens and self.speculation:
            raise ValueError(
                f"heavy_tokens={self.heavy_tokens} and speculation={self.speculation!r:.60} do not "
                "go together: drafts that do not stand would have their say in which tokens stay"
            )
        self._check_ranks()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"max_num_seqs={self.max_num_seqs}: some decodes would never run"
            )
        if self.exact and self.attention_backend not in ("auto", "exact"):
            raise ValueError(
                f"exact=True needs attention_backend='exact', not {self.attention_backend!r}"
            )
        is_blockwise = self.is_blockwise  # refuses, too, what is no format
        if self.exact and is_blockwise:
            raise ValueError(
                f"exact=True needs a kv_format with token scales, not {self.kv_format!r}: the "
                "scales of a block depend on which tokens were computed together"
            )

    def _check_ranks(self) -> None:
        """Refuse what several ranks cannot do, and what only they can."""
        ranks = (
            f"tensor_parallel={self.tensor_parallel}, pipeline_parallel={self.pipeline_parallel}"
        )
        if self.num_ranks == 1:
            for name in ("micro_batches", "rank_threads", "rank_link"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}={getattr(self, name)} needs several ranks: {ranks}")
            return
        if self.is_blockwise and (self.micro_batches or 1) > 1:
            raise ValueError(
                f"micro_batches={self.micro_batches} needs a kv_format with token scales, not "
                f"{self.kv_format!r}: a block that one piece of a step has filled cannot be opened "
                "again if the step is interrupted"
            )
        if self.heavy_tokens:
            raise ValueError(
                f"heavy_tokens={self.heavy_tokens} needs the weights of attention in one place, "
                f"not in ranks: {ranks}"
            )
        if self.kv_head_groups > 1:
            raise ValueError(
                f"kv_head_groups={self.kv_head_groups} does what ranks really do: leave it at 1 "
                f"with {ranks}"
            )
        if self.backend in ("cpu", "triton"):
            raise ValueError(f"backend={self.backend!r} is for one rank, and these are {ranks}")
        if self.rank_host == "thread" and self.rank_threads is not None:
            raise ValueError(
                f"rank_threads={self.rank_threads}: ranks with rank_host='thread' share torch's"
            )

    @property
    def is_blockwise(self) -> bool:
        """Whether scales of K or V are those of blocks, not of tokens."""
        halves = () if self.kv_format == "auto" else parse_kv_format(self.kv_format)
        return any(half.is_blockwise for half in halves)

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def largest_chunk(self) -> int:
        """Most tokens of one sequence in one step."""
        return min(self.chunk_size or self.max_num_batched_tokens, self.max_num_batched_tokens)

    @property
    def needs_torch(self) -> str | None:
        """Which knob asks for what only torch's operators do; None if none does."""
        if self.num_ranks > 1:
            return f"a model on {self.num_ranks} ranks is computed by operators"
        if self.exact:
            return "exact=True has its own order of sums"
        if self.heavy_tokens:
            return f"heavy_tokens={self.heavy_tokens} needs the weights of attention, of each step"
        if self.attention_backend not in ("auto", "torch"):
            return f"attention_backend={self.attention_backend!r} is torch's"
        return None

    def to_dict(self) -> dict[str, Any]:
        """As JSON knows it."""
        return asdict(replace(self, policy="fcfs", speculation=None, rank_link=None)) | {
            "policy": str(as_policy(self.policy)),
            "speculation": self.speculation and repr(self.speculation),
            "rank_link": name_of(self.rank_link) or None,
        }


POSITIVE = (
    "block_size",
    "num_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_head_groups",
    "max_phase_steps",
    "tensor_parallel",
    "pipeline_parallel",
)
NOT_NEGATIVE = (
    "num_swap_blocks",
    "sink_tokens",
    "heavy_tokens",
    "top_k_recorded",
    "max_overtakes",
)
RANK_HOSTS = ("process", "thread", "torchrun", "ray")
BATCHING_MODES = ("static", "prefill_first", "decode_first", "mixed")
