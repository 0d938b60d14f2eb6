"""Where a draft model comes from: the target in a cheaper format, its first layers, or another one.

Self-speculation needs no second model: Zhang et al. 2024, "Draft & Verify"; Elhoushi et al. 2024,
"LayerSkip", where the exit layer was trained for it. There the drafts' K and V are the target's
own; here every drafter has a memory of its own, which is why all three are one.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, fields, replace

import torch

from pdlab.engine import admission
from pdlab.engine.config import EngineConfig
from pdlab.kvcache import parse_kv_format
from pdlab.models import Model, load
from pdlab.models.calibration_text import calibration_windows
from pdlab.models.decoder import Decoder
from pdlab.models.packed_cache import packed_once
from pdlab.quantize import PackedWeights, fill_decoder, pack_decoder, parse_format
from pdlab.requirements import require_int
from pdlab.speculate.length import check_num_tokens, length_of
from pdlab.speculate.model_drafter import ModelDrafter


@dataclass(frozen=True, kw_only=True)
class ModelKnobs:
    """What all drafters with a model have.

    With `num_tokens="auto"` the lengths of drafts depend on measured times. Greedy output does not,
    it is the target's own; sampled output is drawn from the target's distribution in any case, but
    which of its texts a seed gives depends on where drafts end.

    Raises:
        ValueError: a field is out of range.
    """

    num_tokens: int | str = 4
    """Tokens of a draft; or `auto`, as many as measurements say are worth it."""
    kv_format: str = "auto"
    """How the draft model's K and V are stored, with token scales; `auto` is its dtype."""
    num_blocks: int | None = None
    """KV blocks for the draft model; None for as many as the engine has. With fewer, sequences that
    find no room have no drafts."""
    chunk_size: int = 512
    """Most tokens of all prompts that are computed for the draft model before one step. A sequence
    has no draft until all of its prompt is."""

    def __post_init__(self) -> None:
        check_num_tokens(self.num_tokens)
        if self.kv_format != "auto":
            halves = parse_kv_format(self.kv_format)
            if any(half.is_blockwise for half in halves):
                raise ValueError(
                    f"kv_format={self.kv_format!r} must have token scales: drafts that do not "
                    "stand are written over, and a block that shares scales cannot be in part"
                )
        if self.num_blocks is not None:
            require_int("num_blocks", self.num_blocks, least=1)
        require_int("chunk_size", self.chunk_size, least=1)

    def drafter(self, draft: Model, config: EngineConfig) -> ModelDrafter:
        """The drafter with this model.

        Args:
            config: of the target, resolved.
        """
        own = draft_config(draft, config, self)
        return ModelDrafter(draft, own, length_of(self.num_tokens), self.chunk_size)


def draft_config(draft: Model, config: EngineConfig, knobs: ModelKnobs) -> EngineConfig:
    """How the draft model runs: as the target does, where that fits, but never in exact mode, which
    only costs: whatever is drafted, the target's output is the same."""
    assert config.max_model_len is not None
    own = EngineConfig(
        block_size=config.block_size,
        num_blocks=knobs.num_blocks or config.num_blocks,
        kv_format=knobs.kv_format,
        window=config.window,
        sink_tokens=config.sink_tokens,
        max_model_len=min(config.max_model_len, draft.config.max_model_len),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(config.max_num_seqs, knobs.chunk_size),
        cuda_graphs=config.cuda_graphs,
        record_trace=False,
    )
    if draft.packed is None:
        try:
            return admission.resolve(draft, replace(own, backend=config.backend))
        except ValueError:  # what computes the target does not compute this model
            pass
    return admission.resolve(draft, own)


