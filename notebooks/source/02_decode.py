# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 02 Decode: the phase that fetches
#
# **The question.** After the first word, the answer comes at a steady pace: one token, one step. Why
# can a machine that computed a hundred prompt tokens in a blink not make the next ten at once? And
# what sets the pace?
#
# You will measure generation without a KV cache, see exactly what the cache saves, find what a
# decode step waits for, and learn the one trick that makes decoding cheap: batching.
#
# *About 25 minutes. Before this: [01 Prefill](01_prefill.ipynb).*

# %%
import pdlab
from pdlab import workbench as wb

wb.glossary("decode", "KV cache", "TPOT", "ITL", "MBU", "memory-bound", "batch", "throughput")

# %%
model = pdlab.load("smollm2-135m")
guess = wb.Predictions()

# %% [markdown]
# ## 1. Without a cache
#
# The next token depends on all tokens before it. The simplest way to get it: run the whole text
# through the model, take the most probable next token, append it, and run the whole text again.
# `NaiveGenerator` does just that. The engine keeps K and V of every token instead, and computes only
# the new one. Both use the same weights, so the answer must be the same.

# %%
prompt = (
    "A key-value cache stores the keys and values of all earlier tokens, so that the model does not "
    "have to compute them again for each new token. The memory it needs grows with the length of the "
    "text, and so a server must decide carefully"
)
print(len(model.tokenizer.encode(prompt)), "tokens of prompt")
guess.predict(
    "With about eighty tokens of text, the next token takes how many times as long without a cache?",
    key="naive",
    unit="times",
)

# %%
comparison = wb.compare_with_naive(model, prompt, 32)
print("same tokens:", comparison.same_tokens)
wb.show(wb.figures.naive_against_cached(comparison))

# %%
from statistics import median

late = slice(-8, None)
ratio = median(comparison.naive.token_s[late]) / median(comparison.cached_s[late])
work = comparison.naive.costs[-1].total_flops / comparison.cached_costs[-1].total_flops
guess.compare("naive", ratio, "times", note=f"The last token's FLOPs, counted: {work:.0f} times.")

# %% [markdown]
# Look at the two numbers in the card. Without a cache the last token takes dozens of times the *work*
# (the FLOPs), but only a few times the *time*. So the cached step is, in some sense, slow: it does
# hardly any arithmetic and still takes its time. Keep that in mind for section 3.
#
# It is often said that *every decode step recomputes the whole history*. That describes the
# upper line. With a cache, K and V of the history are read, not recomputed; what still spans the history is
# one row of attention.
#
# ## 2. One step, looked at closely
#
# Each decode step takes **one** token in: the one drawn in the step before. Its query looks at every
# key in the cache; its own K and V are appended; its logits give the next token. That is a loop by
# nature: the input of a step is the output of the one before.

# %%
engine = pdlab.Engine(model)
with engine.probe(layers=[0, 8, 16, 29]):
    engine.generate("One, two, three, four, five,", pdlab.SamplingParams(max_tokens=16))
wb.Stepper(engine.trace, step=3)

# %% [markdown]
# In the attention picture, the rows below the prompt's triangle are the decode steps: one row each.
# A single query at the end needs no mask, since everything in the cache is in its past.

# %%
wb.AttentionView(engine.trace)

# %% [markdown]
# Memory grows by the same number of bytes with every token: K and V, in every layer, for every KV
# head. Not exponentially, not quadratically. The bytes below are read off the engine's own records.

# %%
from itertools import pairwise

used = [step.kv_used_bytes for step in engine.trace.steps]
growth = {later - earlier for earlier, later in pairwise(used)}
per_token = engine.trace.engine["kv_bytes_per_token"]
print(f"KV bytes step by step: {used[0]:,}, {used[1]:,}, {used[2]:,} ... {used[-1]:,}")
print(f"growth of every decode step: {growth} bytes; one token's K and V: {per_token:,} bytes")

# %% [markdown]
# ## 3. What a step waits for
#
# A decode step multiplies each weight with one number and adds it up: 2 FLOPs a weight. But it must
# fetch that weight first: 4 bytes in fp32. So from the measured bandwidth you can say in advance how
# long a step takes at least.

