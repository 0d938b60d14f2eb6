# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 01 Prefill: the phase that computes
#
# **The question.** A long prompt makes you wait for the first word. What is the machine doing in that
# time, does twice the prompt mean twice the wait, and could it be done faster?
#
# You will see text become tokens, all tokens computed in one pass, the causal mask, the keys and
# values that stay behind, and the first token drawn from the last position. Then you measure the time
# to first token and find out what limits it.
#
# *About 25 minutes. Before this: [00 Start here](00_start_here.ipynb).*

# %%
import pdlab
from pdlab import workbench as wb

wb.glossary("prefill", "query, key, value", "causal mask", "TTFT", "MFU", "compute-bound", "GQA")

# %%
model = pdlab.load("smollm2-135m")
guess = wb.Predictions()

# %% [markdown]
# ## 1. Text becomes tokens
#
# The model never sees letters. A **byte-level BPE** tokenizer cuts the text's UTF-8 bytes into pieces
# from a fixed vocabulary of 49,152 entries. A common English word is one piece. What about four
# characters of Chinese, 我是谁？, for a tokenizer that was made mostly from English?

# %%
guess.predict("How many tokens are the four characters of 我是谁？", key="tokens", unit="tokens")

# %%
text = "我是谁？"
ids = model.tokenizer.encode(text)
guess.compare(
    "tokens",
    len(ids),
    "tokens",
    kind="counted",
    note="Twelve bytes of UTF-8, three for each character.",
)
wb.token_table(model.tokenizer, text)

# %% [markdown]
# Some characters fall into *parts of characters*: a single token may hold one byte that means nothing
# on its own. This has two consequences. The same thought costs more tokens, and with them time and
# memory, in a language the tokenizer was not made for (twice as many here, compare below). And whoever
# streams text must hold bytes back until a character is complete.

# %%
wb.token_table(model.tokenizer, "Who am I?")

# %% [markdown]
# ## 2. One pass, not a loop
#
# It is often said that *prefill goes through the prompt token by token*. Test it. The engine has a
# knob, `chunk_size`: the most prompt tokens it may compute in one step. At `chunk_size=1` it does
# exactly what the claim says, literally, on the same code. Does the result differ, and the time?

# %%
guess.predict(
    "96 prompt tokens one by one take how many times as long as all at once?",
    key="loop",
    unit="times",
)

# %%
at_once = wb.prefill_sweep(model, [96], repeats=3)
one_by_one = wb.prefill_sweep(model, [96], repeats=1, chunk_size=1)
fast_s, slow_s = wb.median_ttft_s(at_once), wb.median_ttft_s(one_by_one)
print(f"96 tokens in one step   {fast_s * 1e3:7.0f} ms   measured")
print(f"96 tokens in 96 steps   {slow_s * 1e3:7.0f} ms   measured")
guess.compare("loop", slow_s / fast_s, "times")

# %% [markdown]
# And the result? Ordinarily a sum may round differently when it is computed in another shape. In
# **exact mode** the order of all additions is fixed (it is slower), and the engine promises that how a
# prompt is cut changes nothing: not "nearly nothing", but no bit of the KV cache. Here with a sentence:

# %%
import torch

prompt = "The capital of France is Paris, and the capital of Japan is"
whole = wb.kv_after_prefill(model, prompt, exact=True)
looped = wb.kv_after_prefill(model, prompt, exact=True, chunk_size=1)
print("K and V:", list(whole.shape), "= [K/V, layers, tokens, KV heads, head_dim]")
print("bit for bit the same:", torch.equal(whole, looped))

# %% [markdown]
# So the loop is not wrong, it is a waste. All tokens of the prompt are known in advance. Within a
# layer, q, K and V of a position need only that position's input to the layer, and all of these are
# there. So a layer computes all positions together, and each weight that is fetched from memory serves
# every one of them.
#
# ## 3. The causal mask
#
# In one pass, each token must see the tokens before it and none after it. The mask makes it so: the
# score matrix keeps its lower triangle. Below are attention weights of this prompt. The row is the
# token that looks, the column the token it looks at.
#
# (As before, a probe recomputed them from the engine's own queries and cached keys.)

