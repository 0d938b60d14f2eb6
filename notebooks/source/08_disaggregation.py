# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 08 Disaggregation: one machine reads, another one writes
#
# **The question.** Four people are reading answers as they are written. A fifth one pastes a long
# document. Lesson 07 cut it into chunks, so that nobody stalls for long. What if the document went
# to *another machine*, which does nothing but read prompts? Who gains, who pays, and what has to
# travel between the two?
#
# You will give one of your cores to prompts and one to outputs, measure what is gained and what is
# lost, watch K and V travel layer by layer, fill the receiver's memory, kill a worker with -9 in
# the middle of an answer, choose how many workers read and how many write, and let a simulator draw
# the map of who wins where.
#
# *About 90 minutes. Before this: [07 Scheduling](07_scheduling.ipynb).*

# %%
import pdlab
from pdlab import workbench as wb

guess = wb.Predictions()
wb.glossary(
    "PD disaggregation", "interference", "prefill worker", "decode worker", "router",
    "KV transfer", "TTFT", "ITL",
)  # fmt: skip

# %%
model = pdlab.load("smollm2-135m")

# %% [markdown]
# ## 1. Who pays for a long prompt?
#
# Everything in this section really runs, in processes of their own. Four plans for the same cores:
#
# * **one engine** has all cores. A step may hold a whole prompt beside the decodes.
# * **one engine, chunks**: the same with prompts cut into chunks of 64 (lesson 07).
# * **two engines**: a process on each half of the cores. Each serves whole requests.
# * **disaggregated**: the *same two processes*. But one only reads prompts, and hands their K and V
#   to the other one, which only writes.
#
# The next cell starts four processes, each with a model of its own (some seconds), and measures
# your machine's pace. `p0` is the first worker that reads prompts, `d0` the first that writes; who
# does both is called `d0`, too.

# %%
from pdlab.workbench import disagg_experiments as lab

plans = lab.Plans(model)
step_s = plans.decode_step_s()
print(f"one engine, a step of four chats: {step_s * 1e3:.0f} ms   measured")
for name, hosts in plans.groups.items():
    for host in hosts:
        cores = ", ".join(map(str, host.spec.cores or ["any"]))
        print(f"{name:25} process {host.process.pid}, {host.name} on core {cores}")
scene = lab.scene(step_s)
for label, r in zip(lab.LABELS, scene, strict=True):
    print(
        f"{label:9} comes at {r.arrival_s:4.1f} s: {r.num_prompt_tokens:3} tokens of prompt,"
        f" {r.num_output_tokens:2} to be written"
    )

# %%
guess.predict(
    "The longest gap in a chat, disaggregated, is so much of that with one engine",
    ["more than half of it", "a fifth to a half", "less than a fifth"],
    key="gap",
)

# %%
guess.predict(
    "And the document's first token comes, compared with one engine,",
    ["sooner", "at about the same time", "later"],
    key="document",
)

# %%
runs = plans.play(scene)
title = "A document comes while four chats are being written"
wb.show(wb.figures.token_rows(runs, lab.LABELS, title))

# %% [markdown]
# Read it panel by panel. A tick is a token that a reader sees.
#
# * *One engine*: the document is computed in one step, and in that step nobody else gets a token.
#   All four chats stand still together. This is **interference**.
# * *Chunks*: no long silence, but the ticks are further apart while the document is read.
# * *Two engines*: the document fell to one of the two. Its chats stand still, for as long or longer,
#   since half of the cores reads it. The other two chats do not notice.
# * *Disaggregated*: no prompt is ever computed where the chats are written. They hardly notice. (A
#   little: both cores share one memory.) Before the second tick of each row K and V travelled. You
#   cannot see it, and that is the point.

# %%
outcomes = {name: lab.Outcome.of(run) for name, run in runs.items()}
print("                      gap, median   longest   document's first token   measured, once")
for name, o in outcomes.items():
    print(
        f"{name:19} {o.chat_p50_s * 1e3:10.0f} ms {o.chat_gap_s * 1e3:6.0f} ms"
        f" {o.document_ttft_s:20.2f} s"
    )
one, apart = outcomes[lab.ONE], outcomes[lab.APART]
part = apart.chat_gap_s / one.chat_gap_s
answer = "more than half of it" if part > 0.5 else "a fifth to a half"
answer = answer if part > 0.2 else "less than a fifth"
chunks = apart.chat_gap_s / outcomes[lab.CHUNKS].chat_gap_s
guess.compare("gap", answer, note=f"To be exact: {part:.0%}; of that with chunks {chunks:.0%}.")
later = apart.document_ttft_s / one.document_ttft_s
answer = "sooner" if later < 0.9 else "later" if later > 1.1 else "at about the same time"
guess.compare("document", answer, note=f"After {later:.2f} times as long.")

# %%
wb.LatencyView({name: run.serving for name, run in runs.items()}, metric="itl")

# %% [markdown]
# (How many of all gaps were no longer than so much. Move the limit on the pace.) The fair rival of
# the split is not the engine that knows no chunks, but the one that does, and against it the gain is
# much smaller. Smaller chunks still would bring the two closer, and the document's first token later.
#
# And who pays? The document. One engine reads it with all cores, the prefill worker has half of
# them. How much that costs depends on how much faster your machine reads with all cores: with two
# shared ones, seldom twice. And a transfer comes on top (we come to that). So "disaggregation
# improves TTFT" is no law of nature: for *one* prompt it makes it worse, or changes nothing. What it
# can improve is the TTFT of prompts that would have waited behind *decodes*.

# %%
wb.show(wb.figures.cluster_timeline(runs[lab.APART], "Disaggregated: one reads, one writes"))

