# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 04 KV formats: fewer bytes a token
#
# **The question.** A long conversation's K and V can take more memory than the model itself. Each
# of those numbers takes four bytes here and two in most servers. Could it take one byte, or half
# of one? What breaks first, and how would you notice?
#
# You will round real keys by hand, find out why K and V want to be rounded in different ways,
# measure what it costs in words and in probabilities, and see what the saved bytes buy, and what
# they do not.
#
# *About 25 minutes. Before this: [03 Paged KV](03_paged_kv.ipynb).*

# %%
import textwrap

import torch

import pdlab
from pdlab import EngineConfig
from pdlab import workbench as wb
from pdlab.workbench import format_experiments as experiments

wb.glossary("KV cache", "quantization", "scale", "outlier channel", "perplexity", "KL divergence")

# %%
model = pdlab.load("smollm2-135m")
shape = model.config
guess = wb.Predictions()

# %% [markdown]
# ## 1. How many bytes is a token?
#
# *INT8 saves 75% of the KV cache*, one reads. The sum is right if you start from fp32: four bytes
# become one. But hardly anybody serves with an fp32 cache; bf16, with two bytes, is the usual
# start. So, from bf16 to int8:

# %%
guess.predict(
    "From bf16 to int8, KV memory shrinks by",
    ["25%", "a little less than 50%", "exactly 50%", "75%"],
    key="int8",
)

# %% [markdown]
# Before the table, how to read a format's name, such as `int4:channel/int4:token:32`:
#
# * **K's format / V's format**. Without a slash, both have the same.
# * Before the colon, the numbers. `int8` and `int4` are whole-number **codes**. A code means
#   nothing without its **scale**, the number to multiply it with. `int4` also has a **zero
#   point**, the number to add then, so that its 16 codes can lie where the values lie. `fp8` is a
#   float of eight bits, and has a scale here, too.
# * After the colon, *whose numbers share a scale*. `token:32`: 32 neighbouring channels of a
#   token. `token`: all channels of a token in one KV head. `channel`: one channel in all tokens of
#   a block. `head`: all that a KV head has in a block.
# * The short names: `fp8` is `fp8:token`, `int8` is `int8:token`, `int4` is `int4:token:32`.

# %%
names = ["fp32", "bf16", "fp8", "int8", "int4", "int4:channel/int4:token:32"]
sizes = experiments.bytes_per_token(shape, names)
print(f"{'fp32':28}{sizes['fp32']:9,.0f} bytes")
for name, size in list(sizes.items())[1:]:
    from_fp32, from_bf16 = 1 - size / sizes["fp32"], 1 - size / sizes["bf16"]
    print(f"{name:28}{size:9,.0f} bytes  {from_fp32:6.1%} below fp32  {from_bf16:6.1%} below bf16")
saved = 1 - sizes["int8"] / sizes["bf16"]
near = "a little less than 50%" if 0.4 < saved < 0.5 else f"about {saved:.0%}"
answer = "exactly 50%" if saved == 0.5 else near
guess.compare("int8", answer, kind="counted", note=f"To be exact: {saved:.1%}")

# %% [markdown]
# These bytes are read off the tensors in which a real block of the cache is stored, scales
# included, for scales must be stored, too. An fp16 scale for each 64 numbers adds 3% to int8. int4
# has groups of 32 numbers, and a scale *and* a zero point for each, so its overhead is larger: five
# bits a number, not four.
#
# ## 2. Round one vector by hand
#
# Here are K and V of a text, as the engine cached them. We take a single key: one token, one
# layer, one KV head, 64 numbers. To store it in eight bits, choose the scale so that the largest
# number becomes 127, divide, round, and keep the integers.

# %%
kv = wb.kv_after_prefill(model, wb.topic_tokens(model, 384))
print("K and V:", list(kv.shape), "= [K/V, layers, tokens, KV heads, head_dim]")

k = kv[0, 12, 40, 0]
scale = k.abs().max() / 127
codes = (k / scale).round().to(torch.int8)
print("K      ", [round(x, 2) for x in k[20:28].tolist()])
print("codes  ", codes[20:28].tolist(), f"  scale {scale:.4f}")
print("back   ", [round(x, 2) for x in (codes * scale)[20:28].tolist()])
print(f"largest error {(codes * scale - k).abs().max():.4f}, half a step is {scale / 2:.4f}")

