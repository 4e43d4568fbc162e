"""Advice on batch size and learning rate: SNGM settings from an SGD recipe, and bounds for a budget of gradients.

`recipe` converts an SGD recipe to SNGM at a larger batch, `budget` finds the largest batch that each method's bound
allows, `page` writes the result. Every number has its source: given, measured, theory or a rule of thumb. See
docs/advise.md for the derivation.
"""

from .budget import Constants, budget_curves
from .recipe import Recipe, carry_over, carry_recipe

__all__ = ["Constants", "Recipe", "budget_curves", "carry_over", "carry_recipe"]
