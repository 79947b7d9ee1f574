"""Architectures as data, and the decoder they describe."""
