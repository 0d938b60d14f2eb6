# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 09 Kernels and speed: where are the other milliseconds?
#
# **The question.** To write one token, a model has to read all of its weights once. Ours has 538 MB
# of them in fp32. Divide that by what your memory gives in a second: that is how long a token should
# take. In lesson 02 it took several times as long. Who takes the rest, and how does one get it back?
# And once it is back: how does one read fewer bytes?
#
# You will count what happens in one step, put two ways of computing the same step on one time axis,
# read a quarter of the bytes and then less than a fifth, write a kernel for a GPU without having one, and draw every
# step of the lesson under one roof.
#
# *About 60 minutes. Before this: [02 Decode](02_decode.ipynb); blocks of KV are from [03
# Paged KV](03_paged_kv.ipynb), scales, groups, KL and perplexity from [04 KV
# formats](04_kv_formats.ipynb). The first time, the compiled step is
# compiled: half a minute, with a bar. It is kept.*

# %%
import pdlab
from pdlab import workbench as wb

guess = wb.Predictions()
wb.glossary(
    "decode", "kernel", "kernel launch", "fusion", "CUDA graph", "quantization",
    "matrix-vector product", "arithmetic intensity",
)  # fmt: skip

# %%
import torch

from pdlab.costmodel import calibrate
from pdlab.workbench import speed_experiments as lab

model = pdlab.load("smollm2-135m", device="cpu", dtype="fp32")
machine = calibrate(refresh=True)  # as it is now
floor_s = model.weight_bytes / machine.bandwidth_bytes_s
print(
    f"weights: {model.weight_bytes / 1e6:.0f} MB; memory: {machine.bandwidth_bytes_s / 1e9:.1f} GB/s"
)
print(
    f"so a token takes at least {floor_s * 1e3:.0f} ms   predicted, {torch.get_num_threads()} threads"
)

# %% [markdown]
# ## 1. What one step does
#
# The model is a Python program: for each layer it calls a norm, a matrix product, a rotation, and so
# on. Each of those is an **operator** of torch: a function of its own that takes tensors, makes
# tensors, and returns. The code inside that does the work is called a **kernel**.

# %%
guess.predict(
    "How many operators does torch run for one token? (30 layers)",
    ["about 100", "about 300", "about 1,000", "about 5,000"],
    key="operators",
)

# %%
step = lab.count_step(model)
print(f"{step.operators:5} operators compute or copy something   counted")
print(f"{step.views:5} more only describe memory anew (views: a slice, a transpose)")
often = sorted(step.by_name.items(), key=lambda pair: -pair[1])[:9]
print("most often:", ", ".join(f"{count} x {name}" for name, count in often))
options = {100: "about 100", 300: "about 300", 1000: "about 1,000", 5000: "about 5,000"}
nearest = min(options, key=lambda n: abs(n - step.operators))
guess.compare(
    "operators", options[nearest], kind="counted", note=f"{step.operators}, without views."
)

# %% [markdown]
# Only 121 of them are matrix products: four a layer, and the head. Those read the weights. What do
# all the others move?

# %%
guess.predict(
    "Of all bytes that the step moves, how much is NOT weights?",
    ["less than a tenth", "a tenth to a third", "more than a third"],
    key="bytes",
)

# %%
everything = step.weight_bytes + step.other_bytes
share = step.other_bytes / everything
print(f"weights             {step.weight_bytes / 1e6:7.1f} MB   counted")
print(f"everything else     {step.other_bytes / 1e6:7.1f} MB   (K and V, hidden states, logits)")
answer = "a tenth to a third" if share > 0.1 else "less than a tenth"
guess.compare("bytes", answer, kind="counted", note=f"To be exact: {share:.1%}.")

# %% [markdown]
# So by the bytes, nothing but the weights matters: all the rest is a few percent. By the clock it is
# another story. First the products alone: all layers in turn, so that no matrix is still in the
# processor's cache when its turn comes.

