# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 03 Paged KV: who owns each byte
#
# **The question.** The weights of a model never grow. Yet servers run out of memory, turn requests
# away, and throw away work they have done. What fills the memory, how much of it is empty space that
# somebody holds, and what can be done about it?
#
# You will measure what grows and how fast, pack the same requests in four ways, follow blocks from
# owner to owner, let requests share them, and then make the pool too small on purpose.
#
# *About 30 minutes. Before this: [02 Decode](02_decode.ipynb).*

# %%
import pdlab
from pdlab import EngineConfig, SamplingParams
from pdlab import workbench as wb

guess = wb.Predictions()
wb.glossary(
    "KV cache", "block", "block table", "slot", "fragmentation", "reference count", "copy-on-write",
    "prefix cache", "eviction", "preemption", "swap", "watermark",
)  # fmt: skip

# %%
model = pdlab.load("smollm2-135m")

# %% [markdown]
# ## 1. What grows, and how fast
#
# Three things take memory: the **weights** (fixed), the **KV cache** (K and V of every token, kept as
# long as the request lives), and **activations** (everything a step computes on its way, such as
# hidden states, q, and scores). You may read that memory "grows exponentially" with the prompt, or
# that "twice the prompt takes four times the KV". Say what you expect, then measure it.

# %%
guess.predict(
    "From 256 to 512 tokens of prompt, the KV cache grows by a factor of", key="kv", unit="times"
)

# %%
from pdlab.workbench import kv_experiments as kv
from pdlab.workbench.figures import growth

lengths = [128, 256, 512]
points = kv.memory_by_length(model, lengths)
wb.show(growth.memory_growth(points))

# %%
fused, unfused = points[:3], points[3:]
kv_sizes = [p.kv_bytes for p in fused]
for name, sizes in (
    ("KV cache", kv_sizes),
    ("activations, fused", [p.peak_bytes for p in fused]),
    ("activations, unfused", [p.peak_bytes for p in unfused]),
):
    megabytes = " ".join(f"{size / 1e6:7.1f}" for size in sizes)
    power = kv.growth_exponent(lengths, sizes)
    print(f"{name:21}{megabytes} MB   grows as n to the power of {power:.2f}   measured")
guess.compare("kv", kv_sizes[2] / kv_sizes[1], "times")

# %% [markdown]
# The KV cache is **linear**: a power of 1, the same bytes for every token. What is quadratic is a
# table of scores, one for each pair of tokens and each head, and only where attention is *unfused*,
# so that the table is really written out. That part goes up by four when the prompt doubles, the
# rest of the activations by two, and the line above is their sum. Fused attention goes through the
# table in tiles and never holds all of it. And even where there is a table, it is gone when the layer
# is done. It was never part of the cache.
#
# How much of what a step computes is there at the same time?

# %%
last = fused[-1]
print(f"made in this step, one after the other {last.total_bytes / 1e6:7,.0f} MB   measured")
print(f"at most at once                        {last.peak_bytes / 1e6:7,.0f} MB   measured")
print(f"so each byte served about {last.total_bytes / last.peak_bytes:.0f} times")

# %% [markdown]
# Activations are **released and reused**, layer after layer. Some articles call this "gradient
# checkpointing in decode". Checkpointing belongs to training: it drops activations that the backward
# pass will want, and computes them again. In inference there is no backward pass, so nothing is kept
# for it. Two things come near: this reuse, and dropping a request's K and V to compute them again,
# which you will do in section 4.
#
# ## 2. One piece for each request?
#
# So KV is what fills the memory, and it is cut up among requests whose length nobody knows in
# advance. The simplest plan gives each request one piece, with room for the longest there may be.
# Other plans: the next power of two, moving to a larger piece when it is full; or exactly what is
# needed, moving at every token.
#
# To compare them we need traffic. `azure-conv-like` is a small synthetic trace that ships with
# pdlab, drawn from the statistics of a public one (Azure LLM inference 2023, conversations). No model
# runs here: a replay moves request lengths through an allocator, at 50 ms a step, and each plan gets
# the same memory: 96,000 slots, one for each token. All numbers from it are **simulated**.

# %%
from pdlab.workload.traces import find_trace, read_trace

requests = read_trace(find_trace("azure-conv-like"))  # or the path of a trace of your own
tokens = [request.num_kv_tokens for request in requests]
print(f"{len(requests)} requests in {requests[-1].arrival_s:.0f} s")
print(f"mean {sum(tokens) / len(tokens):,.0f} tokens, the longest {max(tokens):,}")
guess.predict(
    "Each request reserves room for the longest. Which part of the memory it takes holds tokens?",
    key="useful",
    unit="%",
)

