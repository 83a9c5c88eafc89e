"""Recipes: how a group is played where its episodes are not n of a kind, whatever the environment.

| module | owns |
|---|---|
| `recipe.py` | what a recipe is; which there are |
| `grove.py` | the trees of one group while they grow |
| `pivot.py` | branches at the tokens that matter most |
| `tree.py` | branches at every level |
| `answer.py` | the environment of runs that have none: one prompt, one completion |
"""