# %%
readings = lab.linear_rates(model)
print("                 weights        torch   compiled, one by one   measured")
for r in readings:
    rates = [r.nbytes / s / 1e9 for s in (r.torch_s, r.compiled_s)]
    print(f"{r.name:12} {r.nbytes / 1e6:8.1f} MB {rates[0]:7.1f} GB/s {rates[1]:17.1f} GB/s")
torch_s, compiled_s = sum(r.torch_s for r in readings), sum(r.compiled_s for r in readings)
print(f"all of them, {torch.get_num_threads()} threads: {torch_s * 1e3:.0f} ms", end="")
print(f" in torch, {compiled_s * 1e3:.0f} ms compiled; floor {floor_s * 1e3:.0f} ms")

# %% [markdown]
# A product with a single row does two things with each weight: read it, and multiply it once. So it
# is a test of *reading*, and a library that was tuned for large products need not be good at it.
# That explains one part of the missing time: the products do not read as fast as the memory gives.
# The other part lies between the products. (The compiled kernels wake the other threads once for each
# product here. In section 2 one call does all of them, in less time than this table says. And if your
# processor's last cache is as large as what is read, no floor of memory holds.)
#
# ## 2. The same step on one time axis
#
# What does it cost to call an operator that has next to nothing to do?

# %%
for name, seconds in lab.call_costs().items():
    print(f"{name:36} {seconds * 1e6:6.2f} us   measured, the least of 5")

# %% [markdown]
# A microsecond or two. That is dispatch: find the right function for this dtype and this device,
# check the shapes, allocate the result, come back to Python. (A composed operator such as the norm
# makes several such calls inside.) Nobody would notice, if it were not for the two thousand calls in
# each token, views included: 2 to 3 ms. The rest is small kernels, and the Python between them.
#
# Now the whole step. Above, torch's profiler notes when each operator begins and ends. Below, the
# **compiled step** of this engine (`EngineConfig(backend="cpu")`): one call from Python, in it a
# program of some 300 phases, one after the other on all cores, and each phase notes when it began.

# %%
guess.predict(
    "The compiled step takes how much of torch's time?",
    ["about as long", "two thirds", "half or less"],
    key="fused",
)

# %%
timelines = [lab.torch_timeline(model), lab.compiled_timeline(model)]
source = f"measured here, fp32, context 128, {torch.get_num_threads()} threads; the profiler adds some 3 us to each call"
wb.show(wb.figures.step_timelines(timelines, source))

# %%
number = timelines[0].usual_layer
wb.show(wb.figures.layer_timelines(timelines, number, source))
by_torch, compiled = timelines
print(f"{by_torch.name:18} {by_torch.wall_s * 1e3:6.1f} ms, of which", end="")
print(f" {by_torch.between_s * 1e3:.1f} ms between operators")
print(f"{compiled.name:18} {compiled.wall_s * 1e3:6.1f} ms; what lies between is not told apart")
ratio = timelines[1].wall_s / timelines[0].wall_s
answer = "about as long" if ratio > 0.8 else "two thirds" if ratio > 0.55 else "half or less"
guess.compare("fused", answer, note=f"To be exact: {ratio:.0%}.")

# %% [markdown]
# Look at the layer. In torch's row the wide bars are products. Between them stand dozens of slivers:
# norm, rotation, writing K and V, gathering the blocks, SiLU. Each moves some kilobytes, which takes
# no time worth mentioning, and yet they fill a good part of the row, and so does the *white* between
# them: that is Python, on its way to the next call, and the profiler, which makes slivers and white
# wider than they are (section 4 times both steps without it).
#
# In the lower row the same arithmetic is there, and the slivers are gone. It cannot show any white: a
# phase's bar runs until the next one begins, so waiting for the last chunk is inside it. Three things
# did that:
#
# * **No calls.** The program is a table of numbers. Going to the next phase costs well below a
#   microsecond. On a GPU this is what a **CUDA graph** is for: a GPU's kernel needs some
#   microseconds to be launched (NVIDIA's measurement in *Getting Started with CUDA Graphs*: a kernel
#   of 2.9 us took 9.6 us each when every launch was waited for, 3.8 us when launches overlapped,
#   and 3.4 us in a graph), and a decode step of a large model has a thousand of them.
# * **Fusion.** What is computed is used while it is still in a register or in the cache. SiLU, its
#   product with the other half, and the rounding for the next weight are one phase of a row;
#   K and V are read block by block where they lie, and never copied together.
# * **Work that is shared as it goes.** Each phase is cut into chunks of some 20 us, and who is free takes
#   the next. Threads meet only at a phase's end, and a processor that is busy takes fewer chunks.
#
# What fusion does *not* do: it moves no fewer weights. Below it stays the same floor.
#
# (And `torch.compile`, which fuses automatically? It was tried once, on all of a layer but attention:)