# %%
from pdlab.workload.cache_replay import replay_cache

replays = kv.under_bar("replay", lambda: replay_cache(requests, num_blocks=6000, block_size=16))
results = {r.policy: r for r in replays}
plans = {
    "max": "reserve the longest",
    "power_of_two": "next power of two",
    "grow": "grow by copying",
    "paged": "paged, blocks of 16",
}
wb.show(wb.figures.fragmentation([(plans[p], results[p].fractions) for p in plans]))

# %%
generated = sum(request.num_output_tokens for request in requests)
for policy, name in plans.items():
    r = results[policy]
    print(
        f"{name:20} {r.mean_running:5.1f} requests at once, {r.mean_queue_s:6.1f} s in line,"
        f" {r.copied_tokens / generated:7,.1f} tokens copied for each one generated   simulated"
    )
note = "Published for the systems before paging: 20.4% to 38.2% (Kwon et al. 2023, figure 2)."
guess.compare("useful", 100 * (1 - results["max"].waste), "%", kind="simulated", note=note)

# %% [markdown]
# Two kinds of loss have names. **Internal fragmentation** is room inside a piece that its request
# never uses. **External fragmentation** is free room between the pieces, in holes too small for the
# next in line. Our "next power of two" is kinder than the one measured in the vLLM paper (*Orca
# (Pow2)* in its figure 2): that one reserves the room for the output in advance, ours takes more when
# it must, and copies.
#
# Growing by copying has almost no empty room, and pays by moving the whole request again for each
# token it generates. Is that much? A step reads all weights once, so let us count in weights.

# %%
from pdlab.costmodel import weight_bytes
from pdlab.models.catalog import shape

grown = results["grow"]
copied = grown.copied_tokens / generated
for name, element_bytes in (("smollm2-135m", 4), ("llama-8b", 2)):
    token_bytes = shape(name).kv_bytes_per_token(element_bytes)
    step_bytes = grown.mean_running * copied * token_bytes
    share = step_bytes / weight_bytes(shape(name), element_bytes)
    print(
        f"{name}, {element_bytes} bytes a number: {token_bytes / 1e3:.0f} kB for each token of KV\n"
        f"    {copied:,.0f} tokens copied for each one generated: {copied * token_bytes / 1e6:.0f} MB\n"
        f"    a step with {grown.mean_running:.0f} requests copies about {step_bytes / 1e9:.1f} GB,"
        f" {share:.1f} times the bytes of all weights   simulated"
    )

# %% [markdown]
# So it is no small matter, for a small model or a large one. It gets worse with every token of
# context and with every further request, and the weights do not.
#
# **Paging** gives up the one piece. Memory is cut into **blocks** of a few tokens, all alike, and each
# sequence has a **block table** that says where its blocks lie. Any free block will do, so there are no
# holes, and the only empty room is in a sequence's last block. It is what an operating system does
# with the memory of processes, and the words are borrowed from there.
#
#     position 13, blocks of 4:   13 // 4 = 3     it lies in logical block 3
#                                 table[3] = 9    which is physical block 9
#                                 9 * 4 + 13 % 4  = slot 37
#
# Watch it on a real run. Left: each sequence's table. Right: the pool it points into. Walk through the
# steps, and point at a block.

# %%
config = EngineConfig(block_size=4, num_blocks=32, enable_prefix_cache=False)
prompts = ["The capital of France is", "One, two, three, four, five, six,", "Paged memory has no"]
answers = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (4, 12, 8)]
engine = pdlab.Engine(model, config)
engine.generate(prompts, answers)
wb.BlockTableView(engine.trace, step=6)

# %% [markdown]
# A sequence takes a block only when its last one is full, and its blocks need not be neighbours. When
# it ends, its blocks are free for anybody. How large should a block be? Smaller blocks waste less:

# %%
used = sum(step.kv_used_bytes for step in engine.trace.steps)
empty = sum(step.kv_wasted_bytes for step in engine.trace.steps)
print(
    f"the run above, all its steps: {empty / (used + empty):.1%} of the taken slots empty   measured\n"
)
for point in kv.waste_by_block_size(requests, [4, 16, 64, 256]):
    print(
        f"blocks of {point.block_size:3}: {point.waste:6.2%} empty   simulated, {len(requests)} requests"
    )

