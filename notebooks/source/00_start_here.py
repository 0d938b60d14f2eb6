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
# In this lesson you measure your own machine, load a real language model of 135 million weights,
# send it one prompt, and walk through everything it does, step by step. Nothing here is a drawing of
# what might happen: every picture is drawn from a recorded run of the engine on the machine named
# below it.
#
# *About 15 minutes. Run the cells from top to bottom. If you only read, the pictures are here.*

# %%
import pdlab
from pdlab import workbench as wb

wb.glossary(
    "token", "prefill", "decode", "KV cache", "TTFT", "TPOT", "roofline", "FLOP", "memory bandwidth"
)

# %% [markdown]
# ## 1. The two limits of any machine
#
# A processor can do two things: calculate, and fetch numbers from memory to calculate with. Each has
# a ceiling, and they are far apart.
#
# * **Peak FLOP/s**: multiplications and additions a second, with all operands at hand.
# * **Memory bandwidth**: bytes a second that arrive from main memory.
#
# Their quotient is the **ridge point**: how many calculations the machine can afford for each byte it
# fetches. Work that does fewer than that waits for memory, and a faster calculator would not help it.
# Work that does more waits for arithmetic. This one number explains most of what follows.
#
# The next cell measures the ceilings (a few seconds the first time; then they are remembered).

# %%
from pdlab.costmodel import calibrate, ridge_point

machine = calibrate()
print(machine.name)
print(f"peak, fp32 matrix product {machine.peak('fp32') / 1e9:7.1f} GFLOP/s   measured")
print(f"memory bandwidth, reading {machine.bandwidth_bytes_s / 1e9:7.1f} GB/s      measured")
print(f"ridge point               {ridge_point(machine, 'fp32'):7.1f} FLOP/byte")

# %% [markdown]
# ## 2. The model
#
# `smollm2-135m` is a small but complete relative of the models you know: the same layers, the same
# attention with grouped KV heads, the same tokenizer family. What we learn on it holds for the large
# ones; only the numbers grow.

# %%
model = pdlab.load("smollm2-135m")
shape = model.config

print(
    f"{shape.num_layers} layers of {shape.hidden_size}, vocabulary of {shape.vocab_size:,} tokens"
)
print(f"{shape.num_heads} query heads share {shape.num_kv_heads} KV heads of {shape.head_dim}")
print(f"{shape.num_parameters:,} weights, {model.weight_bytes / 1e6:.0f} MB in {model.dtype}")

# %% [markdown]
# ## 3. Predict, run, compare
#
# The prompt below has about forty tokens. To answer, the engine first works through the prompt
# (**prefill**) and then makes the answer one token at a time (**decode**). Before you run it: how
# long does the whole prompt take, compared with *one* token of the answer?

# %%
guess = wb.Predictions()
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
print(f"prompt {times.num_prompt_tokens} tokens, answer {times.num_output_tokens} tokens")
print(f"time to first token (TTFT)          {times.ttft_s * 1e3:6.1f} ms   measured")
print(f"time per output token after (TPOT)  {times.tpot_s * 1e3:6.1f} ms   measured")
guess.compare("ratio", times.ttft_s / times.tpot_s, "times")

# %% [markdown]
# Most people guess too high: the prompt has dozens of tokens, so should it not take dozens of times
# as long? It does not. **Prefill** uses each weight for all prompt tokens at once; **decode** fetches
# all the weights again for every single token, and uses each of them once.
#
# ## 4. Walk through it
#
# Press ▶, drag the slider, or use the arrow keys. The frames are the recorded steps: the text becomes
# tokens; prefill computes them all and fills the KV cache; the last position gives the first token;
# then each decode step feeds one token in and draws the next. Watch three things:
#
# 1. the **tokens**: how many are computed in this step?
# 2. the **KV blocks**: every computed token leaves its K and V in a slot, and slots are never
#    rewritten while the request lives;
# 3. the **time bar**: which stage takes it?

# %%
wb.Stepper(engine.trace, step=2)

# %% [markdown]
# ## 5. Where each step stands
#
# Put every step into one picture: across, how many calculations it does for each byte it must fetch
# (its **arithmetic intensity**); upwards, how many calculations a second it reached. The roof is what
# your machine can do at most. The prefill stands far to the right of the decodes.
#
# With the menu you can ask what another machine would make of the same steps. Those are
# **predicted** from published data sheets, and marked so; nothing but this machine was measured.

