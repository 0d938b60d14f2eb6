"""Measure how long steps of every shape take on this machine: the simulator's clock.

The steps are those of a real engine, timed from one call to the next, with all it does beside the
model. What is left out is how a step came about: contexts are filled by a runner that computes
nothing, because the time of a decode depends on how much it reads and not on what.

The coefficients go to the user's cache directory, one file for each machine, model and set of knobs
that decides how long a step takes. On a busy machine all steps are slow. So the share of the
processor that the measurement got is kept too. Below 80%, the basis says so, and the next calls
measure again, up to three times in all; what had the largest share is kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm

from pdlab.costmodel import LinearStepTimes, fit_step_times
from pdlab.engine import Engine, EngineConfig, admission
from pdlab.engine.runner import StepOutput
from pdlab.engine.scheduler import ScheduledBatch
from pdlab.engine.timing import StageClock
from pdlab.kvcache import blocks_for
from pdlab.machine import processor_name
from pdlab.models import Model
from pdlab.models.cache import cache_dir, cache_text
from pdlab.requirements import require_int
from pdlab.sampling import Sampled, SamplingParams
from pdlab.workload.step_shapes import Sample, shape_of_record

CACHE_FORMAT = 3
"""Raised when a measurement changes its meaning, so that older files are not read."""
ROUNDS, ENOUGH_S = 5, 0.6
"""Every step is measured once a round, so that a busy minute does not slow one shape alone; those
that have run for so many seconds sit out."""
LEAST_SHARE, MOST_ATTEMPTS = 0.8, 3
"""Below this share of the processor, measure again; after so many attempts, believe it."""
SHARE_SIZE = 512
"""Side of the matrices whose product tells the share: some 5 ms."""
DECODES_FOR = 16
"""Tokens that a decode may generate: more than there are steps in a scene."""
TIMING_KNOBS = (
    "block_size",
    "kv_format",
    "kv_head_groups",
    "window",
    "sink_tokens",
    "heavy_tokens",
    "exact",
    "backend",
    "cuda_graphs",
    "attention_backend",
    "record_trace",
    "top_k_recorded",
)
"""Knobs of the engine that decide how long a step of a given shape takes."""


class Prompts(NamedTuple):
    """Prompts computed together in one step, each behind `start` tokens that are cached."""

    lengths: tuple[int, ...] = ()
    start: int = 0


class Scene(NamedTuple):
    """Decodes, and what is computed beside them: one step for each entry of `beside`."""

    contexts: tuple[int, ...]
    """Tokens that each decode reads in the first of the steps."""
    beside: tuple[Prompts, ...]


ALONE = Prompts()
SCENES = (
    *(Scene((), (Prompts((n,)),)) for n in (1, 16, 64, 128, 256, 512, 1024, 2048)),
    *(Scene((), (Prompts((length,) * n),)) for length, n in ((16, 8), (64, 4), (256, 2))),
    Scene((), (Prompts((64,), 512), Prompts((256,), 256), Prompts((512,), 512))),
    Scene((), (Prompts((256,), 1536),)),
    Scene((64,), (ALONE, Prompts((64,)), Prompts((256,)))),
    *(Scene((context,), (ALONE,)) for context in (512, 1792)),
    Scene((1024,), (ALONE, Prompts((128,)))),
    *(Scene((64,) * n, (ALONE,)) for n in (2, 3, 4, 5, 6, 12, 16, 24)),
    Scene((64,) * 8, (ALONE, Prompts((32,)), Prompts((128,)))),
    Scene((64,) * 32, (ALONE, Prompts((64,)), Prompts((256,)))),
    *(Scene((256,) * n, (ALONE,)) for n in (2, 3, 4, 16, 32)),
    Scene((256,) * 8, (ALONE, Prompts((64,)), Prompts((256,)), Prompts((64, 64)))),
    *(Scene((512,) * n, (ALONE,)) for n in (3, 4, 5, 8, 16)),
    *(Scene((1024,) * n, (ALONE,)) for n in (2, 3, 8)),
    Scene((1024,) * 4, (ALONE, Prompts((256,)), Prompts((256,), 512))),
    Scene((1792, *(64,) * 7), (ALONE, Prompts((256,), 256))),
    Scene((1024, *(128,) * 15), (ALONE,)),
    Scene((1024, 512, 256, 128), (ALONE,)),
)
"""The steps that are measured: decodes by number and context, prompts, and both together."""
WARM_UP = (8, 8), {0: Prompts(), 1: Prompts((32,)), 2: Prompts((32,))}
"""Contexts and prompts of steps that do not count: the first ones of a process are slower."""


# --- measuring -----------------------------------------------------------------------------------


class Measurement(NamedTuple):
    """Steps that were run."""

    samples: list[Sample]
    """The median seconds of each."""
    processor_share: float = 1.0
    """Processor time that a product of matrices got between the scenes, over its seconds times the
    threads: unlike a step, it surely uses all. 1 where nothing else ran, and always on a GPU."""

    @property
    def was_idle(self) -> bool:
        """Whether nearly nothing else ran."""
        return self.processor_share >= LEAST_SHARE


class ProcessorShare:
    """Finds out which part of the processor this process gets, in many short tests."""

    def __init__(self) -> None:
        self._factor = torch.randn(SHARE_SIZE, SHARE_SIZE)
        self._seconds = self._processor_s = 0.0

    def test(self) -> None:
        """Multiply matrices once."""
        start_s, start_processor_s = time.perf_counter(), time.process_time()
        self._factor @ self._factor
        self._processor_s += time.process_time() - start_processor_s
        self._seconds += (time.perf_counter() - start_s) * torch.get_num_threads()

    def __call__(self) -> float:
        """Over all tests so far."""
        return min(1.0, self._processor_s / self._seconds)


class IdleRunner:
    """Computes nothing: every token that is asked for is token 0, at once.

    With it the engine does all that it does beside the model, and nothing else.
    """

    def carry_out(self, orders: Iterable[object]) -> None:
        """Move no block: nothing stands in them."""

    def commit(self) -> None:
        """Nothing is left to do."""

    def run(self, batch: ScheduledBatch, clock: StageClock, step: int) -> StepOutput:
        """A token for each sequence that is up to date."""
        token = Sampled(0, 1.0, [])
        return StepOutput({drawer.sequence_id: [token] for drawer in batch.drawers})


@contextmanager
def computing_nothing(engine: Engine) -> Iterator[None]:
    """Inside the `with` block the engine's steps run on an `IdleRunner`."""
    runner = engine.runner
    engine.runner = IdleRunner()
    try:
        yield
    finally:
        engine.runner = runner


