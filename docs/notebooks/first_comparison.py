# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Your first comparison
#
# Which optimizer keeps its accuracy when the batch grows? This notebook compares momentum SGD and SNGM on
# scikit-learn's digits, at a small and a large batch. It needs `pip install 'sngm[train]'` and takes half a minute on
# two CPU cores.

# %%
import sngm

# %% [markdown]
# One training run. Every argument except the task has a default.

# %%
run = sngm.train("digits", method="sngm", lr=0.1, batch=512, epochs=4, seed=0)
run

# %% [markdown]
# A run has its scores, the metrics of each epoch, and the trained model:

# %%
print(run.result["test_accuracy"])
print([round(epoch["test_accuracy"], 3) for epoch in run.history])
print(type(run.model).__name__)

# %% [markdown]
# The comparison. Each method tries the same number of learning rates, and the best one is chosen on validation data.
# With this learning rate the method is then trained on the whole training set, once per seed, and tested. Runs are
# recorded in the folder `runs/`: a second call repeats no run, and a stopped comparison resumes.

# %%
study = sngm.compare("digits", methods=["msgd", "sngm"], batches=[64, 512], lrs=[0.1, 0.3], seeds=2, epochs=4)
study

# %% [markdown]
# The study has the best method at a batch and a list of all runs, and writes a page with figures that opens offline:

# %%
print(study.best(batch=512))
print(len(study.runs), "runs, the first:", study.runs[0])
study.report("comparison.html")