# %% [markdown]
# No number moved by more than half a step: that is all that rounding does. With four bits there
# are far fewer steps; let the codes run from −7 to 7. One large number still sets the scale for
# all 64. (Zero is in the middle here, to keep it simple. The engine's int4 has a zero point, and
# codes from 0 to 15 between the smallest and the largest number.)

# %%
guess.predict("With codes from −7 to 7, how many of the 64 numbers become 0?", key="zeros")

# %%
scale4 = k.abs().max() / 7
codes4 = (k / scale4).round()
print(codes4.int().tolist())
guess.compare("zeros", int((codes4 == 0).sum()), "of 64", kind="counted")

# %% [markdown]
# All numbers share one ruler, and the longest of them decides how coarse it is. A few large
# channels use the ends of the scale, the others crowd around zero. What matters is therefore not
# only how many bits there are, but *who has to share a scale with whom*.
#
# ## 3. K has outlier channels
#
# Is that key special? Below is the size of every K and V of one head, 96 tokens down, 64 channels
# across, in units of the head's median channel.

# %%
wb.show(wb.figures.kv_magnitudes(kv, layer=12, head=0))

# %% [markdown]
# In K, a few **channels** are large in every token: stripes that run down the picture. In this
# head V has none. Over all layers and heads of this model:

# %%
for name, x in zip("KV", kv, strict=True):
    ratios = experiments.outlier_ratios(x)
    print(
        f"{name}: the largest channel is {ratios.median():4.1f} times the median channel"
        f" (the middle one of {ratios.numel()} heads; from {ratios.min():.1f} to {ratios.max():.1f})"
    )

# %% [markdown]
# A few heads of V do have a loud channel, but the middle head has none to speak of. In K a loud
# channel is the rule.
#
# ## 4. Along the token, or along the channel?
#
# So there are two ways to form groups of, say, 16 numbers that share a scale:
#
# * **per token**: 16 neighbouring channels of one token. A loud channel spoils the quiet ones
#   beside it.
# * **per channel**: the same channel in 16 tokens, which is a block. Loud stays with loud.
#
# Both need the same number of scales, and the same bytes. Which is better?

# %%
options = ["per channel, by a factor of 2 or more", "per channel, by less", "per token"]
guess.predict("For K, which has the smaller error at 4 bits?", options, key="k")

# %%
guess.predict("And for V?", options, key="v")

# %%
for name, x in zip("kv", kv, strict=True):
    token, channel = (experiments.relative_error(x, f) for f in ("int4:token:16", "int4:channel"))
    print(f"{name.upper()}: its own error {token:.1%} per token, {channel:.1%} per channel")
    small = "per channel, by less" if channel < token else "per token"
    guess.compare(name, options[0] if token / channel >= 2 else small)

# %% [markdown]
# (Measured: the length of the difference over the length of the original, over all layers.)
#
# Liu et al. (2024, *KIVI*) found on large models what you see for K, and they store **K per
# channel, but V per token**. Does that not contradict the line for V, whose own error may well be
# smaller per channel? It does not, for V's own error is not what counts. Attention's output is a
# **weighted mean** of the values of a few tokens, and what counts is *its* error. With a scale for
# each token, rounding errors of one token stay with that token. With a scale over many tokens, a
# large value of one that nobody looks at coarsens those that everybody looks at. (The first token
# is such a one: lesson 05 shows that much attention goes to it, and its V is smaller than most.)
# Section 6 puts this to the test.
#
# ## 5. Why a scale per channel needs blocks
#
# A scale per token is known as soon as the token is. A scale per channel depends on the largest of
# all the tokens that share it, and those do not exist yet. So the engine keeps a block in full
# precision while it fills, and rounds it once, when it is full. Watch the error of K of a 12-token
# prompt while the tokens after it arrive (block size 16):

# %%
kivi, reverse = "int4:channel/int4:token:32", "int4:token:32/int4:channel"
for point in experiments.watch_a_block_fill(model, kivi):
    print(f"{point.num_tokens:3} tokens cached: error of the prompt's K {point.k_error:6.2%}")