# %%
from pdlab.costmodel import calibrate, load_hardware, mbu, mfu, predict

machine = calibrate()
sample = wb.decode_sweep(model, batch_sizes=[1], context_lens=[128], num_steps=12)
step_s = wb.decode_step_s(sample, batch_size=1)
cost = wb.cost_of(wb.decode_steps(sample, 1)[-1])
floor = predict(cost, machine, "fp32")
print(f"bytes to fetch      {cost.total_bytes / 1e6:8.0f} MB")
print(f"fetching, at least  {floor.memory_s * 1e3:8.1f} ms   predicted")
print(f"arithmetic, at least{floor.compute_s * 1e3:8.1f} ms   predicted")
print(f"a step              {step_s * 1e3:8.1f} ms   measured")
print(f"MBU {mbu(cost, step_s, machine):.0%}, MFU {mfu(cost, step_s, machine, 'fp32'):.1%}")

# %% [markdown]
# Fetching takes several times as long as the arithmetic, so memory sets the floor: that is what
# *bandwidth-bound* means, and a faster calculator would not lower it. This step is still well above its
# floor. **MBU** says how far: it is the part of the bandwidth that was put to use. Where is the rest?
# The black marks below are each stage's own floor.

# %%
last = wb.decode_steps(sample, 1)[-1]
wb.show(wb.figures.stage_breakdown(sample, last.step, machine))

# %%
gemv = machine.details["gemv_bytes_s"]
print(
    f"the weights, read by a matrix-vector product {model.weight_bytes / gemv * 1e3:5.1f} ms   predicted"
)
print(f"the step                                     {last.wall_s * 1e3:5.1f} ms   measured")

# %% [markdown]
# The first line is a second, more modest floor: a product with a single row does not read memory as
# fast as a plain read does, and calibration measured it on its own, on large matrices. The rest comes
# from everything around it: hundreds of small operations in each step, started one by one, and
# products on small matrices in between. Nothing of it is the model's need. That is why serving engines
# fuse operations and write kernels for this one step, and why a later lesson does.

# %% [markdown]
# ## 4. A longer context
#
# Attention reads all K and V of the context in every step. Does a context that is 32 times as long
# make the step much slower?

# %%
guess.predict(
    "With 1,024 tokens of context instead of 32, a step takes how many times as long?",
    key="context",
    unit="times",
)

# %%
contexts = wb.decode_sweep(model, context_lens=[32, 256, 512, 1024])
wb.show(wb.figures.tpot_by_context(contexts, machine))

# %%
short_s, long_s = (wb.decode_step_s(contexts, context_len=n) for n in (32, 1024))
guess.compare("context", long_s / short_s, "times")
kv, weights = (contexts.steps[-1].bytes_moved[part] for part in ("kv_read", "weights"))
print(f"at 1,024 tokens a step fetches {weights / 1e6:.0f} MB of weights, {kv / 1e6:.0f} MB of KV")

# %% [markdown]
# The KV to read grows with every token, but the weights dominate until the two are equal (for this
# model after more than ten thousand tokens; exercise 1). The measured step grows faster than the
# dashed line of the bytes. One reason is that here the blocks of a context are copied together before
# attention reads them; a kernel that reads blocks in place is a later lesson's subject.
#
# ## 5. Batching makes it cheap
#
# Fetching a weight for one sequence costs as much as fetching it for eight. If eight sequences decode
# in the same step, each weight is used eight times per fetch. What happens to the time of a step, and
# to the tokens a second?

# %%
guess.predict(
    "A step that decodes 8 sequences takes how many times as long as a step for one?",
    key="batch",
    unit="times",
)

# %%
batches = wb.decode_sweep(model, batch_sizes=[1, 2, 4, 8, 16], context_lens=[64])
wb.show(wb.figures.tpot_by_batch(batches, machine))

# %%
one_s = wb.decode_step_s(batches, batch_size=1)
for size in (1, 2, 4, 8, 16):
    seconds = wb.decode_step_s(batches, batch_size=size)
    print(
        f"batch {size:2}: {seconds * 1e3:6.1f} ms a step, {size / seconds:6.1f} tokens/s in all,"
        f" {size / seconds * one_s:4.1f} times the throughput of one"
    )