# %%
trial = lab.recorded_compile()
gain = trial.eager_s / trial.compiled_s - 1
print(
    f"torch {trial.torch}: a step {trial.eager_s * 1e3:.0f} ms, compiled {trial.compiled_s * 1e3:.0f} ms:"
)
print(f"{gain:+.0%}, after {trial.warm_up_s:.0f} s of warm-up   {lab.recorded_line()}")

# %% [markdown]
# It lost a tenth where that was recorded: 90 compiled calls a step, each of which first checks whether
# its guards still hold. It fuses what stands between the products within a function. The products stay the library's, and
# with them the larger part of the time; the paged cache, the calls from layer to layer and the
# sampling stay Python's. On GPUs, where launches weigh more, it does more, and vLLM builds on it.
#
# ## 3. Fewer bytes
#
# Now the step is near the floor. To be faster still, lower the floor. A weight in fp32 has 32 bits;
# how many does it need?
#
# | format | what is kept | bits a weight |
# |---|---|---|
# | `fp32` | the number | 32 |
# | `int8` | an integer from -127 to 127, and one scale for each row | 8 |
# | `q8_0` | the same with a scale for 32 weights (GGUF's Q8_0) | 8.5 |
# | `int4` | an integer from 0 to 15, a scale and a minimum for 32 weights (GGUF's Q4_1) | 5 |
#
# The file that this model comes in has its layers in Q4_1 and its head in Q8_0: fp32 is what is made
# of it when it is loaded. `weights="file"` reads the blocks as they are, so nothing at all is lost
# by it.
#
# Here is the model's largest matrix, the head, in three formats, multiplied with more and more rows.

# %%
guess.predict(
    "With 8 rows instead of 1, the product in fp32 takes how many times as long?",
    key="rows",
    unit="times",
)

# %%
costs = lab.row_costs(model)
out, width = costs.shape
source = (
    f"measured here: the head [{out:,} x {width}], compiled kernels; fp32 above 16 rows by torch"
)
wb.show(wb.figures.rows_figure(costs, machine, source))

# %%
fp32 = costs.seconds["fp32"]
guess.compare("rows", fp32[8] / fp32[1], "times")
for name, times in costs.seconds.items():
    print(
        f"{name:5} one row {times[1] * 1e3:5.1f} ms at {costs.nbytes[name] / times[1] / 1e9:4.1f} GB/s;"
        f" arithmetic takes as long as reading at {costs.turning_point(name):4.1f} rows"
    )
print("measured")

# %% [markdown]
# For one row, time follows bytes: that is the whole secret of fast decoding with small weights. And
# in fp32, eight rows cost little more than one, since the weight that has been fetched is used eight
# times. (This is the batching of lesson 02, in one matrix.)
#
# (Above 16 rows the engine leaves fp32 to torch's BLAS: the jump there is that.) But look where the
# lines turn. An integer has to be unpacked and scaled before it can be used, and
# multiplied like any other number. A format that halves the reading does not halve the arithmetic,
# so it turns *earlier*. For long prompts and large batches, small weights buy nothing by their
# size; there it is the speed of integer arithmetic that counts. (int4's second row costs as much as
# its fourth: its kernel takes rows by four. int8 is ahead from 2 rows on, in this matrix.)
#
# ### What rounding costs
#
# Integer products need integers on both sides, so the *rows* are rounded too. The kernels take int16
# beside int8 weights, and two planes of int8 (a coarse one, and what is left over) beside int4. Is
# that fine enough? Rows that the model itself computes from a text:

# %%
print("relative error of a product                       mean    worst   measured")
for e in lab.rounding_errors(model):
    print(f"{e.name:44} {e.mean:9.1e} {e.worst:8.1e}")

# %% [markdown]
# Rounding the rows as the kernels do costs about a hundredth of what int8 costs the weights, or less.
# One plane of int8 alone would be as coarse as int8 weights, but ten times finer than rounding to 4
# bits. So many systems take one: it is half the arithmetic. We take two because these weights lie on
# their 4-bit grid already, and lose nothing.
#
# ### What a format costs in quality

# %%
quality = lab.recorded_weights()
if quality is None:
    print("`pdlab bench weights` has not been recorded")
else:
    print(f"perplexity of fp32: {quality.perplexity:.3f}, {quality.num_tokens:,} tokens   recorded")
    print("weights                      MB   perplexity       KL   same best token   greedy tokens")
    for c in quality.costs:
        name = c.weights + (" (regrouped)" if c.regrouped else "")
        print(
            f"{name:24} {c.nbytes / 1e6:6.0f} {quality.increase(c):+11.2%} {c.kl:9.5f}"
            f" {c.agreement:14.1%} {c.equal_tokens:12.1f} of {quality.greedy_tokens}"
        )

# %% [markdown]
# How to read it. **KL** is how far the distribution of the next token moves from that of fp32, in
# nats (natural logarithms); *same best token* is how often both would choose the same one; *greedy
# tokens* is how long a greedy answer stays the same. `A/B` has layers in A and the head in B; `int4`
# alone has its head in q8_0. Only the weights were rounded for this table, not the rows.
#
# * `int4` loses nothing here, and that is no magic: these weights *come* from a 4-bit file, so they lie
#   on that grid already, and every one of them was given back exactly (its line follows from that). To
#   see what 4 bits cost a model that does not, the channels were put in another order, with the rows
#   and columns that belong to them: fp32 computes the same, but other weights now share a group of
#   32, and most no longer lie on its grid. Rounding to the nearest then costs this small model dearly.
# * `int4/int4` rounds the head, too. The head is a fifth of this model's weights, and its error goes
#   straight into the logits.
# * `gptq` (Frantar et al. 2023) looks at what the model computes on some text, and rounds each weight so
#   that it makes up for the errors of those before it. AWQ (Lin et al. 2024) and llama.cpp's
#   importance matrix use the same knowledge in other ways: what meets large activations must be kept
#   more exactly. Its weights are *further* from fp32 than the nearest ones, and its answers are much
#   nearer: what counts is not the weight but what it does.
#
# ## 4. From plain torch to 4 bits
#
# All of it together: the engine's own decode steps, 128 tokens of context, five modes in turns. Each
# mode's floor is its own bytes over the same bandwidth.

# %%
guess.predict(
    "From torch in fp32 to the file's own blocks, a token comes how many times as fast?",
    key="waterfall",
    unit="times",
)

# %%
modes = lab.Modes()
points = modes.measure()
source = f"measured here in turns, medians; {torch.get_num_threads()} threads; floors predicted"
alone = lab.pick(points)
wb.show(wb.figures.mode_bars(alone, machine, source))

# %%
print("one sequence, 128 tokens of context        bytes      step    tokens/s   of the floor")
for mode, p in alone.items():
    print(
        f"{mode:32} {p.bytes / 1e6:12.0f} MB {p.step_s * 1e3:6.1f} ms {1 / p.step_s:8.1f}"
        f" {p.floor_s(machine) / p.step_s:12.0%}"
    )
names = [mode.name for mode in lab.MODES]
guess.compare("waterfall", alone[names[0]].step_s / alone[names[3]].step_s, "times")

