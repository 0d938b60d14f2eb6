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
# loss: it is the model. The one below is tiny and has random weights, but it has Mistral's
# structure, with a window of 24. In exact mode, the engine that drops blocks must give the same tokens as a
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
# SmolLM2, the model of the other sections, was trained with full attention. How much worse does it foretell a text with a
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
print("prefill, decode")
for name in ("full", "window, window"):
    loss = losses[name]
    print(f"{name:16} perplexity {loss.perplexity:6.1f}, same first choice {loss.agreement:.0%}")
guess.compare("factor", losses["window, window"].perplexity / losses["full"].perplexity, "times")

# %% [markdown]
# Are the words from more than 64 tokens ago worth that much? Or has something else broken? What was
# it that left the window?
#
# ## 5. The sink
#
# Look at where attention goes. First in numbers, then in a picture of four layers: choose a
# late one and look at its first column.

# %%
guess.predict(
    "Of the attention of queries from position 8 on, over all layers and heads, how much goes to "
    "the very first token?",
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
# put it: every token can see it. Xiao et al. (2024, *StreamingLLM*) call it an **attention sink**.
# When it leaves the window, that weight must go elsewhere, and every head that used to rest makes
# noise. The cure is cheap: keep the first few tokens.

# %%
print("prefill, decode")
for name in ("full", "window, window", "sinks, sinks"):
    loss = losses[name]
    print(f"{name:16} perplexity {loss.perplexity:6.1f}, same first choice {loss.agreement:.0%}")
full, bare, kept = (losses[n].perplexity for n in ("full", "window, window", "sinks, sinks"))
print(f"window -> window + sinks: {bare / kept:.2f} times less. That was the sink.")
print(f"window + sinks -> full: {kept / full:.2f} times less. That the forgotten words were worth.")

# %% [markdown]
# All that for four more tokens. Here is the whole curve, measured on a longer text (**recorded**; machine and
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
print(f"\nat most {max(held)} blocks held at once: one more, for the sinks")

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
    ["better by a fifth or more", "within a fifth", "worse by a quarter or more"],
    key="recipe",
)

# %%
print("prefill, decode")
for name, loss in losses.items():
    print(f"{name:16} perplexity {loss.perplexity:6.1f}, same first choice {loss.agreement:.0%}")
gain = losses["full, window"].perplexity / losses["window, window"].perplexity
bounds = [(0.8, "better by a fifth or more"), (1.25, "within a fifth")]
verdict = next((name for bound, name in bounds if gain <= bound), "worse by a quarter or more")
guess.compare("recipe", verdict, note=f"{gain:.2f} times the perplexity.")
clean = losses["full, sinks"].perplexity / losses["sinks, sinks"].perplexity
print(f"with the sinks kept, full attention in prefill makes it {clean:.2f} times")

# %% [markdown]
# Both rows of that question have lost the sink in decode, and noise drowns the rest. The clean
# comparison is *sinks, sinks* against *full, sinks*: the last number, 1.00 if it makes no
# difference. What counts is what *decode* sees: look at *window, full*, where only prefill had a
# window. (Nor does the recipe save memory at its peak: a full prefill needs all blocks of the
# prompt.) So it changes the model, unless the model was trained so.
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
# Sinks bring most of the perplexity back. They do not bring back what was forgotten. Here a fact
# stands near the beginning, and the question at the end. The third way is **H2O** (Zhang et al.
# 2023, *heavy-hitter oracle*): behind the window, keep those tokens that have received the most
# attention so far. (Here: whole blocks of 8, the same for all layers and heads, so that it sees a
# few tokens more than its knobs say. H2O chooses tokens, for each head.)

# %%
walk = (
    "Mara walked along the river in the morning. The water was cold and the sky was grey. She met "
    "an old man who sold apples, and he told her about the town and the bridge. She bought two "
    "apples and went on. "
)
behind = {
    "full": {},
    "window": {"window": 64, "sink_tokens": 4},
    "heavy": {"window": 32, "sink_tokens": 4, "heavy_tokens": 24},
}


def tell(first_sentence):
    code = "The code for the blue door is"
    return f"{first_sentence} {code} 7319. {walk}{walk}{code}"


# %%
guess.predict(
    "Which of them still know the code?",
    ["only full", "full and heavy", "full and window", "all of them", "none"],
    key="code",
)

# %%
story = tell("This is a story about a small town by a river.")
recalled = {name: experiments.recall(model, story, "7319", **behind[name]) for name in behind}
for name, it in recalled.items():
    print(
        f"{name} {behind[name]}: {it.text!r}, {'knows' if it.knows else 'does not know'} the code"
    )
    print(f"   sees {it.num_visible} keys; the code is in block {it.fact_blocks}, left: {it.kept}")
knowing = [name for name in recalled if recalled[name].knows]
answer = {0: "none", 1: f"only {' '.join(knowing)}", 3: "all of them"}
guess.compare("code", answer.get(len(knowing), " and ".join(knowing)))