# %% [markdown]
# (The run above wastes more than the trace does with blocks of the same size: its sequences are short,
# so that the last block counts for more. Exercise 2 predicts these numbers.)
#
# Why not blocks of one token, then? Tables get longer, and attention has to fetch from as many places
# as there are blocks. Kwon et al. settled on 16: large enough to use the GPU well, and small enough
# to keep the empty room small in most of their workloads (their section 7.2).
#
# ## 3. Sharing
#
# Once memory is in blocks, two sequences can point at the *same* block. Many prompts begin alike:
# system prompts, few-shot examples, the chat so far. In lesson 01 you saw that the K and V of a
# prefix do not depend on what follows. So they can be kept and used again: the **prefix cache**.
#
# Below, the beginning is a page of Python's manual, and two questions are asked about it, one after the
# other. What happens to the time to first token?

# %%
from pydoc_data.topics import topics

page = "You answer questions about this page of Python's manual.\n" + topics["booleans"]
questions = [
    "What does `not` do?",
    "What does `x and y` return?",
    "Can I write `not x == y`?",
    "Which values are false?",
]
chats = [
    [{"role": "system", "content": page}, {"role": "user", "content": question}]
    for question in questions
]
guess.predict(
    "The first question waits how many times as long for its first token as the second?",
    key="prefix",
    unit="times",
)

# %%
shared = pdlab.Engine(model, EngineConfig(block_size=16, num_blocks=96))
wb.warm_up(model)
short = SamplingParams(max_tokens=8, ignore_eos=True)
metrics = [shared.generate(chat, short)[0].metrics for chat in chats[:2]]
for m in metrics:
    print(
        f"{m.num_prompt_tokens} tokens of prompt, {m.num_cached_tokens:3} found in the cache,"
        f" first token after {m.ttft_s * 1e3:6.0f} ms   measured"
    )
guess.compare("prefix", metrics[0].ttft_s / metrics[1].ttft_s, "times")

# %% [markdown]
# Nobody asked for it: when a request ends, its full blocks are free, but they keep what they hold until
# somebody needs the room. The least recently used goes first (**eviction**). Now two more questions, both
# at once. The blocks of the page are drawn in both tables, and are there once.

# %%
shared.generate(chats[2:], short)
first = next(s for s in shared.trace.steps if len(s.residents) == 2)
print(f"KV that sharing spares in this step: {first.kv_shared_bytes / 1e6:.1f} MB   measured")
print(f"hit rate so far: {shared.prefix_cache_stats.hit_rate:.0%} of the tokens looked up")
wb.BlockTableView(shared.trace, step=first.step)

# %% [markdown]
# ### What makes two blocks the same?
#
# Not their own tokens. Put the same sixteen tokens, at the same positions, behind two different
# beginnings of sixteen tokens. Will their keys be the same?

# %%
guess.predict(
    "Same block, other beginning: in which layers do its keys differ?",
    ["in no layer", "in all layers", "in all but the first", "only in the last"],
    key="chain",
)

# %%
block = model.tokenizer.encode(
    " and so the cat sat down on the mat and began to sing its old song."
)[:16]
beginnings = [
    chats[0][0]["content"],
    "Once upon a time there lived a clockmaker who had a cat, " * 3,
]
behind = [
    wb.kv_after_prefill(model, model.tokenizer.encode(text)[:16] + block, exact=True)[0, :, 16:]
    for text in beginnings
]
differences = kv.difference_by_layer(*behind)
for layer in (0, 1, 2, 15, 29):
    print(f"layer {layer:2}: keys differ by {differences[layer]:6.1%}   measured")
differing = [layer for layer, difference in enumerate(differences) if difference]
chain = {0: "in no layer", 30: "in all layers", 29: "in all but the first", 1: "only in the last"}
guess.compare("chain", chain.get(len(differing), f"in {len(differing)} layers"))

# %% [markdown]
# In the first layer, K and V come from the token and its position alone, so they are equal to the
# last bit. From the second layer on, the input has been through attention and carries the beginning
# in it. A cache that looked up blocks by their own tokens would hand out wrong K and V in all these
# layers. So a block's name is a **chain**: the hash of its own tokens *and* of the block before it,
# which stands for everything before. And because two hashes may be equal by accident, this engine
# compares the tokens, too.
#
# ### Twins, and samples of one prompt
#
# Two identical prompts in the *same* step find nothing: a block can be found when it is full and its
# step is done. Both compute. A third, later, finds the first one's blocks.

