"""Public data that some benches use where it lies beside the project."""

from pathlib import Path

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
TRACES = SHARED_DATA / "traces"
AZURE_CONV = TRACES / "azure-2023-conv.csv"
