"""The data plane: batches, forward pass, head, sampling."""
