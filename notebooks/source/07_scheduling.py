# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 07 Scheduling: who runs, who waits
#
# **The question.** One machine, many users. Four chats are being answered. Somebody pastes a long
# document, and right after it three people ask short questions. Who has to wait, for how long, and
# who decided that?
#
# You will run this very scene on the engine under five plans, let a simulator predict each of them,
# send two hundred users to a machine in a blink, find the load at which everything falls apart, and
# write a policy of your own.
#
# *About 75 minutes. Before this: [01 Prefill](01_prefill.ipynb), [02 Decode](02_decode.ipynb), and
# for the part on the prefix cache [03 Paged KV](03_paged_kv.ipynb).*

# %%
import pdlab
from pdlab import EngineConfig
from pdlab import workbench as wb

guess = wb.Predictions()
wb.glossary(
    "scheduler", "static batching", "continuous batching", "chunked prefill", "token budget",
    "head-of-line blocking", "TTFT", "ITL",
)  # fmt: skip

# %%
model = pdlab.load("smollm2-135m")

# %% [markdown]
# ## 1. One machine, many users
#
# The engine works in **steps**. Each step is one pass through the model, over whatever tokens the
# scheduler puts into it: one token for each sequence that decodes, and known tokens of prompts. So
# who waits is decided anew at every step. First your machine's pace: four chats alone.

# %%
from pdlab.workbench import scheduling_experiments as lab

pace = lab.pace(model)
step_s = pace.decode_step_s(4)
print(f"a decode step of four chats: {step_s * 1e3:.0f} ms   measured, after a run to warm up")
scene = lab.scene(step_s)
for role, r in zip(scene.roles, scene.requests, strict=True):
    print(
        f"{role:9} comes at {r.arrival_s:5.2f} s: {r.num_prompt_tokens:3} tokens of prompt,"
        f" {r.num_output_tokens:2} to be written"
    )

# %% [markdown]
# (The times of arrival are counted in decode steps, so that the story is the same on a slow
# machine. Prompts are random tokens: only time is looked at here.) Four plans, one after the other:
#
# * **static**: those that wait when nothing runs are the batch, and nobody joins until all of it
#   has finished. So servers did it before Orca (2022).
# * **prefill first**: a step holds prompts *or* decodes, and prompts go first.
# * **decode first**: the same, but decodes go first (for 4 steps in a row at most: the engine's
#   `max_phase_steps`, which is 16 unless it is told otherwise).
# * **mixed**: a step holds all decodes, and beside them a **chunk** of a prompt, as long as there
#   is **budget**: here 64 tokens a step. (The other three have the usual 2,048, so the whole
#   document fits into one step of theirs.)

# %%
guess.predict(
    "Under which plan do the short questions have their first token soonest?",
    ["static", "prefill first", "decode first", "mixed, budget 64"],
    key="soonest",
)

# %%
guess.predict(
    "Prefill first: the longest gap between two tokens that a chat sees, in ordinary decode steps",
    key="gap",
    unit="steps",
)

# %%
plans = {
    "static": EngineConfig(num_blocks=128, batching="static"),
    "prefill first": EngineConfig(num_blocks=128, batching="prefill_first"),
    "decode first": EngineConfig(
        num_blocks=128, batching="decode_first", max_phase_steps=lab.PHASE_STEPS
    ),
    "mixed, budget 64": EngineConfig(num_blocks=128, max_num_batched_tokens=64),
}
played = lab.play(model, scene.requests, plans)

# %%
from pdlab.workbench.figures import scheduling as pictures

wb.show(pictures.lanes({n: played[n].run for n in plans}, scene.labels, "One scene, four plans"))

# %%
outcomes = {name: lab.Outcome.of(played[name].run, scene.roles) for name in plans}
print("longest waits in s     question  gap of  document  all   steps")
print("                       TTFT      a chat  TTFT      done         measured")
for name, o in outcomes.items():
    print(
        f"{name:22} {o.question_ttft_s:7.2f} {o.chat_gap_s:8.2f} {o.document_ttft_s:8.2f}"
        f" {o.done_s:7.2f} {o.num_steps:5}"
    )
soonest = sorted(outcomes, key=lambda name: outcomes[name].question_ttft_s)
guess.compare("soonest", soonest[0], note=f"From first to last: {'; '.join(soonest)}.")
guess.compare("gap", outcomes["prefill first"].chat_gap_s / step_s, "steps")

# %% [markdown]
# Read the picture row by row. A hollow bar waits, blue is prefill, orange is decode, and a thin
# dark line **stalls**: it is in the middle of its answer, and steps go by without it.
#
# * *Static* never disturbs a chat, and everybody else waits for the last of them to end.
# * *Prefill first* takes the document as soon as the step under way is over. The chats pay: no
#   token for as long as the whole document takes, and then the questions, which came meanwhile and
#   are prompts, too.
# * *Decode first* is polite to the chats until its 4 steps are over. Then they stall as well, for
#   the document and the questions together.
# * *Mixed* never stalls anybody: each chat gets a token in every step, though steps that carry a
#   chunk are longer. Nothing is for free: look how long the document takes, and the questions
#   behind it.
#
# Compare the questions under *mixed* and *prefill first*. Each of them is tiny, but the document
# came before, and with a budget of 64 there is no room beside its chunks. This is **head-of-line
# blocking**: the long one in front holds up all who stand behind it, and cutting it into chunks
# makes it stay in front for longer. On a quiet machine the modern plan is the worse one for them.
# (These are single runs. If your machine did something else during one of them, that is in its
# seconds, too, and the numbers of a row may not go with those of another.)
#
# ### The cure
#
# The budget says how much a *step* may hold. A second knob, `chunk_size`, says how much of *one
# prompt*. With chunks of 32 in a budget of 64, half of the room is left to those who stand behind.

