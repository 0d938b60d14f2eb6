# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 11 Parallelism: one model on several devices
#
# **The question.** A model of 70 billion numbers in 16 bits is 140 GB: no single GPU of 80 GB holds it.
# So cut it up. But where? Through every layer, or between the layers? Each cut needs a wire, something has
# to travel over it for every token, and meanwhile somebody waits. What does it cost, and what does it buy?
#
# You will cut a layer by hand, run one engine on two and three **ranks** (processes that compute one model
# together), count every byte that they tell each other, hold a pipeline's bubbles against the formula, and
# find out why two cores with half a model each can be faster than two cores with a whole one.
#
# *About 45 minutes. Before this: [02 Decode](02_decode.ipynb), [07 Scheduling](07_scheduling.ipynb).*

# %%
import pdlab
from pdlab import workbench as wb
from pdlab.models.shard_plan import ShardPlan
from pdlab.workbench import parallel_experiments as lab

guess = wb.Predictions()
wb.glossary(
    "rank", "tensor parallel", "pipeline parallel", "data parallel", "collective", "all-reduce",
    "micro-batch", "bubble",
)  # fmt: skip

# %%
model = pdlab.load("smollm2-135m", device="cpu", dtype="fp32")

# %% [markdown]
# ## 1. Where can a model be cut?
#
# Two directions. **Tensor parallel** (TP) cuts *through* every layer: each rank has some of the attention
# heads, some columns of the MLP, some rows of the vocabulary, and all ranks work on the same token at the
# same time. **Pipeline parallel** (PP) cuts *between* layers: rank 0 has the first ones, and hands what
# comes out to rank 1.
#
# This model has 3 KV heads, each shared by 3 query heads. A KV head is not cut (its K and V would be
# needed on both sides), so two ranks get 2 and 1.

# %%
guess.predict("TP = 2: how much of all weights does the larger rank hold?", key="share", unit="%")

# %%
wb.show(wb.figures.shard_map(ShardPlan(model.config, tensor_parallel=2), name=model.name))

# %%
plan = ShardPlan(model.config, tensor_parallel=2)
shares = lab.weight_shares(model, plan)
print("TP = 2:", ", ".join(f"rank {i} {share:.1%}" for i, share in enumerate(shares)), "  counted")
guess.compare("share", 100 * shares[0], "%", kind="counted")

# %% [markdown]
# Not far from half: attention is a small part of a layer, and MLP and vocabulary divide evenly. The KV
# cache is another matter. It is cut like the heads, so rank 0 has two thirds of it. In a large model with
# 8 KV heads on 8 GPUs, each has one. On 16 GPUs? Most systems then keep each KV head twice; this one
# refuses (`tensor_parallel=4 is more than the model's 3 KV heads`).
#
# ## 2. Cutting a layer by hand
#
# The MLP is `down(silu(gate(x)) * up(x))`. Cut `gate` and `up` by rows: each rank then has half of the
# inner numbers, and both halves can go through `silu` and the product on their own, because these work
# number by number. Cut `down` by columns to match. What each rank has in the end is not half of the
# answer. It is *all of the answer, in part*:

# %%
import torch
import torch.nn.functional as F

gate, up, down = lab.mlp_weights(model, layer=0)
draw = torch.Generator().manual_seed(0)
x = torch.randn(3, model.config.hidden_size, generator=draw) / 10


def mlp(x, gate, up, down):
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


half = gate.shape[0] // 2
left = mlp(x, gate[:half], up[:half], down[:, :half])
right = mlp(x, gate[half:], up[half:], down[:, half:])
whole = mlp(x, gate, up, down)
print("one number of the answer:", f"{left[0, 0]:.6f} + {right[0, 0]:.6f}", end=" ")
print(f"= {left[0, 0] + right[0, 0]:.6f}, whole {whole[0, 0]:.6f}")
apart = (left + right - whole).abs().max().item()
print(f"furthest apart of {whole.numel():,}: {apart:.1e}   computed")

# %% [markdown]
# So the ranks have to add up what they have: an **all-reduce**. Attention works the same way: heads never
# look at each other, and the projection behind them is cut by columns. That is one sum after attention and
# one after the MLP (Megatron-LM, Shoeybi et al. 2019), and one more for the embedding, of which each rank
# has half of the rows. Cut in any other way, a sum would be needed in the middle, too.
#
# (Not bit for bit the same: 1,536 products were added up in one row, and now in two halves. Floating point
# rounds after each addition, so the order shows in the last digits. This engine sums in the order of the
# ranks, always; the order that a ring has differs from part to part.)
#
# Now really, on two processes. In each decode step, how much does one rank send to the other?