# %%
wb.RooflineView(engine.trace, machine)

# %% [markdown]
# A decode step does about half a calculation for each byte: two FLOPs for each weight, and four
# bytes for each weight in fp32. No machine in the menu has its ridge point that low. So what a decode
# step can reach is set by memory everywhere, and the fastest calculator on Earth would not change it.
# How far below its roof a point stands is another matter: that gap is software, and lesson 02 looks
# into it.
#
# ## 6. What attention looks at
#
# In each layer and head, every token spreads its attention over itself and the tokens before it. In prefill
# this is a triangle, computed at once; in decode it is one more row a step. Move through layers and
# heads: some look at the previous token, many rest on the very first one (an "attention sink", Xiao
# et al. 2023).
#
# A fused attention kernel never holds these weights in one place, so a **probe** recomputes them
# beside the step, from the engine's own queries and the keys in its cache. That takes time, so this
# is a second run; the one above was timed without it.

# %%
with pdlab.Engine(model) as probed, probed.probe(layers=[0, 12, 29]):
    probed.generate(chat, pdlab.SamplingParams(max_tokens=32))
wb.AttentionView(probed.trace, layer=12)

# %% [markdown]
# ## 7. How to read the pictures
#
# The colours mean the same in every lesson, and every number says what it is:
#
# | word | meaning |
# |---|---|
# | **measured** | timed in this run, on this machine |
# | **recorded** | measured when the trace was made, a moment or a year ago; its machine and date stand beside it |
# | **counted** | follows from shapes alone: FLOPs, the least bytes to move, tokens |
# | **predicted** | computed by the cost model from shapes and a machine's ceilings |
# | **simulated** | made by a simulation that uses predicted times |
# | **published** | taken from a data sheet or paper, which is named |

# %%
from IPython.display import HTML

HTML(wb.legend())

# %% [markdown]
# ## Exercises
#
# **1. Bytes of KV.** Every computed token leaves one K and one V vector in every layer, for every
# *KV* head (not every query head). Write the number of bytes for `n` tokens.


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
    assert kv_bytes(shape, recorded.num_tokens) == recorded.kv_used_bytes, "compare with the trace"
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

# %% [markdown]
# **2. The floor of decode.** A decode step must read every weight once. From the weights' bytes and
# this machine's bandwidth: what is the least time a step can take, in seconds?


# %%
def decode_floor_s(weight_bytes, bandwidth_bytes_s):
    # BEGIN SOLUTION
    return weight_bytes / bandwidth_bytes_s
    # END SOLUTION


# %%
@wb.check("the floor of decode")
def floor_check():
    assert decode_floor_s(1e9, 2e9) == 0.5, "1 GB at 2 GB/s takes half a second"
    floor_s = decode_floor_s(model.weight_bytes, machine.bandwidth_bytes_s)
    print(f"floor {floor_s * 1e3:.1f} ms (predicted), TPOT {times.tpot_s * 1e3:.1f} ms (measured)")


# %% [markdown]
# <details><summary>Solution</summary>
#
# `weight_bytes / bandwidth_bytes_s`. What a real step takes beyond this floor is the price of everything
# else: attention, norms, starting some hundreds of operations, and matrix products that do not reach the
# full bandwidth with a single row. Lesson 02 looks for it.
#
# </details>

# %% [markdown]
# ## What production systems do
#
# The same loop runs in the large servers: choose a batch, run it, hand out the tokens. vLLM's
# scheduler and SGLang's differ in detail, not in kind, and both keep KV in blocks like the ones you
# saw (Kwon et al. 2023, *Efficient Memory Management for Large Language Model Serving with
# PagedAttention*, section 4). They make the two phases share a batch (Agrawal et al. 2024,
# *Sarathi-Serve*) or run them on different machines (Zhong et al. 2024, *DistServe*; Patel et al.
# 2024, *Splitwise*), because one waits for arithmetic and the other for memory. The roofline itself
# is from Williams, Waterman and Patterson 2009.
#
# **Next:** [01 Prefill](01_prefill.ipynb), the phase that computes; then [02 Decode](02_decode.ipynb),
# the phase that fetches.

# %%
engine.close()