# %%
guess.predict(
    "Chunks of 32: the slowest question's first token comes so many times sooner than before",
    key="cure",
    unit="times",
)

# %%
cured = {
    "mixed, chunks of 32": EngineConfig(num_blocks=128, max_num_batched_tokens=64, chunk_size=32)
}
plans |= cured
played |= lab.play(model, scene.requests, cured)
last = ("mixed, budget 64", "mixed, chunks of 32")
wb.show(
    pictures.lanes(
        {n: played[n].run for n in last}, scene.labels, "The same budget, smaller chunks"
    )
)

# %%
by_role = {name: lab.named(each.run, scene.labels) for name, each in played.items()}
before, after = (lab.Outcome.of(played[name].run, scene.roles) for name in last)
print(
    f"slowest question: {before.question_ttft_s:.2f} s, with the cure {after.question_ttft_s:.2f} s"
)
print(
    f"document:         {before.document_ttft_s:.2f} s, with the cure {after.document_ttft_s:.2f} s"
)
print(f"all done:         {before.done_s:.2f} s, with the cure {after.done_s:.2f} s   measured")
print(f"steps in all:     {before.num_steps}, with the cure {after.num_steps}   counted")
chunks = [lab.num_chunks(by_role[name], "document") for name in last]
print(f"document:         in {chunks[0]} chunks, with the cure in {chunks[1]}   counted")
guess.compare("cure", before.question_ttft_s / after.question_ttft_s, "times")

# %% [markdown]
# The questions pass the document by. Who paid? The document: its chunks are half as large, so it
# needs about twice as many. Nobody else does: the same tokens are computed, and most of the steps
# would have been there anyway for the chats, with or without a chunk in them. (Count the steps
# rather than the seconds. Each plan ran once, and a machine that was busy during one of the runs
# tells another story by the clock; the simulation below does not have that trouble.) Is it fair
# that one reader waits longer, so that three others have their answers? That is no question for an
# engine. It is what the knobs are for.
#
# Look at the runs by hand: choose a plan, point at a bar or at a step.

# %%
wb.Gantt(by_role, run="mixed, chunks of 32")

# %% [markdown]
# ## 2. A machine made of numbers
#
# To try two hundred users this way would take minutes, for each plan. But the scheduler does not
# know the model: it sees lengths and blocks. So let it run without one. The **simulator** drives
# the very scheduler and block pool of the engine; only the time of a step comes from a formula:
#
# step time = base + a cost for each prompt token, each query-key pair, each decode, each token of
# context
#
# (A query-key pair is one product of attention: a new token looks at itself and at each before it.)
# The costs are fitted to steps that were measured. Is that good enough? To be honest about it, each
# of the five runs is predicted from the steps of the *others*: the formula has never seen the run
# that it is compared with.

# %%
predicted = lab.predict_each({"pace": pace} | played, scene, plans)
wb.show(pictures.predicted_against_measured(predicted))

# %% [markdown]
# Where it is off, ask for the reason. There are four:
#
# * Your machine does other things, too: a measured run carries the noise of its own minute.
# * The longest gap is the time of a *single* step, and nothing averages out over one step.
# * A product of matrices does not get slower smoothly but in jumps, and the formula is a straight
#   line through them.
# * The scheduler decides between steps. A request that comes just before the end of a step is in
#   the next one; a blink later, it is in the one after that, which may be a document later. Where
#   the simulated steps are a little shorter than the real ones, such a decision may fall on the
#   other side, and then one request is far off, or a gap moves to another place, though each step
#   was predicted well.
#
# If most marks are outside the grey band, the machine was busy: run this page again from `pace` on
# when it is quiet. (`pdlab bench scheduling` does this comparison with care, over longer runs.) One
# run beside its twin:

# %%
name = "mixed, budget 64"
twins = {"measured": played[name].run, "simulated": predicted[name].run}
wb.show(pictures.lanes(twins, scene.labels, f"{name}: on the engine, and in the simulator"))

# %% [markdown]
# From here on simulations rest on one formula, fitted to all steps that your machine has shown us.
# All that follows can only be as good as this fit, so its errors come first; if they are large,
# step times that were recorded on another machine take its place.

# %%
ground = lab.ground({"pace": pace} | played, predicted)
times = ground.times
print(ground.line)
print(f"step times: {times.basis}")

# %% [markdown]
# Now "what if" costs a few milliseconds. What if, in our scene, the shortest job went first
# (`policy="sjf"`), instead of smaller chunks?

# %%
guess.predict(
    "Budget 64 and policy sjf, no chunk_size: the slowest question waits",
    ["far less than with fcfs", "just as long", "longer"],
    key="sjf",
)

