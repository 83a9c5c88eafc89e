"""The recipes that there are, and what an [environment.recipe] table describes."""

from collections.abc import Mapping
from typing import Any

from millrace.core.plugins import build_plugin
from millrace.environments.branching.pivot import Pivot
from millrace.environments.branching.recipe import Recipe
from millrace.environments.branching.tree import Tree

SECTION = "environment.recipe"
RECIPES: dict[str, type] = {"pivot": Pivot, "tree": Tree}


def build_recipe(table: Mapping[str, Any]) -> Recipe:
    """Built in, or "module:Name" of the user's; raises ConfigError."""
    return build_plugin(table, builtins=RECIPES, default="pivot", section=SECTION)
