"""The engine's own benchmarks, registered in ``rooftune.benches``; see ``rooftune bench --list``."""