# %%
engine = pdlab.Engine(model)
with engine.probe(layers=[0, 8, 16, 29]):
    output = engine.generate(prompt, pdlab.SamplingParams(max_tokens=6))[0]
print(prompt + output.text)
wb.AttentionView(engine.trace)

# %% [markdown]
# Why must the mask be there in *prefill*, where nobody could peek at an answer anyway? Because of
# what is kept. Without it, from the second layer on, the K and V of the first token would depend on
# the last one, and one more token would make all of them wrong. With it, a prefix has the same K and V
# whatever comes after. Check that on the engine:

# %%
longer = wb.kv_after_prefill(model, prompt + " Tokyo. Both are large cities.", exact=True)
shared = whole.shape[2]
print(f"{shared} shared tokens, {longer.shape[2]} in all")
print("the shared K and V are bit for bit the same:", torch.equal(whole, longer[:, :, :shared]))

# %% [markdown]
# This one fact carries the rest of the course: it is why a KV cache works at all, why prefixes can be
# shared between requests, and why a prompt may be prefilled in chunks, or on another machine.
#
# ## 4. What stays behind, and the first token
#
# Step through it: a chunked prefill this time, eight tokens a step, so that you see the blocks fill.
# Nothing is drawn from a chunk that is not the last. The last position's logits give the first token.

# %%
with pdlab.Engine(model, pdlab.EngineConfig(chunk_size=8, block_size=4, num_blocks=16)) as chunked:
    chunked.generate(prompt, pdlab.SamplingParams(max_tokens=6))
wb.Stepper(chunked.trace, step=2)

# %% [markdown]
# ## 5. Does twice the prompt take twice as long?
#
# Attention compares each token with all before it: n(n + 1)/2 pairs. From this it is often concluded
# that prefill costs O(n²). Everything else in a layer (projections, MLP) is linear in n. Which part
# wins?

# %%
guess.predict(
    "From 512 to 1,024 tokens, the time to first token grows by a factor of",
    ["less than 1.5", "about 2", "about 3", "about 4"],
    key="doubling",
)

# %%
from pdlab.costmodel import Chunk, calibrate, mfu, step_cost

machine = calibrate()
sweep = wb.prefill_sweep(model, [64, 128, 256, 512, 768, 1024], repeats=2)
wb.show(wb.figures.ttft_by_prompt(sweep, machine))

# %%
factor = wb.median_ttft_s(sweep, 1024) / wb.median_ttft_s(sweep, 512)
bounds = [(1.5, "less than 1.5"), (2.5, "about 2"), (3.5, "about 3"), (99, "about 4")]
answer = next(name for bound, name in bounds if factor < bound)
guess.compare("doubling", answer, note=f"The factor: {factor:.2f}")

# %% [markdown]
# The dotted line is the linear part of the fit, the dashed one what the counted FLOPs would take at
# this machine's peak. How much of the work is quadratic can be counted exactly, too:

# %%
for step in sweep.steps[:6]:
    share = step.flops["attention"] / step.total_flops
    print(f"{step.num_tokens:5} tokens: attention is {share:4.0%} of the FLOPs   counted")

# %% [markdown]
# The two parts are equal only at a prompt of several thousand tokens (exercise 2). "O(n²)" describes
# very long prompts. At the lengths of everyday use, doubling the prompt costs about double.
#
# ## 6. Bound by compute
#
# Each point below is one prefill of the sweep. The more tokens share a fetch of the weights, the
# further right it stands: 64 tokens already do some tens of calculations for each byte. Past the ridge
# memory is no longer the limit; what is left is the processor's arithmetic and how well the software
# uses it. **MFU** says how much of the measured peak was reached.