# %% [markdown]
# ### And the throughput?
#
# Sixteen short questions (16 tokens) with longer answers (24), all at once. There is next to nothing
# to read: the prefill worker is soon through with it. And then?

# %%
guess.predict(
    "Output tokens a second, disaggregated divided by two engines (1: as many)",
    key="throughput",
    unit="times",
)

# %%
crowd = plans.play(lab.many_answers(), [lab.ONE, lab.TWO, lab.APART], for_fit=True)
results = {name: lab.Outcome.of(run) for name, run in crowd.items()}
print("                       output   first token, median   its workers are busy   measured, once")
for name, o in results.items():
    busy = ", ".join(f"{each:.0%}" for each in lab.busy(crowd[name]))
    print(f"{name:16} {o.tokens_per_s:6.1f} tokens/s {o.ttft_p50_s:13.2f} s {busy:>22}")
ratio = results[lab.APART].tokens_per_s / results[lab.TWO].tokens_per_s
print(f"disaggregated / two engines: {ratio:.2f}")

# %% [markdown]
# A single run on a machine that does other things, too: run the cell again, and see how much the
# ratio moves. So here is the same comparison, longer, three times in turns, on a machine that had
# nothing else to do, as `pdlab bench disaggregation` makes it:

# %%
recorded, overlaps, line = lab.recorded_bench()
of = {(plan.workload, plan.plan): plan for plan in recorded}
rates = [of["many answers", name].tokens_per_s[0] for name in (lab.APART, lab.TWO)]
guess.compare("throughput", rates[0] / rates[1], "times", kind="recorded")
wb.show(wb.figures.plans_figure(recorded, line))
for (workload, name), plan in of.items():
    print(f"{workload + ',':18} {name:18} first token, median: {plan.ttft_p50_s[0]:.2f} s")

# %% [markdown]
# The two workloads give opposite answers.
#
# * With **many answers** one side soon idles, and the split makes fewest tokens. This is the price: it
#   computes the *same* tokens, on cores that may no longer help each other, holds the weights twice,
#   and adds a transfer. (Why is it not half of the rate? Writing waits for memory, which both cores
#   share: one that is alone gets more of it. On two GPUs, each with a memory of its own, it would
#   be half.)
# * With **a document among chats** both sides have work, and the split even makes most tokens: no
#   step is held up by another kind of work, and two processes with a core each get more done than
#   one with two threads that wait for each other.
#
# vLLM's documentation says it in capitals: "Disaggregated prefill DOES NOT improve throughput." It
# adds no arithmetic and no bandwidth. Then why does everybody build it? Because users do not buy
# tokens a second. They buy an answer that begins soon *and* flows, and section 7 shows where the
# split serves more of those.
#
# ## 2. What travels
#
# When the prompt is read, its K and V are on the wrong worker. They are copied: 2 (K and V) x
# layers x KV heads x head_dim x bytes of an element, for each token. Nothing else has to travel,
# but one token (the first, which the prefill worker has drawn) and the state of the sampler.

# %%
wb.glossary("KV transfer", "link", "push, pull", "layer-wise transfer", "reservation", "lease")

# %%
guess.predict(
    "Qwen3-8B in bf16 has 36 layers, 8 KV heads of 128. K and V of one token:",
    key="kib",
    unit="KiB",
)

# %%
label_of = lab.labels_of(runs[lab.APART])
for place, t in enumerate(runs[lab.APART].transfers):
    print(
        f"{label_of[t.request_id]:9} {t.num_tokens:4} tokens, {t.num_bytes:11,} bytes:"
        f" {t.num_bytes / t.num_tokens / 1024:.0f} KiB a token, there"
        f" {lab.waited_s(runs[lab.APART], place) * 1e3:4.1f} ms after the prompt's end"
    )
print()
for shape in lab.shapes(model):
    kib = shape.bytes_per_token / 1024
    gb = 4096 * shape.bytes_per_token / 1e9
    print(f"{shape.name:29} {kib:5.0f} KiB a token, 4,096 tokens: {gb:5.2f} GB   by the formula")
guess.compare("kib", lab.shapes(model)[2].bytes_per_token / 1024, "KiB", kind="counted")

# %% [markdown]
# The bytes are those of the formula, to the last one. And they are many: our smallest of models
# moves 24 MB for a document of 512 tokens. (What the receiver has in its prefix cache stays at
# home. And where the two sides keep K and V in different formats, the smaller one travels.)
#
# ### What a link costs
#
# Between two processes of one machine this takes some milliseconds. Between two machines there is a
# **link**. Here is a pair with one of 1 Gb/s between, which is *simulated*: what arrives is held
# back until such a link would have brought it. Everything else is real. Two ways to send:
#
# * **push**: the whole prompt, once it is computed.
# * **stream**: each layer leaves as soon as it is computed, while the next one is being computed.
#   Then the receiver must have promised room *before* the prompt is begun: a **reservation**.

# %%
from pdlab.disagg import LINKS

ethernet = LINKS["1GbE"]
num_bytes = lab.DOCUMENT_TOKENS * model.config.kv_bytes_per_token(4)
print(f"{num_bytes / 1e6:.1f} MB take {ethernet.transfer_s(num_bytes) * 1e3:.0f} ms by bandwidth;")
print(f"to compute the prompt took {lab.prefill_s(runs[lab.APART]) * 1e3:.0f} ms in section 1")
guess.predict(
    "Layer by layer, the receiver is spared so much of its wait",
    ["less than half", "half to 90 %", "more than 90 %"],
    key="hidden",
)

