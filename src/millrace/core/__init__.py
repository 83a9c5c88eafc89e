"""Records, protocols, errors, spans: the words every stage shares. Torch-free; imports nothing of
ours."""