# %% [markdown]
# The first bar to the second: the same bytes, and most of the way to the floor is gone. That is what
# kernels can do. From there on only bytes help much. From the second bar to the last they fall to a sixth, and the
# time follows, not quite: the smaller the weights, the more of the step is something else (attention, K
# and V, the norms, choosing the token, and the engine around it, which is still Python). This is
# Amdahl's law, and it is why "4 bits are 8 times as fast as 32" is not what anybody measures. (The last
# bar is not free: rounding the head costs 6.6% of perplexity by the table above. The bar before it is.)
#
# ## 5. A kernel by you
#
# On a GPU the slivers are the same ones, and the remedy is the same: write one kernel for several
# operators. In **Triton** (Tillet et al. 2019) a kernel is a Python function that is compiled for the
# GPU. It is written for one *program*, that works on a block of numbers at once, and it is launched
# as a grid of many.
#
# Yours shall compute what stands between the two products of the MLP, `silu(gate) * up`. In torch that
# is three calls (chunk, SiLU, product), which read gate, write a result, read it again, read up and
# write. Fused: read two numbers, write one.
#
# ```
#         x, one row:   | gate: SIZE numbers | up: SIZE numbers | perhaps a gap |     x_stride apart
#         out, one row: | SIZE numbers       |                                        SIZE apart
#
#         program (i, t):  row i,  block t   (tl.program_id(0), tl.program_id(1))
#         its numbers:     t * BLOCK + 0, 1, 2, ... BLOCK - 1          (tl.arange(0, BLOCK))
# ```
#
# You need `tl.load(pointer + offsets, mask=...)`, `tl.store(pointer + offsets, values, mask=...)`,
# `tl.exp`, and `.to(tl.float32)`. SiLU is `g / (1 + exp(-g))`. Three traps: the last block of a row may
# be only partly *in* the row; rows of `x` may be further apart than they are long; and `exp` wants
# fp32, so convert first.

# %%
from pdlab.workbench.speed_experiments import triton_language

tl = triton_language()


# on a GPU: @triton.jit
def silu_mul_kernel(out_ptr, x_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    # BEGIN SOLUTION
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    gate = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + SIZE + at, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * SIZE + at, out, mask=inside)
    # END SOLUTION


# %%
@wb.check("your kernel")
def kernel_check():
    from pdlab.workbench.speed_experiments import try_silu_mul

    tried = try_silu_mul(silu_mul_kernel)  # in Triton's interpreter, in a process of its own
    print("\n".join(tried or ["there is no Triton here (it is for Linux): not tried"]))


# %% [markdown]
# (The check runs your kernel on the CPU, in Triton's *interpreter*, which takes your programs one after
# the other. It finds wrong results and stray writes; not a load beyond a row, an overflow of 32-bit
# offsets, or what only the GPU's compiler refuses.)
#
# <details><summary>Solution</summary>
#
# ```python
# row = tl.program_id(0)
# at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
# inside = at < SIZE
# gate = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
# up = tl.load(x_ptr + row * x_stride + SIZE + at, mask=inside, other=0.0).to(tl.float32)
# out = gate / (1 + tl.exp(-gate)) * up
# tl.store(out_ptr + row * SIZE + at, out, mask=inside)
# ```
#
# The engine's own kernel, `silu_mul_kernel` in `kernels/triton/elementwise.py`, is this one with two
# more lines: the row number is made 64 bits wide, since rows times stride may exceed what 32 bits hold,
# and the result is converted to whatever `out` holds.
#
# </details>
#
# A Triton kernel can be compiled without a GPU, too. The compiler then tells what a program takes of
# the processor that it would run on. That decides how many of them can be at work at once, and
# while one waits for memory another one computes:

# %%
print(
    "planned for        kernel                      card   registers   spilled   shared memory   tensor cores"
)
for row in lab.recorded_resources():
    print(
        f"{row['name']:18} {row['kernel']:26} sm_{row['sm']} {row['registers']:9} {row['spilled_bytes']:9}"
        f" {row['shared_bytes'] / 1024:11.1f} KiB   {row['tensor_core'] or '-'}"
    )