def measure_steps(
    model: Model,
    config: EngineConfig | None = None,
    *,
    rounds: int | None = None,
    progress: bool = False,
) -> list[Sample]:
    """As `measure_with_share`, the steps alone."""
    return measure_with_share(model, config, rounds=rounds, progress=progress).samples


def measure_with_share(
    model: Model,
    config: EngineConfig | None = None,
    *,
    rounds: int | None = None,
    progress: bool = False,
) -> Measurement:
    """Run steps of many shapes on a real engine: the median seconds of each.

    Some 40 seconds for `smollm2-135m` on two cores. The engine is one of its own, with the knobs of
    `config` that decide how long a step takes (`TIMING_KNOBS`) and room for all shapes, so that
    what is measured holds for any budget, pool and policy. Shapes that are longer than the model
    takes are left out.

    Args:
        rounds: at most so many times each step; None for `ROUNDS`.
    """
    rounds = ROUNDS if rounds is None else rounds
    require_int("rounds", rounds, least=1)
    with Calibration(model, config) as calibration:
        turns = [n for _ in range(rounds) for n in range(calibration.num_scenes)]
        for n in tqdm(turns, desc="measuring steps", leave=False, disable=not progress):
            calibration.play(n, enough_s=ENOUGH_S)
            calibration.share.test()
        share = 1.0 if model.decoder.device.type == "cuda" else calibration.share()
        return Measurement(calibration.samples(median), share)