@dataclass(frozen=True)
class SelfDraft(ModelKnobs):
    """Draft with the target itself, its weights in a cheaper format.

    On the CPU, in fp32. Where compiled kernels cannot be had, torch computes with weights that are
    rounded and as wide as before: then a draft costs what plain decoding does, and it loses.

    A model that comes from a 4-bit file, as the default one does, loses next to nothing to `int4`:
    such drafts nearly always stand, and then the target might as well be served in `int4`.

    Raises:
        ValueError: a field is out of range, or the format is unknown.
    """

    weights: str = "int4"
    """A format to quantize to: `int8`, `q8_0`, `int4`, `int4:gptq`, ... (see
    `pdlab.quantize.formats`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_format(self.weights)

    def make(self, model: Model, config: EngineConfig) -> ModelDrafter:
        if model.device.type != "cpu" or model.dtype is not torch.float32:
            raise ValueError(
                f"SelfDraft(weights={self.weights!r}) needs a target on the CPU in fp32, not "
                f"{model.dtype} on {model.device}"
            )
        if not model.has_weights:
            raise ValueError(
                f"SelfDraft(weights={self.weights!r}) needs the weights of {model.name}: load it"
            )
        packed = _packed(model, self.weights)
        draft = replace(model, packed=packed)
        if draft_config(draft, config, self).backend != "cpu":
            decoder = deepcopy(model.decoder)
            fill_decoder(decoder, packed)
            draft = replace(draft, decoder=decoder)
        return self.drafter(draft, config)


def _packed(model: Model, weights: str) -> PackedWeights:
    if parse_format(weights).is_calibrated:
        windows = calibration_windows(model.tokenizer, model.config)
        return packed_once(model.decoder, weights, windows, progress=True)
    return pack_decoder(model.decoder, weights)


@dataclass(frozen=True)
class EarlyExit(ModelKnobs):
    """Draft with the target's first layers, then its final norm and head. Shares its weights.

    Raises:
        ValueError: a field is out of range.
    """

    num_layers: int
    """Layers that are computed, fewer than the target has."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("num_layers", self.num_layers, least=1)

    def make(self, model: Model, config: EngineConfig) -> ModelDrafter:
        if self.num_layers >= model.config.num_layers:
            raise ValueError(
                f"EarlyExit(num_layers={self.num_layers}) must be less than the "
                f"{model.config.num_layers} layers of {model.name}"
            )
        return self.drafter(first_layers(model, self.num_layers), config)


def first_layers(model: Model, num_layers: int) -> Model:
    """A model of the first layers of another, with its final norm and head, on the same weights."""
    shape = replace(
        model.config,
        num_layers=num_layers,
        layer_windows=model.config.layer_windows[:num_layers],
    )
    full, decoder = model.decoder, Decoder(shape, model.dtype, "meta")
    decoder.stack = full.stack[:num_layers]
    for name in ("embedding", "final_norm", "head", "cos", "sin"):
        setattr(decoder, name, getattr(full, name))
    packed = model.packed and replace(model.packed, layers=model.packed.layers[:num_layers])
    return replace(model, config=shape, decoder=decoder, packed=packed)


@dataclass(frozen=True, repr=False)
class DraftModel(ModelKnobs):
    """Draft with another model of the same vocabulary.

    Raises:
        ValueError: a field is out of range.
    """

    model: Model | str
    """A loaded model; or what `pdlab.load` loads, on the target's device and in its dtype."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.model, Model | str) or not self.model:
            raise ValueError(f"model={self.model!r:.60} must be a Model, or a name for pdlab.load")

    def __repr__(self) -> str:
        """With the name of a model that is loaded already."""
        values = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "model"]
        name = self.model.name if isinstance(self.model, Model) else self.model
        return f"DraftModel({', '.join([repr(name), *values])})"

    def make(self, model: Model, config: EngineConfig) -> ModelDrafter:
        draft = self.model
        if isinstance(draft, str):
            draft = load(draft, device=model.device, dtype=model.dtype)
        check_vocabularies(draft, model)
        return self.drafter(draft, config)


def check_vocabularies(draft: Model, target: Model) -> None:
    """Raise a ValueError unless token ids mean the same to both.

    Where one of them has no tokenizer, as random weights have none, only the sizes can be compared.
    """
    ours, theirs = draft.config.vocab_size, target.config.vocab_size
    if ours != theirs:
        raise ValueError(
            f"DraftModel: {draft.name} has a vocabulary of {ours} tokens, {target.name} one of "
            f"{theirs}: drafts must be of the same tokens"
        )
    if draft.tokenizer is None or target.tokenizer is None:
        return
    mine, other = (t.backend.get_vocab() for t in (draft.tokenizer, target.tokenizer))
    if mine != other:
        token, token_id = next((t, i) for t, i in mine.items() if other.get(t) != i)
        raise ValueError(
            f"DraftModel: the tokenizers of {draft.name} and {target.name} differ, for one in "
            f"{token!r:.40}, {token_id} and {other.get(token)}"
        )