# %%
guess.predict(
    "TP = 2, one sequence, one decode step: bytes that rank 0 sends. 30 layers, hidden size 576, fp32",
    key="bytes",
    unit="kB",
)

# %%
one = lab.answer(model)
two = lab.answer(model, tensor_parallel=2)
print(two.text, "\n")
print("the same tokens as on one:", two.token_ids == one.token_ids, "  counted")
step = two.typical("decode")
sent = sum(c.wire_bytes for c in step.collectives if c.rank == 0)
guess.compare("bytes", sent / 1000, "kB", kind="counted")

# %%
wb.show(wb.figures.collectives_of_step(two.trace, step.step))

# %%
wb.ShardView(two.trace, step=step.step)

# %% [markdown]
# Rank 0 sends 576 numbers, 2,304 bytes, and does so 61 times: twice a layer, and once for the embedding.
# Rank 1 sends its half of the logits on top, since the token is drawn in one place. Little, in bytes. But
# each of the 61 is a moment in which *both have to be there*. Wires have a latency, and the ranks are
# never ready at the same moment: here rank 0 has twice the heads
# (compare the times of *output*, which wait for attention, with those of *mlp*).
#
# The black marks are what the formula says, from the shapes alone. They agree to the byte, on every grid
# (a test holds them against each other). For a prompt, all of that is multiplied by its tokens: with 512 of
# them each rank sends 72 MB.
#
# ## 3. What does it buy on two cores?
#
# Four ways to use them: one process with two threads; TP = 2 with a thread each; PP = 2 with a thread each;
# or two whole copies of the model, **data parallel** (DP), with a thread and requests of its own each. The
# work: prompts of 256 tokens, one (*b1*) or two at once (*b2*), and decoding one sequence or eight.

# %%
guess.predict(
    "One sequence decodes: TP = 2 with a thread each, beside one process with two threads",
    ["slower", "about as fast", "faster"],
    key="decode",
)

# %%
guess.predict(
    "And the first token of a prompt of 256 tokens?",
    ["slower", "about as fast", "faster"],
    key="prefill",
)

# %%
found = lab.side_by_side()
works = ("prefill b1", "prefill b2", "decode b1", "decode b8")
print("gain over one process, in tokens a second   measured, fp32\n")
print(f"{'':22}" + "".join(f"{work:>12}" for work in works))
gain = {w.name: {work: found.ratio(w.name, work) for work in works} for w in lab.GRIDS}
for name, gains in gain.items():
    print(f"{name:22}" + "".join(f"{gains[work]:11.2f}x" for work in works))

# %%
wb.show(wb.figures.parallel_gains(gain, "measured here in turns, fp32, medians of two rounds"))


# %%
def in_words(gain):
    return "faster" if gain > 1.07 else "slower" if gain < 0.93 else "about as fast"


two_ranks = gain["TP=2"]
for key, work in (("decode", "decode b1"), ("prefill", "prefill b1")):
    guess.compare(key, in_words(two_ranks[work]), note=f"{two_ranks[work]:.2f} times.")
share = found.of("TP=2", "decode b1").exchange_share
print(f"of its ranks' time in decode, {share:.0%} went into exchanges   measured")
token_ms = 1e3 * found.of("TP=2", "decode b1").median_s
kernel_ms = 1e3 * lab.answer(model, backend="cpu").typical("decode").wall_s
print(
    f"a token: TP = 2 {token_ms:.0f} ms; one process, compiled kernels {kernel_ms:.0f} ms   measured"
)