class Calibration:
    """Steps of all shapes on an engine of its own, scene by scene, whenever there is time for one.

    Use it as a context manager: leaving gives the engine's memory back.

    Args:
        config: only its `TIMING_KNOBS` matter.
        longest: requests of more tokens are left out, for whoever serves none; None for the longest
            that the model takes.
        seed: of prompts, and of the order of the scenes.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig | None = None,
        *,
        longest: int | None = None,
        seed: int = 0,
    ):
        config = config or EngineConfig()
        limit, forgets = model.config.max_model_len, bool(config.heavy_tokens)
        if longest is not None:
            limit = min(limit, longest + 1)
        scenes = (_possible(scene, limit, forgets) for scene in SCENES)
        self._scenes = [scene for scene in scenes if scene.beside]
        warm_up = Scene(WARM_UP[0], tuple(WARM_UP[1].values()))
        self._engine = Engine(model, _measuring(config, [*self._scenes, warm_up]))
        self._draw = random.Random(seed)
        self._taken: dict[tuple[int, int], list[Sample]] = {}
        self.share = ProcessorShare()
        list(_play(self._engine, *WARM_UP, self._draw))

    def __enter__(self) -> Calibration:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    @property
    def num_scenes(self) -> int:
        return len(self._scenes)

    @property
    def spent_s(self) -> float:
        """Seconds of all steps so far."""
        return sum(self._seconds(key) for key in self._taken)

    def play(self, scene: int, *, enough_s: float = math.inf) -> None:
        """Run the steps of a scene once, without those that have run for `enough_s`."""
        contexts, beside = self._scenes[scene]
        left = {
            i: prompts for i, prompts in enumerate(beside) if self._seconds((scene, i)) < enough_s
        }
        for i, sample in _play(self._engine, contexts, left, self._draw):
            self._taken.setdefault((scene, i), []).append(sample)

    def play_next(self) -> None:
        """Run the steps of the scene that has had the least time for each, whichever if several.

        So short steps run often and long ones seldom, and all of them now and then.
        """
        spent_s = [
            sum(self._seconds((n, i)) for i in range(len(scene.beside))) / len(scene.beside)
            for n, scene in enumerate(self._scenes)
        ]
        least_s = min(spent_s)
        self.play(self._draw.choice([n for n, each in enumerate(spent_s) if each == least_s]))

    def samples(self, average: Callable[[list[float]], float]) -> list[Sample]:
        """Each step that has run, with the average of its seconds."""
        return [
            (runs[0][0], average([seconds for _, seconds in runs])) for runs in self._taken.values()
        ]

    def _seconds(self, key: tuple[int, int]) -> float:
        return sum(seconds for _, seconds in self._taken.get(key, ()))


def _possible(scene: Scene, limit: int, forgets: bool) -> Scene:
    """The scene without what is longer than `limit` tokens, or needs a prefix cache."""
    most = max(scene.contexts, default=0) + 2 * len(scene.beside)  # decodes grow with each step
    beside = tuple(
        prompts
        for prompts in scene.beside
        if max(most, prompts.start + max(prompts.lengths, default=0)) < limit
        and not (forgets and prompts.start)
    )
    return Scene(scene.contexts, beside)


def _measuring(config: EngineConfig, scenes: Sequence[Scene]) -> EngineConfig:
    """The knobs of `config` that matter, in an engine with room for every scene."""
    steps = [(scene.contexts, prompts) for scene in scenes for prompts in scene.beside]
    tokens = max(sum(c) + len(p.lengths) * p.start + sum(p.lengths) for c, p in steps)
    sequences = max(len(contexts) + len(prompts.lengths) for contexts, prompts in steps)
    return EngineConfig(
        **{name: getattr(config, name) for name in TIMING_KNOBS},
        num_blocks=blocks_for(tokens, config.block_size) + 2 * sequences,
        max_num_seqs=sequences,
        max_num_batched_tokens=max(tokens, sequences),
        enable_prefix_cache=not config.heavy_tokens,
        preemption="recompute",
        watermark=0,
    )


def _play(
    engine: Engine, contexts: Sequence[int], beside: dict[int, Prompts], draw: random.Random
) -> Iterator[tuple[int, Sample]]:
    """Time a step for each entry of `beside`, with decodes that read `contexts`."""
    if not beside:
        return
    with computing_nothing(engine):
        decodes = [_submit(engine, _tokens(engine, c - 1, draw), DECODES_FOR) for c in contexts]
        if decodes:
            engine.step()
    for i, prompts in beside.items():
        ids = _submit_prompts(engine, prompts, draw)
        start_s = time.perf_counter()
        record = engine.step()
        seconds = time.perf_counter() - start_s
        assert record is not None, "there was something to compute"
        for request_id in ids:
            engine.collect(request_id)
        yield i, (shape_of_record(record), seconds)
    for request_id in decodes:
        engine.abort(request_id)
        engine.collect(request_id)


def _submit_prompts(engine: Engine, prompts: Prompts, draw: random.Random) -> list[str]:
    """Queue prompts of which the first `start` tokens are in the prefix cache."""
    whole = [_tokens(engine, prompts.start + n, draw) for n in prompts.lengths]
    if prompts.start:
        with computing_nothing(engine):
            cached = [_submit(engine, tokens[: prompts.start], 1) for tokens in whole]
            engine.step()
        for request_id in cached:
            engine.collect(request_id)
    return [_submit(engine, tokens, 1) for tokens in whole]


def _tokens(engine: Engine, number: int, draw: random.Random) -> list[int]:
    """A prompt that no other begins like."""
    return draw.choices(range(engine.model.config.vocab_size), k=max(1, number))


def _submit(engine: Engine, tokens: list[int], max_tokens: int) -> str:
    return engine.submit(tokens, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


# --- the cache -----------------------------------------------------------------------------------


def measured_step_times(
    model: Model,
    config: EngineConfig | None = None,
    *,
    refresh: bool = False,
    progress: bool = False,
) -> LinearStepTimes:
    """How long steps take on this machine: measured the first time, then from the cache.

    Args:
        config: only its `TIMING_KNOBS` matter.
        refresh: measure again and replace what is cached.
    """
    config = admission.resolve(model, config or EngineConfig())
    key = _key(model, config)
    path = _cache_path(key)
    earlier = None if refresh else _load(path, key)
    if earlier and earlier.is_final:
        return earlier.step_times
    measured = measure_with_share(model, config, progress=progress)
    share, attempts = measured.processor_share, 1
    times = fit_step_times(measured.samples, _basis(model, key, measured))
    if earlier:
        attempts += earlier.attempts
        if earlier.processor_share > share:
            times, share = earlier.step_times, earlier.processor_share
    _save(path, key, _Cached(times, share, attempts))
    return times


def _basis(model: Model, key: dict[str, Any], measured: Measurement) -> str:
    count = key["num_threads"]
    basis = (
        f"measured on {key['processor']}, {count} thread{'s' * (count > 1)}, {key['device']}, "
        f"{date.today().isoformat()}: {model.name}, {key['dtype']}"
    )
    if measured.was_idle:
        return basis
    return f"{basis}; slowed by other processes, {measured.processor_share:.0%} of the processor"


class _Cached(NamedTuple):
    """What a cache file holds beside its key."""

    step_times: LinearStepTimes
    processor_share: float
    attempts: int

    @property
    def is_final(self) -> bool:
        """Whether measuring again would gain nothing, or was tried often enough."""
        return self.processor_share >= LEAST_SHARE or self.attempts >= MOST_ATTEMPTS


def _key(model: Model, config: EngineConfig) -> dict[str, Any]:
    """What the times depend on."""
    device = model.decoder.device
    on_gpu = device.type == "cuda"
    return {
        "format": CACHE_FORMAT,
        "processor": torch.cuda.get_device_name(device) if on_gpu else processor_name(),
        "num_threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "device": str(device),
        "dtype": str(model.decoder.dtype).removeprefix("torch."),
        "model": model.name,
        "shape": model.config.to_dict(),
        "knobs": {name: getattr(config, name) for name in TIMING_KNOBS},
    }


def _cache_path(key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_dir() / "step_times" / f"{digest[:16]}.json"


def _load(path: Path, key: dict[str, Any]) -> _Cached | None:
    """What is cached; None where there are none that can be trusted."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] != key:
            return None
        share, attempts = float(stored["processor_share"]), int(stored["attempts"])
        return _Cached(LinearStepTimes.from_dict(stored["step_times"]), share, attempts)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _save(path: Path, key: dict[str, Any], cached: _Cached) -> None:
    """Write for the next call."""
    values = cached._asdict() | {"step_times": cached.step_times.to_dict()}
    text = json.dumps({"key": key} | values, indent=2)
    cache_text(path, text)