# %%
twin = "Two identical prompts arrive at the very same moment, and neither has anything to find yet."
shared.clear_prefix_cache()
for label, prompts in (("together", [twin, twin]), ("later", [twin])):
    found = [output.metrics.num_cached_tokens for output in shared.generate(prompts, short)]
    print(f"{label:8}  tokens found in the cache: {found}")

# %% [markdown]
# Somebody who wants three answers to one prompt should therefore ask once, with `n=3`. The prompt is
# computed once, and the sequence **forks**: three tables, the same blocks. They part ways when
# they write. The last block of the prompt is only partly full, and all three want to put their own next
# token into it. Whoever writes to a block that others hold gets a copy first: **copy-on-write**. How many
# blocks will be copied?

# %%
story = "The old clockmaker looked at the letter and"
rest = len(model.tokenizer.encode(story)) % 4
print(f"{len(model.tokenizer.encode(story))} tokens of prompt: {rest} in the last block of 4")
guess.predict("Three samples fork: how many blocks are copied?", key="fork", unit="blocks")

# %%
import textwrap

sampled = SamplingParams(n=3, temperature=0.7, seed=7, max_tokens=9, ignore_eos=True)
with pdlab.Engine(model, EngineConfig(block_size=4, num_blocks=32)) as forked:
    [output] = forked.generate([story], sampled)
for completion in output.completions:
    print(textwrap.fill(f"sample {completion.index}: {completion.text!r}", 96))
copies = [move for step in forked.trace.steps for move in step.moves if move.kind == "copy"]
guess.compare("fork", len(copies), "blocks")
wb.BlockTableView(forked.trace, step=1)

# %% [markdown]
# If the prompt ends inside a block, that is one fewer than there are samples: when the others have their
# own copy, nobody else holds the original, and the last one goes on writing in it. (If the prompt ends
# with a block, each begins a new one, and nothing is copied.) Each block counts its holders (its
# **reference count**), and that is all there is to know. Full blocks are never copied by a fork, because
# nobody will ever write to them: K and V are only appended. (There is one other copy. A prompt found
# *whole* in the cache still needs its last token computed, for the logits. If somebody holds the block
# of that token, the newcomer gets a copy to write it to.)
#
# You may read that shared KV "must be synchronised to all replicas". It need not be: nobody changes it.
# Only tables and counts must be right.
#
# ### One pool, several engines
#
# Nor must the sequences be those of one engine. Two engines below have one memory: one pool of blocks,
# one prefix cache. The first reads the page of the manual. What does the second one find?

# %%
config = EngineConfig(block_size=16, num_blocks=96)
memory = pdlab.Engine.memory_for(model, config, num_engines=2)
one, two = (pdlab.Engine(model, config, memory=memory) for _ in range(2))
for name, own, chat in (("one", one, chats[0]), ("two", two, chats[1])):
    m = own.generate(chat, short)[0].metrics
    print(f"engine {name}: {m.num_prompt_tokens} tokens, {m.num_cached_tokens} found in the pool")

# %% [markdown]
# Now each serves a request of its own at the same time, and they take turns. Here is the second engine's
# view: the blocks of the page are held by both, and those that only the first engine holds are drawn
# as "other engines".

# %%
for own, chat in ((one, chats[2]), (two, chats[3])):
    own.submit(chat, short)
for own in (one, two, one, two):
    own.step()
wb.BlockTableView(two.trace, step=two.trace.steps[-1].step)

# %% [markdown]
# One set of counts for all. The pool can check itself: given the tables of everybody, does every block
# have as many holders as it counts, and are all the others free?

# %%
tables = [r.block_table for own in (one, two) for r in own.trace.steps[-1].residents]
memory.manager.pool.check(tables)  # raises an error if one block is wrong
held = {block for table in tables for block in table}
print(
    f"{sum(map(len, tables))} entries in the two tables, {len(held)} blocks held: all accounted for"
)
one.close()
two.close()

# %% [markdown]
# ## 4. Pressure
#
# Answers grow, and nobody knows how far. Sooner or later a sequence needs a block and there is none.
# Waiting does not help if all wait for each other, so the engine takes everything back from the one
# that came last: **preemption**. Its tokens are known, only its K and V are gone. Two ways to bring
# them back: **recompute** them in one prefill, or keep a copy in host memory and **swap** it in
# again.
#
# Three requests, first in a roomy pool, then in one of 16 blocks, too small for all three. In exact
# mode, so that we can ask for more than similar answers. (The prefix cache is off in these runs: a
# request that comes back might find some of its own blocks, and the costs would be hard to tell apart.)