# %%
wb.RooflineView(sweep, machine)

# %%
for step in sweep.steps[:6]:
    work = wb.cost_of(step)
    share = mfu(work, step.wall_s, machine, "fp32")
    print(
        f"{step.num_tokens:5} tokens {step.wall_s * 1e3:8.0f} ms {work.total_flops / 1e9:7.1f} GFLOP"
        f" {work.arithmetic_intensity:6.0f} FLOP/byte   MFU {share:4.0%}"
    )

# %% [markdown]
# ## Exercises
#
# **1. Pairs.** How many query-key pairs does the causal mask leave when `num_tokens` new tokens come
# after `start` cached ones?


# %%
def pairs(start, num_tokens):
    # BEGIN SOLUTION
    return sum(position + 1 for position in range(start, start + num_tokens))
    # END SOLUTION


# %%
@wb.check("pairs under the causal mask")
def pairs_check():
    assert pairs(0, 1) == 1, "the first token sees itself"
    assert pairs(0, 4) == 10, "1 + 2 + 3 + 4"
    assert pairs(4, 4) == pairs(0, 8) - pairs(0, 4), "cutting a prompt must change no pair"


# %% [markdown]
# <details><summary>Solution</summary>
#
# The query at position `p` sees `p + 1` keys: `sum(p + 1 for p in range(start, start + num_tokens))`.
# Two chunks have exactly the pairs of the whole; chunked prefill does no attention twice.
#
# </details>

# %% [markdown]
# **2. Where quadratic catches up.** In one layer, attention takes `4 * num_heads * head_dim` FLOPs for
# each pair (q·K and weights·V), about n²/2 pairs. The linear parts take 2 FLOPs for each weight of
# the layer and token. At which prompt length `n` are the two equal?


# %%
def crossover(shape):
    hidden, inner = shape.hidden_size, shape.intermediate_size
    layer_weights = hidden * sum(shape.qkv_sizes) + shape.q_size * hidden + 3 * hidden * inner
    # BEGIN SOLUTION
    return 2 * layer_weights / (2 * shape.num_heads * shape.head_dim)
    # END SOLUTION


# %%
@wb.check("crossover")
def crossover_check():
    n = round(crossover(model.config))
    flops = step_cost(
        model.config, [Chunk(0, n)], num_sampled=0, weight_element_bytes=4, kv_element_bytes=4
    ).flops
    ratio = flops["attention"] / (flops["qkv"] + flops["output"] + flops["mlp"])
    assert abs(ratio - 1) < 0.01, f"at {n:,} tokens, attention is {ratio:.2f} of the linear parts"
    print(f"equal at {n:,} tokens (counted, not measured)")


# %% [markdown]
# <details><summary>Solution</summary>
#
# `2 * layer_weights * n = 4 * num_heads * head_dim * n² / 2`, so
# `n = layer_weights / (num_heads * head_dim)`: about 6,000 tokens here. A model with wider
# layers has its crossover later, because its weights grow with the square of the width and attention
# only with the width: for Llama 3.1 8B it is beyond 50,000 tokens.
#
# </details>

# %% [markdown]
# ## What production systems do
#
# * **Fused attention** never stores the score matrix (Dao et al. 2022, *FlashAttention*), so its memory
#   is linear even where its work is quadratic. On a CPU, the default path of this engine does the same.
# * **Chunked prefill** cuts long prompts so that running requests are not held up (Agrawal et al.
#   2024, *Sarathi-Serve*, section 4). Small chunks fetch the weights more often, as you measured.
# * **Prefix caching** skips prefill for a prefix seen before (vLLM's automatic prefix caching; SGLang's
#   RadixAttention, Zheng et al. 2024). Section 3 is why that is safe.
# * **Disaggregation** gives prefill machines of its own, chosen for arithmetic (Splitwise, DistServe).
#
# **Next:** [02 Decode](02_decode.ipynb), the phase that fetches.

# %%
engine.close()