# %% [markdown]
# The code left the window long ago, that much is sure. And the heavy hitters? Attention received
# *so far* is a memory of the past, and it favours the beginning: early tokens have been there to be
# looked at by everybody. Nobody had asked for the code yet when the choice was made. The same fact
# in the same story, with another first sentence:

# %%
for first in ("This is a story about a small town by a river.", "A story of a town."):
    it = experiments.recall(model, tell(first), "7319", **behind["heavy"])
    print(f"{first!r}: {it.text!r}, {'knows' if it.knows else 'does not know'} the code")
    print(f"   sees {it.num_visible} keys; the code is in block {it.fact_blocks}, left: {it.kept}")

# %% [markdown]
# Which facts survive is a matter of luck: here, of where the blocks are cut and of what was said
# beside the fact. Whatever is thrown away on such a score is thrown away before the question is
# known. That is the risk of every eviction, and perplexity, a mean over all tokens, cannot say
# which fact was lost. A test with a needle in it can.
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

    for arguments, right, hint in (
        ((8, 4, 2), [0, 1, 5, 6, 7, 8], "two sinks and four of the window"),
        ((2, 4), [0, 1, 2], "nothing before the beginning, nothing after itself"),
    ):
        yours = visible_positions(*arguments)
        assert yours == right, f"{hint}: {right}; you returned {yours!r}"
    for position in range(20):
        mask = visible(torch.tensor([position]), torch.arange(20), Window(5, 3))[0]
        right, yours = mask.nonzero().flatten().tolist(), visible_positions(position, 5, 3)
        assert yours == right, f"the query at {position} sees {right}; you returned {yours!r}"


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
    for size, right, hint in (
        (1, 1, "a single token lies in one block"),
        (2, 2, "two neighbours may lie in two blocks"),
    ):
        yours = window_blocks(size, 16)
        assert yours == right, f"{hint}; you returned {yours!r}"
    for size in range(1, 40):
        touched = {len({(p + i) // 8 for i in range(size)}) for p in range(8)}
        yours = window_blocks(size, 8)
        right = f"a window of {size} touches {max(touched)} blocks of 8"
        assert yours == max(touched), f"{right}; you returned {yours!r}"


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
        got = f"{num_blocks} blocks, {num_sequences} sequences: you returned {size!r}"
        fits = Retention(size).peak_blocks(10**6, 1, 16) <= share
        assert fits, f"{got}, which needs more than {share} blocks a sequence"
        more = Retention(size + 1).peak_blocks(10**6, 1, 16) > share
        assert more, f"{got}, but {size + 1} would still fit into {share} blocks"


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
# * **StreamingLLM** (Xiao et al. 2024) and **H2O** (Zhang et al. 2023) need no training; so do
#   their successors, such as SnapKV (Li et al. 2024), which chooses by what the *end of the
#   prompt* looks at: where the question stands. Serving systems seldom switch such eviction on by
#   default: it loses something, and nobody knows beforehand what.
#
# The idea of a window is older than these models: Child et al. 2019 (*Sparse Transformers*),
# Beltagy et al. 2020 (*Longformer*).
#
# ## What lessons 03 to 05 did with the bytes
#
# | Means | Who holds the bytes | Until when | Saves | Costs | Is the text unchanged? |
# | --- | --- | --- | --- | --- | --- |
# | Paging | a sequence, block by block | it ends or is preempted | room reserved for tokens that never come | a block table; part of the last block | yes |
# | Prefix cache | the pool, after the last owner | the block is needed, least recently used first | computing a known beginning again | looking up | yes |
# | Fork, copy-on-write | all samples together, counted | the last one lets go | copies of the common part | a copied block where they part | yes |
# | Recompute | nobody: given back | — | the room of a preempted sequence | computing it all again | yes |
# | Swap | host memory | there is room again | the room on the device | host memory, and moving it twice | yes |
# | Watermark | nobody: kept free | running sequences grow into it | preemptions | a little room for new requests | yes |
# | int8 | as before | as before | about half, from bf16 | rounding; time without a fused kernel | rounded: perplexity within 1% (04) |
# | KIVI, int4 | as before, and an open area | as before; open until the block is full | about two thirds, from bf16 | rounding; the open area; exact mode | rounded: perplexity within 2% (04) |
# | Window | the latest W tokens | they are W tokens back | all growth beyond W | all that is older | no, unless trained so |
# | Window + sinks | those, and the first few | sinks: to the end | the same, less a block | all between | no, but fluent |
# | Heavy hitters | those, and the most looked at | others receive more | the same, less their blocks | the rest, by luck; weighing | no |
#
# "Yes" is to the last bit in exact mode; elsewhere sums may be rounded in another order, and a near
# tie may fall the other way.
#
# **Next:** [06 Sampling and output](06_sampling_and_output.ipynb): from memory to words, how a token is
# chosen from the probabilities that come out.
