# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # From an SGD recipe to batch 8192
#
# You train with SGD at a small batch and want to use a larger one. `sngm.advise` runs your recipe for an epoch or two,
# measures the gradient, and gives the learning rate and weight decay for SNGM at the new batch. The advice follows a
# rule of thumb, checked on networks with normalisation layers; docs/advise.md says how far the rule holds.

# %%
import torch
from torch import nn
from torch.utils.data import TensorDataset

import sngm

generator = torch.Generator().manual_seed(0)
x = torch.randn(40_000, 32, generator=generator)
y = (x[:, :8].sin().sum(1) + x[:, 8] * x[:, 9] > 0).long()
train, test = TensorDataset(x[:32_768], y[:32_768]), TensorDataset(x[32_768:], y[32_768:])


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))


task = sngm.Task.from_torch(model, train, test, epochs=6)

# %% [markdown]
# First, a run with the SGD recipe unchanged:

# %%
sgd = dict(lr=0.1, batch=128, weight_decay=1e-4)
before = sngm.train(task, f"msgd(weight_decay={sgd['weight_decay']})", lr=sgd["lr"], batch=sgd["batch"])
print("SGD at batch 128:", before.result["test_accuracy"])

# %% [markdown]
# The advice for batch 8192. It names the source of each number: measured, a rule of thumb, or given.

# %%
advice = sngm.advise(task, from_sgd=sgd, to_batch=8192)
advice

# %% [markdown]
# The same training with SNGM, with 64 times fewer steps per epoch. For comparison, SGD at the same batch with a
# linearly scaled learning rate:

# %%
after = sngm.train(task, f"sngm(weight_decay={advice['weight_decay']})", lr=advice["lr"], batch=advice["batch"])
scaled = sngm.train(task, "msgd", lr=0.1 * 64, batch=8192)
print("SNGM at batch 8192:", after.result["test_accuracy"])
print("SGD at batch 8192, lr * 64:", scaled.result.get("test_accuracy", scaled.status))

# %% [markdown]
# The gradient noise limits the batch. `sngm.probe` measures this noise along a short run.

# %%
facts = sngm.probe(task, batch=128, lr=0.1, points=2, samples=128, iterations=3)
print("gradient noise scale:", [round(point["noise_scale"]) for point in facts["points"]])