# %%
from pdlab.workload.simulation import simulate

again, small = lab.scene_for(times), {"num_blocks": 128, "max_num_batched_tokens": 64}
what_if = {
    "budget 64, fcfs": (again, EngineConfig(**small)),
    "budget 64, sjf": (again, EngineConfig(**small, policy="sjf")),
    "budget 64, chunks of 32": (again, EngineConfig(**small, chunk_size=32)),
    "budget 64, no document": (lab.without_document(again), EngineConfig(**small)),
    "budget 2,048": (again, EngineConfig(num_blocks=128)),
}
waits = {}
print("mixed                     slowest question   gap of a chat   document   simulated")
for name, (each, config) in what_if.items():
    o = lab.Outcome.of(simulate(each.requests, config, times), each.roles)
    waits[name] = o.question_ttft_s
    document = f"{o.document_ttft_s:9.2f} s" if o.document_ttft_s else "none".rjust(11)
    print(f"{name:24} {o.question_ttft_s:15.2f} s {o.chat_gap_s:13.2f} s {document}")
change = waits["budget 64, sjf"] / waits["budget 64, fcfs"]
answer = "longer" if change > 1.1 else "just as long" if change > 0.9 else "far less than with fcfs"
guess.compare("sjf", answer, kind="simulated")

# %% [markdown]
# What the smaller chunks give to the questions they take from the document. Without a document the
# questions would wait less still: the cure is not complete. And a mixed step with a budget of 2,048
# takes the whole document at once, so the chats wait for it as they do under *prefill first*. It is
# not the mixing that spares them, it is the budget.
#
# And `sjf`? A **policy** orders those who *wait*. The document did not wait: an engine has
# **seats**, so many sequences may run at once (`max_num_seqs`, 32 by default). When the document
# came, a seat was free, and it was let in at once. Who is in keeps its turn. So batching mode,
# budget and chunk size decide about those who are inside, and the policy about the door. It begins
# to matter when there is a queue, and for that we need more users.
#
# ## 3. Two hundred users
#
# The workload `mixed` has short chats (four of five) and documents of several hundred tokens.
# Requests come as a Poisson process: independent of each other, and of how busy the machine is. We
# have 8 seats, and a budget of 256.
#
# What is *good*? Users feel the time to the first token and the pace after it. A **service level
# objective** (SLO) sets a limit for each, and **goodput** counts only the requests that keep both.
# Such limits should come from users. Ours come from your machine, so that this page tells the same
# story everywhere: thrice what a document of 800 tokens takes alone, and thrice a decode step of 8
# chats. (On two cores of a CPU this is slow. What counts is what happens at such limits.)

# %%
wb.glossary(
    "TPOT", "percentile", "SLO", "goodput", "saturation", "open loop", "closed loop",
    "Little's law", "scheduling policy", "starvation",
)  # fmt: skip

# %%
from pdlab.workload import WORKLOADS

seats = {"num_blocks": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 256}
slo = lab.limits(times)
mixed = WORKLOADS["mixed"]
most = lab.saturation_rps(mixed(200, 1.0), EngineConfig(**seats), times)
print(f"limits: first token within {slo.ttft_s:.1f} s, then {slo.tpot_s * 1e3:.0f} ms a token:")
print("three times a document, and a decode step of 8 chats, by the step times above   simulated")
print(f"all 200 at once, mixed batching: {most:.2f} requests a second get through   simulated")
guess.predict(
    "Mixed batching: up to which part of that rate do 9 of 10 requests meet both limits?",
    ["less than half", "half to 80 %", "nearly all of it"],
    key="knee",
)

# %%
from time import perf_counter

modes = {
    name: EngineConfig(**seats, batching=name)
    for name in ("static", "prefill_first", "decode_first", "mixed")
}
rates = [most * part for part in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)]
start_s = perf_counter()
sweep = lab.load_sweep(lambda rate: mixed(200, rate), rates, modes, times, slo)
print(f"{len(rates) * len(modes) * 200:,} requests simulated in {perf_counter() - start_s:.1f} s")
wb.show(pictures.load_curves(sweep, slo))

# %%
for name, loads in sweep.items():
    best = lab.best_rate(loads)
    print(f"{name:14} 9 of 10 in time up to {best:.2f} requests/s, {best / most:.0%} of saturation")

# %% [markdown]
# How much of this is the luck of these 200 requests? Mixed batching again, with others:

# %%
knees = sorted(
    lab.knee(lambda rate, seed=seed: mixed(200, rate, seed), rates[3:], modes["mixed"], times, slo)
    / most
    for seed in range(5)
)
print("9 of 10 in time up to", ", ".join(f"{part:.0%}" for part in knees), "of saturation")
middle = knees[2]
answer = "less than half" if middle < 0.49 else "half to 80 %"
answer = answer if middle < 0.81 else "nearly all of it"
guess.compare("knee", answer, kind="simulated", note="The one in the middle of five.")