# %% [markdown]
# * **Decode.** The product of *one* row with a matrix hardly uses the second thread of torch (lesson 09), so
#   one process leaves half of the machine idle. TP gives each core a matrix of its own, and that is worth
#   more than 61 exchanges cost. Strictly, that is a gain over a poor use of threads: the compiled kernels of
#   lesson 09 use both, and need no ranks to be faster still (last line). On GPUs the reason is another one,
#   and better: each has a *memory* of its own, and twice the memories read the weights in half the time.
# * **Prefill.** A product with many rows uses both threads well already. Nothing is left to win, and what is
#   exchanged costs: TP comes out even at best.
# * **PP** computes a token rank after rank: while one stage works, the other waits. So for a single sequence
#   there is nothing to gain (a few hundredths either way are noise). For prompts it can be mended (section 5).
# * **DP** does nothing for one request, which has one core of two. For several there is no exchange and no
#   waiting; but it holds all weights twice, and each copy reads all of them for its half of the batch.
#
# ## 4. A slower wire
#
# Inside a machine a message takes some 50 microseconds. What if the two ranks were two machines? The engine
# can hold back what arrives, as a link of that kind would (**simulated**: the computing is real, the delay
# is added).

# %%
guess.predict(
    "Over 1 Gb/s Ethernet a prompt of 128 tokens takes how many times as long as here?",
    key="ethernet",
    unit="times",
)

# %%
links = lab.over_links(model)
here = links["this machine"]
print("TP = 2          128 tokens  of that the wire    a decode step  of that the wire")
for name, run in links.items():
    kind = "measured" if run is here else "simulated; the wire predicted"
    print(
        f"{name:14} {run.prefill_s * 1e3:8.0f} ms {run.wire_prefill_s * 1e3:14.0f} ms"
        f" {run.decode_s * 1e3:13.1f} ms {run.wire_decode_s * 1e3:14.1f} ms   {kind}"
    )
ratio = links["1GbE"].prefill_s / here.prefill_s
guess.compare("ethernet", ratio, "times", kind="simulated")

# %% [markdown]
# A prompt minds the *bandwidth*: of 128 tokens, each rank sends the other 18 MB, and 125 MB/s carry that in
# 0.14 s. A decode step minds the *latency*: 61 times 30 microseconds, and its few bytes. Both are why systems
# keep tensor parallel inside a box, where the wires are NVLink, and go to other boxes with pipelines or copies.
# (*The wire* is bytes and latency alone, one exchange after the other. Of the milliseconds of a decode step one
# or two are chance.)
#
# What would it be for a model that really needs it? Predicted from shapes, peaks and links, nothing run:

# %%
wb.ParallelPlanner()

# %% [markdown]
# Try: Llama 70B on GPUs of 80 GB. Which grids fit at all? Then change the link, and see which of the two
# latencies, TTFT or TPOT, minds it more. Then a longer prompt.
#
# ## 5. A pipeline and its bubbles
#
# PP sends next to nothing: 2,304 bytes for each token and stage, once. But stage 1 cannot begin before stage
# 0 is done. Unless the work comes in pieces: while stage 1 computes the first piece of a prompt, stage 0 is at
# the second. With p stages and m pieces of equal size, everything takes m + p - 1 slots, of which each stage
# works in m. So (p - 1) / (m + p - 1) of the time is **bubbles** (GPipe, Huang et al. 2019).

# %%
guess.predict("2 stages, a prompt in 4 pieces: which part is bubbles?", key="bubbles", unit="%")

# %%
runs = wb.record_pipelines(model, (1, 2, 4, 8), prompt_tokens=512, batch=8, output_tokens=4)
wb.BubbleView(runs, run="4 micro-batches")

# %%
print("512 tokens, 2 stages   measured     (p - 1) / (m + p - 1), predicted")
for m, trace in zip((1, 2, 4, 8), runs.values(), strict=True):
    prefill = next(step for step in trace.steps if step.phase == "prefill")
    print(
        f"m = {m}: {prefill.wall_s * 1e3:6.0f} ms, bubbles {prefill.idle_share:4.0%}"
        f" {1 / (m + 1):22.0%}"
    )
four = next(step for step in runs["4 micro-batches"].steps if step.phase == "prefill")
guess.compare("bubbles", 100 * four.idle_share, "%")

# %% [markdown]
# The bubbles are as the formula says. The time is not: from 4 pieces to 8 the bubbles are halved, and next to
# nothing is won, since smaller products take longer a token. Choose a decode step in the widget and move the
# slider: eight sequences in eight pieces have few bubbles, and take far longer. A piece of one token reads all
# weights of its stage, just as eight tokens do. *Bubbles are not the goal, time is.*
#
# That is why serving systems fill a pipeline otherwise: not pieces of one step, but several *batches* under
# way, each a step apart. It needs as many more sequences at once, and every one of them waits as long as
# before: a pipeline buys throughput and memory, never a shorter time between two tokens of one answer.
#
# And it changes no bit. The layers are computed as ever, only elsewhere:

# %%
plain = lab.answer(model, max_tokens=8, exact=True)
piped = lab.answer(model, max_tokens=8, exact=True, pipeline_parallel=3, micro_batches=4)
last_plain, last_piped = (run.trace.steps[-1].sequences[0] for run in (plain, piped))
print("three stages, same tokens:", piped.token_ids == plain.token_ids)
print("same probability, to the last digit:", last_piped.probability == last_plain.probability)
print(last_plain.probability, last_piped.probability, "  computed, exact=True")

# %% [markdown]
# ### Claims, tested
#
# * *"Two devices halve the latency."* On two cores that share a memory, section 3: none of the ways did. Where
#   each device has a memory of its own, and the wire is fast, TP comes near it: open the planner again, 2 x 1.
#   PP never does for a single token.
# * *"Split a small model over many GPUs to make it fast."* Somebody measured it with a model of 1.5 billion
#   numbers: one Tesla P100 420 tokens/s, four of them with a quarter of the model each 130, four
#   with a copy each 975 (llamaR, *Multi-GPU*; published). If it fits, and throughput is the aim, copy it.
# * *"Tensor parallel gives the same result."* The same mathematics; not the same bits (section 2). Greedy
#   tokens agree but at near ties.
# * *"Prefill uses batch parallelism, decode pipeline parallelism."* No rule at all: section 3 has the numbers for
#   this machine, the planner for others. DistServe (2024) searches both phases separately.
# * *"Cutting the KV cache by heads is what paging does."* Paging cuts it along the tokens (lesson 03), on each
#   rank for its own heads. Block 7 is block 7 on all ranks; it just holds other heads.
#
# ## Exercises
#
# **1. A row-parallel product.** `w` is [outputs, inputs], `x` is [tokens, inputs]. Give what each of `n` ranks
# has before the all-reduce: a list of `n` tensors [tokens, outputs] that add up to x wᵀ. Inputs are cut into `n`
# ranges; if it is not even, the first ones have one more.


# %%
def partial_sums(x, w, n):
    # BEGIN SOLUTION
    inputs = torch.arange(x.shape[1]).tensor_split(n)
    return [x[:, part] @ w[:, part].T for part in inputs]
    # END SOLUTION


# %%
@wb.check("partial sums")
def sums_check():
    import torch

    x, w = torch.arange(12.0).view(2, 6), torch.arange(18.0).view(3, 6)
    parts = partial_sums(x, w, 2)
    assert len(parts) == 2, f"2 ranks have 2 tensors, not {len(parts)}"
    assert parts[0].shape == (2, 3), f"each is [2, 3], not {tuple(parts[0].shape)}"
    assert torch.equal(sum(parts), x @ w.T), "they must add up to the whole"
    assert torch.equal(parts[0], x[:, :3] @ w[:, :3].T), "rank 0 has the first half of the inputs"
    uneven = partial_sums(torch.ones(1, 7), torch.ones(1, 7), 3)
    assert [int(part) for part in uneven] == [3, 2, 2], "7 inputs on 3 ranks: 3, 2, 2"
    print("7 inputs on 3 ranks, all ones:", [int(part) for part in uneven], "add up to 7")


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# inputs = torch.arange(x.shape[1]).tensor_split(n)
# return [x[:, part] @ w[:, part].T for part in inputs]
# ```
#
# In the engine, `pdlab/models/sharded.py` cuts the weights once, when a rank loads them.
#
# </details>

# %% [markdown]
# **2. Bytes of a step.** TP over `n` ranks. Each rank sends all it has to each other rank, after the embedding
# and twice a layer. How many bytes leave one rank for a step of `tokens` tokens? (Without the logits.)


# %%
def bytes_a_rank_sends(n, layers, hidden, tokens, bytes_per_number):
    # BEGIN SOLUTION
    sums = 2 * layers + 1
    return sums * (n - 1) * tokens * hidden * bytes_per_number
    # END SOLUTION