# %%
prompts = [
    "The capital of France is Paris, and the capital of Japan is",
    "One, two, three, four, five, six, seven,",
    "A key-value cache stores the keys and values of all earlier tokens, so that",
]
small = {"block_size": 4, "num_blocks": 16, "exact": True}
pools = {
    "roomy": EngineConfig(**small | {"num_blocks": 64}),
    "recompute": EngineConfig(**small, preemption="recompute"),
    "swap": EngineConfig(**small, preemption="swap", num_swap_blocks=16),
}
runs = {}
for name, config in wb.progress(pools.items(), "pools"):
    ledger = name == "swap"  # section 5 looks at every byte of this one
    runs[name] = kv.run_under_pressure(
        model, prompts, config, max_tokens=14, measure_activations=ledger
    )

# %%
for name, run in runs.items():
    print(
        f"{name:10} {len(run.trace.steps)} steps, {run.num_preemptions} preempted,"
        f" {run.recomputed_tokens:2} tokens computed again, {run.swapped_bytes / 1e6:.1f} MB swapped;"
        f" same tokens, K and V: {run.equals(runs['roomy'])}"
    )
moved = next(step.step for step in runs["swap"].trace.steps if step.swapped)
wb.BlockTableView(runs["swap"].trace, step=moved)

# %% [markdown]
# `True` means equal to the roomy run, bit for bit, in every token and in all K and V. In exact mode,
# preemption costs time and never the result. Without it, K and V that are computed again may differ in
# their last bits, as in any other batch, and a close call between two tokens may then go the other
# way. (Formats that scale whole blocks, which you will meet in lesson 04, cannot promise it at all:
# their scales depend on which tokens were computed together, so exact mode refuses them.)
#
# And what does it cost? Recomputing costs the arithmetic of a prefill, swapping costs a trip of all KV
# bytes there and back. Guess first, for this machine.

# %%
guess.predict(
    "To bring 256 tokens back on this machine, which is done sooner?",
    ["recompute", "swap"],
    key="back",
)

# %%
from pdlab.costmodel import calibrate, preemption_cost

machine = kv.under_bar("what this machine can do", calibrate)
back = kv.bring_back(model, [64, 128, 256])
sizes = {"weight_element_bytes": 4, "kv_element_bytes": 4}
for b in back:
    cost = preemption_cost(model.config, b.num_tokens, machine, "fp32", **sizes)
    print(
        f"{b.num_tokens:4} tokens: recompute {b.recompute_s * 1e3:7.1f} ms measured,"
        f" {cost.recompute_s * 1e3:7.1f} predicted;"
        f"  swap {b.swap_s * 1e3:6.1f} ms measured, {cost.swap_s * 1e3:6.1f} predicted"
    )
guess.compare("back", "swap" if back[-1].swap_s < back[-1].recompute_s else "recompute")

# %% [markdown]
# Mind what was compared: on a processor, "host memory" is the same memory, and a swap is a plain
# copy. "Predicted" is a floor, here and below: all arithmetic at its peak, and every link at its full
# rate. On a server's GPU the blocks must cross a bus that is far slower than either memory. Here is what
# the cost model says for published GPUs, each with its own bus.

# %%
from pdlab.costmodel import link_bytes_s, load_hardware

half = {"weight_element_bytes": 2, "kv_element_bytes": 2}
for name in ("l4", "a100-80gb", "h100-sxm"):
    gpu = load_hardware()[name]
    print(f"{gpu.name}, bus {link_bytes_s(gpu) / 1e9:.0f} GB/s in one direction   published")
    for small_or_large in ("smollm2-135m", "llama-8b"):
        cost = preemption_cost(shape(small_or_large), 2048, gpu, "bf16", **half)
        print(
            f"    {small_or_large:13} recompute {cost.recompute_s * 1e3:6.1f} ms,"
            f" swap {cost.swap_s * 1e3:5.1f} ms: {min(cost._fields, key=cost._asdict().get)[:-2]}"
            "   predicted, 2,048 tokens"
        )

# %% [markdown]
# Two ratios decide. A large model does many calculations for each byte of KV, so its K and V are dear
# to compute and cheap to carry. And what counts of a GPU is its arithmetic against its bus: where
# arithmetic grew faster, computing again looks better. With `preemption="auto"` this engine asks the
# cost model each time. Kwon et al. (section 7.3) measured both: with small blocks recomputing won,
# because many small copies do not use the bus well, and from 16 to 64 tokens a block the two were
# about equal.
#
# Better than a good preemption is none. The **watermark** is a part of the pool that admission leaves
# alone, so that those who run can grow:

# %%
marked = []
for watermark in (0.0, 0.3):
    config = EngineConfig(block_size=4, num_blocks=16, preemption="recompute", watermark=watermark)
    run = kv.run_under_pressure(model, prompts, config, max_tokens=14)
    marked.append(run)
    print(
        f"watermark {watermark:3.0%}: {run.num_preemptions} preempted, {run.recomputed_tokens:2} tokens"
        f" computed again, {len(run.trace.steps)} steps"
    )
spared = marked[0].recomputed_tokens - marked[1].recomputed_tokens
longer = len(marked[1].trace.steps) - len(marked[0].trace.steps)
print(f"the mark spares {spared} tokens of prefill, for {longer} more steps")

# %% [markdown]
# A mark makes the last request wait where it could have begun: less is computed twice, and it may
# take more steps. Too low a mark wastes work, too high a mark wastes room.
#
# ## 5. The ledger
#
# Every byte of the swap run, step by step. Find the step in which a request moves to host memory. Then
# compare the rows: weights stay, activations come and go, and the KV pool is where the action is.
# (This pool is tiny on purpose. In a server the pool is all memory that the weights leave over.)

# %%
wb.MemoryLedger(runs["swap"].trace, step=0)

# %% [markdown]
# ## 6. "Split the KV by heads to make blocks"
#
# This is how paging is sometimes explained. Try it: `kv_head_groups=3` stores each KV head of this
# model in a tensor of its own. Beside it, what paging really cuts: the tokens.

# %%
cuts = {
    "heads in 1 group, blocks of 16": {"kv_head_groups": 1, "block_size": 16, "num_blocks": 8},
    "heads in 3 groups, blocks of 16": {"kv_head_groups": 3, "block_size": 16, "num_blocks": 8},
    "heads in 1 group, blocks of 4": {"kv_head_groups": 1, "block_size": 4, "num_blocks": 32},
}
for name, knobs in cuts.items():
    with pdlab.Engine(model, EngineConfig(**knobs)) as cut:
        cut.generate(prompts[0], SamplingParams(max_tokens=6, ignore_eos=True))
        parts = cut.kv_cache.tensors
    step = cut.trace.steps[-1]
    print(f"{name}: {len(parts)} tensors of {list(parts[0].shape)}")
    print(f"    {step.kv_wasted_bytes / 1e3:.0f} kB of taken slots are empty   measured")

# %% [markdown]
# (The shape is [layers, blocks, tokens of a block, KV heads, head_dim], and there is one such tensor for
# K and one for V in each group.) Cutting along the heads changes nothing for the empty slots: each
# group has the same blocks, with the same holes, in narrower tensors. It is what **tensor
# parallelism** does, to place the heads on several devices. Paging cuts along the *tokens*, because
# tokens are what arrives one by one.
#
# ## 7. Real traffic
#
# Back to the traces. How much of a prompt is found depends on how long its blocks survive, and so
# on the size of the pool. `mooncake-conv-like` has what we need: conversations whose turns repeat
# the ones before (synthetic, after the trace of Mooncake, Qin et al. 2025, with blocks of 512).

# %%
from statistics import median

conversations = read_trace(find_trace("mooncake-conv-like"))
rates = kv.hit_rate_points(conversations, [250, 500, 1000, 2000, 4000, None])
wb.show(wb.figures.hit_rate_by_blocks(rates))

# %%
[endless] = kv.under_bar(
    "replay", lambda: replay_cache(conversations, num_blocks=None, baselines=False)
)
running = endless.taken_slots / 512
most = endless.block_hit_rate
enough = next(count for count, rate in rates if count is None or rate >= 0.9 * most)
print(f"the requests that run hold {running:.0f} blocks, mean over time   simulated")
print(f"an endless cache finds {most:.1%} of all blocks of the prompts   simulated")
if enough:
    print(f"nine tenths of that takes {enough:,} blocks, {enough / running:.0f} times as many")
print(f"time between two turns: {median(kv.turn_gaps_s(conversations)):.0f} s (median)   counted")

# %% [markdown]
# A hit is only a hit if the block is still there when the next turn comes, and people take their time.
# (In the published trace, which is denser, the median is two minutes.) So a prefix cache wants far more
# room than the requests that run, and that is why servers add host memory and disks behind the pool.
# Even then most blocks are new. In the *published* trace an endless cache finds 36.6% of them, when we
# replay it, and the synthetic one was made to match that. For other traffic the number is another one.
#
# ### "From 48 to 19 GB: 60% less"
#
# This number goes around as the gain of separating prefill from decode. Separation cannot do it: it
# holds the weights *twice*. Which techniques could? One knob a bar, with Llama 3.1 8B's KV
# shape, on the trace of section 2. The bars are KV alone, and what is taken on average over time. What do
# you expect of paging and int8 together?