print("a thread has at most 255 registers   as compiled, no GPU")

# %% [markdown]
# *Spilled* is what did not fit into registers and goes to memory and back: a kernel that spills can be
# slower than the operators it replaces. `silu-mul` is the engine's version of yours, among the smallest: it
# does little with each number, and its speed is that of the memory. (`sm_80` is an A100, `sm_90` an H100.)
#
# ## 6. Every point under one roof
#
# Each step of section 4, and more: batches of 8 and 32, and a prompt of 128 tokens. Before you look:

# %%
guess.predict(
    "A prompt of 128 tokens, with the file's 4-bit weights, takes how long compared with fp32?",
    ["a fifth", "half to three quarters", "about as long", "longer"],
    key="prompt",
)

# %%
source = f"measured here in turns, medians; ceilings measured, {torch.get_num_threads()} threads"
wb.show(wb.figures.mode_roofline(points, machine, source))

# %%
print(
    "ms a step                        decode 1   decode 8   decode 32   a prompt of 128   measured"
)
kinds = [lab.pick(points, "decode", n) for n in (1, 8, 32)] + [lab.pick(points, "prefill")]
for name in names:
    print(f"{name:30}" + "".join(f"{kind[name].step_s * 1e3:12.1f}" for kind in kinds))
prompt = kinds[-1]
ratio = prompt[names[3]].step_s / prompt[names[0]].step_s
answer = "half to three quarters" if ratio > 0.35 else "a fifth"
answer = "longer" if ratio > 1.2 else "about as long" if ratio > 0.8 else answer
guess.compare("prompt", answer, note=f"To be exact: {ratio:.2f} times as long.")

# %% [markdown]
# Differences below a fifth mean nothing here. And above 16 rows "compiled, fp32" *is* torch: the engine
# leaves such steps to it.
#
# * **Batch 1** (circles) climbs along the slope. Fewer bytes for the same FLOPs: the point moves to the
#   right *and* up, since on the slope FLOP/s follow the bytes.
# * **A larger batch** does the same by other means: more FLOPs for the same bytes.
# * **The prompt** (stars) stands under the flat roof, and no format moves it up by its bytes. What
#   moves it is the arithmetic: int8 products do more multiplications in an instruction than fp32
#   ones, so they may stand above a roof that was measured in fp32; 4-bit weights must be unpacked
#   first, and their two planes multiplied twice.
#
# That is why speed is always a pair: a format and a batch.
#
# ### Claims, tested
#
# * *"Python is the bottleneck."* Half true here. Python and dispatch are a part of the torch step, and
#   section 2 shows which. But remove all of it, and the weights still have to be read: that part no
#   language makes faster. The larger the model, the smaller Python's part: its calls grow with the
#   layers, the bytes with their size.
# * *"int4 is 8 times as fast."* It has a sixth of the bytes (scales count, and the head), and gains less
#   than that in decode. At a batch of 8 and more, and in prefill, int8 was faster here.
# * *"Kernels matter only on GPUs."* Section 2 was a CPU.
# * *"`torch.compile` solves it."* It takes what it can see. On the recorded machine
#   that was less than its guards cost.
# * *"Quantized models are worse."* Depends on bits, groups and method: the table in section 3 has
#   everything from no loss at all to a loss you would notice.
#
# ## Exercises
#
# **1.** was your kernel, in section 5.
#
# **2. A phone.** Its memory gives 50 GB/s. How many tokens a second does a model write at most, alone?
# `bits` is what a weight takes, with scales.


# %%
def most_tokens_s(num_weights, bits, bandwidth_bytes_s):
    # BEGIN SOLUTION
    return bandwidth_bytes_s / (num_weights * bits / 8)
    # END SOLUTION