# %% [markdown]
# KIVI calls the unrounded newest tokens the *residual*. It makes the newest tokens, those that are
# looked at a lot, exact, and it costs memory: here an area of a fixed size beside the blocks.

# %%
one = experiments.open_area_bytes(shape, kivi, num_blocks=1)
area = experiments.open_area_bytes(shape, kivi)
print(f"a block of K that still fills: {one:,} bytes in fp32")
print(f"the area: {area:,} bytes; 32 sequences may fill a block each, and begin the next")

# %% [markdown]
# Otherwise it is a nice fit: paging cuts the cache along tokens into blocks, and a block is just
# what a scale per channel needs. And blocks of 32 tokens need half the scales of blocks of 16:

# %%
for block_size in (16, 32, 64):
    size = experiments.bytes_per_token(shape, ["int4:channel"], block_size)["int4:channel"]
    error = experiments.relative_error(kv[0], "int4:channel", block_size)
    print(f"block size {block_size}: {size:6,.0f} bytes a token, error of K {error:.1%}")

# %% [markdown]
# That is the trade of every **group size**: fewer scales, more strangers who share one.
#
# ## 6. What does it cost?
#
# An error of K in percent says little. What counts is what the model says. Three measures, each
# against the same model with an fp32 cache, on the same text:
#
# * **perplexity**: how surprised is the model by the words that really come next? (1 would mean:
#   never surprised. The change matters.)
# * **KL divergence**: how far is each distribution of the next token from what it would have been?
# * **agreement**: at how many positions is the most probable token still the same?

# %%
guess.predict(
    "int8 raises the perplexity by",
    ["less than 1%", "1% to 5%", "more than 5%"],
    key="perplexity",
)

# %%
v_token, v_channel = "fp32/int4:token:16", "fp32/int4:channel"
configs = wb.format_configs(("fp32", "int8", "int4", kivi, reverse, v_token, v_channel))
costs = wb.kv_costs(model, configs, wb.topic_tokens(model, 512))
by_name = {cost.label: cost for cost in costs}
for name, cost in by_name.items():
    change = cost.perplexity / by_name["fp32"].perplexity - 1
    print(
        f"{name:28}{cost.bytes_per_token:8,.0f} bytes  perplexity {cost.perplexity:6.3f}"
        f" ({change:+6.2%})  KL {cost.kl:.5f}  agreement {cost.agreement:6.1%}"
    )
change = by_name["int8"].perplexity / by_name["fp32"].perplexity - 1
bounds = [(0.01, "less than 1%"), (0.05, "1% to 5%"), (99, "more than 5%")]
guess.compare("perplexity", next(name for bound, name in bounds if change < bound))

# %% [markdown]
# In the last two rows K is exact, and V is rounded in the two ways of section 4, with the same
# bytes. V's own error, that of attention's output, and what becomes of the predictions:

# %%
for name in (v_token, v_channel):
    cost = by_name[name]
    own, attended = cost.v_error.mean(), cost.attended_error.mean()
    print(f"{name:20} V {own:.1%} off, attention output {attended:.1%} off, KL {cost.kl:.5f}")
token, channel = by_name[v_token], by_name[v_channel]
for what, a, b in (
    ("own error of V", token.v_error.mean(), channel.v_error.mean()),
    ("error of attention's output", token.attended_error.mean(), channel.attended_error.mean()),
    ("KL divergence", token.kl, channel.kl),
):
    print(f"smaller {what}: per {'token' if a < b else 'channel'}")

# %% [markdown]
# KL goes with the error of attention's output, the weighted mean; V's own error may point the
# other way.
#
# All that was measured now, on this machine, on a text that is short for such a purpose: on 500
# tokens the perplexity of a good format may even come out a little *better* than the reference. KL
# cannot be lucky in this way; look at it when formats are close. Below is the same measurement on
# more text, **recorded**: machine, date and number of tokens stand in the subtitle.

# %%
study = wb.recorded_study("kv_formats")
wb.show(wb.figures.kv_costs(study.costs, study.reference, study.source))

# %%
recorded = {cost.label: cost for cost in study.costs}
for name in ("int8", "int4", kivi, reverse):
    cost = recorded[name]
    change = cost.perplexity / recorded["fp32"].perplexity - 1
    print(
        f"{name:28}{cost.bytes_per_token:7,.0f} bytes  {change:+.1%} perplexity, KL {cost.kl:.4f}"
    )
