"""Named benchmarks behind ``rooftune bench``: one module for each, registered under ``rooftune.benches``."""
