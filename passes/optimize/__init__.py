"""Passes that make a rewritten graph cheaper, and change nothing that it computes."""