worse = recorded[reverse].kl / recorded[kivi].kl
print(f"\nthe KL of the wrong way round is {worse:.1f} times KIVI's (recorded)")

# %% [markdown]
# The last two differ only in the way round: K per channel and V per token, or the reverse. They
# store the same number of codes and scales. What differs is who shares a scale with a loud channel
# of K, and with whom a value is rounded.
#
# **A caution about texts.** The agreement in the tables is on a given text: one slip does not
# reach the next position. Let the model write its own text, and two answers that part at one near
# tie go on differently ever after. That looks dramatic, and may be harmless: both may be fine
# sentences.

# %%
prompt = "A key-value cache stores the keys and values of all earlier tokens, so"
some = wb.format_configs(("fp32", "int8", kivi))
for name, greedy in wb.greedy_agreement(model, some, [prompt], 32).items():
    at, num_tokens = greedy.first_difference[0], len(greedy.token_ids[0])
    same = f"the same {num_tokens} tokens" if at is None else f"{at} tokens the same, then others"
    print(f"{name}, {same}:")
    print(textwrap.fill(greedy.texts[0].strip(), 90), "\n")

# %% [markdown]
# ## 7. Explore
#
# The beginning of the same text, in any format. Choose formats for K and for V, scales and group
# size. Look at the error by layer and head, at the bytes, and at the text. Which format below 8,000
# bytes a token has the attention output that is least off? Of two formats, does the better one
# also keep the text longer? (Not always: one near tie decides about a text.)

# %%
wb.FormatLab(model, wb.topic_tokens(model, 128))

# %% [markdown]
# ## 8. The error, layer by layer
#
# Errors of K do not simply add up over the layers. Each layer's attention weighs keys by a
# softmax: where one token wins clearly, a small error changes nothing; where two are close, it may
# swap them. V's own error comes on top. So the output of attention looks different from the error
# of K; both pictures have the same scale of colours. (Each cell shows what this layer's own cache
# does to it, whatever the layers before did.)

# %%
int4 = by_name["int4"]
most = max(int4.k_error.max(), int4.attended_error.max())
wb.show(wb.figures.error_heatmap(int4, "k", zmax=most))

# %%
wb.show(wb.figures.error_heatmap(int4, "attended", zmax=most))

# %% [markdown]
# ## 9. What it buys
#
# **Room.** More tokens in the same memory, which means more sequences in a batch, or longer ones.
# Counted, for 256 MB of KV, the area for blocks that still fill included:

# %%
for name, size in sizes.items():
    area = experiments.open_area_bytes(shape, name)
    note = f", beside {area / 1e6:.1f} MB for open blocks" if area else ""
    print(f"{name:28}{(256e6 - area) / size:10,.0f} tokens{note}")

# %% [markdown]
# **Time, perhaps.** A decode step reads all K and V of its context; fewer bytes, less to wait for.
# For a model of 8 billion weights in bf16 that decodes 16 sequences of 8,192 tokens, on an H100
# with its published ceilings, the cost model says:

# %%
from pdlab.costmodel import Chunk, load_hardware, predict, step_cost
from pdlab.models.catalog import SHAPES

h100, large = load_hardware()["h100-sxm"], SHAPES["llama-8b"]
for name, size in experiments.bytes_per_token(large, ["bf16", "int8", kivi]).items():
    element_bytes = size / large.kv_bytes_per_token(1)
    batch = [Chunk(8191, 1)] * 16
    cost = step_cost(
        large, batch, num_sampled=16, weight_element_bytes=2, kv_element_bytes=element_bytes
    )
    floor = predict(cost, h100, "bf16")
    print(
        f"{name:28}{cost.bytes['kv_read'] / 1e9:5.1f} GB of KV, {cost.bytes['weights'] / 1e9:.1f} GB"
        f" of weights: {floor.time_s * 1e3:5.1f} ms at least   predicted"
    )

# %% [markdown]
# That is a floor for a kernel that reads codes and multiplies by scales on the way, inside
# attention. What does *our* engine do with it, here, in plain torch?

