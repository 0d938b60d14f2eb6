"""The cluster in simulated time: the router itself, workers without a model, and what to search."""
