"""Advice on batch size and learning rate, from the settings that a user trains with now, or from convergence bounds.

`recipe` converts the settings of SGD (learning rate, batch size, weight decay) to SNGM at a larger batch, and those of
AdamW and of spectral SNGM to the same method at a larger batch. `budget` finds the largest batch that each method's
convergence bound allows for a fixed total of single-sample gradients. `page` writes the result. Every number is
labelled with its source: given, measured, theory or a rule of thumb. docs/advise.md has the derivation.
"""

from .budget import Constants, budget_curves
from .recipe import Recipe, carry_recipe
from .rules import carry_over

__all__ = ["Constants", "Recipe", "budget_curves", "carry_over", "carry_recipe"]
