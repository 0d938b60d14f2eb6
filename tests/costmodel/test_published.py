"""Published step times: formulas, files, and the fit of Llama-2-70B on A100."""

import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from pdlab.costmodel import (
    PUBLISHED,
    Chunk,
    Overheads,
    RooflineStepTimes,
    ServedBatch,
    StepShape,
    StepTimes,
    causal_pairs,
    fit_overheads,
    load_distserve_profile,
    load_hardware,
    predict,
    published,
    read_splitwise,
    relative_errors,
    step_cost,
)
from pdlab.costmodel.published import (
    LLAMA2_70B,
    LLAMA2_70B_OVERHEADS,
    LLAMA2_70B_STEP_S,
    OPT_13B_LARGE_BATCH,
)
from pdlab.costmodel.roofline_times import (
    FITTED,
    LARGE_STEP,
    MeasuredStep,
    distinct_steps,
    num_begun,
)

from .shapes import TINY, TINY_WINDOWED

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "published"
DISTSERVE = FOLDER / "distserve_sim" / "profiler-a100-80g.distserve.json"
VLLM = FOLDER / "distserve_sim" / "profiler-a100-80g.vllm.json"
MAX_TOKENS = FOLDER / "distserve_sim" / "max_num_tokens.csv"
SPLITWISE = FOLDER / "splitwise_sim" / "perf_model_a100.csv"
A100 = load_hardware()["a100-80gb"]


def there(path: Path) -> Path:
    if not path.is_file():
        pytest.skip(f"the published file {path.name} is not here")
    return path


def prefill(*lengths: int) -> StepShape:
    pairs = sum(causal_pairs(0, n) for n in lengths)
    return StepShape(len(lengths), sum(lengths), pairs, 0, 0)


def decode(*contexts: int) -> StepShape:
    return StepShape(0, 0, 0, len(contexts), sum(contexts), max(contexts))


# --- DistServe -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(1,), (512,), (2048,), (100, 200, 300), (64,) * 20])
def test_opt_13b_prefill_takes_what_the_formula_says(lengths: tuple[int, ...]) -> None:
    squares = sum(n**2 for n in lengths)
    expected_ms = 18.10254647486372 + 0.1019122572698738 * sum(lengths)
    expected_ms += 7.122264314252114e-06 * squares
    times, _ = published("a100-opt-13b")
    assert times.step_s(prefill(*lengths)) == pytest.approx(expected_ms / 1e3, rel=1e-9)


def test_opt_13b_decode_has_other_constants_from_95_sequences_on() -> None:
    times, _ = published("a100-opt-13b")
    small_ms = 19.934702624895458 + 0.0006269356524350583 * 94 * 300 + 0.03850697740828398 * 94
    large_ms = 7.1661889468253595 + 0.0005798000403396046 * 95 * 300 + 0.15831096191764046 * 95
    assert times.step_s(decode(*[300] * 94)) == pytest.approx(small_ms / 1e3, rel=1e-9)
    assert times.step_s(decode(*[300] * 95)) == pytest.approx(large_ms / 1e3, rel=1e-9)


def test_chunks_of_a_prompt_add_up_to_it_but_for_the_passes_over_the_weights() -> None:
    times, _ = published("a100-opt-13b")
    cuts = (0, 100, 700, 1500)
    chunks = [
        StepShape(1, end - start, causal_pairs(start, end - start), 0, 0)
        for start, end in pairwise(cuts)
    ]
    seconds = sum(times.step_s(chunk) for chunk in chunks)
    assert seconds == pytest.approx(times.step_s(prefill(1500)) + 2 * 0.01810254647486372)


@pytest.mark.parametrize("num_decodes", [1, 94, 95, 200])
def test_a_mixed_step_saves_a_pass_over_the_weights(num_decodes: int) -> None:
    times, _ = published("a100-opt-13b")
    alone, prompt = decode(*[500] * num_decodes), prefill(256)
    both = StepShape(*prompt[:3], *alone[3:])
    apart_s = times.step_s(alone) + times.step_s(prompt)
    shared_s = min(0.01810254647486372, 0.019934702624895458)
    assert times.step_s(both) == pytest.approx(apart_s - shared_s)


OPT_13B_NAMES = [name for name in PUBLISHED if "opt-13b" in name]
prompt_chunks = st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 2000)), max_size=6)
contexts = st.lists(st.integers(1, 2048), max_size=200)


def mixed(chunks: list[tuple[int, int]], contexts: list[int]) -> StepShape:
    pairs = sum(causal_pairs(start, n) for start, n in chunks)
    tokens = sum(n for _, n in chunks)
    longest = max(contexts, default=0)
    return StepShape(len(chunks), tokens, pairs, len(contexts), sum(contexts), longest)