# %%
slow = lab.SlowPair(model, ethernet)
sent = slow.send()
waits = {way: lab.waited_s(run) for way, run in sent.items()}
for way, wait_s in waits.items():
    print(
        f"{way:6}: {wait_s * 1e3:5.0f} ms from the end of the prompt until the receiver goes on"
        "   measured, link simulated"
    )
hidden = 1 - waits["stream"] / waits["push"]
answer = "less than half" if hidden < 0.5 else "half to 90 %" if hidden < 0.9 else "more than 90 %"
guess.compare("hidden", answer, note=f"To be exact: {hidden:.0%}.")

# %%
wb.TransferView(sent)

# %% [markdown]
# Time 0 is the end of the prompt's last step. Above, the sender's steps; each line below is a
# parcel on its way; then the receiver's steps. With *push* the link sleeps while the prompt is
# computed, and the receiver waits while the link works. With *stream* both happen at once, and what
# is left is the last layer: it cannot leave before it is computed. (Even of that a part is hidden:
# after the last layer's K and V, its MLP and the logits are still to be computed.)
#
# So what counts is not how long the transfer takes, but how much of it is *left over*: the last
# layer, as long as the link keeps up with the layers; and if it does not, it is the link that counts
# (exercise 2 finds the formula). A document of 4,096 tokens, Qwen3-8B on an H100, at the peak of its
# arithmetic (nothing real reaches it) and at half of it:

# %%
from pdlab.costmodel import StepShape, causal_pairs

h100, _ = lab.devices("h100-sxm", "l4")
shape = lab.shapes(model)[2]
prefill_s = h100.step_s(StepShape(1, 4096, causal_pairs(0, 4096), 0, 0))
print(
    f"{shape.name}; prefill {prefill_s * 1e3:.0f} ms, or {2 * prefill_s * 1e3:.0f} ms   predicted"
)
print("link       all of it   left over, layer by layer   at half of the peak")
sizes = shape.config.num_layers, 4096 * shape.bytes_per_token
for fast, slow_prefill in zip(
    lab.exposed(prefill_s, *sizes), lab.exposed(2 * prefill_s, *sizes), strict=True
):
    print(
        f"{fast.link.name:9} {fast.whole_s * 1e3:8.1f} ms {fast.layered_s * 1e3:18.1f} ms"
        f" {slow_prefill.layered_s * 1e3:18.1f} ms"
    )

# %% [markdown]
# (PCIe is the bus inside a machine, NVLink are cables between its GPUs.) Between 10 and 100 Gb/s lies
# the difference between "the network is the bottleneck" and "the network is free". That is why
# production systems use RDMA (network cards that write into another machine's memory without its
# processor) and NVLink, and why DistServe, where the network is slow, puts what has to exchange K and
# V into one machine (Zhong et al. 2024, section 4.2). What counts is the bytes of K and V per second of prefill. So longer prompts do not
# make it worse, faster GPUs do, and GQA makes it better: a token of Llama-2-7B has 3.6 times the
# bytes of one of Qwen3-8B.
#
# ## 3. When the receiver is full
#
# The decode worker of this pair has room for 576 tokens. Four prompts of 240 come at once, each
# with 16 tokens to be written. Two fit. Where do the others wait? (The prefill worker takes two of
# them in a step.)

# %%
guess.predict(
    "With stream, the third prompt",
    ["is computed, and then waits for room", "waits for room, and then is computed",
     "is refused", "pushes another one out"],
    key="room",
)  # fmt: skip

# %%
full = slow.crowd()
slow.close()
print("                 begun   first token   second token   measured, link simulated")
for way, run in full.items():
    for number, each in enumerate(lab.Room.of(run), start=1):
        print(
            f"{way:6} prompt {number} {each.queue_s:5.2f} s {each.ttft_s:10.2f} s"
            f" {each.ttft_s + each.first_gap_s:12.2f} s"
        )
third = lab.Room.of(full["stream"])[2]
first_room = third.queue_s > third.first_gap_s
answer = "waits for room, and then is computed"
guess.compare("room", answer if first_room else "is computed, and then waits for room")

# %%
for way, run in full.items():
    wb.show(wb.figures.cluster_timeline(run, f"{way}: four prompts, room for two"))

# %% [markdown]
# Nobody is refused, nothing overflows. The queue only stands in different places, and this is
# **backpressure**: a full receiver makes the sender wait, instead of letting memory burst.
#
# * *stream* promises room first. The third prompt is not begun until somebody has finished, and
#   meanwhile the prefill worker idles.
# * *push* computes it at once. Its reader sees the first token early, and then nothing for long:
#   the second one waits for room. The K and V stay in the prefill worker's memory: *that* is the
#   queue, and it can fill up, too.
#
# Compare the second tokens. Prompts 1 and 2, for whom there is room, are ahead with *stream*: their K
# and V left while they were computed, and with push they wait until the sender has a moment between
# two steps. Prompts 3 and 4 are ahead with *push*: they were computed while they waited. And look at
# what a benchmark would say that reports TTFT alone: with push the first tokens of prompts 3 and 4
# come early, and nobody can do anything with them. (SGLang has room allotted before the prefill, so that none is computed in vain. DistServe
# lets the decode side pull when it can: the prefill side's memory is the queue, which its authors
# want for bursts.)
#
# Either way, memory at the prefill worker that nobody fetches would be lost for ever if its reader
# had gone: so it is kept under a **lease**, which the router renews for as long as somebody cares.
#
# ## 4. kill -9
#
# One worker reads, two write. When each of four answers has six tokens, one of the two writers is
# ended with SIGKILL: no farewell, its memory is gone, and so are the K and V of what it wrote. Two
# answers take the best token, two are drawn at temperature 0.8, each with a seed. All engines run in
# `exact` mode, as in lesson 01.

