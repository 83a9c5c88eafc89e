"""Branching recipes: groups whose episodes are branches of each other.

| module | owns |
|---|---|
| `recipe.py` | the Recipe protocol |
| `registry.py` | the built-in recipes by name |
| `scheduler.py` | grows the episode trees of one group |
| `pivot.py` | branches at the tokens that matter most |
| `tree.py` | branches at every level |
"""
