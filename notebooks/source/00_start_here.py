# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Start here: one prompt, end to end
#
# **The question.** You press Enter. For a moment nothing happens, then words come out one after
# another at a steady pace. Why are there two speeds? Where does the time go, and what would make it
# shorter?
#
# In this lesson you load a real language model of 135 million weights, send it one prompt, walk
# through everything it does, and measure what your own machine can do at most. Nothing here is a
# drawing of what might happen: every picture is drawn from a recorded run of the engine, on the
# machine named below it.
#
# *About 20 minutes. Run it cell by cell with Shift+Enter and answer the questions before you run on.
# If you only read, the pictures are here.*

# %%
import pdlab
from pdlab import workbench as wb

guess = wb.Predictions()
wb.glossary(
    "token", "prefill", "decode", "attention", "KV cache", "logits", "TTFT", "TPOT", "roofline"
)

# %% [markdown]
# ## 1. The model
#
# Text goes in and out as **tokens**: words or pieces of words, each with a number. The model is a stack
# of layers. Each layer holds large matrices (the **weights**) and turns one vector for each token into
# a new one, in two parts:
#
# * **Attention.** Every token makes three vectors: a **query** (what am I looking for?), a **key**
#   (what do I offer?) and a **value** (what do I hand over?). It compares its query with the keys of
#   the tokens before it and its own, and takes a weighted mean of their values. Several **heads** do
#   this side by side.
# * **MLP.** Three more matrix products work on each token by itself.
#
# After the last layer, one number for each word of the vocabulary (the **logits**) says what comes
# next.
#
# `smollm2-135m` is small but complete: it has the same parts as the models you know. What we learn
# about how it *runs* holds for the large ones; only the numbers grow.

# %%
model = pdlab.load("smollm2-135m")
shape = model.config

print(f"{shape.num_layers} layers of width {shape.hidden_size}, {shape.vocab_size:,} tokens known")
print(
    f"{shape.num_heads} query heads of {shape.head_dim} numbers share {shape.num_kv_heads} KV heads"
)
print(f"{shape.num_parameters:,} weights, {model.weight_bytes / 1e6:.0f} MB in {model.dtype}")

# %% [markdown]
# ## 2. Predict, run, compare
#
# The prompt below has about forty tokens. To answer, the engine first works through the prompt
# (**prefill**) and then makes the answer one token at a time (**decode**). Before you run it: how
# long does the whole prompt take, compared with *one* token of the answer?

# %%
guess.predict(
    "The time to the first token is how many times the time of each token after it?",
    key="ratio",
    unit="times",
)

# %%
chat = [{"role": "user", "content": "In one sentence: why does a language model keep a KV cache?"}]

wb.warm_up(model)
engine = pdlab.Engine(model)
output = engine.generate(chat, pdlab.SamplingParams(max_tokens=32))[0]
print(output.text)

# %%
times = output.metrics
prompt_tokens, ttft_ms, tpot_ms = times.num_prompt_tokens, times.ttft_s * 1e3, times.tpot_s * 1e3
print(f"{prompt_tokens} tokens of prompt, {times.num_output_tokens} tokens of answer")
print(f"time to first token (TTFT)          {ttft_ms:6.1f} ms   measured")
print(f"time per output token after (TPOT)  {tpot_ms:6.1f} ms   measured")
print(
    f"so a prompt token took {ttft_ms / prompt_tokens:.1f} ms, a token of the answer {tpot_ms:.1f} ms"
)
guess.compare("ratio", ttft_ms / tpot_ms, "times")

# %% [markdown]
# (A model this small answers fluently and often wrongly. We look at how it runs, not at what it says.)
#
# Most people guess too high: the prompt has dozens of tokens, so should it not take dozens of times
# as long? It does not. Token for token, prefill is far cheaper. **Prefill** uses each weight for all
# prompt tokens at once; **decode** fetches all the weights again for every single token, and uses each
# of them once.
#
# ## 3. Walk through it
#
# Colours mean the same in every lesson, and every number says what it is:
#
# | word | meaning |
# |---|---|
# | **measured** | timed in this run, on this machine |
# | **recorded** | measured when the trace was made; its machine and date stand beside it |
# | **counted** | follows from shapes alone: tokens, FLOPs, the least bytes to move |
# | **predicted** | what the counted work would take at a machine's ceilings |
# | **simulated** | made by a simulation that uses predicted times |
# | **published** | taken from a data sheet or a paper, which is named |

# %%
from IPython.display import HTML

HTML(wb.legend("prefill", "decode", "cached", "wasted", "free"))

# %% [markdown]
# Press ▶, or drag the slider, or click it and use the arrow keys. The frames are the recorded steps:
# the text becomes tokens; prefill computes them all; the last position gives the first token; then
# each decode step feeds one token in and draws the next. Watch three things:
#
# 1. the **tokens**: how many are computed in this step?
# 2. the **KV cache**: every computed token leaves its key and value (K and V) in a slot of a block, for
#    all later tokens to look at; slots are not rewritten while the request lives;
# 3. the **time bar**: which stage takes it?

# %%
wb.Stepper(engine.trace, step=2)

# %% [markdown]
# ## 4. Why two speeds: the two limits of any machine
#
# A processor can do two things: calculate, and fetch numbers from memory to calculate with. Each has
# a ceiling, and they are far apart.
#
# * **Peak FLOP/s**: multiplications and additions a second, with all operands at hand.
# * **Memory bandwidth**: bytes a second that arrive from main memory.
#
# Their quotient is the **ridge point**: how many calculations the machine can afford for each byte it
# fetches. Work that does fewer than that can go no faster than memory delivers, and a faster calculator
# would not help it. This one number explains most of what follows. The next cell measures it (a few
# seconds the first time; then it is remembered).

