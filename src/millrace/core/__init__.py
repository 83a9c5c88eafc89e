"""Records, protocols, errors and spans that all packages share. Torch-free."""
