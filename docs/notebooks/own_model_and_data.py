# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Your own model and data
#
# Compare optimizers on your own `nn.Module` and `Dataset`, with an optimizer of your own among them.

# %%
import torch
from torch import nn
from torch.utils.data import TensorDataset

import sngm

# %% [markdown]
# You need a model, and map-style datasets of `(input, target)` samples: any with `__len__` and `__getitem__`.


# %%
class MLP(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


generator = torch.Generator().manual_seed(0)
x = torch.randn(3000, 20, generator=generator)
y = (x[:, :5].pow(2).sum(1) > 5).long()
train, test = TensorDataset(x[:2000], y[:2000]), TensorDataset(x[2000:], y[2000:])

# %% [markdown]
# A task combines the model and the datasets. `epochs`, `batches` and other attributes of `sngm.Task` set its defaults.

# %%
task = sngm.Task.from_torch(MLP, train, test, epochs=10, batches=(32, 500))

# %% [markdown]
# A method is a name, a name with settings, an optimizer class, or a function `(params, lr) -> optimizer`.


# %%
def nesterov(params, lr):
    return torch.optim.SGD(params, lr=lr, momentum=0.9, nesterov=True)


study = sngm.compare(task, methods=["sngm(weight_decay=8e-4)", torch.optim.AdamW, nesterov], lrs=[0.01, 0.1], seeds=2)
study

# %% [markdown]
# `sngm.register` gives an optimizer a name that works wherever a built-in name does.

# %%
sngm.register("nesterov-0.95", torch.optim.SGD, {"momentum": 0.95, "nesterov": True})
run = sngm.train(task, "nesterov-0.95", lr=0.05, batch=100)
print(run.result["test_accuracy"])

# %% [markdown]
# A regression task sets its own loss and metric:

# %%
target = (x @ torch.linspace(-1, 1, 20)).unsqueeze(1)
data = TensorDataset(x[:2000], target[:2000]), TensorDataset(x[2000:], target[2000:])
regression = sngm.Task.from_torch(
    lambda: nn.Linear(20, 1), *data, loss=nn.functional.mse_loss, metric="loss", epochs=3, name="regression"
)
print(sngm.train(regression, lr=0.1, batch=100).result)