# %% [markdown]
# Each curve is low up to some rate, and then it climbs: its **knee**. At the knee nothing breaks,
# and no step is out of the ordinary: 8 sequences and 256 tokens are the most there can be in one.
# But requests come in clusters, and the nearer the load is to saturation, the longer the queue of
# one cluster is still there when the next one comes. So a server is run at some part of what it
# could do, and how large that part is depends on the scheduler: the four modes compute the very
# same tokens on the very same machine, and have their knees at different rates.
#
# ### The mean says nothing
#
# Take the last rate at which mixed batching still does well:

# %%
busy = lab.best_rate(sweep["mixed"]) or rates[0]
runs = {name: simulate(mixed(200, busy), config, times) for name, config in modes.items()}
from pdlab.workload.report import summarize

print("TTFT in s       mean   p50   p90   p99   within 25 % of the mean   simulated")
for name, run in runs.items():
    t = summarize(run).ttft_s
    near = lab.share_near_mean(run)
    print(f"{name:14} {t.mean:5.1f} {t.p50:5.1f} {t.p90:5.1f} {t.p99:5.1f} {near:8.0%} of requests")

# %% [markdown]
# Look at *mixed*. Most requests are short and quick, and a few wait many times as long, so the mean
# lies where few are. And a user who sends 70 requests meets the slowest hundredth with a chance of
# one in two (1 - 0.99^70). This is why servers are judged by p99. Move the limits, and see which
# part of all requests is within:

# %%
wb.LatencyView(runs, slo=slo)

# %% [markdown]
# ### Little's law
#
# A simulator can be wrong in many ways. One check needs no other machine: whatever the order, the
# number of requests inside, on average, is the rate at which they come times how long one stays (L
# = λW, Little 1961). Here the left side is counted in the steps, the right side from the requests.

# %%
for name, run in runs.items():
    law = lab.Little.of(run)
    print(
        f"{name:14} counted inside {law.counted:6.2f}; {law.rate_rps:.2f}/s x {law.mean_s:.2f} s"
        f" = {law.product:6.2f}, apart by {abs(law.counted / law.product - 1):.1%}   simulated"
    )

# %% [markdown]
# (They are a little apart, because a request that comes in the middle of a step is first seen by
# the next.) The law also says what a queue costs: twice as many inside at the same rate means that
# each stays twice as long.
#
# ### How not to measure
#
# A usual benchmark has N clients, each of which sends its next request when it has its answer: a
# **closed loop**. If the server slows down, so do the clients. Compare it with users who come
# whenever they like (**open loop**):

# %%
mix_of_200 = mixed(200, most)
config = EngineConfig(**seats)
print("                     requests/s  queue p99   TTFT p50    p99   in time   simulated")
for clients in (4, 8, 16):
    s = lab.closed_loop(mix_of_200, clients, config, times, slo)
    print(
        f"closed, {clients:2} clients   {s.requests_per_s:9.2f} {s.queue_s.p99:8.1f} s"
        f" {s.ttft_s.p50:9.1f} s"
        f" {s.ttft_s.p99:5.1f} s {s.attainment:6.0%}"
    )
for part in (0.8, 1.0, 1.2):
    s = summarize(simulate(mixed(200, part * most), config, times), slo)
    print(
        f"open, {part * most:.2f}/s come   {s.requests_per_s:10.2f} {s.queue_s.p99:8.1f} s"
        f" {s.ttft_s.p50:9.1f} s"
        f" {s.ttft_s.p99:5.1f} s {s.attainment:6.0%}"
    )

# %% [markdown]
# With 8 clients for 8 seats the machine gives all it can, and nobody ever waits for a seat (what
# waiting there is, is for the budget: a document's chunk fills a step). Compare its median with
# that of the same rate from users who come when they like: there it is a disaster, and the queue
# would go on growing if there were more than 200 of them. Schroeder et al. (2006, *Open versus
# closed: a cautionary tale*) warn of exactly this. Little's law says it in one line: in a closed
# loop, L is fixed, so a longer W can only lower λ.
#
# ## 4. Who is next?
#
# Now there is a queue, and the policy decides at the door:
#
# * `fcfs`: first come, first served.
# * `sjf`: the shortest prompt first. (How long the *answer* will be, nobody knows.)
# * `priority`: the lower number first, with **ageing**: who waits becomes more urgent with time, so
#   that nobody waits for ever. Here chats have 0 and documents 1, and it takes two TTFT limits to
#   make up for one level.
# * `deadline`: whose TTFT limit is nearest; those who missed it go last.
# * `longest_prefix`: who finds most in the prefix cache.
#
# All of them are about the door only. Who was let in keeps its turn, even if KV memory runs out and
# somebody must give blocks back: then it is the last who came in, whatever its number.

# %%
guess.predict(
    "At 90 % of saturation, from fcfs to sjf: the share of requests in time",
    ["falls", "stays the same within 5 points", "rises"],
    key="winner",
)

# %%
guess.predict(
    "And the slowest document waits so many times as long under sjf as under fcfs",
    key="payer",
    unit="times",
)

# %%
from pdlab.engine.policies import Deadline, Priority