# %%
wb.glossary("recompute", "failover", "exactly once")

# %%
guess.predict(
    "How many tokens does a reader see twice?",
    ["none", "the last one", "all six"],
    key="twice",
)

# %%
guess.predict(
    "The dead worker's answers go on with",
    ["the tokens they would have had anyway", "other tokens, as good as those",
     "an error"],
    key="tokens",
)  # fmt: skip

# %%
expected = lab.undisturbed(model)  # one engine in this process, which nobody kills
killed = lab.kill_one(model, "d0")
for reader, output, where in zip(killed.readers, expected, killed.where, strict=True):
    print(f"on {where}: …{reader.text_with_mark!r:.75}")
    same = reader.token_ids == output.token_ids
    print(f"    {len(reader.token_ids)} tokens; the same as undisturbed: {same}   measured")
print("‖: the moment of the kill")
same = all(r.token_ids == o.token_ids for r, o in zip(killed.readers, expected, strict=True))
guess.compare("tokens", "the tokens they would have had anyway" if same else "other tokens")
guess.compare("twice", "none" if same else "some", kind="counted")

# %%
wb.show(wb.figures.recovery_figure(killed.run))
print(f"noticed {killed.noticed_s * 1e3:.0f} ms after the kill: {killed.failure.reason}")
for seconds in killed.recovery_s():
    print(f"went on {seconds * 1e3:.0f} ms after that   measured")

# %%
wb.show(wb.figures.cluster_timeline(killed.run))

# %% [markdown]
# How is that possible? The router keeps nothing but *tokens*: the prompt, and what it has handed
# on. That is enough. It sends both to the prefill worker as one longer prompt, K and V are computed
# anew (and the beginning is often still in its prefix cache), and travel to the other writer. Three
# things make it right:
#
# * **Handed on once.** A token counts when the router has it. What the dead worker had computed and
#   not yet told is computed again, and nobody ever saw it.
# * **The dice know their place.** Each draw depends on the seed and the *position*, not on how many
#   were drawn before on this worker (lesson 06), so the same number falls again.
# * **Arithmetic.** "The same tokens" needs the same logits. This run is in `exact` mode. In the
#   fast mode a prompt that is read at once and one that was written token by token differ in the
#   last bits, and a near tie may fall to the other side: still a good answer, but another one.
#
# What is *not* possible: to hide the gap. The reader waits until the loss is noticed (at once, if the
# operating system tells that a process has ended; after some missed signs of life, if a machine or
# a network is gone), and then for the recomputation; and everybody else shares what is left.
#
# Now you. *Start* takes some seconds; then answers are written without end, and each worker has a
# button that ends its process. (The same in large, for a classroom:
# [demos/pd_live.ipynb](demos/pd_live.ipynb).)

# %%
wb.LiveCluster(model)

# %% [markdown]
# *Half of the lesson lies behind you, and all that was measured. A good place for a break. (Run on
# from here without restarting: section 5 needs your two processes once more.)*
#
# ## 5. How many of each?
#
# Real clusters have many workers: 3P5D means three that read and five that write. A side keeps up
# as long as its workers together have more seconds than the requests need of it. The most gets
# through when both sides are equally busy.

# %%
wb.glossary("xPyD", "P:D ratio", "cost model", "role switch", "goodput", "SLO")

# %%
requests, usual = lab.mixed_requests(400), lab.Twin.recorded()
prompt, output = lab.mean_lengths(requests)
print(f"workload `mixed`: on average {prompt:.0f} tokens of prompt, {output:.0f} to be written")
by_model = lab.planned(usual, requests, 8)
times, batch = usual.times["d0"], by_model.batch
print(f"a prompt of {prompt:.0f} tokens takes {by_model.need.prefill_s:.2f} s, a step for {batch}")
print(f"answers at once takes {lab.decode_step_s(times, batch):.2f} s")
guess.predict("Of 8 such workers, so many should read", key="ratio", unit="workers")

# %% [markdown]
# First by this cost model alone: step times that were recorded elsewhere, with two threads. Then
# **corrected** by measurement: how long the steps of a run on *your* pair took, beside how long
# they should have taken.

# %%
rehearsal = plans.rehearse()
by_clock = lab.planned(usual, requests, 8, run=rehearsal)
for name, plan in (("cost model alone", by_model), ("corrected by measurement", by_clock)):
    print(
        f"{name:25} a request needs {plan.need.prefill_s:.2f} s of reading and"
        f" {plan.need.decode_s:.2f} s of writing: {plan.best}"
    )
guess.compare("ratio", by_model.best.num_prefill, "workers", kind="predicted")

# %% [markdown]
# If the two lines differ, then because the two sides are wrong by different factors. Reading is
# arithmetic, and half of the cores do half as much of it. Writing waits for memory, and one core
# often gets nearly as much out of memory as two. Then the correction moves the *ratio*, not only
# the rate. (Dynamo's planner did something like it, with TTFT and ITL for step times: its
# "correction factors", documented up to version 1.1.)
#
# Is the division right? To try eight workers for real we would need eight cores. The **simulator**
# has them. (From here to the end of this section all is on *recorded* step times, so that you see
# what we write about.)

# %%
capacity = lab.simulated_capacity(usual, requests, by_model.options)
print("carries, requests/s   predicted   simulated, 400 at once")
for each, rate in zip(by_model.options, capacity, strict=True):
    print(f"{each} {each.capacity_rps:24.2f} {rate:11.2f}")

