# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 05 Windows and eviction: what may be forgotten
#
# **The question.** A chat goes on for days. Must the model keep the K and V of every word that was
# ever said? What can it forget, what happens to the text when it does, and how can you tell what
# was lost?
#
# You will bound the memory of an endless text, watch the text fall apart, find the four tokens
# that hold it together, and test two popular claims by running them literally.
#
# *About 20 minutes. Before this: [04 KV formats](04_kv_formats.ipynb).*

# %%
import pdlab
from pdlab import EngineConfig, SamplingParams
from pdlab import workbench as wb
from pdlab.attention import Window
from pdlab.trace import DROPPED
from pdlab.workbench import window_experiments as experiments

wb.glossary(
    "KV cache", "block table", "sliding window", "attention sink", "eviction", "heavy hitter"
)

# %%
model = pdlab.load("smollm2-135m")
guess = wb.Predictions()

# %% [markdown]
# ## 1. What full attention costs in the long run
#
# With full attention, memory grows with every token and never stops; so does what each decode step
# must read. A **sliding window** of W tokens ends both: a token looks at the W latest tokens,
# itself included, and what no later token will look at can go. Counted, for one sequence of a
# 7-billion model (32 layers, 8 KV heads of 128, bf16), in full and with a window of 4,096:

# %%
from pdlab.models.catalog import SHAPES

per_token = SHAPES["mistral-7b"].kv_bytes_per_token(2)
for num_tokens in (1_000, 4_096, 32_000, 128_000, 1_000_000):
    full, bounded = num_tokens * per_token, min(num_tokens, 4096) * per_token
    print(f"{num_tokens:9,} tokens: {full / 1e9:6.1f} GB in full, {bounded / 1e9:.1f} GB windowed")

# %% [markdown]
# ## 2. A text longer than its memory
#
# Here is a pool of 10 blocks of 8 tokens: 80 slots. We ask for a prompt and an answer of 131
# tokens in all. With full attention, the engine refuses, for it could never finish:

# %%
prompt = (
    "A key-value cache stores the keys and values of all earlier tokens, so that the model does not "
    "have to compute them again for each new token."
)
small = {"block_size": 8, "num_blocks": 10, "chunk_size": 8}
params = SamplingParams(max_tokens=100, ignore_eos=True)
with pdlab.Engine(model, EngineConfig(**small)) as engine:
    try:
        engine.generate(prompt, params)
    except ValueError as error:
        print(error)

# %% [markdown]
# Now with a window of 32 tokens, computed in chunks of at most 8. 131 tokens fill 17 blocks. How
# many are held at once?

# %%
guess.predict("At most how many blocks of 8 tokens are held at once?", key="blocks", unit="blocks")

# %%
with pdlab.Engine(model, EngineConfig(window=32, **small)) as windowed:
    forgetful = windowed.generate(prompt, params)[0]
held = [experiments.blocks_held(step) for step in windowed.trace.steps]
guess.compare("blocks", max(held), "blocks", kind="counted")

# %% [markdown]
# Four full blocks of window, and one more because the window's edge lies inside a block. As the
# window moves on, blocks at its back are given back to the pool and taken again at its front. Walk
# through the steps: entries that are gone stay in the block table as empty frames, so that
# positions keep their place. (A hatched block is free: the prefix cache remembers it until
# somebody takes it.)

# %%
wb.BlockTableView(windowed.trace, step=60)

# %% [markdown]
# Memory is bounded, however long the text becomes. But look at it:

# %%
print(forgetful.text)

# %% [markdown]
# ## 3. A model that was trained with a window
#
# Some models were *made* with a window, such as Mistral 7B (Jiang et al. 2023). For them it is no
# loss: it is the model. Ours is tiny and has random weights, but it has Mistral's structure, with
# a window of 24. In exact mode, the engine that drops blocks must give the same tokens as a
# generator that keeps the whole text and only masks:

# %%
mistral = pdlab.load("random:tiny-mistral")
tokens, params_tiny = list(range(60)), SamplingParams(max_tokens=60, ignore_eos=True)
with pdlab.Engine(mistral, EngineConfig(exact=True, block_size=8, chunk_size=8)) as engine:
    dropped = engine.generate(tokens, params_tiny)[0].token_ids
    most = max(map(experiments.blocks_held, engine.trace.steps))