@pytest.mark.parametrize("name", OPT_13B_NAMES)
@given(chunks=prompt_chunks.filter(bool), contexts=contexts.filter(bool))
@example(chunks=[(0, 1)], contexts=[300])
def test_a_mixed_step_takes_no_less_than_either_part_alone(
    name: str, chunks: list[tuple[int, int]], contexts: list[int]
) -> None:
    step_s = published(name).step_times.step_s
    both = step_s(mixed(chunks, contexts))
    assert both >= max(step_s(mixed(chunks, [])), step_s(mixed([], contexts)))


@pytest.mark.parametrize("name", OPT_13B_NAMES)
@given(chunks=prompt_chunks, contexts=contexts, more=st.integers(1, 500))
@example(chunks=[], contexts=[300] * 32, more=1)
def test_more_work_takes_no_less(
    name: str, chunks: list[tuple[int, int]], contexts: list[int], more: int
) -> None:
    step_s = published(name).step_times.step_s
    assume(chunks or contexts)
    now_s = step_s(mixed(chunks, contexts))
    assert step_s(mixed([*chunks, (0, more)], contexts)) >= now_s, "another prompt"
    if chunks:
        (start, n), *rest = chunks
        assert step_s(mixed([(start, n + more), *rest], contexts)) >= now_s, "a longer chunk"
        assert step_s(mixed([(start + more, n), *rest], contexts)) >= now_s, "a later chunk"
    if contexts:
        grown = [contexts[0] + more, *contexts[1:]]
        assert step_s(mixed(chunks, grown)) >= now_s, "a longer context"
    if len(contexts) + 1 != OPT_13B_LARGE_BATCH:
        assert step_s(mixed(chunks, [*contexts, more])) >= now_s, "another decode"


@pytest.mark.parametrize(
    ("name", "path", "num_devices"),
    [
        ("a100-opt-13b", DISTSERVE, 1),
        ("2xa100-opt-13b", DISTSERVE, 2),
        ("4xa100-opt-13b", DISTSERVE, 4),
        ("a100-opt-13b-vllm", VLLM, 1),
    ],
)
def test_our_table_says_what_the_published_file_says(
    name: str, path: Path, num_devices: int
) -> None:
    times, knobs = published(name)
    theirs = load_distserve_profile(there(path))["facebook/opt-13b", num_devices]
    for shape in (prefill(700), prefill(9, 90), decode(50), decode(*[800] * 30), decode(*[9] * 99)):
        assert times.step_s(shape) == pytest.approx(theirs.step_s(shape), rel=1e-12)
    rows = there(MAX_TOKENS).read_text().splitlines()
    [room] = [r for r in rows if r.startswith(f"facebook/opt-13b,{num_devices},1,")]
    assert knobs["num_blocks"] * knobs["block_size"] == int(room.split(",")[-1])


def test_a_profile_of_another_model_is_read() -> None:
    profiles = load_distserve_profile(there(DISTSERVE))
    times = profiles["facebook/opt-66b", 4]
    assert "facebook/opt-66b, tensor parallelism 4" in times.basis
    expected_ms = 29.441636037717455 + 0.151352180625198 * 100 + 8.317450765979451e-06 * 100**2
    assert times.step_s(prefill(100)) == pytest.approx(expected_ms / 1e3, rel=1e-9)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"m": 1}', '{"m": {"1": {"prefill": [1, 2]}}}', '{"m": {"x": {}}}']
)
def test_a_file_that_is_no_profile_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"profile\.json: no profile of DistServe"):
        load_distserve_profile(path)


# --- the roofline --------------------------------------------------------------------------------