# %%
from pdlab.costmodel import calibrate, ridge_point

machine = calibrate()
print(machine.name)
print(f"peak, fp32 matrix product {machine.peak('fp32') / 1e9:7.1f} GFLOP/s   measured")
print(f"memory bandwidth, reading {machine.bandwidth_bytes_s / 1e9:7.1f} GB/s      measured")
print(f"ridge point               {ridge_point(machine, 'fp32'):7.1f} FLOP/byte")

# %% [markdown]
# Put every step into one picture, the **roofline**: across, how many calculations a step does for each
# byte it must fetch (its **arithmetic intensity**); upwards, how many calculations a second it reached.
# The roof is what your machine can do at most. The prefill stands far to the right of the decodes.
#
# With the menu you can ask what other machines could make of the same steps. Those points are
# **predicted** from published data sheets and stand right at their roof; nothing but this machine was
# measured.

# %%
wb.RooflineView(engine.trace, machine)

# %% [markdown]
# A decode step does about half a calculation for each byte: two FLOPs (a multiplication and an
# addition) for each weight, and four bytes for each weight in fp32. No machine in the menu has its
# ridge point that low. So what a decode step can reach is set by memory everywhere, and the fastest
# calculator on Earth would not change it. How far below its roof a point stands is another matter:
# that gap is software, and lesson 02 looks into it.
#
# ## 5. What attention looks at
#
# In prefill, the weights of attention form a triangle that is computed at once; in decode, one more
# row is added in each step. Move through layers and heads: some look at the previous token, many rest
# on the very first one (an "attention sink", Xiao et al. 2023).
#
# The engine's own attention never holds these weights in one place. So a **probe** recomputes them
# beside the step, from the step's own queries and the keys in its cache. That takes time, so this is a
# second run; the one above was timed without it.

# %%
with pdlab.Engine(model) as probed, probed.probe(layers=[0, 12, 29]):
    probed.generate(chat, pdlab.SamplingParams(max_tokens=32))
wb.AttentionView(probed.trace, layer=12)

# %% [markdown]
# ## Exercises
#
# **1. Bytes of KV.** Every computed token leaves one K and one V vector in every layer, for every
# *KV* head (not every query head). Write the number of bytes for `num_tokens` tokens.


# %%
def kv_bytes(shape, num_tokens, bytes_per_element=4):
    # BEGIN SOLUTION
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    return per_token * bytes_per_element * num_tokens
    # END SOLUTION


# %%
@wb.check("bytes of KV")
def kv_bytes_check():
    recorded = engine.trace.steps[0]
    yours = kv_bytes(shape, recorded.num_tokens)
    hint = f"yours {yours:,} bytes, recorded {recorded.kv_used_bytes:,} for {recorded.num_tokens} tokens"
    assert yours == recorded.kv_used_bytes, hint
    assert kv_bytes(shape, 0) == 0, "no tokens, no bytes"


# %% [markdown]
# <details><summary>Solution</summary>
#
# K **and** V, in every layer, for every KV head:
#
# ```python
# per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
# return per_token * bytes_per_element * num_tokens
# ```
#
# It is linear in the number of tokens. Claims that the cache grows "quadratically" or "exponentially"
# mix it up with the score matrix of an unfused attention, which is a temporary.
#
# </details>
#
# **2. The floor of decode.** A decode step must read every weight once. What is the least time a step
# can take, in seconds, for a model of `num_weights` weights that are stored in `bytes_per_weight` bytes
# each?


# %%
def decode_floor_s(num_weights, bytes_per_weight, bandwidth_bytes_s):
    # BEGIN SOLUTION
    return num_weights * bytes_per_weight / bandwidth_bytes_s
    # END SOLUTION


# %%
@wb.check("the floor of decode")
def floor_check():
    assert decode_floor_s(1e9, 2, 1e9) == 2.0, "2 GB of weights at 1 GB/s take two seconds"
    here = decode_floor_s(shape.num_parameters, 4, machine.bandwidth_bytes_s)
    large = decode_floor_s(8e9, 2, machine.bandwidth_bytes_s)
    print(
        f"this model {here * 1e3:.1f} ms (predicted); it took {times.tpot_s * 1e3:.1f} ms (measured)"
    )
    print(f"an 8B model in bf16 on this machine: {large:.2f} s a token at least (predicted)")


# %% [markdown]
# <details><summary>Solution</summary>
#
# `num_weights * bytes_per_weight / bandwidth_bytes_s`. What a real step takes beyond this floor is the
# price of everything else. It also says what helps: fewer weights, fewer bytes for each, more
# bandwidth, or more tokens for each fetch. Every technique of this course is one of these.
#
# </details>
#
# ## What production systems do
#
# The same loop runs in the large servers: choose a batch, run it, hand out the tokens. vLLM's
# scheduler and SGLang's differ in detail, not in kind, and both keep KV in blocks like the ones you
# saw (Kwon et al. 2023, *Efficient Memory Management for Large Language Model Serving with
# PagedAttention*, section 4). They make the two phases share a batch (Agrawal et al. 2024,
# *Sarathi-Serve*) or run them on different machines (Zhong et al. 2024, *DistServe*; Patel et al.
# 2024, *Splitwise*), because one is limited by arithmetic and the other by memory. The roofline itself
# is from Williams, Waterman and Patterson 2009.
#
# **Next:** [01 Prefill](01_prefill.ipynb), the phase that computes; then [02 Decode](02_decode.ipynb),
# the phase that fetches.

# %%
engine.close()