guess.compare("batch", wb.decode_step_s(batches, batch_size=8) / one_s, "times")

# %% [markdown]
# The step from one sequence to two is special: the library's matrix product has a fast path for a
# single row and is much slower for two. From there on the picture is as promised: twice the sequences
# for little more time.
#
# *Decode cannot run in parallel* is true inside one sequence and false across sequences. On the
# roofline, a bigger batch moves the decode step to the right: the same fetch, more arithmetic. What
# grows with the batch without being shared is attention: each sequence has its own KV to read.

# %%
view = wb.RooflineView(batches, machine)
view.selected = len(view.points) - 1  # the last step: a decode of 16
view

# %% [markdown]
# At a batch of 16 the step comes close to the ridge of this processor, or has crossed it. On a GPU the
# ridge lies far to the right: exercise 2 finds out how far. (The squares on the right are the prefills
# of these runs.)
#
# ## Exercises
#
# **1. When KV weighs as much as the weights.** At which context length does one decode step (batch 1)
# read as many bytes of KV as of weights?


# %%
def equal_context(weight_bytes, kv_bytes_per_token):
    # BEGIN SOLUTION
    return weight_bytes / kv_bytes_per_token
    # END SOLUTION


# %%
@wb.check("KV as heavy as the weights")
def equal_context_check():
    assert equal_context(1000, 10) == 100, "1,000 bytes of weights, 10 bytes a token: 100 tokens"
    print(f"{equal_context(model.weight_bytes, per_token):,.0f} tokens (counted)")


# %% [markdown]
# <details><summary>Solution</summary>
#
# `weight_bytes / kv_bytes_per_token`. With a batch of 32 it is 32 times sooner: each sequence reads its
# own KV, while the weights are shared. That is why servers with large batches care so much about KV
# bytes (grouped KV heads, quantized KV).
#
# </details>

# %% [markdown]
# **2. The batch that reaches the ridge.** A decode step of `b` sequences does about 2 · b FLOPs for
# each weight and fetches 4 bytes for it. At which `b` does it stop being bound by bandwidth (ignore
# attention)?


# %%
def ridge_batch(peak_flops_s, bandwidth_bytes_s, bytes_per_weight=4):
    # BEGIN SOLUTION
    return peak_flops_s / bandwidth_bytes_s * bytes_per_weight / 2
    # END SOLUTION


# %%
@wb.check("batch at the ridge")
def ridge_check():
    assert ridge_batch(100e9, 10e9, 4) == 20, "100 GFLOP/s and 10 GB/s in fp32: 20 sequences"
    assert ridge_batch(100e9, 10e9, 2) == 10, "half the bytes of a weight, half the batch"
    b = ridge_batch(machine.peak("fp32"), machine.bandwidth_bytes_s)
    h100 = load_hardware()["h100-sxm"]
    there = ridge_batch(h100.peak("bf16"), h100.bandwidth_bytes_s, 2)
    print(f"b = {b:.0f} here (measured peaks), {there:.0f} on an H100 in bf16 (published peaks)")


# %% [markdown]
# <details><summary>Solution</summary>
#
# `2b / bytes_per_weight = ridge`, so `b = ridge * bytes_per_weight / 2`. On an H100 in bf16 that is
# about 295 sequences: decoding for a single user leaves more than 99% of such a GPU's arithmetic idle.
#
# </details>

# %% [markdown]
# ## What production systems do
#
# * **Continuous batching** fills each step with whatever sequences are alive, instead of waiting for a
#   batch to end (Yu et al. 2022, *Orca*). This engine's scheduler does it too.
# * **Paged KV** makes room for large batches by wasting almost no KV memory (Kwon et al. 2023).
# * **Fewer bytes**: grouped KV heads (Ainslie et al. 2023), quantized weights and KV.
# * **Fewer steps**: speculative decoding checks several drafted tokens in one fetch of the weights
#   (Leviathan et al. 2023; Chen et al. 2023).
# * **No gaps**: CUDA graphs and fused kernels remove the time between operations that you saw in
#   section 3.
#
# The arithmetic of this lesson is worked out for large machines in Pope et al. 2022, *Efficiently
# Scaling Transformer Inference*.

# %%
engine.close()