# %% [markdown]
# The best division is found, though the peak is flat: 3P5D is as good. The rates themselves are off
# by up to a third, both ways. Less gets through where both sides should always be busy: at the
# beginning nobody writes, and at the end nobody reads. More, where several prompts share a step.
#
# The ratio is where most disappointed benchmarks go wrong: with 1P1D, and answers that take far
# longer than prompts, one GPU idles. To be level with chunked prefill, "the prefill workload v.s.
# decode workload should be roughly 1:1 (in terms of runtime)", wrote the author of vLLM's first
# disaggregation to somebody who had measured 1P1D with 1,024 tokens in and 50 out (vLLM issue
# 11345).
#
# ### Short prompts need not travel
#
# A question of 20 tokens is read in one short step. Is it worth a journey? **Conditional
# disaggregation** reads short prompts where they will be written (`local_prefill_tokens`), and only
# long ones elsewhere. On 1P1D, with the workload `mixed` at 70 % of what the pair can bear:

# %%
print("prompts read where they    sent to      TTFT, median         ITL")
print("are written                p0         chat   document     p99   simulated")
for each in lab.conditional(usual, (0, 32, 64, 128, 2000)):
    rule = f"up to {each.most_tokens} tokens" if each.most_tokens else "none"
    print(
        f"{rule:24} {each.num_moved:4} of {each.num_requests}"
        f" {each.chat_ttft_s:6.2f} s {each.document_ttft_s:7.2f} s {each.gap_p99_s * 1e3:6.0f} ms"
    )

# %% [markdown]
# A little of it relieves the prefill worker: chats need not queue behind documents any more, and
# begin sooner. It is not free: the gaps of those who are being read grow, and documents wait longer
# for room at a writer that has more to do. At 128 nobody gains, and in the end we are back at one
# engine that does everything, beside one that does nothing.
#
# ### Roles that follow the load
#
# No division is right all day. Documents in the morning, chats in the evening: a worker is a whole
# engine, so it can change sides. What it has begun, it brings to its end; a **role** only says what
# it is *sent*. The controller gives a worker of the idle side to the side that is behind. Four
# workers:

# %%
tide = lab.tide(usual)
slo = lab.tide_slo(usual)
print("60 s of documents (500 tokens in, 8 out), then 60 s of chats (20 in, 60 out), each as much")
print("as 0.7 times three of the four workers can bear on the busier side. In time: first token")
print(f"within {slo.ttft_s:.1f} s, {slo.tpot_s * 1e3:.0f} ms a token")
guess.predict(
    "Most requests are in time with",
    ["1P3D all the time", "2P2D all the time", "3P1D all the time", "roles that follow the load",
     "four whole engines, chunks of 128"],
    key="tide",
)  # fmt: skip

# %%
followed = {
    "1P3D all the time": lab.follow(usual, tide, 1, 3),
    "2P2D all the time": lab.follow(usual, tide, 2, 2),
    "3P1D all the time": lab.follow(usual, tide, 3, 1),
    "roles that follow the load": lab.follow(usual, tide, 2, 2, lab.CONTROL),
    "four whole engines, chunks of 128": lab.whole_engines(usual, tide, 4, 128),
}
shares = {name: each.in_time(slo) for name, each in followed.items()}
for name, share in shares.items():
    print(f"{name:34} {share:4.0%} in time   simulated")
for switch in followed["roles that follow the load"].switches:
    print(f"  {switch.time_s:5.1f} s: {switch.worker} is to {switch.role}; {switch.reason}")
guess.compare("tide", max(shares, key=shares.get), kind="simulated")

# %% [markdown]
# Look at the switches: a controller sees a queue only when it is there, so it always comes a little
# late. And one whose limits do not suit the machine is no better than none. Try `lab.CONTROL |
# {"most_wait_s": 10}`: `lab.follow(usual, tide, 2, 2, ...).in_time(slo)`.
#
# And look at the last row. Whole engines have no ratio that could be wrong, so they need no
# controller. With limits as wide as these, the simplest thing is the best one. Where is it not?
# First a question that you should have had for some time.
#
# ## 6. The simulator beside two real processes
#
# How right is it? The simulator has the *real* router and the *real* schedulers. What it makes up is
# how long steps, links and messages take. Its step times were fitted to your pair's steps in *other*
# runs; the scene of section 1 it has never seen.

# %%
twin = lab.Twin.of(plans)
for name, times in twin.times.items():
    print(f"{name}: {times.basis}, half of them within {times.median_error:.0%}")
simulated = twin.run(scene)
print("                         measured  simulated  ratio")
for pair in lab.compared(runs[lab.APART], simulated):
    print(f"{pair.name:23} {pair.measured_s:8.3f} s {pair.simulated_s:8.3f} s  {pair.ratio:5.2f}")
twins = {"measured": runs[lab.APART], "simulated": simulated}
title = "Disaggregated: two processes, and their twin in numbers"
wb.show(wb.figures.token_rows(twins, lab.LABELS, title))

# %% [markdown]
# Within 15 %, one may trust differences of a third. Off by more, and always to the same side? The
# simulator is an optimist: it does not know that two cores at work slow each other down, for they
# share the memory, nor what else your machine does. Then trust only which of two simulated numbers
# is larger. What was measured in turns:

# %%
for name, (ttft, tpot, turns) in lab.recorded_agreement().items():
    print(
        f"{name:11} simulated / measured: TTFT {ttft:.2f}, TPOT {tpot:.2f}"
        f"   recorded; turns: {turns}"
    )
plans.close()