policies = {"fcfs": "fcfs", "sjf": "sjf"}
policies |= {"priority": Priority(2 * slo.ttft_s), "deadline": Deadline(slo.ttft_s)}
crowd = mixed(300, 0.9 * most)
served = lab.under_policies(crowd, policies, EngineConfig(**seats), times, slo)
wb.show(pictures.policy_ranges(served, slo))
points = 100 * (served["sjf"].attainment - served["fcfs"].attainment)
answer = "rises" if points > 5 else "falls" if points < -5 else "stays the same within 5 points"
guess.compare("winner", answer, kind="simulated", note=f"By {points:.0f} points.")
longer = served["sjf"].documents.max / served["fcfs"].documents.max
guess.compare("payer", longer, "times", kind="simulated")

# %% [markdown]
# The work is the same under each of them; only the order differs. *First come, first served* is
# fair, and at this load that means: whoever comes with the crowd is late, a chat as much as a
# document. *Shortest first* empties the queue of the many small ones while a few large ones wait.
# The documents pay, and the unlucky ones pay dearly. *Deadline* gives up on those who are lost,
# which sounds cruel and is the point: time that goes to a request that is late already makes the
# next one late, too. (See its p99: who is given up waits till the rush is over, chat or document.)
# And *priority* helps less than you may have thought: it ages, so a document that has waited for
# two TTFT limits stands level with a chat that has just come. Now **overload**, when more comes
# than can ever be served in time:

# %%
print("in time             fcfs    sjf  priority  deadline   simulated")
for part in (0.7, 0.9, 1.1, 1.4):
    row = lab.under_policies(mixed(300, part * most), policies, EngineConfig(**seats), times, slo)
    shares = "   ".join(f"{each.attainment:5.0%}" for each in row.values())
    print(f"{part:4.0%} of saturation {shares}")

# %% [markdown]
# Past saturation somebody must lose, and the policies differ in whom they let lose: with `fcfs`
# nearly everybody, with `deadline` those who are late, with `sjf` those who are expensive. To give
# up one expensive request saves several cheap ones. No order makes the machine faster. (And all of
# this is for 300 requests: a longer rush makes a longer queue.)
#
# ### Starvation, and a bound
#
# If short ones keep coming, a long one might wait for ever. The engine bounds the wait under
# *every* policy, also under one of yours: `max_overtakes` is how many later requests may be let in
# before one that waits. Then the oldest is next, whatever the policy says. It is 1,000 by default,
# more than all our 300 requests, so the tables above were without a bound.

# %%
print("sjf, 20 % more than can be served   simulated")
rush = mixed(300, 1.2 * most)
for overtakes in (1000, 100, 30, 10):
    config = EngineConfig(**seats, max_overtakes=overtakes)
    each = lab.under_policies(rush, {"sjf": "sjf"}, config, times, slo)["sjf"]
    print(
        f"max_overtakes {overtakes:5,}: chats p50 {each.chats.p50:5.1f} s, documents at most"
        f" {each.documents.max:5.0f} s, in time {each.attainment:.0%}"
    )

# %% [markdown]
# "Shortest job first starves long prompts" is true without a bound, and the bound has a price: the
# smaller it is, the more it is first come, first served again. (In a finite workload even the
# unbounded one ends: the documents are served when all chats are done.)
#
# ### The cache at the door
#
# `longest_prefix` needs prompts that begin alike. `mooncake-conv-like` is a synthetic trace that
# ships with pdlab, with the statistics of a public one (Mooncake, conversations), here at 1/32 of
# its prompt lengths, and the KV memory is small, so that what is in the cache does not stay for
# long.

# %%
from dataclasses import replace

from pdlab.workload import find_trace, read_trace, scaled

trace = read_trace(find_trace("mooncake-conv-like"))
talks = scaled(trace, prompt=1 / 32, output=1 / 8, max_len=1500, num_requests=300)
little = EngineConfig(**seats | {"num_blocks": 256})
limit = lab.saturation_rps(talks, little, times)
own_rps = len(talks) / talks[-1].arrival_s
orders = {p: p for p in ("fcfs", "longest_prefix")}
print("load   policy           found in the cache   TTFT p50     p99   simulated")
for part in (0.6, 1.3):
    slower = own_rps / (part * limit)
    some = [replace(r, arrival_s=r.arrival_s * slower) for r in talks]
    for name, each in lab.under_policies(some, orders, little, times, slo).items():
        print(
            f"{part:4.0%}   {name:15} {each.cached_share:8.1%} of tokens"
            f" {each.chats.p50:12.1f} s {each.chats.p99:6.1f} s"
        )

# %% [markdown]
# In a long queue there is often somebody whose beginning is still in memory, and to take him now,
# before its blocks are needed for others and it is evicted (lesson 03), spares its computation.
# With a short queue there is hardly a choice, and the policy changes little. At 130 % of saturation
# all wait long. Look at the first column: what is found need not be computed. Who gains is another
# matter: those who share nothing with anybody are passed over, so the typical wait may even grow.
#
# Now try it all: every change simulates 200 requests anew.

# %%
wb.PolicyLab(model, step_times=times, slo=slo)

# %% [markdown]
# ## 5. Claims, tested
#
# ### "Continuous batching gives x times the throughput"
#
# Static batches lose when one sequence is done and its seat stays empty. 200 short prompts, all
# there from the beginning, 8 seats, and answers of different lengths:

# %%
guess.predict(
    "Answers of 4 to 44 tokens, all as likely: mixed is so many times as fast as static batching",
    key="speedup",
    unit="times",
)

# %%
from pdlab.workload import Between, Fixed, LogNormal

answers = {
    "all answers have 24 tokens": Fixed(24),
    "4 to 44 tokens, all as likely": Between(4, 44),
    "most are short, some very long": LogNormal(12, 60, most=200),
}
gains = {
    name: lab.simulated_speedup(lengths, EngineConfig(**seats), times)
    for name, lengths in answers.items()
}
for name, each in gains.items():
    print(
        f"{name:31} {each.ratio:.2f} times as fast; static takes {each.step_ratio:.2f} times"
        " as many steps   simulated"
    )
guess.compare("speedup", gains["4 to 44 tokens, all as likely"].ratio, "times", kind="simulated")

# %% [markdown]
# The steps that are saved are emptier than those that stay, and an emptier step takes less time: so
# the time falls by less than the number of steps.
#
# So the honest answer to "how much?" is: *it depends on the spread of the answers' lengths*. If all
# are alike, static batches lose nothing. The famous factors (23 times in a blog post of Anyscale,
# 2023; 36.9 times in the Orca paper) compare whole systems: longer tails, more seats, paged memory,
# other kernels. And throughput is not where users feel it first: look at TTFT in section 3.
#
# ### "Chunked prefill is free", "chunked prefill raises throughput"

# %%
guess.predict(
    "From a budget of 2,048 tokens to one of 32: the time for 200 requests, all there at once",
    ["falls", "stays the same within 5 %", "rises"],
    key="chunks",
)

# %%
budgets = [16, 32, 64, 128, 256, 512, 2048]
gap_s = slo.tpot_s  # the limit on the mean gap, now for every single one
half = mixed(200, 0.5 * most)
points = lab.budget_sweep(half, budgets, EngineConfig(**seats), times, slo, gap_s)
wb.show(pictures.budget_curves(points, slo.ttft_s, gap_s))
print("budget                ", "".join(f"{p.budget:7}" for p in points), "  simulated")
print("all at once, in s     ", "".join(f"{p.all_at_once_s:7.0f}" for p in points))
print("in time by TTFT, TPOT ", "".join(f"{p.summary.attainment:7.0%}" for p in points))
print("by TTFT and every gap ", "".join(f"{p.kept.both:7.0%}" for p in points))
change = points[1].all_at_once_s / points[-1].all_at_once_s
answer = "falls" if change < 0.95 else "rises" if change > 1.05 else "stays the same within 5 %"
guess.compare("chunks", answer, kind="simulated", note=f"To be exact: {change:.2f} times.")

# %% [markdown]
# It is a trade, and the panel on the right has both its sides. A smaller budget makes the long gaps
# shorter, because no step is ever long; but a document needs more steps, each of which has its base
# cost, so first tokens come later, and below some budget prompts come faster than they can be
# chunked: the queue grows without end. Between the two is a budget that serves most.
#
# Look at the last two lines of the table, too. TPOT is the *mean* of a request's gaps: a stall
# hides behind many quick tokens, and a large budget is never punished. Only a limit on the gaps
# themselves sees what chunks are for.
#
# Nor does chunking raise what the machine can do: see the first line. What it raises is how much
# can be served *within a limit on gaps*, and this is what Sarathi-Serve reports: capacity within
# latency limits, 2.6 times that of vLLM for one model, up to 3.7 and 5.6 times for larger ones
# (published). (On a GPU, a step that only decodes leaves most of the arithmetic idle, so a chunk
# beside it is nearly free up to some size. On a CPU that size is small.)
#
# ## 6. A machine you do not have
#
# Step times can also come from others. The simulator of DistServe (Zhong et al. 2024) has fits for
# OPT-13B on one A100 of 80 GB, and `azure-conv-like` has the statistics of a public trace of
# conversations (Azure 2023), here cut to the model's 2,048 tokens. Everything below is **simulated
# on published fits**.

# %%
from pdlab.costmodel import published
from pdlab.workload.serving import SLO

a100, knobs = published("a100-opt-13b")
print(a100.basis)
print(f"room for {knobs['num_blocks'] * knobs['block_size']:,} tokens of KV   published")
azure = read_trace(find_trace("azure-conv-like"))
chats = scaled(azure, max_len=2047, rate=0.4, num_requests=300)
promise = SLO(ttft_s=1.0, tpot_s=0.05)
print(f"{len(chats) / chats[-1].arrival_s:.1f} requests a second")
guess.predict(
    "With which token budget do most have a first token in 1 s and no gap above 100 ms?",
    ["128", "256 to 512", "1024 or 2048"],
    key="budget",
)

# %%
gpu = EngineConfig(**knobs, max_num_seqs=128)
points = lab.budget_sweep(chats, [128, 256, 512, 1024, 2048], gpu, a100, promise, gap_s=0.1)
wb.show(pictures.budget_curves(points, promise.ttft_s, 0.1))
for p in points:
    s = p.summary
    print(
        f"budget {p.budget:5}: {s.attainment:.0%} within TTFT and TPOT, {p.kept.both:.0%} within"
        f" TTFT and every gap, ITL p99 {s.itl_s.p99 * 1e3:.0f} ms   simulated"
    )
