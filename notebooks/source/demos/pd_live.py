# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Live: kill a worker while it writes
#
# *For a classroom, with a projector. About 10 minutes. The lesson behind it:
# [08 Disaggregation](../08_disaggregation.ipynb).*
#
# One process reads prompts (**prefill**), two write answers (**decode**). Four readers always want
# something. Everything is real: processes of this machine, each with its own copy of the model, and
# K and V travel between them over sockets. Nothing runs before you press **Start**.

# %%
import pdlab
from pdlab import workbench as wb

model = pdlab.load("smollm2-135m")

# %%
live = wb.LiveCluster(model)
live

# %% [markdown]
# Press **Start**, and wait for three processes to load the model: some seconds. Then ask, before each
# click, what will happen.
#
# 1. **Watch one answer.** Who reads its prompt, who writes it? When does the first of them no longer
#    matter?
# 2. **Paste a long document.** Which card changes? Do the four answers stop? What would happen if the
#    same process read and wrote?
# 3. **kill -9 d0.** Who is affected, and for how long? Does a word come twice, is one missing? (Green
#    words were written by another worker, after the mark.) What had to be computed again?
# 4. **kill -9 p0.** Why do the answers that are being written not notice? And who reads for the next
#    ones? Paste a document once more, and watch the tokens per second.
# 5. **Start them anew.** Why is a new process not there at once? Who sends it work?
# 6. **Kill all three.** Now nobody is left who could go on, and every reader is told so. What would
#    have to be stored, and where, so that even this costs no answer?
#
# Each card shows the number of its process. So a terminal will do as well: `kill -9` and the number.
#
# For those who like to type:

# %%
# live.start()
# live.kill("d0")
# live.revive("d0")
# live.paste(num_tokens=600)

# %% [markdown]
# ## Is it the same answer?
#
# Take the last answers, those of lost workers among them, and let one engine, which nobody disturbs,
# answer the same questions with the same seeds.

# %%
served = [answer for answer in live.answers if answer.output.error is None][-6:]
if served:
    with pdlab.Engine(model, live.config) as engine:
        alone = engine.generate([a.prompt for a in served], [a.params for a in served])
    for answer, other in zip(served, alone, strict=True):
        same = answer.output.token_ids == other.token_ids
        print(
            answer.output.request_id, "the same tokens" if same else "differs", answer.output.text
        )
else:
    print("Nothing was served yet: press Start.")

# %% [markdown]
# In fast mode a rare one may differ, where two tokens were nearly tied: other batches round otherwise.
# `wb.LiveCluster(model, exact=True)` is slower, and there all are the same, to the last token,
# whatever you kill.
#
# At the end:

# %%
live.stop()