STEPS = {
    "prefill": ([Chunk(0, 700)], prefill(700)),
    "equal prompts": ([Chunk(0, 64)] * 5, prefill(*[64] * 5)),
    "chunk": ([Chunk(512, 256)], StepShape(1, 256, causal_pairs(512, 256), 0, 0)),
    "decodes": ([Chunk(n - 1, 1) for n in (30, 500, 90)], decode(30, 500, 90)),
    "mixed": (
        [Chunk(299, 1), Chunk(0, 128)],
        StepShape(1, 128, causal_pairs(0, 128), 1, 300, 300),
    ),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("num_devices", [1, 4])
def test_without_overheads_a_step_takes_what_the_cost_model_predicts(
    step: str, num_devices: int
) -> None:
    chunks, shape = STEPS[step]
    cost = step_cost(
        LLAMA2_70B,
        chunks,
        num_sampled=len(chunks),
        weight_element_bytes=2,
        kv_element_bytes=2,
    )
    expected_s = predict(cost, A100, "fp16").time_s / num_devices
    times = RooflineStepTimes(LLAMA2_70B, A100, "fp16", num_devices)
    assert times.step_s(shape) == pytest.approx(expected_s, rel=1e-3)


def test_each_overhead_counts_once_for_what_it_stands_for() -> None:
    shape = StepShape(3, LARGE_STEP + 10, 2_000_000, 5, 5000, 1000)
    bare = RooflineStepTimes(LLAMA2_70B, A100)
    overheads = Overheads(0.1, 0.5, prompt_s=0.01, decode_s=0.001, large_step_token_s=0.0001)
    loaded = RooflineStepTimes(LLAMA2_70B, A100, overheads=overheads)
    more_s = 0.1 + 3 * 0.01 + 5 * 0.001 + 10 * 0.0001
    more_s += bare.roofs(shape).compute_s  # at half of the peak it takes twice as long
    assert loaded.step_s(shape) == pytest.approx(bare.step_s(shape) + more_s)


def test_bad_arguments_of_a_roofline_are_named() -> None:
    with pytest.raises(ValueError, match="layer_windows"):
        RooflineStepTimes(TINY_WINDOWED, A100)
    with pytest.raises(ValueError, match="num_devices=0"):
        RooflineStepTimes(TINY, A100, num_devices=0)
    with pytest.raises(ValueError, match="dtype='fp8'"):
        RooflineStepTimes(TINY, A100, "fp8")
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"peak_share={share}"):
            RooflineStepTimes(TINY, A100, overheads=Overheads(peak_share=share))


# --- the fit to Llama-2-70B ----------------------------------------------------------------------


def made_up(num_devices: int, length: int, batch: int, overheads: Overheads) -> ServedBatch:
    """What a server with these overheads would measure."""
    times = RooflineStepTimes(LLAMA2_70B, A100, "fp16", num_devices, overheads)
    bare = ServedBatch(num_devices, length, batch, 128, 1.0, 1.0)
    return bare._replace(prefill_s=times.step_s(bare.prefill), token_s=times.step_s(bare.decode))


def test_a_fit_finds_the_overheads_that_made_the_times() -> None:
    known = {
        n: Overheads(0.01 * n, 0.6, prompt_s=0.02, decode_s=0.001, large_step_token_s=1e-4)
        for n in (2, 4)
    }
    batches = [
        made_up(n, length, batch, known[n])
        for n in known
        for length, batch in ((128, 1), (512, 1), (512, 16), (4096, 1), (8192, 1), (256, 4))
    ]
    found = fit_overheads(distinct_steps(batches), LLAMA2_70B, A100)
    for n in known:
        assert found[n] == pytest.approx(known[n], rel=1e-6)


def test_a_prefill_counts_once_whatever_follows_it_and_repeats_count_by_their_median() -> None:
    short = ServedBatch(2, 512, 1, 128, 0.20, 0.05)
    batches = [short, short._replace(prefill_s=0.21), short._replace(prefill_s=0.29, token_s=0.06)]
    batches += [short._replace(num_output_tokens=512, prefill_s=0.21, token_s=0.07)]
    steps = distinct_steps([*batches, short._replace(num_devices=4)])
    assert [(s.num_devices, s.phase, s.shape.num_context_tokens) for s in steps] == [
        (2, "decode", 512 + 64),
        (2, "decode", 512 + 256),
        (2, "prefill", 0),
        (4, "decode", 512 + 64),
        (4, "prefill", 0),
    ]
    assert [s.seconds for s in steps] == [0.05, 0.07, 0.21, 0.05, 0.20]


def test_cutting_a_prompt_costs_steps_and_not_prompts() -> None:
    times = published("8xa100-llama2-70b").step_times
    cuts = range(0, 2049, 256)
    chunks = [StepShape(1, 256, causal_pairs(start, 256), 0, 0) for start in cuts[:-1]]
    bare = RooflineStepTimes(LLAMA2_70B, A100, "fp16", 8, Overheads(LLAMA2_70B_STEP_S[8]))
    overheads = LLAMA2_70B_OVERHEADS[8]
    compute_s = sum(bare.roofs(chunk).compute_s for chunk in chunks)
    expected_s = sum(map(bare.step_s, chunks)) + overheads.prompt_s
    expected_s += compute_s * (1 / overheads.peak_share - 1)
    assert sum(map(times.step_s, chunks)) == pytest.approx(expected_s)


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=20))
def test_prompts_that_all_begin_are_all_counted(lengths: list[int]) -> None:
    assert num_begun(prefill(*lengths)) == len(lengths)


@given(st.integers(1, 4000), st.integers(1, 4000))
def test_a_later_chunk_alone_begins_no_prompt(start: int, length: int) -> None:
    assert num_begun(StepShape(1, length, causal_pairs(start, length), 0, 0)) == 0