# %%
guess.predict(
    "On this machine, a decode step with int8 instead of fp32 KV (256 tokens of context) is",
    ["faster by 5% or more", "about as fast", "slower by 5% or more"],
    key="time",
)

# %%
steps = experiments.decode_by_format(model, ["fp32", "bf16", "int8", "int4"], context_len=256)
step_s = {name: experiments.step_s(of_it) for name, of_it in steps.items()}
for name, seconds in step_s.items():
    kv_bytes = steps[name][-1].bytes_moved["kv_read"]
    print(
        f"{name:6}{kv_bytes / 1e6:6.1f} MB of KV (counted), {seconds * 1e3:7.1f} ms a step (measured)"
    )
ratio = step_s["int8"] / step_s["fp32"]
bounds = [(0.95, "faster by 5% or more"), (1.05, "about as fast"), (99, "slower by 5% or more")]
guess.compare("time", next(n for bound, n in bounds if ratio < bound), note=f"{ratio:.2f} times.")

# %% [markdown]
# Whatever came out here, two things work against the saving. At 256 tokens the KV is a small part of what a step
# reads: the weights are far more. And plain torch must first write the codes out as floats, in
# memory, before attention can read them: extra work, and extra bytes. To gain time, a kernel must
# **fuse** the two. So the format alone buys memory. Whether it buys time is a question of the
# kernel, and vLLM's manual said the same of its first fp8 cache: more room, no better latency.
#
# ## 10. Rounded, but repeatable
#
# Rounding is lossy. But is it at least *repeatable*? A format with a scale per token rounds each
# token by itself, whoever else is in the batch. So in exact mode all the lossless knobs must still
# change nothing, down to the last bit of the codes and scales:

# %%
alone = EngineConfig(exact=True, kv_format="int8")
crowded = EngineConfig(exact=True, kv_format="int8", chunk_size=3, block_size=8, kv_head_groups=3)
company = ["One, two, three,", "The capital of France is"]
first = experiments.stored_bytes(model, [prompt], alone)
second = experiments.stored_bytes(model, [prompt, *company], crowded)
print("alone; or in a batch, in chunks, in other blocks, each KV head in a tensor of its own:")
print("the same bytes:", experiments.same_bytes(first, second))

# %% [markdown]
# Formats with a scale per block cannot promise this: a key computed in the same step as the end of
# its block is read rounded by one chunking and unrounded by another. The engine refuses them in
# exact mode, and says why.

# %%
try:
    EngineConfig(exact=True, kv_format=kivi)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Exercises
#
# **1. Bytes of a token.** Codes of `bits` bits, and `scale_bytes` bytes of scales for every
# `group` numbers. How many bytes does a token's K and V take?


# %%
def kv_bytes_per_token(shape, bits, group, scale_bytes=2):
    # BEGIN SOLUTION
    numbers = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    return numbers * bits / 8 + numbers / group * scale_bytes
    # END SOLUTION


# %%
@wb.check("bytes of a token")
def token_bytes_check():
    from pdlab.workbench.format_experiments import bytes_per_token

    stored = bytes_per_token(shape, ["int8", "int8:token:16", "int4"])
    for name, arguments, hint in (
        ("int8", (8, 64), "one scale of 2 bytes for each head"),
        ("int8:token:16", (8, 16), "four times as many scales"),
        ("int4", (4, 32, 4), "a scale and a zero point, 4 bytes a group"),
    ):
        yours, right = kv_bytes_per_token(shape, *arguments), stored[name]
        assert yours == right, f"{name}, {hint}: {right:,.0f} bytes; you returned {yours!r}"


# %% [markdown]
# <details><summary>Solution</summary>
#
# K **and** V, all layers, all KV heads: `numbers = 2 * num_layers * num_kv_heads * head_dim`. The
# codes take `numbers * bits / 8` bytes, the scales `numbers / group * scale_bytes`. In bits a
# number: `bits + 8 * scale_bytes / group`. That is what "4 bits" really costs: 5 at a group of 32,
# 6 at 16.
#
# </details>

# %% [markdown]
# **2. A symmetric quantizer.** Return integer codes from −(2^(bits−1) − 1) to 2^(bits−1) − 1, and
# a scale, so that `codes * scale` is as close to `x` as it can be. Beware of a vector of zeros.


