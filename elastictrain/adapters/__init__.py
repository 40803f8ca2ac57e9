"""Runs for the loops of frameworks: `adapters.lightning` and `adapters.huggingface`. Each needs its framework, and nothing else
imports it."""