kept = pdlab.NaiveGenerator(mistral, exact=True).generate(tokens, params_tiny).token_ids
print(f"same tokens: {dropped == kept}; at most {most} of {120 // 8} blocks were held")

# %% [markdown]
# Such a model is not blind beyond its window. A token of the second layer looks at tokens that
# have themselves looked back in the first. So what is known travels up to W − 1 tokens back in
# each layer: for Mistral 7B, 32 layers of 4,096 make 131,000 tokens (published). It gets there
# second-hand.
#
# ## 4. A model that was not
#
# Ours, SmolLM2, was trained with full attention. How much worse does it foretell a text with a
# window of 64? We prefill 384 tokens of text, go on with 384 more, and look at how surprised the
# model is by each of these: its **perplexity**.

# %%
guess.predict("With a window of 64 tokens, the perplexity grows by a factor of", key="factor")

# %%
narrow, sinks = Window(64), Window(64, sinks=4)
settings = {
    "window, window": (narrow, narrow),
    "sinks, sinks": (sinks, sinks),
    "full, window": (None, narrow),
    "full, sinks": (None, sinks),
    "window, full": (narrow, None),
}
losses = experiments.window_losses(model, wb.topic_tokens(model, 768), settings, num_prefill=384)
for name in ("full", "window, window"):
    loss = losses[name]
    print(f"{name:16} perplexity {loss.perplexity:6.1f}, same first choice {loss.agreement:.0%}")
guess.compare("factor", losses["window, window"].perplexity / losses["full"].perplexity, "times")

# %% [markdown]
# That is far more than the words from more than 64 tokens ago can be worth. Something else has
# broken. What was it that left the window?
#
# ## 5. The sink
#
# Look at where attention goes. First in numbers, then in a picture of four layers: choose a
# late one and look at its first column.

# %%
guess.predict(
    "Of all attention, over all layers and heads, how much goes to the very first token?",
    key="sink",
    unit="%",
)

# %%
long_prompt = prompt + " The memory it needs grows with the length of the text."
with pdlab.Engine(model) as engine, engine.probe():
    engine.generate(long_prompt, SamplingParams(max_tokens=1))
shares = experiments.sink_shares(engine.trace, 1, after=8)
for layer in (0, 6, 12, 18, 24, 29):
    print(f"layer {layer:2}: {shares[layer]:4.0%} of the attention goes to the first token")
guess.compare("sink", 100 * sum(shares.values()) / len(shares), "%")

# %%
with pdlab.Engine(model) as probed, probed.probe(layers=[0, 12, 24, 29]):
    probed.generate(long_prompt, SamplingParams(max_tokens=1))
wb.AttentionView(probed.trace, layer=24)

# %% [markdown]
# Nothing about that token is worth so much attention. But softmax must give away all of its
# weight, even when a head has nothing to look for, and training made the first token the place to
# put it: every token can see it. Xiao et al. (2023, *StreamingLLM*) call it an **attention sink**.
# When it leaves the window, that weight must go elsewhere, and every head that used to rest makes
# noise. The cure is cheap: keep the first few tokens.

# %%
for name in ("full", "window, window", "sinks, sinks"):
    loss = losses[name]
    print(f"{name:16} perplexity {loss.perplexity:6.1f}, same first choice {loss.agreement:.0%}")

# %% [markdown]
# Four more tokens. Here is the whole curve, measured on a longer text (**recorded**; machine and
# date in the subtitle):

# %%
study = wb.recorded_study("windows")
wb.show(wb.figures.window_costs(study.costs, study.reference, study.source))

# %% [markdown]
# And the small pool of section 2, with the same window and four sinks:

# %%
with pdlab.Engine(model, EngineConfig(window=32, sink_tokens=4, **small)) as streaming:
    print(streaming.generate(prompt, params)[0].text)
held = [experiments.blocks_held(step) for step in streaming.trace.steps]
print(f"\nat most {max(held)} blocks held at once")

# %% [markdown]
# One thing differs from the paper. StreamingLLM counts positions *inside the cache*: when tokens
# leave, those after them move up, so that no distance ever exceeds the window, and a text may go
# on far beyond the length the model was trained for. This engine keeps each key's position in the
# text: the sinks stay truly far away. It is simpler and shares blocks with the prefix cache, but a
# text still ends at the model's own length.
#
# ## 6. "Full attention in prefill, sliding window in decode"
#
# One reads this as a recipe: prefill sees everything, so the prompt is well understood, and decode
# can then do with a window. Run it literally. Before you do: prefill in full and then decode with
# a window of 64, compared with the window in both phases:

# %%
guess.predict(
    "Full attention in prefill makes the perplexity in decode",
    ["much better", "hardly any different", "much worse"],
    key="recipe",
)

# %%
print("prefill, decode")
for name, loss in losses.items():
    print(f"{name:16} perplexity {loss.perplexity:6.1f}, same first choice {loss.agreement:.0%}")
gain = losses["full, window"].perplexity / losses["window, window"].perplexity
verdict = "much better" if gain < 0.8 else "hardly any different" if gain < 1.25 else "much worse"
guess.compare("recipe", verdict)

# %% [markdown]
# What counts is what *decode* sees. Prefilling in full and then hiding it is no better than never
# having looked; the other way round, a windowed prefill under a full decode, costs far less. (Nor
# does the recipe save memory at its peak: a full prefill needs all blocks of the prompt.) So it
# changes the model, unless the model was trained so; and what helps is again the sinks.
#
# A second claim is bolder: *decode feeds only the last KV entry*. That is a window of 1, in
# decode. Literally:

# %%
for name, window in {"all of the KV": None, "the last entry only": Window(1)}.items():
    text = experiments.generate_switched(model, prompt, decode=window, max_tokens=24).text
    print(f"{name}: {text!r}\n")

# %% [markdown]
# What is right about it: decode feeds only the last *token* into the model. Its query looks at the
# whole cache.
#
# ## 7. Fluent is not the same as informed
#
# Sinks keep the text fluent. They do not bring back what was forgotten. Here a fact stands near
# the beginning, and the question at the end. The third way is **H2O** (Zhang et al. 2023,
# *heavy-hitter oracle*): behind the window, keep those tokens that have received the most
# attention so far. (Here: whole blocks of 8, the same for all layers and heads; H2O chooses
# tokens, for each head.)

# %%
walk = (
    "Mara walked along the river in the morning. The water was cold and the sky was grey. She met "
    "an old man who sold apples, and he told her about the town and the bridge. She bought two "
    "apples and went on. "
)
story = (
    "This is a story about a small town by a river. The code for the blue door is 7319. "
    f"{walk}{walk}The code for the blue door is"
)
guess.predict(
    "Which of them still knows the code?",
    ["full attention only", "full and heavy hitters", "all of them"],
    key="code",
)

# %%
behind = {
    "full": {},
    "window 64 + 4 sinks": {"window": 64, "sink_tokens": 4},
    "window 32 + 4 sinks + 32 heavy": {"window": 32, "sink_tokens": 4, "heavy_tokens": 32},
}
knows = {}
for name, knobs in behind.items():
    config = EngineConfig(block_size=8, chunk_size=16, enable_prefix_cache=False, **knobs)
    with pdlab.Engine(model, config) as engine:
        text = engine.generate(story, SamplingParams(max_tokens=6, ignore_eos=True))[0].text
    table = engine.trace.steps[-1].residents[0].block_table
    knows[name] = "7319" in text
    print(f"{name}: {text!r}\n   blocks left: {[i for i, b in enumerate(table) if b != DROPPED]}")

# %%
several = "all of them" if all(knows.values()) else "full and heavy hitters"
guess.compare("code", several if list(knows.values())[-1] else "full attention only")

# %% [markdown]
# Look at which blocks stayed. Attention received *so far* is a memory of the past, and it favours
# the beginning: early tokens have been there to be looked at by everybody. Nobody had asked for
# the code yet when the choice was made. Whatever is thrown away on such a score is thrown away
# before the question is known. That is the risk of every eviction, and perplexity, a mean over all
# tokens, cannot say which fact was lost. A test with a needle in it can.
#
# ## Exercises
#
# **1. What is visible?** Which positions does the query at `position` see, with a window of `size`
# tokens and `sinks` first tokens? Return them as a list, in order.


# %%
def visible_positions(position, size, sinks=0):
    # BEGIN SOLUTION
    return [p for p in range(position + 1) if p > position - size or p < sinks]
    # END SOLUTION


