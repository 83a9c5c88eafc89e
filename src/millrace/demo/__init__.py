"""The demo: a small model learns to sort digits by reinforcement, on two cores, in minutes."""