# %%
@wb.check("bytes of a step")
def bytes_check():
    from pdlab.costmodel import collectives_of

    yours = bytes_a_rank_sends(2, 30, 576, 1, 4)
    told = collectives_of(model.config, 2, 1, [(1, 1)], 4)
    counted = sum(each.wire_bytes for each in told if each.rank == 0)
    assert yours == counted, f"rank 0 sent {counted:,} bytes in section 2, not {yours:,}"
    assert bytes_a_rank_sends(1, 30, 576, 1, 4) == 0, "one rank has nobody to send to"
    assert bytes_a_rank_sends(3, 30, 576, 1, 4) == 2 * counted, "on three ranks, two others"
    big = bytes_a_rank_sends(8, 80, 8192, 1, 2)
    print(f"SmolLM2, TP = 2: {yours:,} bytes, counted; Llama 70B, bf16, TP = 8: {big:,}, predicted")


# %% [markdown]
# <details><summary>Solution</summary>
#
# `(2 * layers + 1) * (n - 1) * tokens * hidden * bytes_per_number`. For large tensors on more than two ranks
# it is cheaper that each sums a part of the columns and sends that around: 2 (n - 1) / n instead of n - 1
# times the tensor, in two rounds instead of one. This engine, like vLLM's own all-reduce, takes the one for small
# and the other for large ones.
#
# </details>

# %% [markdown]
# **3. How many pieces?** A stage takes `fixed_s + tokens * token_s` for a piece: reading its weights, and the
# arithmetic. A prompt of `prompt` tokens in `m` equal pieces goes through `p` such stages. Which m of `choices`
# is done first?


# %%
def best_pieces(prompt, p, fixed_s, token_s, choices):
    # BEGIN SOLUTION
    def total_s(m):
        return (m + p - 1) * (fixed_s + prompt / m * token_s)

    return min(choices, key=total_s)
    # END SOLUTION


# %%
@wb.check("how many pieces")
def pieces_check():
    choices = [1, 2, 4, 8, 16, 32, 64]
    assert best_pieces(512, 2, 0.0, 1e-3, choices) == 64, "if a piece costs nothing, many"
    assert best_pieces(512, 1, 0.1, 1e-3, choices) == 1, "one stage has no bubbles to fill"
    assert best_pieces(512, 2, 0.5, 1e-9, choices) == 1, "if only weights count, one"
    yours = best_pieces(512, 2, 0.03, 1.5e-3, choices)
    assert yours == 4, f"30 ms for the weights, 1.5 ms a token: 4 pieces, not {yours}"
    for p in (2, 4, 8):
        print(f"{p} stages: {best_pieces(512, p, 0.03, 1.5e-3, choices)} pieces")


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def total_s(m):
#     return (m + p - 1) * (fixed_s + prompt / m * token_s)
#
# return min(choices, key=total_s)
# ```
#
# By calculus m is near the square root of (p - 1) x prompt x token_s / fixed_s. Decode has one token a sequence,
# so nothing to divide, and m = 1 wins: section 5.
#
# </details>

# %% [markdown]
# ## What production systems do
#
# * **vLLM** uses Megatron's cuts. Its guide (*Parallelism and Scaling*): no parallelism if the model fits on
#   one GPU; tensor parallel within a machine; across machines, tensor parallel within each and pipeline
#   parallel between. For small tensors it has an all-reduce of its own, one-shot or two-shot, over NVLink.
# * **On processors**, gloo, the default of torch, waits with a thread of its own, which costs more than the
#   message. So vLLM, SGLang, DeepSpeed and TGI each wrote an all-reduce over shared memory (gloo issue 455
#   lists them), and this engine's ranks on one machine have plain sockets. Under `torchrun` they use gloo.
# * **Across machines on processors**: with a flat ring of gloo between two machines, about 96 collectives a
#   token, a model of 14 billion numbers came to 5.5 tokens/s (vLLM pull request 46447; published). Section 4 in
#   real life.
# * **llama.cpp** deals layers out by default (`--split-mode layer`), because consumer machines have slow wires,
#   and can cut rows (*docs/multi-gpu.md*).
# * **TensorRT-LLM, SGLang and vLLM** run pipelines with several batches under way instead of pieces of one.
# * **Mixtures of experts** are cut in yet another way: whole experts on each device, and tokens travel to them
#   (expert parallel). Not in this engine.
#
# What ours lacks: overlap of an exchange with the next product, several batches in a pipeline, KV heads kept
# twice, packed weights on ranks, experts. NCCL between GPUs is wired up and was never run.