# %%
@wb.check("what is visible")
def visible_check():
    import torch

    from pdlab.attention import Window, visible

    assert visible_positions(8, 4, 2) == [0, 1, 5, 6, 7, 8], "two sinks and four of the window"
    assert visible_positions(2, 4) == [0, 1, 2], (
        "nothing before the beginning, nothing after itself"
    )
    for position in range(20):
        mask = visible(torch.tensor([position]), torch.arange(20), Window(5, 3))[0]
        right = mask.nonzero().flatten().tolist()
        assert visible_positions(position, 5, 3) == right, f"the query at {position} sees {right}"


# %% [markdown]
# <details><summary>Solution</summary>
#
# `[p for p in range(position + 1) if p > position - size or p < sinks]`. The window counts the
# token itself, so that a window of 1 sees only itself. (Libraries differ here by one: read the
# code before you compare.)
#
# </details>

# %% [markdown]
# **2. Blocks of a window.** Decoding one token at a time, how many blocks of `block_size` tokens
# can a window of `size` tokens touch at most?


# %%
def window_blocks(size, block_size):
    # BEGIN SOLUTION
    return -(-(size - 1) // block_size) + 1
    # END SOLUTION


# %%
@wb.check("blocks of a window")
def window_blocks_check():
    assert window_blocks(1, 16) == 1, "a single token lies in one block"
    assert window_blocks(2, 16) == 2, "two neighbours may lie in two blocks"
    for size in range(1, 40):
        touched = {len({(p + i) // 8 for i in range(size)}) for p in range(8)}
        yours = window_blocks(size, 8)
        assert yours == max(touched), f"window {size}, blocks of 8: {max(touched)}, not {yours}"


# %% [markdown]
# <details><summary>Solution</summary>
#
# The worst case begins with the last slot of a block: that is one block, and the other `size - 1`
# tokens fill `ceil((size - 1) / block_size)` more. In Python: `-(-(size - 1) // block_size) + 1`.
#
# </details>

# %% [markdown]
# **3. Choose a window.** `num_sequences` sequences decode at once in a pool of `num_blocks`
# blocks. How large can the window be at most, so that they never run out?


# %%
def largest_window(num_blocks, num_sequences, block_size):
    # BEGIN SOLUTION
    return (num_blocks // num_sequences - 1) * block_size + 1
    # END SOLUTION


# %%
@wb.check("choose a window")
def largest_window_check():
    from pdlab.kvcache import Retention

    for num_blocks, num_sequences in ((512, 32), (100, 7), (12, 6)):
        size, share = largest_window(num_blocks, num_sequences, 16), num_blocks // num_sequences
        fits = Retention(size).peak_blocks(10**6, 1, 16) <= share
        assert fits, f"a window of {size} needs more than {share} blocks a sequence"
        more = Retention(size + 1).peak_blocks(10**6, 1, 16) > share
        assert more, f"a window of {size + 1} would still fit into {share} blocks"


# %% [markdown]
# <details><summary>Solution</summary>
#
# Each sequence has `num_blocks // num_sequences` blocks; turn exercise 2 round: `(share - 1) *
# block_size + 1`. Sinks take a block of their own, and a prefill chunk needs room beside the
# window.
#
# </details>

# %% [markdown]
# ## What production systems do
#
# * **Mistral 7B** (Jiang et al. 2023): a window of 4,096 in every layer, in a rolling buffer. Its
#   later versions went back to full attention.
# * **Gemma 2** (2024) mixes: every other layer has a window of 4,096, the rest look at everything.
#   **Gemma 3** (2025) has five windowed layers, of 1,024, for each full one. The full layers
#   remember, the others save memory.
# * **gpt-oss** (OpenAI 2025): every other layer has a window of 128; and each head has a *learned*
#   sink, a number in the softmax's denominator, so that no token has to serve as one.
# * With mixed layers, a block table for each *kind* of layer is needed, or the full layers keep
#   everything alive. vLLM's *hybrid KV cache manager* does this; the engine of this course has one
#   table for all layers, and so keeps what any layer needs.
# * **StreamingLLM** (Xiao et al. 2023) and **H2O** (Zhang et al. 2023) need no training; so do
#   their successors, such as SnapKV (Li et al. 2024), which chooses by what the *end of the
#   prompt* looks at: where the question stands. Serving systems seldom switch such eviction on by
#   default: it loses something, and nobody knows beforehand what.
#
# The idea of a window is older than these models: Child et al. 2019 (*Sparse Transformers*),
# Beltagy et al. 2020 (*Longformer*).
