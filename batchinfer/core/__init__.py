"""The control plane: who runs, with which blocks, in what order, and when a row ends. No torch."""