# %%
def quantize(x, bits):
    # BEGIN SOLUTION
    largest = 2 ** (bits - 1) - 1
    scale = x.abs().max().clamp(min=1e-9) / largest
    return (x / scale).round(), scale
    # END SOLUTION


# %%
@wb.check("a symmetric quantizer")
def quantizer_check():
    import torch

    x = torch.tensor([0.0, 1.0, -2.0, 0.3, 1.7])
    for bits in (4, 8):
        codes, scale = quantize(x, bits)
        got = f"; for {bits} bits you returned {codes.tolist()}, {float(scale):.4g}"
        largest = 2 ** (bits - 1) - 1
        assert torch.equal(codes, codes.round()), "codes are whole numbers" + got
        assert codes.abs().max() == largest, f"the largest code should be {largest}" + got
        assert (codes * scale - x).abs().max() <= scale * 0.5001, "an error above half a step" + got
        assert codes[0] == 0, "zero stays zero" + got
    codes, scale = quantize(torch.zeros(4), 8)
    back = codes * scale
    assert torch.equal(back, torch.zeros(4)), f"zeros come back as zeros, not as {back.tolist()}"


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# largest = 2 ** (bits - 1) - 1
# scale = x.abs().max().clamp(min=1e-9) / largest
# return (x / scale).round(), scale
# ```
#
# Without the `clamp`, a vector of zeros divides 0 by 0 and becomes NaN. A cache meets such a
# vector sooner or later, and one NaN in K makes every later token NaN.
#
# </details>

# %% [markdown]
# **3. Which format fits?** `sizes` names formats, the most precise first, with their bytes per
# token. Return the most precise that keeps `num_tokens` tokens in `budget_bytes`, or None.


# %%
def choose_format(sizes, num_tokens, budget_bytes):
    # BEGIN SOLUTION
    fitting = (name for name, size in sizes.items() if size * num_tokens <= budget_bytes)
    return next(fitting, None)
    # END SOLUTION


# %%
@wb.check("which format fits")
def choice_check():
    known = {"bf16": 100, "int8": 52, "int4": 32}
    for budget, right, hint in (
        (1000, "bf16", "10 tokens of 100 bytes fit into 1,000 bytes"),
        (999, "int8", "one byte short: take the next"),
        (320, "int4", "just enough"),
        (300, None, "nothing fits: None"),
    ):
        yours = choose_format(known, 10, budget)
        assert yours == right, f"{budget} bytes for 10 tokens, {hint}; you returned {yours!r}"


# %% [markdown]
# <details><summary>Solution</summary>
#
# `next((name for name, size in sizes.items() if size * num_tokens <= budget_bytes), None)`. A
# server asks it the other way round: the memory left beside the weights is given, and the format
# decides how many blocks there are, and so how many requests may run at once.
#
# </details>

# %% [markdown]
# ## What production systems do
#
# * **vLLM**: `kv_cache_dtype="fp8"`, one scale for a whole tensor or one for each head, calibrated
#   before on a data set, or 1.0 (*Quantized KV Cache* in its manual). **TensorRT-LLM**: int8 and
#   fp8, later NVFP4 caches with calibrated scales (*Numerical Precision* in its manual). fp8 needs
#   hardly any scale: its steps grow with the numbers.
# * **llama.cpp**: `--cache-type-k q8_0`, `--cache-type-v q4_0` and others: one fp16 scale for 32
#   channels of a token. V in such a type needs its fused attention.
# * **KIVI** (Liu et al. 2024): 2 bits, K per channel and V per token, with a residual. Hugging
#   Face's `QuantizedCache` has such a residual, of 128 tokens, and one axis for both K and V.
#   **KVQuant** (Hooper et al. 2024) takes K
#   *before* the rotary embedding, where channels are even more regular, and stores the largest 1%
#   of the numbers apart.
# * **Fewer numbers instead of fewer bits**: grouped KV heads (Ainslie et al. 2023), and DeepSeek's
#   latent attention (DeepSeek-V2, 2024), which caches one short vector for all heads.
#
# **Next:** [05 Windows and eviction](05_windows_and_eviction.ipynb): tokens that may be forgotten
# altogether.