# %% [markdown]
# For what comes now this tests the router, the schedulers and the links. The step times are others.
#
# ## 7. Who wins where
#
# Now machines that you do not have: four A100s of 80 GB with OPT-13B, by fits of step times that
# DistServe's authors published; conversations made up with the lengths and the gaps of a public
# trace (Azure 2023); 100 Gb/s between any two. Three ways to use them:
#
# * **prefill first**: four whole engines, prompts before decodes, as vLLM did at first.
# * **chunked**: four whole engines, chunks of prompts beside decodes (Sarathi-Serve), of 128 to 2,048
#   tokens.
# * **disaggregated**: 1P3D, 2P2D or 3P1D, by stream or push, whichever is best.
#
# Which one *wins* depends on what you promise. So promise everything: for each pair of limits, on
# the first token and on the pace, the map has the most requests a second and device of which 9 of
# 10 keep both. Ratio and chunk size are chosen anew for each tile. First with the pace as most
# benchmarks have it: the *mean* gap of a request, TPOT.

# %%
guess.predict(
    "By the mean gap, disaggregation wins where",
    ["the first token must come soon, and the pace may be slow",
     "the pace must be quick, and the first token may take its time",
     "both must be quick", "everywhere"],
    key="map",
)  # fmt: skip

# %%
found = wb.WinMap(pace="tpot")
guess.compare("map", lab.corner(found.shown, "disaggregated"), kind="simulated")
found

# %% [markdown]
# Move over the tiles: each says what every way gets, and which cluster of it. There is no winner,
# there is a *map*. TaiChi (Wang et al. 2025) finds the same: whole engines win where the first token
# is urgent and the pace is not, disaggregation where the pace is urgent and the first token is not,
# and between them "neither approach can deliver optimal goodput".
#
# But wait. In section 1 it was the *longest* gap that hurt. An answer of 200 tokens that stands still
# for two seconds has a mean gap that is only 10 ms longer! So the same runs again, with the gap that
# 99 of 100 of a request's gaps keep.

# %%
guess.predict(
    "By the p99 gap of a request, disaggregation wins where",
    ["the first token must come soon, and the pace may be slow",
     "the pace must be quick, and the first token may take its time",
     "both must be quick", "everywhere"],
    key="gaps",
)  # fmt: skip

# %%
by_gaps = wb.WinMap(pace="itl")
guess.compare("gaps", lab.corner(by_gaps.shown, "disaggregated"), kind="simulated")
by_gaps

# %% [markdown]
# Another map. *Prefill first* has all but vanished, for its stalls are no longer averaged away, and
# small chunks win where the first token has time. The split wins where *both* must be quick: chunks
# small enough for the gaps make the first token late, and it is the only way that needs none. Who
# tells you that one way is better has chosen a workload, limits, and a *statistic*.
#
# Press *compute* for other traffic (code completion: long prompts, short outputs), or a slow link.
#
# ### Claims, tested
#
# Much of what is written about disaggregation is true *somewhere*. Here are four claims, each at a
# pair of limits that suits it, and what the two maps have there.

# %%
claims = {
    "“it raises throughput”": (5.0, 0.25),
    "“it always improves TTFT”": (0.3, 0.25),
    "“it keeps the pace”": (5.0, 0.03),
    "“whole engines cannot work”": (1.0, 0.1),
}
modes = found.shown["modes"]
print(f"{'requests/s and device':27}{'limits':>18}" + "".join(f"{mode:>15}" for mode in modes))
for text, limits in claims.items():
    for each in (found, by_gaps):
        values = [lab.goodput_at(each.shown, mode, *limits) for mode in modes]
        name = f"{limits[0]:g} s, {limits[1] * 1e3:.0f} ms {each.pace}"
        print(f"{text:27}{name:>18}" + "".join(f"{value:15.2f}" for value in values))

# %% [markdown]
# (tpot: mean gap; itl: p99 gap. 0.00: at no rate that was tried, 9 of 10 requests kept both limits.)
#
# * *"It raises throughput."* With limits so wide that they hardly count, all devices may do
#   everything, and the split leaves some idle while others have the work. DistServe's famous "up to
#   7.4x more requests" is **goodput** per GPU within tight limits, at its best, over one system with
#   chunked prefill; over the vLLM of its day it was 2.0 to 5.7 times (section 6.2).
# * *"It always improves TTFT."* Only a part of the devices reads prompts. Where they come quickly,
#   they queue there. It serves more where a soon first token *and* short gaps are asked for.
# * *"It keeps the pace."* Yes, this is what it is for. (A p99 gap of 30 ms nobody can keep.)
# * *"Whole engines cannot work."* At moderate limits they serve more than the split does, in chunks
#   even if no gap may be long.
# * *"It cures the memory explosion"* is on no map: it holds the weights *twice*. Paging, GQA and
#   quantization save memory (lessons 03 and 04).
#
# What is not modelled here: 14% of the trace's prompts are longer than the model takes, and are cut;
# the fits are of one engine, and mixed steps are composed by us from its prefill and decode times;
# OPT-13B without GQA has 800 KiB of K and V a token. Take the shape of the map, not its third digit.
#
# ### All of it on one page
#
# Your machine again, and all knobs at once: how many read, chunks on either side, the link, the
# rate, the limits. Each move is simulated at once, for all three ways, with the step times that were
# fitted to your `p0` in section 5; *run it for real* puts real processes beside it. Can you find a
# rate and limits at which each of the three ways wins?

# %%
wb.PDLab(model, step_times=twin.times["p0"])

# %% [markdown]
# ## 8. Write on something cheaper?
#
# Reading needs arithmetic, writing needs memory bandwidth. So why not read on an expensive GPU and
# write on a cheap one, or on a CPU, or on the user's own laptop? Qwen3-8B, 1,024 tokens of prompt
# and 256 of output; rooflines of published ceilings, so nothing real is faster than this.

