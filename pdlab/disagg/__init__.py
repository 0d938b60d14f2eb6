"""Prefill/decode disaggregation: workers for prompts, workers for outputs, and K and V between."""