best = max(points, key=lambda p: p.kept.both).budget
answer = "128" if best < 256 else "256 to 512" if best <= 512 else "1024 or 2048"
guess.compare("budget", answer, kind="simulated", note=f"To be exact: {best}.")

# %% [markdown]
# Look at both shares. Above some 256 tokens the one within TTFT and TPOT hardly changes, while the
# longest gaps grow with every doubling, and the share without a long gap collapses: a stall of a
# quarter of a second hides behind two hundred quick tokens. An SLO that cannot see what users
# complain about is met by accident. Below 256, prompts do not get through fast enough, and TTFT
# goes.
#
# And the four modes, on that machine?

# %%
print("                in time  TTFT kept  TPOT kept  TTFT p99   ITL p99   simulated")
for name in modes:
    config = replace(gpu, batching=name, max_num_batched_tokens=512)
    run = simulate(chats, config, a100)
    s = summarize(run, promise)
    only = [SLO(promise.ttft_s, 1e9), SLO(1e9, promise.tpot_s)]
    first, pace_kept = (summarize(run, each).attainment for each in only)
    print(
        f"{name:14} {s.attainment:7.0%} {first:9.0%} {pace_kept:10.0%} {s.ttft_s.p99:8.1f} s"
        f" {s.itl_s.p99 * 1e3:6.0f} ms"
    )

# %% [markdown]
# *Prefill first* and *decode first* miss opposite halves of the promise: the one has first tokens
# in time and lets the pace go, the other keeps the pace of the few it lets in. (*Decode first* has
# one step of prompts for sixteen of decodes, and that is less than comes: its queue only grows.)
# What is not modelled: DistServe measured prefill and decode apart, so a *mixed* step is composed
# by us (the prefill's time, and what the decodes add beyond an empty step), and nobody measured it;
# no host work between steps, network, or tokenizer; no prefix cache; outputs have the trace's
# lengths. Take the shapes of the curves, not their third digit.
#
# ## Exercises
#
# The exercises run on recorded step times (`lab.RECORDED`: this model on two cores), so that they
# have the same answer everywhere.
#
# **1. A policy.** At 90 % of saturation, the median chat waits too long, and `sjf` lets documents
# wait for a minute. Write a rank (the lowest goes first) with which the median TTFT of chats is at
# most 0.7 times that of `fcfs`, while the p99 of documents is at most twice that of `fcfs`. You may
# look at `sequence.num_prompt_tokens`, `sequence.priority` (a document has 1, a chat 0),
# `sequence.arrival_s` (in seconds) and `view.now_s`. (`view.now_s - sequence.arrival_s` is 0 for
# who has just come: do not divide by it.)


# %%
def rank(sequence, view):
    # BEGIN SOLUTION
    return sequence.arrival_s + 0.02 * sequence.num_prompt_tokens
    # END SOLUTION


# %%
@wb.check("a policy")
def policy_check():
    from pdlab.workbench import scheduling_experiments as lab

    crowd = lab.recorded_crowd()
    fcfs, sjf, yours = (
        lab.under_recorded(crowd, policy)
        for policy in ("fcfs", "sjf", lab.OwnPolicy("yours", rank))
    )
    for name, each in (("fcfs", fcfs), ("sjf", sjf), ("yours", yours)):
        chats, documents = each.chats.p50, each.documents.p99
        print(f"{name:5} chats p50 {chats:4.2f} s, documents p99 {documents:4.1f} s   simulated")
    quick = yours.chats.p50 / fcfs.chats.p50
    slow = yours.documents.p99 / fcfs.documents.p99
    assert quick <= 0.7, f"the median chat waits {quick:.2f} times as long as with fcfs, not 0.7"
    assert slow <= 2, f"p99 of documents is {slow:.1f} times that of fcfs, more than 2"


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# return sequence.arrival_s + 0.02 * sequence.num_prompt_tokens
# ```
#
# A token of prompt is worth 20 ms of waiting: a document of 500 tokens lets chats pass that come up
# to 10 seconds later, and none after that. With 0 it is `fcfs`, with a very large number `sjf`. To
# play with yours: `wb.PolicyLab(model, step_times=times, policies=[lab.OwnPolicy("yours", rank)])`.
# In a program, derive a class from `pdlab.Policy` and pass `EngineConfig(policy=...)`: the engine
# takes it as it is.
#
# </details>

# %% [markdown]
# **2. Two knobs.** In our scene, on the recorded machine: the slowest question within 0.65 s, no
# gap of a chat longer than 0.34 s, and the document within 2.25 s. Return `(max_num_batched_tokens,
# chunk_size)`.


# %%
def two_knobs():
    # BEGIN SOLUTION
    return 128, 64
    # END SOLUTION