def errors_of_the_other_half(seed: int, fitted: tuple[str, ...]) -> dict[str, np.ndarray]:
    steps = distinct_steps(read_splitwise(there(SPLITWISE)))
    assert len({(s.num_devices, s.shape) for s in steps}) == len(steps) == 94
    ours, others = halves(steps, seed)
    overheads = fit_overheads(ours, LLAMA2_70B, A100, fitted=fitted)
    times = {n: RooflineStepTimes(LLAMA2_70B, A100, "fp16", n, o) for n, o in overheads.items()}
    return {name: np.abs(errors) for name, errors in relative_errors(others, times).items()}


def halves(steps: list[MeasuredStep], seed: int) -> tuple[list[MeasuredStep], list[MeasuredStep]]:
    """Of each phase one half; no prefill and no decode is in both."""
    draw = random.Random(seed)
    ours: list[MeasuredStep] = []
    for phase in ("prefill", "decode"):
        same = [step for step in steps if step.phase == phase]
        ours += draw.sample(same, len(same) // 2)
    return ours, [step for step in steps if step not in ours]


@pytest.mark.parametrize("seed", range(5))
def test_overheads_of_half_the_configurations_predict_the_other_half(seed: int) -> None:
    errors = errors_of_the_other_half(seed, FITTED)
    assert len(errors["prefill"]) == 19
    assert len(errors["decode"]) == 28
    assert np.median(errors["prefill"]) < 0.12
    assert np.median(errors["decode"]) < 0.04
    assert np.mean(errors["prefill"] <= 0.2) > 0.8
    assert errors["prefill"].max() < 0.3
    assert errors["decode"].max() < 0.15


def test_an_overhead_a_step_alone_explains_decodes_and_not_prefills() -> None:
    """Half a peak is missing in a prefill, and no constant makes up for a factor."""
    errors = errors_of_the_other_half(0, ())
    assert np.median(errors["decode"]) < 0.12
    assert np.mean(errors["decode"] <= 0.2) > 0.9
    assert 0.3 < np.median(errors["prefill"]) < 0.5
    assert np.mean(errors["prefill"] <= 0.2) < 0.1


def test_the_overheads_written_down_are_those_of_all_steps() -> None:
    found = fit_overheads(distinct_steps(read_splitwise(there(SPLITWISE))), LLAMA2_70B, A100)
    assert set(found) == set(LLAMA2_70B_OVERHEADS)
    for n, overheads in found.items():
        assert overheads == pytest.approx(LLAMA2_70B_OVERHEADS[n], rel=1e-3)


def test_bad_measurements_are_named(tmp_path: Path) -> None:
    good, other = distinct_steps([ServedBatch(2, 512, 1, 128, 0.2, 0.05)])
    with pytest.raises(ValueError, match="steps is empty"):
        fit_overheads([], LLAMA2_70B, A100)
    with pytest.raises(ValueError, match="not above the limit 0"):
        fit_overheads([good, other._replace(seconds=0.0)], LLAMA2_70B, A100)
    with pytest.raises(ValueError, match="is not among peak_share, prompt_s"):
        fit_overheads([good], LLAMA2_70B, A100, fitted=("luck",))
    path = tmp_path / "times.csv"
    header = "model,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel\n"
    path.write_text(header + "llama2-70b,512,1,128,200,50,2\nllama2-70b,512,one,128,200,50,2\n")
    with pytest.raises(ValueError, match=r"times\.csv, line 3: .*'one'"):
        read_splitwise(path)
    path.write_text(header + "bloom-176b,512,1,128,200,50,2\n")
    with pytest.raises(ValueError, match=r"no row has model='llama2-70b'"):
        read_splitwise(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"line 2: KeyError\('model'\)"):
        read_splitwise(path)


# --- by name -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_machine_says_what_it_rests_on_and_how_much_room_it_has(name: str) -> None:
    machine = published(name)
    times: StepTimes = machine.step_times
    assert "A100" in times.basis
    assert ("published" in times.basis) is ("opt-13b" in name)
    assert set(machine.engine) == {"block_size", "num_blocks", "max_model_len"}
    assert machine.engine["num_blocks"] > machine.engine["max_model_len"] // 16
    assert 0.01 < times.step_s(decode(500)) < times.step_s(prefill(500)) < 0.3


def test_an_unknown_machine_is_named() -> None:
    with pytest.raises(ValueError, match=r"name='h100' must be one of a100-opt-13b, 2xa100"):
        published("h100")


def test_a_profile_may_hold_whole_numbers(tmp_path: Path) -> None:
    fit = {"prefill": [1, 2, 3], "decoding_smallbs": [1, 0, 0], "decoding_largebs": [1, 0, 0]}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"m": {"1": fit | {"decoding_large_small_bs_threshold": 9}}}))
    assert load_distserve_profile(path)["m", 1].step_s(prefill(10)) == pytest.approx(0.321)