# %%
guess.predict(
    "Paging and int8 KV, against reserving the next power of two: how much less KV memory?",
    key="less",
    unit="%",
)

# %%
bars = kv.savings(requests, shape("llama-8b"))
source = (
    "simulated: azure-conv-like replayed without a memory limit; Llama 3.1 8B, bf16 unless noted"
)
wb.show(growth.savings(bars, source, baseline="next power of two"))

# %%
longest, power, paged, int8 = (bar.num_bytes for bar in bars)
needed = {bar.label: bar.needed_bytes for bar in bars}
print(f"paging, against the longest          {1 - paged / longest:4.0%} less   simulated")
print(f"paging, against a power of two       {1 - paged / power:4.0%} less   simulated")
ratio = needed["paged"] / needed["next power of two"]
print(f"    memory that is always enough     {1 - ratio:4.0%} less   simulated")
print(f"int8, against bf16                   {1 - int8 / paged:4.1%} less   counted, with scales")
print(
    f"int8, against fp32                   {1 - int8 / paged / 2:4.1%} less   counted, with scales"
)
guess.compare("less", 100 * (1 - int8 / power), "%", kind="simulated")

# %% [markdown]
# Two plain means, then: hand memory out in blocks, and use fewer bytes for each number. But mind what is
# counted. "From 48 to 19 GB" is all of a GPU's memory, weights included. Put the weights beside the KV:

# %%
weights = weight_bytes(shape("llama-8b"), 2)
print(f"weights, bf16: {weights / 1e9:.1f} GB")
for label, before in (("the longest", longest), ("a power of two", power)):
    print(
        f"from {label:14} {(weights + before) / 1e9:5.1f} GB to {(weights + int8) / 1e9:.1f} GB:"
        f" {1 - (weights + int8) / (weights + before):3.0%} less in all   simulated"
    )

# %% [markdown]
# The same saving is a smaller part of a larger whole. How near to 60% in all one gets depends on how much
# of the memory was KV, and how badly it was packed before. Separation takes no part in it.
#
# Mind the yardstick, too: "75% less" for int8 is counted from fp32, and servers commonly keep KV in 16
# bits. From bf16 it is about half. Whether a smaller format is worth its error is the question of the
# [next lesson](04_kv_formats.ipynb).
#
# The real traces are public. Give `read_trace` a path, or ask the command line:
# `pdlab replay TRACE --cache-only --blocks infinite`.
#
# ## Exercises
#
# **1. From position to slot.** Where does the K of a position lie? Return the slot.


