"""The public traces, where they are: beside the repository, not in it."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
AZURE_CONVERSATION = FOLDER / "azure_llm_2023" / "AzureLLMInferenceTrace_conv.csv"
AZURE_CODE = FOLDER / "azure_llm_2023" / "AzureLLMInferenceTrace_code.csv"
MOONCAKE_CONVERSATION = FOLDER / "mooncake_fast25" / "conversation_trace.jsonl"


def there(path: Path) -> Path:
    """The path of a public trace; skips the test where the file is not there."""
    if not path.is_file():
        pytest.skip(f"the public trace {path.name} is not here")
    return path