# %%
@wb.check("tokens a second on a phone")
def phone_check():
    yours = most_tokens_s(1e9, 8, 10e9)
    assert abs(yours - 10) < 1e-6, f"10^9 weights of a byte, at 10 GB/s: 10 a second, not {yours}"
    yours = most_tokens_s(1e9, 4, 10e9)
    assert abs(yours - 20) < 1e-6, f"half the bits, twice as many: 20 a second, not {yours}"
    for name, bits in (("fp16", 16), ("int8", 8), ("int4, scale and minimum a 32", 5)):
        rate = most_tokens_s(3e9, bits, 50e9)
        print(f"3 billion weights, {name:30} at most {rate:5.1f} tokens/s   predicted")


# %% [markdown]
# <details><summary>Solution</summary>
#
# `bandwidth_bytes_s / (num_weights * bits / 8)`. K and V come on top: with a long context they are a
# good part of what is read (lesson 04). And it is an upper limit: multiply it by the share of the floor
# that you found in section 4.
#
# </details>

# %% [markdown]
# **3. Where a format turns.** A product with `b` rows reads each weight once (`bits`), and does `b`
# multiply-adds with it. The machine does `madds_s` of them in a second. At which `b` does arithmetic take
# as long as reading?


# %%
def turning_rows(bits, bandwidth_bytes_s, madds_s):
    # BEGIN SOLUTION
    return bits / 8 / bandwidth_bytes_s * madds_s
    # END SOLUTION


# %%
@wb.check("where a format turns")
def turning_check():
    yours = turning_rows(32, 10e9, 50e9)
    assert abs(yours - 20) < 1e-6, f"4 bytes take 0.4 ns, a multiply-add 0.02 ns: 20, not {yours}"
    yours = turning_rows(8, 10e9, 50e9)
    assert abs(yours - 5) < 1e-6, f"a quarter of the bits turns four times as early: 5, not {yours}"
    peak = machine.peak("fp32") / 2
    for name, bits in (("fp32", 32), ("int8", 8), ("int4", 5)):
        b = turning_rows(bits, machine.bandwidth_bytes_s, peak)
        print(f"{name} at {b:5.1f} rows, if its arithmetic were as fast as fp32's   predicted")


# %% [markdown]
# <details><summary>Solution</summary>
#
# `bits / 8 / bandwidth_bytes_s * madds_s`: seconds to read a weight, times multiply-adds in a second.
# Compare with what section 3 measured: all formats may turn later than predicted, since a single row
# does not read at the full bandwidth. To compare the arithmetic itself, look at what one more row costs.
#
# </details>

# %% [markdown]
# ## What production systems do
#
# * **Launches.** vLLM captures whole decode steps as CUDA graphs, one for each of a list of batch
#   sizes, and pieces between the attention calls for mixed batches; the pieces come from
#   `torch.compile`, which also fuses them (*vLLM: CUDA Graphs*, *torch.compile integration*).
#   TensorRT-LLM can do likewise (*Torch Compile & Piecewise CUDA Graph*).
# * **Attention.** FlashAttention (Dao et al. 2022) never writes the matrix of scores to memory:
#   fusion once more. FlashInfer (Ye et al. 2025) has such kernels for paged K and V, many formats and
#   batch shapes.
# * **Four bits on GPUs.** Marlin (Frantar et al. 2024) multiplies fp16 rows with int4 weights, close
#   to the ideal 4 times the speed of fp16 up to batches of 16 to 32, and less beyond: the turning point
#   of exercise 3. Weights come from GPTQ (Frantar et al. 2023) or AWQ (Lin et al. 2024), usually in groups of 128.
# * **On CPUs.** llama.cpp rounds rows to int8 in blocks of 32 and multiplies them with the blocks of
#   the file; its k-quants have super-blocks of 256, for the rows too, and an *importance matrix* from
#   a calibration text weighs the errors (*tools/imatrix*). ONNX Runtime's `MatMulNBits` has the
#   same choice as a parameter, `accuracy_level`: 4 allows int8 rows.
# * **In the open.** `pdlab bench` compares this engine's modes with such peers on your machine.
#
# What ours lacks: instructions for int8 dot products (VNNI, AMX) and for ARM; groups chosen per layer;
# a kernel for one whole layer on a GPU.

# %%
modes.close()