# %%
@wb.check("two knobs")
def two_knobs_check():
    from pdlab.workbench import scheduling_experiments as lab

    knobs = two_knobs()
    is_pair = isinstance(knobs, tuple | list) and len(knobs) == 2
    assert is_pair, f"return two numbers, not {knobs!r}"
    budget, chunk_size = knobs
    outcome = lab.recorded_outcome(budget, chunk_size)
    for what, seconds, most in (
        ("the slowest question waits", outcome.question_ttft_s, 0.65),
        ("the longest gap of a chat is", outcome.chat_gap_s, 0.34),
        ("the document waits", outcome.document_ttft_s, 2.25),
    ):
        print(f"{what} {seconds:.3f} s   simulated")
        assert seconds <= most, f"{what} {seconds:.3f} s, more than {most} s"


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# return 128, 64
# ```
#
# The gap asks for a small chunk, the document for a large one: 64 is between. The budget must leave
# room beside it, for four decodes and two questions of 24 tokens.
#
# </details>

# %% [markdown]
# **3. The most there can be, by hand.** A step of `seats` decodes takes `times.base_s +
# times.rows_s + times.decode_s * seats` seconds, and each prompt token of it `times.prompt_token_s`
# more. How many requests a second get through, if all seats are always taken, and a request has
# this many tokens?


# %%
def capacity(times, prompt_tokens, output_tokens, seats):
    # BEGIN SOLUTION
    step_s = times.base_s + times.rows_s + times.decode_s * seats
    request_s = output_tokens * step_s / seats + prompt_tokens * times.prompt_token_s
    return 1 / request_s
    # END SOLUTION


# %%
@wb.check("the most there can be")
def capacity_check():
    from types import SimpleNamespace

    from pdlab.workbench import scheduling_experiments as lab

    round_times = SimpleNamespace(base_s=0.05, rows_s=0.03, decode_s=0.005, prompt_token_s=0.002)
    for prompt, output, seats, request_s in ((100, 20, 4, 0.7), (50, 30, 2, 1.45)):
        yours = capacity(round_times, prompt, output, seats)
        step_s = 0.08 + 0.005 * seats
        hint = f"{output} tokens, each 1/{seats} of {step_s:.2f} s, and {prompt} of 0.002 s"
        hint += f": {request_s} s a request, {1 / request_s:.2f} a second"
        assert abs(yours - 1 / request_s) < 0.01, f"{hint}; you returned {yours}"
    prompt, output, simulated = lab.recorded_saturation(seats=4)
    yours = capacity(lab.RECORDED, prompt, output, 4)
    print(f"short chat, 4 seats: yours {yours:.2f}, simulated {simulated:.2f} requests a second")
    assert abs(yours / simulated - 1) < 0.15, (
        f"simulated: {simulated:.2f}; you returned {yours:.2f}"
    )


# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# step_s = times.base_s + times.rows_s + times.decode_s * seats
# request_s = output_tokens * step_s / seats + prompt_tokens * times.prompt_token_s
# return 1 / request_s
# ```
#
# Seats share the base cost of a step, and nobody shares a prompt token. (The simulated one is
# lower: contexts have a cost too, and seats are empty for a moment now and then.) The knee comes
# well before it.
#
# </details>

# %% [markdown]
# ## What production systems do
#
# * **Orca** (Yu et al. 2022, OSDI) brought iteration-level scheduling, which is now called
#   continuous or in-flight batching. **Sarathi-Serve** (Agrawal et al. 2024, OSDI) brought chunked
#   prefill beside decodes, "stall-free" within a token budget: our `mixed`. **DistServe** (Zhong et
#   al. 2024, OSDI) judges by goodput, and puts prefill and decode on different GPUs, so that
#   neither stalls the other.
# * **vLLM** V1 has one rule and no phases: running requests first, then waiting ones, until
#   `max_num_batched_tokens` is spent (*vllm/v1/core/sched/scheduler.py*).
#   `long_prefill_token_threshold` caps one prompt's tokens in a step: our `chunk_size`. Its guide
#   says what you measured: a smaller budget for ITL, a larger one for TTFT (*Optimization and
#   Tuning*). `--scheduling-policy` is `fcfs` or `priority`, without ageing; its `priority` also
#   decides who is preempted, which ours does not. As here, the budget must not be less than
#   `max_num_seqs` (*vllm/config/scheduler.py*).
# * **SGLang** runs a prefill batch whenever there is one, and decodes otherwise: our
#   `prefill_first`, with `--chunked-prefill-size`; `--enable-mixed-chunk` mixes, and is off by
#   default. `--schedule-policy` has `fcfs`, `lpm` (our `longest_prefix`) and others; with more than
#   128 in the queue, `lpm` is `fcfs`, for sorting would take too long (*managers/scheduler.py* and
#   *schedule_policy.py*).
# * **TensorRT-LLM**: in-flight batching, and a capacity policy: `GUARANTEED_NO_EVICT` (the default)
#   lets in only who can be finished, `MAX_UTILIZATION` lets in more and may have to pause some;
#   `STATIC_BATCH` is "a legacy mode" (*Useful Runtime Options*). Release candidates of 1.4 can take
#   the prompt with fewest uncached tokens first, with `context_starvation_iterations` against
#   starvation (*SchedulerConfig*).
# * None of them knows how long an answer will be. Research predicts it, or ranks requests by it (Fu
#   et al. 2024, *Efficient LLM Scheduling by Learning to Rank*).
#
# **Next:** prefill and decode on machines of their own, and what it costs to hand the KV over.