# %%
formats = {147456: "bf16", 73728: "int8", 524288: "bf16 without GQA (as Llama-2-7B)"}
l4 = lab.decode_elsewhere("h100-sxm", "l4", list(formats))
print(
    f"the prompt takes {l4.fast.ttft_s * 1e3:.0f} ms on an H100, {l4.slow.ttft_s * 1e3:.0f} ms on an"
)
print(f"L4; K and V in bf16 are {1024 * 147456 / 1e6:.0f} MB   predicted by rooflines")
guess.predict(
    "The last token is sooner than on the L4 alone, if the link has more than about",
    ["100 Mb/s", "1 Gb/s", "10 Gb/s", "100 Gb/s"],
    key="link",
)

# %%
wb.show(wb.figures.break_even_figure(l4, formats, "Read on an H100, write on an L4"))
least = l4.least_bandwidth_bytes_s[147456] * 8
known = {"100 Mb/s": 1e8, "1 Gb/s": 1e9, "10 Gb/s": 1e10, "100 Gb/s": 1e11}
note = f"To be exact: {least / 1e9:.2f} Gb/s."
guess.compare("link", lab.nearest(known, least), kind="predicted", note=note)

# %%
print("            pays        first token        last token              H100 must cost at least")
print(
    "write on    from       split   alone      split   alone   H100     one request   full memory"
)
for name in ("a100-80gb", "rtx-3090", "l4", "epyc-7763"):
    e = lab.decode_elsewhere("h100-sxm", name, [147456], [1.25e9])
    split = e.points[0].split
    print(
        f"{name:9} {e.least_bandwidth_bytes_s[147456] * 8 / 1e9:5.1f} Gb/s"
        f" {split.ttft_s:5.2f} s {e.slow.ttft_s:5.2f} s {split.e2e_s:8.2f} s {e.slow.e2e_s:5.2f} s"
        f" {e.fast.e2e_s:5.2f} s {e.least_price:8.1f} times"
        f" {lab.price_when_full('h100-sxm', name):7.1f} times"
    )
print(
    "read on an H100; 10 Gb/s between; the first columns for one request   predicted by rooflines"
)

# %% [markdown]
# (The CPU keeps weights in 16 bits and computes in fp32.) Two questions, and they are often mixed up:
#
# * **Against the slow device alone.** The first token always comes from the H100, sooner. The *last*
#   one is sooner by at most the time that reading takes on the slow device, and only if the link
#   brings K and V before the slow device could have computed them. Next to the time that writing
#   takes on the slow memory, that is little.
# * **Against the fast one alone**, the split makes no request that is alone any faster. It can only
#   make it *cheaper*: if a second of the H100 costs so many seconds of the other as the last columns
#   say. For equal batches that is the ratio of the two memory bandwidths. But a small memory holds
#   fewer requests at once, and then each of them pays more for the weights. An A100 beside an H100:
#   plausible, and Splitwise proposes it. A small GPU has to be far cheaper than its bandwidth says.
#   A CPU has memory, but hardly bandwidth.
#
# So "decode belongs on the CPU, or at the edge" is mostly unsound; sound cases are older GPUs
# (Splitwise, Patel et al. 2024), and parts of attention on the host's CPU when GPU memory is short
# (NEO, Jiang et al. 2025).
#
# ## Exercises
#
# **1. Seconds on the wire.** How long do K and V of a prompt take, as a whole, on a link? `config`
# has `num_layers`, `num_kv_heads` and `head_dim`; `link` has `bandwidth_bytes_s` and `latency_s`.


# %%
def wire_s(config, num_tokens, bytes_per_element, link):
    # BEGIN SOLUTION
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_per_element
    return num_tokens * per_token / link.bandwidth_bytes_s + link.latency_s
    # END SOLUTION


# %%
@wb.check("seconds on the wire")
def wire_check():
    from pdlab.disagg import LINKS, Link
    from pdlab.models.catalog import SHAPES

    qwen = SHAPES["qwen3-8b"]
    one = wire_s(qwen, 1, 2, Link(144 * 1024, 0.0))
    assert abs(one - 1) < 1e-6, f"one token is 144 KiB: 1 s at 144 KiB/s; you returned {one} s"
    late = wire_s(qwen, 4096, 1, Link(1e9, 0.25))
    assert abs(late - 4096 * 73728 / 1e9 - 0.25) < 1e-6, (
        f"4,096 tokens of 1 byte an element, at 1 GB/s, and once a latency of 0.25 s: not {late} s"
    )
    for name in ("1GbE", "100GbE", "NVLink4"):
        print(f"Qwen3-8B, 4,096 tokens, {name:8} {wire_s(qwen, 4096, 2, LINKS[name]):8.4f} s")


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_per_element
# return num_tokens * per_token / link.bandwidth_bytes_s + link.latency_s
# ```
#
# K *and* V, and the KV heads, not the query heads: with the 32 query heads of Qwen3-8B it would be
# four times as much.
#
# </details>

# %% [markdown]
# **2. What is left over.** A prefill takes `prefill_s`, its `num_layers` layers evenly. The link
# carries one layer after the other, `layer_s` seconds each. How long after the end of the prefill
# has the last layer arrived, if each leaves as soon as it is computed?


# %%
def left_over_s(prefill_s, num_layers, layer_s):
    # BEGIN SOLUTION
    link_waits = prefill_s + layer_s
    layers_wait = prefill_s / num_layers + num_layers * layer_s
    return max(link_waits, layers_wait) - prefill_s
    # END SOLUTION