# %%
def slot(block_table, position, block_size):
    # BEGIN SOLUTION
    return block_table[position // block_size] * block_size + position % block_size
    # END SOLUTION


# %%
@wb.check("from position to slot")
def slot_check():
    import torch

    yours = slot([5, 0, 7, 9], 13, 4)
    hint = "position 13 is in logical block 3, second of its slots"
    assert yours == 37, f"{hint}; you returned {yours!r}"
    with pdlab.Engine(model, pdlab.EngineConfig(block_size=4, num_blocks=16)) as small:
        name = small.submit("One, two, three, four, five, six,", pdlab.SamplingParams(max_tokens=2))
        small.step()
        table = small.trace.steps[0].residents[0].block_table
        for position, own in enumerate(small.read_kv(name).unbind(2)):
            block, offset = divmod(slot(table, position, 4), 4)
            there = small.kv_cache.read([block], 4)[:, :, offset]
            assert torch.equal(there, own), f"position {position} is not in block {block}"


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# return block_table[position // block_size] * block_size + position % block_size
# ```
#
# The check looked up every position of a real prompt in the engine's own memory.
#
# </details>

# %% [markdown]
# **2. The waste of a block size.** Lengths are spread so evenly that every filling of the last block,
# from 1 to `block_size` tokens, is as likely as any other. A request holds `mean_tokens` tokens. Which
# part of its slots is empty, on average?


# %%
def waste(mean_tokens, block_size):
    # BEGIN SOLUTION
    empty = (block_size - 1) / 2
    return empty / (mean_tokens + empty)
    # END SOLUTION


# %%
@wb.check("waste of a block size")
def waste_check():
    from pdlab.workbench import kv_experiments as kv
    from pdlab.workload.traces import find_trace, read_trace

    yours = waste(100, 1)
    assert yours == 0, f"a block of one token is never partly empty; you returned {yours!r}"
    yours = waste(90, 21)
    hint = "10 of 100 slots: 0 to 20 are empty, 10 on average"
    assert abs(yours - 0.1) < 1e-9, f"{hint}; you returned {yours!r}"
    for point in kv.waste_by_block_size(read_trace(find_trace("azure-conv-like")), [16, 64]):
        yours = waste(point.tokens_held, point.block_size)
        print(f"blocks of {point.block_size}: {yours:.2%} predicted, {point.waste:.2%} simulated")
        assert abs(yours - point.waste) < 0.05 * point.waste, "the replay says something else"


# %% [markdown]
# <details><summary>Solution</summary>
#
# 0 to `block_size - 1` slots are empty, each as likely as the others: `(block_size - 1) / 2` on average.
#
# ```python
# empty = (block_size - 1) / 2
# return empty / (mean_tokens + empty)
# ```
#
# Half a block for each request, whatever its length. That is all that paging wastes.
#
# </details>

# %% [markdown]
# **3. The longest cached prefix.** `known` is a set of prefixes, each a tuple of *all* tokens up to the
# end of a full block. How many tokens of `token_ids` need not be computed? Two rules: stop at the first
# block that is not known, and leave at least one token to compute (its logits are needed).
# (A slice beyond the end is the whole list: stop there.)


# %%
def cached_tokens(token_ids, block_size, known):
    # BEGIN SOLUTION
    found = 0
    while found + block_size <= len(token_ids) and tuple(token_ids[: found + block_size]) in known:
        found += block_size
    return min(found, len(token_ids) - 1)
    # END SOLUTION


# %%
@wb.check("the longest cached prefix")
def cached_tokens_check():
    from pdlab.workbench import kv_experiments as kv

    endless = "your loop goes on: a slice beyond the end is the whole list, so stop at the end"
    prefixes = [(1, 2), (1, 2, 3, 4), (7, 8, 3, 4)]
    for token_ids, right, hint in (
        ([1, 2, 3, 4, 5], 4, "both full blocks are known"),
        ([1, 2, 9, 9, 5], 2, "the second block is another one"),
        ([7, 8, 3, 4, 5], 0, "without its beginning, an end is of no use"),
        ([1, 2, 3, 4], 3, "one token is always left to compute"),
    ):
        yours = cached_tokens(token_ids, 2, kv.AskedSet(prefixes, 100, endless))
        assert yours == right, f"{token_ids}: {hint}; you returned {yours!r}"
    ids = list(range(100, 113))
    with pdlab.Engine(model, pdlab.EngineConfig(block_size=4)) as small:
        once = pdlab.SamplingParams(max_tokens=1)
        found = [small.generate(ids, once)[0].metrics.num_cached_tokens for _ in range(2)]
    yours = cached_tokens(ids, 4, kv.AskedSet([tuple(ids[:n]) for n in (4, 8, 12)], 100, endless))
    assert found == [0, yours], f"the engine found {found[1]} of 13 tokens; you returned {yours!r}"


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# found = 0
# while found + block_size <= len(token_ids) and tuple(token_ids[: found + block_size]) in known:
#     found += block_size
# return min(found, len(token_ids) - 1)
# ```
#
# Writing whole prefixes into the set is the chain, spelled out. A real cache stores a hash of the
# parent and the block's own tokens instead, so that a lookup costs a block and not a whole prefix.
#
# </details>

# %% [markdown]
# ## What production systems do
#
# * **vLLM** brought paging to KV (Kwon et al. 2023, *Efficient Memory Management for Large Language
#   Model Serving with PagedAttention*), and names blocks by a chain of hashes (its documentation,
#   *Automatic Prefix Caching*). Its V1 engine preempts by recomputing (*Optimization and Tuning*).
# * **SGLang** keeps prefixes in a radix tree instead of a hash table and evicts its least recently
#   used leaves (Zheng et al. 2024, *SGLang*, section on RadixAttention).
# * **TensorRT-LLM** has a pool of blocks, finds them in a search tree, and can move blocks to host
#   memory before it would evict them (its documentation, *KV Cache System*).
# * **Mooncake** makes one large cache of the host memory and disks of a whole cluster, and looks at
#   where a prefix lies, and at the load, to choose who serves a request (Qin et al. 2025, FAST).
#
# **Next:** [04 KV formats](04_kv_formats.ipynb): fewer bytes for each number, and what they cost.

# %%
engine.close()
shared.close()
