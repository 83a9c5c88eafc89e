"""Groups whose episodes are branches of each other: `recipes.py` chooses the branching points, and
`scheduler.py` plays the episode trees of one group."""