# %%
@wb.check("what is left over")
def left_over_check():
    from pdlab.disagg import Link
    from pdlab.workbench import disagg_experiments as lab

    yours = left_over_s(1.0, 10, 0.05)
    hint = "a link that keeps up has only the last layer left"
    assert abs(yours - 0.05) < 1e-9, f"10 layers in 1 s, 0.05 s each: {hint}, 0.05 s, not {yours}"
    yours = left_over_s(1.0, 10, 0.2)
    hint = "layers queue: the first leaves at 0.1 s, ten take 2 s, so the last is there at 2.1 s"
    assert abs(yours - 1.1) < 1e-9, f"{hint}: 1.1 s are left, not {yours}"
    for bandwidth in (1e6, 1e7, 1e8):
        link = Link(bandwidth, name=f"{bandwidth / 1e6:.0f} MB/s")
        simulated = lab.recorded_wait_s(400, link, 30, 46080)
        mine = left_over_s(lab.recorded_prefill_s(400), 30, 400 * 46080 / 30 / bandwidth)
        print(f"{link.name:9} yours {mine:7.3f} s, simulated {simulated:7.3f} s")
        assert abs(mine / simulated - 1) < 0.05, "the simulator says otherwise"


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# link_waits = prefill_s + layer_s
# layers_wait = prefill_s / num_layers + num_layers * layer_s
# return max(link_waits, layers_wait) - prefill_s
# ```
#
# Either the link waits for every layer, or every layer but the first waits for the link.
#
# </details>

# %% [markdown]
# **3. How many read?** A request needs `prefill_s` of a worker that reads and `decode_s` of one
# that writes. Of `num_workers` workers, how many should read? At least one on each side; of two
# divisions that carry the same, take that with fewer to read.


# %%
def num_readers(prefill_s, decode_s, num_workers):
    # BEGIN SOLUTION
    def carries(x):
        return min(x / prefill_s, (num_workers - x) / decode_s)

    return max(range(1, num_workers), key=lambda x: (carries(x), -x))
    # END SOLUTION


# %%
@wb.check("how many read")
def readers_check():
    from pdlab.workbench import disagg_experiments as lab

    cases = ((1, 1, 8), (1, 3, 8), (2, 1, 3), (0.2, 5, 4), (5, 0.2, 4), (1, 4, 7), (3, 1, 5))
    for prefill_s, decode_s, n in cases:
        yours, best = num_readers(prefill_s, decode_s, n), lab.best_split(prefill_s, decode_s, n)
        rate = min(best / prefill_s, (n - best) / decode_s)
        hint = f"{prefill_s} s and {decode_s} s, {n} workers: {best} read, for {rate:.2f} a second"
        assert yours == best, f"{hint}; you returned {yours}"
    print(f"and the rounding costs (the most there can be: {1 / 3.6:.3f}):")
    for n in (2, 4, 8, 64):
        x = num_readers(1, 2.6, n)
        rate = min(x / 1, (n - x) / 2.6) / n
        print(f"{n:3} workers: {x}P{n - x}D, {rate:.3f} a second and worker")


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def carries(x):
#     return min(x / prefill_s, (num_workers - x) / decode_s)
#
# return max(range(1, num_workers), key=lambda x: (carries(x), -x))
# ```
#
# Rounding the share is not always best: what counts is the side that is short. With two workers a
# third is lost here, with 4 or 8 a tenth, with 64 hardly anything. "The two pools scale
# independently" is worth something only where there is something to divide.
#
# </details>

# %% [markdown]
# ## What production systems do
#
# | | K and V move | the queue stands | if something dies |
# |---|---|---|---|
# | **vLLM**, `NixlConnector` | decode reads blocks from prefill's memory | at prefill, under a lease of 30 s that heartbeats renew | `kv_load_failure_policy`: `fail` by default; `recompute` would prefill on the decode worker |
# | **SGLang**, Mooncake or NIXL | prefill sends, a chunk of the prompt at a time | at decode: room first, *PreallocQueue* (our `stream`) | a prefill server is given up after 2 health checks in a row, 5 s apart, have failed |
# | **Dynamo**, in front of vLLM, SGLang, TensorRT-LLM | as the engine behind does | at the router | *request migration*: the tokens already sent go along (our section 4); off unless `--migration-limit` is set |
# | **DistServe** (Zhong et al. 2024) | decode pulls | at prefill, wanted for bursts (4.3) | not handled |
# | **Splitwise** (Patel et al. 2024) | prefill pushes, layer by layer for long prompts | at the scheduler; a mixed pool for the tides | begun anew |
# | **Mooncake** (Qin et al. 2025, and arXiv 2407.00079) | through a store of K and V in all machines' CPU memory and SSDs | turned away *early*, before a prefill is wasted | |
#
# Sources: *NixlConnector Usage Guide*, *disaggregation/decode.py* and `prefill.py`, *Conditional
# Disaggregation* and *Request Migration*, and the papers.
#
# Why they do it: DistServe chooses each side's size and parallelism by a simulator, for goodput per
# GPU. DeepSeek reads on units of 4 machines and writes on units of 18, for the best layout of a
# mixture of experts differs between the phases (*V3/R1 Inference System Overview*, 2025): perhaps the
# strongest reason of all. Splitwise wants cheaper machines for writing: in its simulations H100s that
# read and A100s that write bring 1.18 times the throughput at 10% lower cost (6.2). Mooncake wants
# the prefix cache of a whole cluster: "59%~498%" more requests within limits.
#
# What ours lacks: Dynamo's conditional disaggregation also asks how much of the prompt is cached,
# where our `local_prefill_tokens` only asks how much is left. And between the two ways of this lesson
# there are more: TaiChi (Wang et al. 2025) has workers that lean to either side.
#
# **Next:** why a decode step is slow at all, and what kernels and smaller weights do about it.
