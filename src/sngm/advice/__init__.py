"""Advice on batch size and learning rate: an SGD recipe carried over to SNGM, and what the bounds say of a budget.

`recipe` has the rule that carries an SGD recipe over to a larger batch, `budget` the largest batch that each method's
bound bears, `page` the page that either ends in. Every number says where it comes from: it is given, measured, theory
or a rule of thumb. The page docs/advise.md has the reasons.
"""

from .budget import Constants, bearable
from .recipe import Recipe, carry_over, carry_recipe

__all__ = ["Constants", "Recipe", "bearable", "carry_over", "carry_recipe"]
