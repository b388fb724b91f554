"""The engine's forward pass on torch and transformers: the only place that imports either."""
